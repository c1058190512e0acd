"""What a change of names has done is on the disk when it returns: every directory that it changed was fsynced after."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cachexfs.adapters import pfs_names
from cachexfs.adapters.pfs_attrs import Attrs
from cachexfs.adapters.pfs_dir import PfsDir
from cachexfs.adapters.pfs_ops import Context

DIRECTORY = Attrs(0o755, None, None, 1, 1, None)
FILE = Attrs(0o640, None, None, 1, 1, None)
#: (kind, path, path2, attributes); ``d`` has ``file`` and ``empty``, ``e`` is empty, ``held`` has ``old``
CHANGES: list[tuple[str, bytes, bytes, Attrs | None]] = [
    ("mkdir", b"d/new", b"", DIRECTORY),
    ("rename", b"d/file", b"e/file", None),
    ("link", b"d/file", b"e/file", None),
    ("unlink", b"d/file", b"", None),
    ("rmdir", b"d/empty", b"", None),
    ("symlink", b"d/link", b"target", FILE),
    ("mknod:p:0", b"d/fifo", b"", FILE),
    ("hide", b"d/file", b"1.2", None),
    ("unhide", b"d/back", b"old", None),
]


@dataclass
class Noted:
    """``Monitor`` of one call after the other."""

    value: int = -1
    pages: list[object] = field(default_factory=list)

    def progress(self, *args: object) -> None: ...

    def note(self, value: int) -> None:
        self.value = value

    def page(self, rows: Sequence[tuple[bytes, object]]) -> None:
        self.pages += rows


class Watch:
    """The directories below a root: their names when each was fsynced last."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.synced: dict[Path, list[str]] = {}
        self.before = self.names()

    def names(self) -> dict[Path, list[str]]:
        return {Path(path): sorted([*files, *dirs]) for path, dirs, files in os.walk(self.root)}

    def fsync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            self.synced[path] = sorted(os.listdir(path))

    def unsynced(self) -> list[Path]:
        """Directories that have other names now than before, and had not at their last fsync."""
        now = self.names()
        changed = [path for path in now if path in self.before and now[path] != self.before[path]]
        return [path for path in changed if self.synced.get(path) != now[path]]


@pytest.fixture
def watch(pfs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    (pfs_dir / "d/empty").mkdir(parents=True)
    (pfs_dir / "e").mkdir()
    (pfs_dir / "d/file").write_bytes(b"x")
    PfsDir(os.fsencode(pfs_dir), None, {}, mutating=True).establish()
    (pfs_dir / ".cachexfs/held").mkdir(exist_ok=True)
    (pfs_dir / ".cachexfs/held/old").write_bytes(b"y")
    watch, fsync = Watch(pfs_dir), os.fsync

    def seen(fd: int) -> None:
        fsync(fd)
        watch.fsync(fd)

    monkeypatch.setattr(os, "fsync", seen)
    return watch


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[0])
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_every_directory_that_a_change_touches_is_synced_after_it(
    watch: Watch, change: tuple[str, bytes, bytes, Attrs | None], *, again: bool
) -> None:
    """``again``: its answer was lost, and the process may have died before it came to the fsync."""
    noted = Noted()

    def run(ino: int) -> None:
        context = Context(os.fsencode(watch.root), None, "nonce", noted, {})  # type: ignore[arg-type]
        pfs_names.run(context, *change, ino)

    run(-1)
    assert watch.names() != watch.before
    if again:
        watch.synced.clear()
        run(noted.value)
    assert watch.unsynced() == []


def test_the_watch_sees_a_directory_that_was_not_synced(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pfs_names, "fsync_dir", abs)
    context = Context(os.fsencode(watch.root), None, "nonce", Noted(), {})  # type: ignore[arg-type]
    pfs_names.run(context, "unhide", b"d/back", b"old", None, -1)
    assert set(watch.unsynced()) == {watch.root / "d", watch.root / ".cachexfs/held"}
