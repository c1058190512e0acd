"""The FUSE kernel interface, as far as the supervisor must understand it.

Role: numbers and layouts from ``linux/fuse.h`` (protocol 7.12 to 7.45, little-endian hosts), and pure
functions over message buffers. No I/O. Called by the pump, the session and the tests.
"""

from __future__ import annotations

import errno
import stat
import struct

# Operations (enum fuse_opcode).
LOOKUP = 1
FORGET = 2
GETATTR = 3
SETATTR = 4
READLINK = 5
SYMLINK = 6
MKNOD = 8
MKDIR = 9
UNLINK = 10
RMDIR = 11
RENAME = 12
LINK = 13
OPEN = 14
READ = 15
WRITE = 16
STATFS = 17
RELEASE = 18
FSYNC = 20
SETXATTR = 21
GETXATTR = 22
LISTXATTR = 23
REMOVEXATTR = 24
FLUSH = 25
INIT = 26
OPENDIR = 27
READDIR = 28
RELEASEDIR = 29
FSYNCDIR = 30
GETLK = 31
SETLK = 32
SETLKW = 33
ACCESS = 34
CREATE = 35
INTERRUPT = 36
BMAP = 37
DESTROY = 38
IOCTL = 39
POLL = 40
NOTIFY_REPLY = 41
BATCH_FORGET = 42
FALLOCATE = 43
READDIRPLUS = 44
RENAME2 = 45
LSEEK = 46
COPY_FILE_RANGE = 47
SETUPMAPPING = 48
REMOVEMAPPING = 49
SYNCFS = 50
TMPFILE = 51
STATX = 52

#: Requests that the kernel expects no answer to.
NO_REPLY = frozenset({FORGET, BATCH_FORGET, NOTIFY_REPLY, INTERRUPT})

#: Notifications that a daemon may send (unique 0): POLL, INVAL_INODE, INVAL_ENTRY, STORE, RETRIEVE, DELETE.
NOTIFY_CODES = frozenset({1, 2, 3, 4, 5, 6})

IN_HEADER = struct.Struct("<IIQQIIIHH")  # len opcode unique nodeid uid gid pid total_extlen padding
IN_HEAD = struct.Struct("<IIQ")  # len opcode unique
IN_NODEID_OFFSET = 16
IN_PID_OFFSET = 32
OUT_HEADER = struct.Struct("<IiQ")  # len error unique
ENTRY_OUT_BYTES = 128
_ENTRY_SIZE_OFFSET = 48
_ENTRY_MODE_OFFSET = 100
_ROOT_NODE = 1
_SIZE_MAX = (1 << 63) - 1
OPEN_OUT = struct.Struct("<QIi")  # fh open_flags backing_id
OPEN_IN = struct.Struct("<II")  # flags open_flags
CREATE_IN = struct.Struct("<IIII")  # flags mode umask open_flags
RELEASE_IN = struct.Struct("<QI")  # fh flags ...

#: A WRITE request: header, then fh offset size write_flags lock_owner flags padding, then the bytes.
WRITE_HEAD_BYTES = IN_HEADER.size + 40
WRITE_SIZE_OFFSET = IN_HEADER.size + 16

FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_NOFLUSH = 1 << 5
FOPEN_PASSTHROUGH = 1 << 7

# INIT request: header, then major minor max_readahead flags flags2.
INIT_IN_FLAGS_OFFSET = 52
INIT_IN_FLAGS2_OFFSET = 56
# INIT reply: offsets from the start of the message.
INIT_OUT_FLAGS_OFFSET = 28
INIT_OUT_MAX_BACKGROUND_OFFSET = 32
INIT_OUT_CONGESTION_OFFSET = 34
INIT_OUT_MAX_WRITE_OFFSET = 36
INIT_OUT_MAX_PAGES_OFFSET = 44
INIT_OUT_FLAGS2_OFFSET = 48
INIT_OUT_STACK_DEPTH_OFFSET = 52
INIT_OUT_BYTES = 80

FLAG_HANDLE_KILLPRIV_V2 = 1 << 28
FLAG_INIT_EXT = 1 << 30
FLAG_PASSTHROUGH = 1 << 37
FLAG_MAX_PAGES = 1 << 22
FLAG_WRITEBACK_CACHE = 1 << 16

#: Largest payload of one READ or WRITE that is let through, bytes. libfuse 3.14 has a buffer of this size.
PAYLOAD_BYTES_MAX = 1 << 20
#: Room for headers and arguments beside the payload, bytes (libfuse's FUSE_BUFFER_HEADER_SIZE).
HEADER_ROOM_BYTES = 4096
MESSAGE_BYTES_MAX = PAYLOAD_BYTES_MAX + HEADER_ROOM_BYTES

PAGE_BYTES = 4096

_U32 = struct.Struct("<I")
_U16 = struct.Struct("<H")
_U64 = struct.Struct("<Q")

