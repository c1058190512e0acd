"""Who reads the bare PFS sees the old checkpoint until the one that overwrites it is complete.

Role: a checker. It remembers which checkpoints were whole there and in the mount, and asks why one is gone: because the
user removed it or a part of it, or because another one is ready. It knows nothing of how the engine decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import xxhash
from sim_store import Store

from cachexfs.core.records import ROOT_FID, OpKind
from cachexfs.core.replica import Replica

COMMIT = b".metadata"


@dataclass
class Whole:
    """A checkpoint that was whole on the PFS when the mount showed the same: its directory and members there."""

    commit: bytes
    directory: int
    members: dict[bytes, int]
    removed: bool = False  # a part of it, by the user


class Kept:
    """``made``: bytes of each commit file that was written -> member -> bytes. ``view``: the catalogue now."""

    def __init__(self, store: Store, made: Mapping[bytes, Mapping[bytes, bytes]]) -> None:
        self._store, self._made = store, made
        self._whole: dict[bytes, Whole] = {}
        self.view: Callable[[], Replica | None] = lambda: None
        self.excused = False  # memory is so small that the old checkpoint may go
        self.checked = 0

    def gone(self, when: str) -> str:
        """Look after a change of the store: why something that was whole is gone without a reason, or nothing."""
        view = self.view()
        if view is None or self.excused or when == "a power cut":
            self._whole.clear()
            return ""
        why = ""
        for path, known in list(self._whole.items()):
            known.removed = known.removed or self._is_removed(view, path, known)
            if self._commit(path) == known.commit:
                continue
            del self._whole[path]
            moved = any(
                name.endswith(b"/" + COMMIT) and i.data == known.commit for name, i in self._store.walk().items()
            )
            self.checked += not known.removed and not moved
            if not known.removed and not moved and not self._is_next_ready(path, known.commit):
                why = f"{path!r} was whole, and is gone after {when} though nothing else is ready"
        for path, ino in self._store.walk().items():
            parent, _, name = path.rpartition(b"/")
            if name == COMMIT and ino.data in self._made and parent not in self._whole:
                self._remember(view, parent, ino.data)
        return why

    def _commit(self, path: bytes) -> bytes | None:
        found = self._store.find(path + b"/" + COMMIT)
        return found.data if found is not None else None

    def _remember(self, view: Replica, path: bytes, commit: bytes) -> None:
        fid = _find(view, path)
        mine = view.lookup(fid, COMMIT) if fid is not None else None
        generation = view.generation(mine.fid) if mine is not None else None
        if fid is None or generation is None or generation.digest != xxhash.xxh3_128_digest(commit):
            return
        names = view.children(fid)
        members = {name: names[name].fid for name in self._made[commit] if name in names}
        contents = {name: view.generation(child) for name, child in members.items()}
        if all(
            (content := contents.get(name)) is not None and content.digest == xxhash.xxh3_128_digest(data)
            for name, data in self._made[commit].items()
        ):
            self._whole[path] = Whole(commit, fid, members)

    def _is_removed(self, view: Replica, path: bytes, known: Whole) -> bool:
        if _find(view, path) != known.directory:
            return True
        names = view.children(known.directory)
        if any(op.kind == OpKind.RESTORE and op.path == path + b"/" + COMMIT for _, op, _ in view.ops()):
            return True  # what it names was not known, and something beside it has changed: it comes back
        return COMMIT not in names or any(
            name not in names or names[name].fid != fid for name, fid in known.members.items()
        )

    def _is_next_ready(self, path: bytes, commit: bytes) -> bool:
        there = self._store.find(path)
        files = [*self._store.tmp.entries.values(), *(there.entries.values() if there is not None else ())]
        ready = {ino.data for ino in files if ino.kind == "f"}
        return any(
            other != commit and other in ready and all(data in ready for data in members.values())
            for other, members in self._made.items()
        )


def _find(view: Replica, path: bytes) -> int | None:
    fid = ROOT_FID
    for name in path.split(b"/") if path else ():
        entry = view.lookup(fid, name)
        if entry is None or entry.kind != "d":
            return None
        fid = entry.fid
    return fid
