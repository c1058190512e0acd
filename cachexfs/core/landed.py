"""Whether a file on the PFS is the one that was put there, or taken over from there.

Role: pure. What a record says of a file on the PFS (``PfsCopy``: inode number, size, modification time) against what a
stat says now. Called wherever something rests on the PFS's copy: eviction, reading, refreshing, landing.
"""

from __future__ import annotations

_SECOND_NS = 10**9


def same_time(one_ns: int, other_ns: int) -> bool:
    """Whether two stamps are the same, as far as a filesystem that keeps whole seconds can tell."""
    if one_ns == other_ns:
        return True
    whole = one_ns % _SECOND_NS == 0 or other_ns % _SECOND_NS == 0
    return whole and one_ns // _SECOND_NS == other_ns // _SECOND_NS
