"""What supervisor and daemon say to each other beside FUSE messages: fixed-size structs, checked on both sides.

Role: the layouts of the control socket (daemon tells supervisor), of the event socket (supervisor tells daemon), and of
the state file that a new daemon inherits. Pure. Called by ``control``, ``child`` and ``client``.
A message of another length, magic or kind, or with another number of descriptors, is refused.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

#: Environment of a daemon: numbers of inherited descriptors, the mount's random name, the capability word.
ENV_FUSE_FD = "CACHEXFS_FUSE_FD"
ENV_CONTROL_FD = "CACHEXFS_SUPERVISOR_FD"
ENV_EVENTS_FD = "CACHEXFS_EVENTS_FD"
ENV_STATE_FD = "CACHEXFS_STATE_FD"
ENV_PAYLOADS_FD = "CACHEXFS_PAYLOADS_FD"
ENV_FDS = (ENV_FUSE_FD, ENV_CONTROL_FD, ENV_EVENTS_FD, ENV_STATE_FD, ENV_PAYLOADS_FD)
#: A process that is started ahead has this one instead, and gets the five over it.
ENV_STANDBY_FD = "CACHEXFS_STANDBY_FD"
ENV_MOUNT_ID = "CACHEXFS_MOUNT_ID"
#: ``VERSION``, so that a daemon of another one ends before it has said that it could serve.
ENV_VERSION = "CACHEXFS_SUPERVISOR_VERSION"
ENV_PASSTHROUGH = "CACHEXFS_PASSTHROUGH"
ENV_MOUNTPOINT = "CACHEXFS_MOUNTPOINT"

MAGIC = 0x43585333  # "CXS3": another number when anything here changes, for a supervisor outlives an upgrade
VERSION = f"{MAGIC:x}"
NAME_BYTES_MAX = 255
#: Exit code of a daemon that could not begin because something that it needs, and that is not this node's, did not
#: answer (sysexits' EX_TEMPFAIL). It has waited for that as long as an application is to wait.
EXIT_TRY_AGAIN = 75


class Call(enum.IntEnum):
    """What the daemon says on the control socket. Nothing of it is answered."""

    READY = 1  # state adopted, about to serve
    STOPPING = 2  # finished on purpose with exit code ``value``: unmount, do not restart
    DRAINING = 3  # the mount has ended and work is left: no deadline for the exit
    OFFER = 4  # one descriptor comes along: it may back file handle ``fh``; in force for the next reply to an open
    ALIVE = 5  # the answer to ``Event.PULSE``
    SHARED = 6  # it takes the bytes of large writes from the shared memory; before its answer to INIT


class Event(enum.IntEnum):
    """What the supervisor tells on the event socket."""

    STOP = 1  # finish up, then call stopping(); after END: leave the work that is left
    RETIRE = 2  # another daemon takes over: end now, leave the state on disk
    END = 3  # the mount is gone: leave the main loop and exit
    PULSE = 4  # does the daemon's loop still run? ``client`` answers by itself


#: Kind of the two messages on a standby's socket: "I wait", and the descriptors with passthrough as ``value``.
HANDOVER = 100


class MalformedError(ValueError):
    """The other side sent something that is not a message."""


_MESSAGE = struct.Struct("<IIQq")  # magic kind fh value
MESSAGE_BYTES = _MESSAGE.size


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the control, event or standby socket. ``value`` is an exit code or a yes."""

    kind: int
    value: int = 0
    fh: int = 0

    def pack(self) -> bytes:
        """The bytes on the wire."""
        return _MESSAGE.pack(MAGIC, self.kind, self.fh, self.value)


def unpack(raw: bytes) -> Message:
    """Parse one message; ``MalformedError`` unless length and magic are right."""
    if len(raw) != MESSAGE_BYTES:
        raise MalformedError(f"{len(raw)} bytes instead of {MESSAGE_BYTES}")
    magic, kind, fh, value = _MESSAGE.unpack(raw)
    if magic != MAGIC:
        raise MalformedError("wrong magic")
    return Message(kind, value, fh)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A request that an earlier daemon had, perhaps applied, and did not answer.

    ``request_id`` is what ``ctx.pid`` shows to the handler (0 for operations without one); ``node2`` and
    ``name2`` are the new parent and name of a rename, ``node2`` the inode of a link or the flags of a setxattr.
    Names over 255 bytes are empty.
    """

    opcode: int
    unique: int
    request_id: int
    node: int
    name: bytes
    node2: int
    name2: bytes


@dataclass(frozen=True, slots=True)
class Handle:
    """A file or directory handle that applications hold open. ``opens`` counts OPENs less RELEASEs.

    ``file`` is the inode number of the file behind it where it passes through, else 0.
    """

    fh: int
    node: int
    flags: int
    opens: int
    is_dir: bool
    passthrough: bool
    file: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """What a new daemon must know: which life of the mount this is, the replays, the open handles.

    ``has_served``: an earlier one has answered applications, so this one must go on with what that one had.
    """

    life: int
    has_served: bool
    replays: tuple[Replayed, ...]
    handles: tuple[Handle, ...]


_STATE_HEAD = struct.Struct("<IIIII")  # magic life has_served replays handles
_REPLAYED = struct.Struct("<IIQQQHH4x256s256s")
_HANDLE = struct.Struct("<QQIIIIQ")
_RECORDS_MAX = 1 << 24


def _name(raw: bytes) -> bytes:
    return raw if len(raw) <= NAME_BYTES_MAX else b""


def pack_state(life: int, replays: Iterable[Replayed], handles: Iterable[Handle], *, has_served: bool) -> bytes:
    """The content of the state file."""
    rows = list(replays)
    open_ones = list(handles)
    parts = [_STATE_HEAD.pack(MAGIC, life, has_served, len(rows), len(open_ones))]
    for r in rows:
        name, name2 = _name(r.name), _name(r.name2)
        parts.append(
            _REPLAYED.pack(r.opcode, r.request_id, r.unique, r.node, r.node2, len(name), len(name2), name, name2)
        )
    parts.extend(_HANDLE.pack(h.fh, h.node, h.flags, h.opens, h.is_dir, h.passthrough, h.file) for h in open_ones)
    return b"".join(parts)


def unpack_state(raw: bytes) -> State:
    """Parse the state file; ``MalformedError`` unless every length fits."""
    if len(raw) < _STATE_HEAD.size:
        raise MalformedError("state file too short")
    magic, life, has_served, replays, handles = _STATE_HEAD.unpack_from(raw)
    if magic != MAGIC or replays > _RECORDS_MAX or handles > _RECORDS_MAX:
        raise MalformedError("state file: wrong magic or counts")
    split = _STATE_HEAD.size + replays * _REPLAYED.size
    if len(raw) != split + handles * _HANDLE.size:
        raise MalformedError("state file: wrong length")
    return State(
        life,
        bool(has_served),
        tuple(_replayed_rows(raw[_STATE_HEAD.size : split])),
        tuple(
            Handle(fh, node, flags, opens, bool(is_dir), bool(passed), file)
            for fh, node, flags, opens, is_dir, passed, file in _HANDLE.iter_unpack(raw[split:])
        ),
    )


def _replayed_rows(raw: bytes) -> Iterator[Replayed]:
    for opcode, request_id, unique, node, node2, n1, n2, name, name2 in _REPLAYED.iter_unpack(raw):
        if n1 > NAME_BYTES_MAX or n2 > NAME_BYTES_MAX:
            raise MalformedError("state file: name too long")
        yield Replayed(opcode, unique, request_id, node, name[:n1], node2, name2[:n2])