#: Sizes of the fixed arguments that precede the names in requests that carry names.
_NAME_OFFSETS = {
    LOOKUP: 0,
    SYMLINK: 0,
    MKNOD: 16,
    MKDIR: 8,
    UNLINK: 0,
    RMDIR: 0,
    RENAME: 8,
    RENAME2: 16,
    LINK: 8,
    CREATE: 16,
    TMPFILE: 16,
    REMOVEXATTR: 0,
}

Buffer = bytes | bytearray | memoryview


def error_reply(unique: int, code: int = errno.EIO) -> bytes:
    """A reply that fails request ``unique`` with errno ``code``."""
    return OUT_HEADER.pack(OUT_HEADER.size, -code, unique)


def u16(message: Buffer, offset: int) -> int:
    """The 16-bit number at ``offset``."""
    return int(_U16.unpack_from(message, offset)[0])


def u32(message: Buffer, offset: int) -> int:
    """The 32-bit number at ``offset``."""
    return int(_U32.unpack_from(message, offset)[0])


def u64(message: Buffer, offset: int) -> int:
    """The 64-bit number at ``offset``."""
    return int(_U64.unpack_from(message, offset)[0])


def put_u32(message: bytearray | memoryview, offset: int, value: int) -> None:
    """Store a 32-bit number."""
    _U32.pack_into(message, offset, value)


def put_u16(message: bytearray | memoryview, offset: int, value: int) -> None:
    """Store a 16-bit number."""
    _U16.pack_into(message, offset, value)


def opcode_of(request: Buffer) -> int:
    """The operation of a request."""
    return u32(request, 4)


def unique_of(request: Buffer) -> int:
    """The kernel's number of a request."""
    return u64(request, 8)


def nodeid_of(request: Buffer) -> int:
    """The inode (or parent directory) that a request is about."""
    return u64(request, IN_NODEID_OFFSET)


def names_of(request: Buffer) -> tuple[bytes, bytes]:
    """The first two names in a request, each empty where the operation has none.

    LINK and RENAME: (old or new name as sent, second name). RENAME: (old, new). SYMLINK: (name, target).
    """
    offset = _NAME_OFFSETS.get(opcode_of(request))
    if offset is None:
        return b"", b""
    parts = bytes(request[IN_HEADER.size + offset :]).split(b"\0")
    return parts[0], parts[1] if len(parts) > 1 else b""


def second_node_of(request: Buffer) -> int:
    """RENAME: the new parent. LINK: the inode that gets a name. SETXATTR: its flags. Otherwise 0."""
    opcode = opcode_of(request)
    if opcode in (RENAME, RENAME2, LINK):
        return u64(request, IN_HEADER.size)
    return u32(request, IN_HEADER.size + 4) if opcode == SETXATTR else 0


def open_flags_of(request: Buffer) -> int:
    """The open(2) flags of an OPEN, CREATE, OPENDIR or TMPFILE request."""
    return u32(request, IN_HEADER.size)


def fh_of_release(request: Buffer) -> int:
    """The file handle that a RELEASE or RELEASEDIR ends."""
    return u64(request, IN_HEADER.size)


def is_file_entry(reply: Buffer) -> bool:
    """Whether the entry in a reply to CREATE is one that the kernel takes: a regular file with a number of its own."""
    node, size = u64(reply, OUT_HEADER.size), u64(reply, OUT_HEADER.size + _ENTRY_SIZE_OFFSET)
    is_regular = stat.S_ISREG(u32(reply, OUT_HEADER.size + _ENTRY_MODE_OFFSET))
    return node > _ROOT_NODE and is_regular and size <= _SIZE_MAX


def open_out_offset(opcode: int) -> int:
    """Where ``fuse_open_out`` starts in the reply to ``opcode``."""
    return OUT_HEADER.size + (ENTRY_OUT_BYTES if opcode in (CREATE, TMPFILE) else 0)


def init_reply_flags(reply: Buffer) -> int:
    """The 64 capability bits that an INIT reply takes."""
    low = u32(reply, INIT_OUT_FLAGS_OFFSET)
    return low | (u32(reply, INIT_OUT_FLAGS2_OFFSET) << 32 if low & FLAG_INIT_EXT else 0)


def init_request_flags(request: Buffer) -> int:
    """The 64 capability bits that the kernel offers in an INIT request."""
    low = u32(request, INIT_IN_FLAGS_OFFSET)
    if low & FLAG_INIT_EXT and len(request) >= INIT_IN_FLAGS2_OFFSET + 4:
        return low | u32(request, INIT_IN_FLAGS2_OFFSET) << 32
    return low


def minimal_init_reply(request: Buffer) -> bytes:
    """An INIT answer that takes nothing, for a connection on which every request will be failed."""
    body = bytearray(INIT_OUT_BYTES)
    OUT_HEADER.pack_into(body, 0, INIT_OUT_BYTES, 0, unique_of(request))
    put_u32(body, OUT_HEADER.size, 7)
    put_u32(body, OUT_HEADER.size + 4, min(u32(request, IN_HEADER.size + 4), 31))
    put_u32(body, INIT_OUT_MAX_WRITE_OFFSET, PAGE_BYTES)
    return bytes(body)
