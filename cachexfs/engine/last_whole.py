"""The last whole checkpoint on the PFS: it stays there until the next one of its series has landed.

Role: who keeps few checkpoints and saves faster than the PFS takes them removes the only one that has landed while the
next ones are still on their way, or are removed before they get there. So the withdrawal of its commit file is issued
held (``core/claims``), the removal of all that it names waits for that, and ``Claims`` asks here when it may go. It
stays for what is going to land only: nothing waits for a checkpoint that the PFS refuses, or whose bytes are lost, and
the last one of all goes when it is removed. Checkpoints that list their members, of one *series*: paths that differ in
numbers alone.

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

    def stays(self, fid: int, path: bytes) -> bool:
        """The same of one that is at that path on the PFS, and may have been removed from the mount."""
        series, comes = _NUMBER.sub(b"#", path), False
        for other in islice(reversed(self._landed), LOOKS_MAX):
            if other == fid or not self._is_of(other, series) or self._leaves(other):
                continue
            names = list(self.node.catalogue.view.pending_renames(self.node.catalogue.view.path(other) or b""))
            if not names:
                return False
            comes = comes or not any(map(self._waits.stuck, names))
        return comes or any(
            other != fid and self._is_of(other, series) and not self._waits.stuck(key)
            for key, other in self._coming.items()
        )

    def _leaves(self, fid: int) -> bool:
        return any(op.kind == OpKind.WITHDRAW for _, op in self.node.catalogue.view.ops_of(fid))

    def _is_of(self, fid: int, series: bytes) -> bool:
        path = self.node.catalogue.view.path(fid)
        return path is not None and _NUMBER.sub(b"#", path) == series


def _last(path: bytes) -> bytes:
    return path.rpartition(b"/")[2]
