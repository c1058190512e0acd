"""Whether a file on the PFS is the one that was put there, or taken over from there.

Role: pure. What a record says of a file on the PFS (inode number, size, modification time as landed) against what a
stat says now. Called wherever something rests on the PFS's copy: eviction, reading, landing; in PFS children, too.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

#: What reading says of a file that is not the one that was expected. No filesystem answers so.
CHANGED = errno.EREMCHG
_SECOND_NS = 10**9


@dataclass(frozen=True, slots=True)
class Landed:
    """A file as it was when it landed. ``mtime_ns`` is None while this mount is about to change it."""

    ino: int
    size: int
    mtime_ns: int | None

    def is_same(self, ino: int, size: int, mtime_ns: int) -> bool:
        """Whether a file that is there now is this one, unchanged."""
        if (ino, size) != (self.ino, self.size):
            return False
        return self.mtime_ns is None or same_time(mtime_ns, self.mtime_ns)


def same_time(one_ns: int, other_ns: int) -> bool:
    """Whether two stamps are the same, as far as a filesystem that keeps whole seconds can tell."""
    if one_ns == other_ns:
        return True
    whole = one_ns % _SECOND_NS == 0 or other_ns % _SECOND_NS == 0
    return whole and one_ns // _SECOND_NS == other_ns // _SECOND_NS
