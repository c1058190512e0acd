"""What happens to each kind of unanswered request when the daemon has died, and the daemon's half of it.

The supervisor cannot know whether the dead daemon applied a request before it died. So each unanswered request
is sent again, marked in the state file that the new daemon inherits, and per operation one of four rules makes
the result *answered once, applied once*:

``AGAIN``   applying twice gives the same result: the new daemon needs to know nothing.
``ONCE``    the second application would fail (EEXIST, ENOENT), undo the first, or undo what another node has done
            since: the request has an id, the daemon stores it with the change, and finds it at the replay.
``DROP``    the kernel waits for no answer: not repeated, and the new daemon expects no effect.
``OWN``     the supervisor's own business, never repeated as it is.

Concurrency: ``Replays`` belongs to the daemon's trio thread. Called by the pump and by the FUSE adaptor.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from . import wire
from .messages import Replayed


class Rule(enum.Enum):
    """How an unanswered request of a dead daemon is treated."""

    AGAIN = "again"
    ONCE = "once"
    DROP = "drop"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class Row:
    """One operation: its name in ``linux/fuse.h``, the rule, and why that is right."""

    name: str
    rule: Rule
    why: str


_READS = "reads only"
_ENTRY = "the id is stored with the entry that it made: answer that"
_GONE = "the id is stored with the removal: answer success"

#: Every opcode of protocol 7.45. An opcode that is not here is treated as AGAIN.
TABLE: dict[int, Row] = {
    wire.LOOKUP: Row("LOOKUP", Rule.AGAIN, "reads only; the lookup count belongs to the one answer"),
    wire.FORGET: Row("FORGET", Rule.DROP, "counts of a dead daemon are void: a count never falls below zero"),
    wire.GETATTR: Row("GETATTR", Rule.AGAIN, _READS),
    wire.SETATTR: Row(
        "SETATTR",
        Rule.ONCE,
        "absolute values, but others may have written since; a size that is not published yet: AGAIN",
    ),
    wire.READLINK: Row("READLINK", Rule.AGAIN, _READS),
    wire.SYMLINK: Row("SYMLINK", Rule.ONCE, _ENTRY),
    wire.MKNOD: Row("MKNOD", Rule.ONCE, _ENTRY),
    wire.MKDIR: Row("MKDIR", Rule.ONCE, _ENTRY),
    wire.UNLINK: Row("UNLINK", Rule.ONCE, _GONE),
    wire.RMDIR: Row("RMDIR", Rule.ONCE, _GONE),
    wire.RENAME: Row("RENAME", Rule.ONCE, "the id is stored with the rename: answer success"),
    wire.LINK: Row("LINK", Rule.ONCE, _ENTRY),
    wire.OPEN: Row(
        "OPEN",
        Rule.AGAIN,
        "a handle nobody was told of is dropped; O_TRUNC happens at one moment of the call, the later one",
    ),
    wire.READ: Row("READ", Rule.AGAIN, _READS),
    wire.WRITE: Row("WRITE", Rule.AGAIN, "the kernel has resolved O_APPEND: offset and bytes are absolute"),
    wire.STATFS: Row("STATFS", Rule.AGAIN, _READS),
    wire.RELEASE: Row("RELEASE", Rule.AGAIN, "a handle that is unknown or ended already: answer success"),
    wire.FSYNC: Row("FSYNC", Rule.AGAIN, "a condition on the bytes, not a change of them"),
    wire.SETXATTR: Row("SETXATTR", Rule.ONCE, "XATTR_CREATE fails the second time; others may have changed it since"),
    wire.GETXATTR: Row("GETXATTR", Rule.AGAIN, _READS),
    wire.LISTXATTR: Row("LISTXATTR", Rule.AGAIN, _READS),
    wire.REMOVEXATTR: Row("REMOVEXATTR", Rule.ONCE, _GONE),
    wire.FLUSH: Row(
        "FLUSH",
        Rule.AGAIN,
        "publishes what is dirty, and the publication knows its bytes: after the first time nothing is",
    ),
    wire.INIT: Row("INIT", Rule.OWN, "the remembered one is sent first, its answer compared and kept"),
    wire.OPENDIR: Row("OPENDIR", Rule.AGAIN, "a handle nobody was told of is dropped"),
    wire.READDIR: Row("READDIR", Rule.AGAIN, "offsets must mean the same to the new daemon"),
    wire.RELEASEDIR: Row("RELEASEDIR", Rule.AGAIN, "a handle that is unknown: answer success"),
    wire.FSYNCDIR: Row("FSYNCDIR", Rule.AGAIN, "a condition, not a change"),
    wire.GETLK: Row("GETLK", Rule.AGAIN, _READS),
    wire.SETLK: Row("SETLK", Rule.AGAIN, "pyfuse3 leaves locks to the kernel"),
    wire.SETLKW: Row("SETLKW", Rule.AGAIN, "pyfuse3 leaves locks to the kernel"),
    wire.ACCESS: Row("ACCESS", Rule.AGAIN, _READS),
    wire.CREATE: Row("CREATE", Rule.ONCE, _ENTRY + ", opened"),
    wire.INTERRUPT: Row("INTERRUPT", Rule.OWN, "pyfuse3 ignores interrupts: not passed on at all"),
    wire.BMAP: Row("BMAP", Rule.AGAIN, _READS),
    wire.DESTROY: Row("DESTROY", Rule.AGAIN, "the end of the mount"),
    wire.IOCTL: Row("IOCTL", Rule.AGAIN, "pyfuse3 answers ENOSYS"),
    wire.POLL: Row("POLL", Rule.AGAIN, _READS),
    wire.NOTIFY_REPLY: Row("NOTIFY_REPLY", Rule.DROP, "answers a question of the dead daemon"),
    wire.BATCH_FORGET: Row("BATCH_FORGET", Rule.DROP, "as FORGET"),
    wire.FALLOCATE: Row("FALLOCATE", Rule.AGAIN, "absolute range (pyfuse3 answers ENOSYS)"),
    wire.READDIRPLUS: Row("READDIRPLUS", Rule.AGAIN, "as READDIR; lookup counts belong to the one answer"),
    wire.RENAME2: Row("RENAME2", Rule.ONCE, "as RENAME; an exchange that is done twice is undone"),
    wire.LSEEK: Row("LSEEK", Rule.AGAIN, _READS),
    wire.COPY_FILE_RANGE: Row("COPY_FILE_RANGE", Rule.AGAIN, "absolute ranges (pyfuse3 answers ENOSYS)"),
    wire.SETUPMAPPING: Row("SETUPMAPPING", Rule.AGAIN, "DAX, not negotiated"),
    wire.REMOVEMAPPING: Row("REMOVEMAPPING", Rule.AGAIN, "DAX, not negotiated"),
    wire.SYNCFS: Row("SYNCFS", Rule.AGAIN, "a condition, not a change"),
    wire.TMPFILE: Row("TMPFILE", Rule.AGAIN, "nobody was told of the first file (pyfuse3 answers ENOSYS)"),
    wire.STATX: Row("STATX", Rule.AGAIN, _READS),
}

#: Operations whose header shows the request id in place of the caller's pid.
IDENTIFIED = frozenset({op for op, row in TABLE.items() if row.rule is Rule.ONCE})

#: The kernel's own limit: a ``ctx.pid`` above is a request id.
PID_MAX = 1 << 22
#: ``ctx.pid`` is a signed 32-bit number.
REQUEST_ID_MAX = (1 << 31) - 1

_XATTR_CREATE = 1


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


class Replays:
    """The requests that the daemons of earlier lives left unanswered, by request id."""

    def __init__(self, rows: Iterable[Replayed] = ()) -> None:
        self._rows = {row.request_id: row for row in rows if row.request_id}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._rows

    def creates_xattr(self, request_id: int) -> bool:
        """Whether a SETXATTR wants the attribute to be new (XATTR_CREATE), which pyfuse3 does not tell its handler."""
        row = self._rows.get(request_id)
        return row is not None and row.opcode == wire.SETXATTR and bool(row.node2 & _XATTR_CREATE)
