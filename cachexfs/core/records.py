"""What the catalogue stores: one frozen record per key, and the keys themselves.

Role: pure. Keys are bytes below the job's prefix, named by parent id so that renaming a directory changes
one key however much lies below it:

====================  ==============================================================
``d/<parent>/<name>``  a name in a directory -> ``Dirent``
``i/<fid>``            attributes, copies and PFS state of a file or directory -> ``Inode``
``g/<fid>``            the published content of a file -> ``Generation`` (its revision is the order of publication)
``t/<fid>``            mtime and ctime of a directory -> ``DirTimes`` (put blindly, never compared)
``p/<opid>``           one pending change of the PFS -> ``Op`` (its creation revision is its order)
``n/<node>``           a node's address and stores -> ``Node``
``l/<node>``           a node's life: there while its lease is -> ``Life``
``c/job``              what all nodes agree on -> ``Job``
``a/<node>``           requests of a node's mount that may be repeated, with their results -> ``Applied``
====================  ==============================================================

``fid`` is a random multiple of 4096 below 2**62 in lower-case hexadecimal; the root's is 4096 ("1000").
"""

from __future__ import annotations

import msgspec

FID_STEP = 4096
ROOT_FID = 4096
FORMAT_VERSION = 1


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all catalogue records: immutable, encoded as a msgpack array. They never form a circle (``gc=False``)."""


class Dirent(Record, frozen=True, tag="d"):
    """A name: which file it is and of what kind (``f``, ``d``, ``l``; ``p`` FIFO, ``s`` socket, ``c``, ``b``)."""

    fid: int
    kind: str


class Copy(Record, frozen=True):
    """A whole copy of one generation outside the PFS. ``store`` is the identity of the staging or NVMe
    directory that holds it: a node that comes back with another store does not hold it."""

    node: str
    store: str
    tier: str  # "memory" or "nvme"
    time_s: float


class Synced(Record, frozen=True):
    """Unpublished bytes that an fsync has made safe: what is published should the writer's node be lost."""

    stage: str
    size: int
    digest: bytes
    tree: bytes
    copies: tuple[Copy, ...]


class PfsCopy(Record, frozen=True):
    """The generation that lies on the PFS, and what identifies it there (the base of a later one)."""

    gen: int
    time_s: float
    ino: int
    size: int
    mtime_ns: int
    hidden: str = ""  # a name below .cachexfs/, when it was withdrawn from its visible name
    missing: bool = False  # it was not found there: nothing is claimed, and whoever finds it says so


class Inode(Record, frozen=True, tag="i"):
    """Attributes and state of one file, directory, symlink or special file. Times in ns, sizes in bytes.

    ``gen`` is the current generation (0: none, as for directories). ``writing`` is the node that has begun to
    change published content and has not published it yet. ``t_returned_s`` and the like are seconds since
    the epoch by the reference node's clock, 0 when the boundary is not reached.
    """

    kind: str
    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    size: int = 0
    gen: int = 0
    origin: str = ""
    nlink: int = 1
    rdev: int = 0
    target: bytes = b""  # of a symlink
    copies: tuple[Copy, ...] = ()
    pfs: PfsCopy | None = None
    writing: str = ""
    synced: Synced | None = None
    t_returned_s: float = 0.0
    t_partner_s: float = 0.0
    t_pfs_s: float = 0.0
    error: str = ""
    imported: bool = True  # directories: the PFS's listing has been taken over
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    retired: int = 0  # the generation whose fast copies were given up because it is on the PFS
    route: str = ""  # of a file's generation; of a directory what was decided for what begins in it: see ``routes``
    routed_s: float = 0.0  # when that was decided
    stale: bool = (
        False  # a commit file that lists its members: one of them has been replaced or removed since it was written
    )
    mixed: bool = False  # a stale commit file: so has one that had been written after it already
    dated: bool = False  # somebody has set its mtime, and no write has moved that since


class Generation(Record, frozen=True, tag="g"):
    """An immutable published content. ``stage`` names its bytes in every staging and NVMe directory that has
    them; ``digest`` is xxh3_128 of the file, ``tree`` of its blocks' digests. ``open`` is set between a create
    and the first FLUSH: the empty file is visible and not yet worth draining."""

    gen: int
    size: int
    digest: bytes
    tree: bytes
    stage: str
    origin: str
    open: bool = False
    conflict: str = ""  # the node whose generation this one replaced without having seen it
    published: int = 0  # the revision of its publication, where this record has been changed since (digests came later)
    stamp_ns: int = 0  # mtime of the staged file when it was published, where the kernel served its writers
    taken: str = ""  # the node whose fsynced bytes these are, published by another one because it was lost


class DirTimes(Record, frozen=True, tag="t"):
    """Times of a directory, moved by every change of its entries."""

    mtime_ns: int
    ctime_ns: int


class OpKind:
    """The kinds of pending changes of the PFS (plain strings, as they are stored)."""

    PUT = "put"
    MKDIR = "mkdir"
    RENAME = "rename"
    UNLINK = "unlink"
    RMDIR = "rmdir"
    SYMLINK = "symlink"
    MKNOD = "mknod"
    LINK = "link"
    ATTR = "attr"
    DIRATTR = "dirattr"
    WITHDRAW = "withdraw"
    RESTORE = "restore"


