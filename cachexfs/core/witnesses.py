"""Files that are always there: whether a shared filesystem shows all of its names.

Role: pure. ``.cachexfs/names`` holds them; each one's name says how many there are. Where a server is down and its
files are left out of listings, some of them are missing, and nothing that is not there can be taken for absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

DIRECTORY = b"names"
#: Every one of eight servers then holds some, but for one chance in 600.
WITNESSES_MAX = 64
INODES_PER_WITNESS = 16  # that must be free

_NAME = re.compile(rb"[0-9a-f]{2}\.([0-9a-f]{2})")


def witnesses(total: int) -> frozenset[bytes]:
    """Their names when there are ``total``."""
    return frozenset(b"%02x.%02x" % (number, total) for number in range(total))


def complaint(seen: Iterable[bytes]) -> str:
    """What a listing of them says against the filesystem; empty when they are all there."""
    names = set(seen)
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    total = max((int(match[1], 16) for match in found), default=1)
    missing = len(witnesses(total) - names)
    if not missing:
        return ""
    why = f"{missing} of the {total} names in .cachexfs/names are missing"
    return f"the PFS does not show all of its files ({why}): is a server of it down?"
