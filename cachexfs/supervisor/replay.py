"""What happens to each kind of unanswered request when the daemon has died, and the daemon's half of it.

The supervisor cannot know whether the dead daemon applied a request before it died. So each unanswered request
is sent again, marked in the state file that the new daemon inherits, and per operation one of four rules makes
the result *answered once, applied once*:

``AGAIN``   applying twice gives the same result: the new daemon needs to know nothing.
``NAMED``   the second application would fail (EEXIST, ENOENT) or undo the first: the daemon asks
            ``Replays.take`` when it sees that failure, and answers success.
``DROP``    the kernel waits for no answer: not repeated, and the new daemon expects no effect.
``OWN``     the supervisor's own business, never repeated as it is.

Why NAMED is sound on one node: the kernel holds the parent's lock (both parents' for rename) from before it
sends a create, mkdir, mknod, symlink, link, unlink, rmdir or rename until the answer is there, and it sends the
first four only for a name that it has just seen missing, the others only for one that it has seen. No other
caller of this mount can have changed the name in between, so EEXIST or ENOENT at a replay is the mark of the
first application. Where others can change the name without this kernel (a catalogue shared by nodes), the
request id decides: the catalogue stores it with the change, and a replay finds its own.

Concurrency: ``Replays`` belongs to the daemon's trio thread. Called by the pump and by the FUSE adaptor.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from . import wire
from .messages import Replayed


class Rule(enum.Enum):
    """How an unanswered request of a dead daemon is treated."""

    AGAIN = "again"
    NAMED = "named"
    DROP = "drop"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class Row:
    """One operation: its name in ``linux/fuse.h``, the rule, and why that is right."""

    name: str
    rule: Rule
    why: str


_READS = "reads only"
_ENTRY = "EEXIST and the entry found is what was asked for: answer that entry"

#: Every opcode of protocol 7.45. An opcode that is not here is treated as AGAIN.
TABLE: dict[int, Row] = {
    wire.LOOKUP: Row("LOOKUP", Rule.AGAIN, "reads only; the lookup count belongs to the one answer"),
    wire.FORGET: Row("FORGET", Rule.DROP, "counts of a dead daemon are void: a count never falls below zero"),
    wire.GETATTR: Row("GETATTR", Rule.AGAIN, _READS),
    wire.SETATTR: Row("SETATTR", Rule.AGAIN, "absolute values; the inode's lock keeps later writes behind it"),
    wire.READLINK: Row("READLINK", Rule.AGAIN, _READS),
    wire.SYMLINK: Row("SYMLINK", Rule.NAMED, _ENTRY + " (a symlink with the same target)"),
    wire.MKNOD: Row("MKNOD", Rule.NAMED, _ENTRY),
    wire.MKDIR: Row("MKDIR", Rule.NAMED, _ENTRY + " (a directory)"),
    wire.UNLINK: Row("UNLINK", Rule.NAMED, "ENOENT: it is gone, answer success"),
    wire.RMDIR: Row("RMDIR", Rule.NAMED, "ENOENT: it is gone, answer success"),
    wire.RENAME: Row("RENAME", Rule.NAMED, "source missing and target there: answer success"),
    wire.LINK: Row("LINK", Rule.NAMED, _ENTRY + " (the same inode)"),
    wire.OPEN: Row("OPEN", Rule.AGAIN, "a handle nobody was told of is dropped; O_TRUNC twice is O_TRUNC"),
    wire.READ: Row("READ", Rule.AGAIN, _READS),
    wire.WRITE: Row("WRITE", Rule.AGAIN, "the kernel has resolved O_APPEND: offset and bytes are absolute"),
    wire.STATFS: Row("STATFS", Rule.AGAIN, _READS),
    wire.RELEASE: Row("RELEASE", Rule.AGAIN, "a handle that is unknown or ended already: answer success"),
    wire.FSYNC: Row("FSYNC", Rule.AGAIN, "a condition on the bytes, not a change of them"),
    wire.SETXATTR: Row("SETXATTR", Rule.AGAIN, "absolute value; with XATTR_CREATE or _REPLACE the request id decides"),
    wire.GETXATTR: Row("GETXATTR", Rule.AGAIN, _READS),
    wire.LISTXATTR: Row("LISTXATTR", Rule.AGAIN, _READS),
    wire.REMOVEXATTR: Row("REMOVEXATTR", Rule.NAMED, "ENODATA: it is gone, answer success"),
    wire.FLUSH: Row("FLUSH", Rule.AGAIN, "publishes what is dirty: after the first time nothing is"),
    wire.INIT: Row("INIT", Rule.OWN, "the remembered one is sent first, its answer compared and kept"),
    wire.OPENDIR: Row("OPENDIR", Rule.AGAIN, "a handle nobody was told of is dropped"),
    wire.READDIR: Row("READDIR", Rule.AGAIN, "offsets must mean the same to the new daemon"),
    wire.RELEASEDIR: Row("RELEASEDIR", Rule.AGAIN, "a handle that is unknown: answer success"),
    wire.FSYNCDIR: Row("FSYNCDIR", Rule.AGAIN, "a condition, not a change"),
    wire.GETLK: Row("GETLK", Rule.AGAIN, _READS),
    wire.SETLK: Row("SETLK", Rule.AGAIN, "pyfuse3 leaves locks to the kernel"),
    wire.SETLKW: Row("SETLKW", Rule.AGAIN, "pyfuse3 leaves locks to the kernel"),
    wire.ACCESS: Row("ACCESS", Rule.AGAIN, _READS),
    wire.CREATE: Row("CREATE", Rule.NAMED, _ENTRY + ", opened; O_EXCL is met, for the name was missing"),
    wire.INTERRUPT: Row("INTERRUPT", Rule.OWN, "pyfuse3 ignores interrupts: not passed on at all"),
    wire.BMAP: Row("BMAP", Rule.AGAIN, _READS),
    wire.DESTROY: Row("DESTROY", Rule.AGAIN, "the end of the mount"),
    wire.IOCTL: Row("IOCTL", Rule.AGAIN, "pyfuse3 answers ENOSYS"),
    wire.POLL: Row("POLL", Rule.AGAIN, _READS),
    wire.NOTIFY_REPLY: Row("NOTIFY_REPLY", Rule.DROP, "answers a question of the dead daemon"),
    wire.BATCH_FORGET: Row("BATCH_FORGET", Rule.DROP, "as FORGET"),
    wire.FALLOCATE: Row("FALLOCATE", Rule.AGAIN, "absolute range (pyfuse3 answers ENOSYS)"),
    wire.READDIRPLUS: Row("READDIRPLUS", Rule.AGAIN, "as READDIR; lookup counts belong to the one answer"),
    wire.RENAME2: Row("RENAME2", Rule.NAMED, "as RENAME; RENAME_EXCHANGE twice undoes itself: the request id decides"),
    wire.LSEEK: Row("LSEEK", Rule.AGAIN, _READS),
    wire.COPY_FILE_RANGE: Row("COPY_FILE_RANGE", Rule.AGAIN, "absolute ranges (pyfuse3 answers ENOSYS)"),
    wire.SETUPMAPPING: Row("SETUPMAPPING", Rule.AGAIN, "DAX, not negotiated"),
    wire.REMOVEMAPPING: Row("REMOVEMAPPING", Rule.AGAIN, "DAX, not negotiated"),
    wire.SYNCFS: Row("SYNCFS", Rule.AGAIN, "a condition, not a change"),
    wire.TMPFILE: Row("TMPFILE", Rule.AGAIN, "nobody was told of the first file (pyfuse3 answers ENOSYS)"),
    wire.STATX: Row("STATX", Rule.AGAIN, _READS),
}

#: Operations whose header shows the request id in place of the caller's pid.
IDENTIFIED = frozenset({op for op, row in TABLE.items() if row.rule is Rule.NAMED} | {wire.SETATTR, wire.SETXATTR})

#: ``ctx.pid`` is a signed 32-bit number.
REQUEST_ID_MAX = (1 << 31) - 1


def describe(request: wire.Buffer, request_id: int) -> Replayed:
    """The row of the state file for one unanswered request."""
    name, name2 = wire.names_of(request)
    opcode = wire.opcode_of(request)
    return Replayed(
        opcode=opcode,
        unique=wire.unique_of(request),
        request_id=request_id,
        node=wire.nodeid_of(request),
        name=name,
        node2=wire.second_node_of(request),
        name2=name2 if opcode in (wire.RENAME, wire.RENAME2) else b"",
    )


_SAME = {wire.RENAME2: wire.RENAME}


class Replays:
    """The requests that the daemon of an earlier life left unanswered, as the FUSE adaptor asks about them.

    A handler of a NAMED operation calls ``take`` once, *on entry*, and keeps the answer: when it is True and the
    operation then meets the failure that a second application gives, the handler answers success. The replay is
    the first request for its name that a new daemon sees, so a row that was taken can serve no later request.
    """

    def __init__(self, rows: Iterable[Replayed] = ()) -> None:
        self._by_name: dict[tuple[int, int, bytes], Replayed] = {}
        self._ids: set[int] = set()
        for row in rows:
            if row.request_id:
                self._ids.add(row.request_id)
            if row.name:
                self._by_name[_SAME.get(row.opcode, row.opcode), row.node, row.name] = row

    def __len__(self) -> int:
        return len(self._by_name)

    def take(self, opcode: int, parent: int, name: bytes) -> bool:
        """Whether this very operation is a replay; it is forgotten then. ``opcode`` as in ``wire``.

        RENAME asks with the *old* parent and name, REMOVEXATTR with the inode and the attribute's name.
        """
        return self._by_name.pop((_SAME.get(opcode, opcode), parent, name), None) is not None

    def is_replay(self, request_id: int) -> bool:
        """Whether the request that shows this id as ``ctx.pid`` was given to an earlier daemon too."""
        return request_id in self._ids