class Op(Record, frozen=True, tag="p"):
    """One pending change of the PFS, under the path of its own time (relative to the PFS directory).

    ``owner`` is the node that carries it out while it lives; who takes it over writes itself there first. ``begun``: a
    call of the owner may be under way, and land late should the owner be lost; PUTs need no such mark, what lands them
    late finds no source. ``commit`` marks a commit operation, ``below`` the directory whose earlier changes it waits
    for ("" is the root) and ``target`` a second one for pointers. ``cancelled``: it must not be seen there.
    ``stage``, ``size`` and ``tree`` (their digest, once known) say which bytes a PUT lands: exactly those, also when a
    later generation exists. ``ready``: they lie on the PFS under a hidden name, synced, with their record. ``held``
    marks a withdrawal until the next commit file is ready (it goes, marked ``ready``, as long as that one is), or with
    ``lasting``, because members are removed, until another one has landed. ``parked`` says how the PFS refused it
    repeatedly, or "open": its writer has not closed the file. ``copies``: who had the bytes of a PUT when its file was
    removed, where they are to land all the same.
    """

    kind: str
    path: bytes
    owner: str
    fid: int = 0
    gen: int = 0
    path2: bytes = b""
    commit: bool = False
    below: bytes = b""
    target: bytes | None = None
    cancelled: bool = False
    size: int = 0
    stage: str = ""
    ready: bool = False
    held: bool = False
    parked: str = ""
    copies: tuple[Copy, ...] = ()
    begun: bool = False
    tree: bytes = b""
    lasting: bool = False

    @property
    def hidden(self) -> str:
        """Of a PUT: the name below ``.cachexfs/tmp`` under which its bytes are made ready."""
        return f"{self.stage or f'{self.fid:x}.{self.gen:x}'}-{self.size:x}"


class Node(Record, frozen=True, tag="n"):
    """A member of the job. ``stores`` are the identities of its staging and NVMe directories."""

    name: str
    host: str
    port: int
    index: int
    memory_store: str
    nvme_store: str
    domain: str = ""
    leaving: bool = False  # its user has asked for the unmount, and all its own data are on the PFS
    ended: str = ""  # or it has ended without: the token that it has left in its staging (``cachexfs.ended``)


class Life(Record, frozen=True, tag="l"):
    """There while the node's lease is alive."""

    node: str
    boot: str


class Job(Record, frozen=True, tag="j"):
    """What all nodes of a job agree on. ``pfs_id``: the identity of the PFS directory, as the first node that could
    ask it had it mounted from ``pfs``; empty until then."""

    version: int
    root: int
    clock_node: str
    replicas: int
    pfs_id: str = ""
    pfs: str = ""


class Applied(Record, frozen=True, tag="a"):
    """Requests that a mount has applied and whose answer may not have reached the kernel: (number, result).

    ``mount`` is the mount's random name: numbers mean nothing to another. A result is the id of the file that the
    request made or linked, 0 where it made none. ``gone``: the files that the last of them took the last name from and
    that applications had open, with what their handles show.
    """

    mount: str
    results: tuple[tuple[int, int], ...] = ()
    gone: tuple[tuple[int, Inode], ...] = ()


AnyRecord = Dirent | Inode | Generation | DirTimes | Op | Node | Life | Job | Applied

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)


def encode(record: AnyRecord) -> bytes:
    """Bytes of a record as the catalogue stores them."""
    return _encoder.encode(record)


def decode(data: bytes) -> AnyRecord:
    """The record of stored bytes. Raises ``msgspec.DecodeError`` (a ``ValueError``) for anything else."""
    return _decoder.decode(data)


def dirent_prefix(parent: int) -> bytes:
    """Common start of the keys of a directory's entries."""
    return b"d/%x/" % parent


def dirent_key(parent: int, name: bytes) -> bytes:
    """Key of one name."""
    return dirent_prefix(parent) + name


def split_dirent_key(key: bytes) -> tuple[int, bytes]:
    """Inverse of ``dirent_key``."""
    _, parent, name = key.split(b"/", 2)
    return int(parent, 16), name


def inode_key(fid: int) -> bytes:
    """Key of an ``Inode``."""
    return b"i/%x" % fid


def generation_key(fid: int) -> bytes:
    """Key of a ``Generation``."""
    return b"g/%x" % fid


def times_key(fid: int) -> bytes:
    """Key of a directory's ``DirTimes``."""
    return b"t/%x" % fid


def op_key(op_id: str) -> bytes:
    """Key of an ``Op``; ``op_id`` sorts in the order in which one node issued its operations."""
    return b"p/" + op_id.encode()


def node_key(name: str) -> bytes:
    """Key of a ``Node``."""
    return b"n/" + name.encode()


def life_key(name: str) -> bytes:
    """Key of a ``Life``."""
    return b"l/" + name.encode()


def applied_key(name: str) -> bytes:
    """Key of a node's ``Applied``."""
    return b"a/" + name.encode()


JOB_KEY = b"c/job"
