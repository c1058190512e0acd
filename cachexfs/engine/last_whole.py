"""The last whole checkpoint on the PFS: it stays there until the next one of its series has landed.

Role: who keeps few checkpoints and saves faster than the PFS takes them removes the only one that has landed while the
next ones are still on their way, or are removed before they get there. So the withdrawal of its commit file is issued
held (``core/claims``), the removal of all that it names waits for that, and ``Claims`` asks here when it may go. It
stays for what is going to land only: nothing waits for a checkpoint that the PFS refuses, or whose bytes are lost, and
the last one of all goes when it is removed. Checkpoints that list their members, of one *series*: paths that differ in
the numbers of one directory's name alone, as ``run1/step-5`` and ``run1/step-9``; ``run2/step-9`` is another series.
Where there are several, as ``run2/step-5``, what differs in a name further down is nearer, and decides.

Concurrency: none; a catalogue listener, and looks at the replica.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice

from cachexfs.core.order import lands_at, lists_members
from cachexfs.core.records import AnyRecord, Inode, Op, OpKind
from cachexfs.core.replica import Applied
from cachexfs.core.waits import Waits
from cachexfs.engine.node import Node

_NUMBER = re.compile(rb"\d+")
NONE = -2  # less than any place in a path, or than that of the root
LOOKS_MAX = 256  # at what landed last: asked at each removal of a member
_LANDS = (OpKind.PUT, OpKind.RENAME, OpKind.LINK)


class LastWhole:
    """Knows which commit files are on the PFS and which are on their way there, of all nodes."""

    def __init__(self, node: Node, waits: Waits) -> None:
        self.node = node
        self._waits = waits
        self._landed: dict[int, None] = {}  # file ids, the last one last
        self._coming: dict[bytes, int] = {}  # pending operation -> file id
        self.on_change: Callable[[], None] = lambda: None

    def load(self) -> None:
        """Take in the state when the engine starts."""
        for key, entry in self.node.catalogue.view.items():
            if key.startswith((b"i/", b"p/")):
                self._notice(key, None, entry.record)

    def notice(self, changes: Applied) -> None:
        """Catalogue listener."""
        if any([self._notice(key, old, new) for key, old, new in changes if key.startswith((b"i/", b"p/"))]):
            self.on_change()

    def _notice(self, key: bytes, old: AnyRecord | None, new: AnyRecord | None) -> bool:
        """Whether it is about a commit file, or the landing of a new name."""
        if key.startswith(b"p/"):
            is_coming = isinstance(new, Op) and new.kind in _LANDS and lists_members(_last(lands_at(new)))
            was_coming = self._coming.pop(key, None) is not None
            if isinstance(new, Op) and is_coming and not new.cancelled:
                self._coming[key] = new.fid
            return is_coming or was_coming or (new is None and isinstance(old, Op) and old.kind == OpKind.RENAME)
        fid = int(key[2:], 16)
        was_landed = fid in self._landed
        is_landed = isinstance(new, Inode) and new.kind == "f" and new.pfs is not None and not new.pfs.hidden
        is_landed = is_landed and any(lists_members(name) for _, name in self.node.catalogue.view.names_of(fid))
        if is_landed and not was_landed:
            self._landed[fid] = None
        elif was_landed and not is_landed:
            del self._landed[fid]
        return is_landed != was_landed

    def keeps(self, fid: int) -> bool:
        """Whether a commit file that lists members must not leave the PFS now, should one of these be removed."""
        path = self.node.catalogue.view.path(fid)
        return fid in self._landed and path is not None and self.stays(fid, path)

    def stays(self, fid: int, path: bytes, key: bytes = b"") -> bool:
        """The same of one that is at that path on the PFS, and may have been removed from the mount. ``key``: its
        withdrawal, should that be held; what waits for it does not land before."""
        view, series, parts = self.node.catalogue.view, _NUMBER.sub(b"#", path), path.split(b"/")
        there, coming = set[int](), set[int]()  # how near those are that have landed, and those on their way
        for other in islice(reversed(self._landed), LOOKS_MAX):
            near = self._nearness(other, series, parts) if other != fid else None
            if near is None or self._leaves(other):
                continue
            names = list(view.pending_renames(view.path(other) or b""))
            if not names:
                there.add(near)
            elif not any(self._is_kept_off(name, key) for name in names):
                coming.add(near)
            if len(parts) - 2 in there:
                return False  # none is nearer
        for name, other in self._coming.items():
            near = self._nearness(other, series, parts) if other != fid and not self._is_kept_off(name, key) else None
            coming.update(() if near is None else (near,))
        return max(coming, default=NONE) > max(there, default=NONE)

    def _is_kept_off(self, key: bytes, withdrawal: bytes) -> bool:
        return self._waits.stuck(key) or self._waits.would_stick(key, withdrawal)

    def _leaves(self, fid: int) -> bool:
        return any(op.kind == OpKind.WITHDRAW for _, op in self.node.catalogue.view.ops_of(fid))

    def _nearness(self, fid: int, series: bytes, parts: list[bytes]) -> int | None:
        """Which directory alone on its path is not as in ``parts``, whose numbers ``series`` leaves out; None: it is of
        another series. The last one where it is to be at that very path."""
        path = self.node.catalogue.view.path(fid)
        if path is None or _NUMBER.sub(b"#", path) != series:
            return None
        others = [at for at, (mine, other) in enumerate(zip(parts, path.split(b"/"), strict=True)) if mine != other]
        last = len(parts) - 2
        return None if len(others) > 1 or others == [last + 1] else others[0] if others else last


def _last(path: bytes) -> bytes:
    return path.rpartition(b"/")[2]
