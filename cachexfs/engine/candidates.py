"""Which directories below one of the mount are checkpoints, by their names, and which of them is the newest.

Role: what ``latest``, ``status`` and ``at_risk_s`` look through. Whether one is whole is for ``Completeness`` to say,
which reads commit files; so who looks for the newest asks from the newest on, and stops. Called by ``Completeness``.

Concurrency: directories of the PFS that nobody has looked into are imported some at a time; all else is synchronous.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from cachexfs.core import formats
from cachexfs.core.commitfiles import step_of
from cachexfs.core.formats import outline
from cachexfs.core.replica import Replica
from cachexfs.errors import CacheXError

IMPORTS_AT_ONCE = 8

Ensure = Callable[[int], Awaitable[None]]
"""Brings a directory's entries in from the PFS; raises ``CacheXError`` when that cannot be done."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A directory that is a checkpoint by its names; a later one is greater. ``step`` -1: none in its name."""

    step: int
    committed_ns: int  # the mtime of its newest commit file: on the mount as on the PFS, before as after a restart
    path: bytes  # relative to where one has looked
    fid: int


def listing_of(view: Replica, fid: int) -> outline.Listing:
    """Files and directories by path below a directory; what is not there is empty."""
    fids = {b"": fid}

    def listing(path: bytes) -> tuple[list[bytes], list[bytes]]:
        children = view.children(fids[path]) if path in fids else {}
        directories = []
        for name, entry in children.items():
            if entry.kind == "d":
                fids[path + b"/" + name if path else name] = entry.fid
                directories.append(name)
        return [name for name, entry in children.items() if entry.kind == "f"], directories

    return listing


def commit_files(view: Replica, fid: int, name: bytes) -> list[tuple[str, bytes]]:
    """(format, commit file) of a checkpoint directory called ``name``: its own, else those of the sets in it."""
    listing = listing_of(view, fid)
    files = listing(b"")[0]
    own = [(known.name, commit) for known, commit in formats.recognise(files)]
    if own:
        return own
    if awaited := outline.awaited(files):
        return [("dcp", awaited)]
    return [
        ("dcp" if commit.endswith(b".metadata") else "sets", commit)
        for commit in outline.parts(name, listing, b"", formats.commit_names)
    ]


def find(view: Replica, fid: int, path: bytes) -> int | None:
    """What lies at a path below a directory; None when it is not there (any more)."""
    found: int | None = fid
    for name in filter(None, path.split(b"/")):
        entry = view.lookup(found, name) if found is not None else None
        found = entry.fid if entry is not None else None
    return found


async def bring_in(view: Replica, fid: int, ensure: Ensure) -> None:
    """Import the directories of the PFS down to the checkpoints. Raises the first ``CacheXError`` of ``ensure``."""
    errors: list[CacheXError] = []
    at_once = trio.CapacityLimiter(IMPORTS_AT_ONCE)

    async def look(directory: int) -> None:
        try:
            async with at_once:
                await ensure(directory)
        except CacheXError as error:
            errors.append(error)
            nursery.cancel_scope.cancel()
            return
        names = [name for name, entry in view.children(directory).items() if entry.kind == "f"]
        if not outline.is_head(names, formats.commit_names):
            for entry in view.children(directory).values():
                if entry.kind == "d":
                    nursery.start_soon(look, entry.fid)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look, fid)
    if errors:
        raise errors[0]


def newest_first(view: Replica, fid: int, called: bytes) -> list[Candidate]:
    """All checkpoints at or below a directory called ``called``, outermost only."""
    found = []
    for path in outline.checkpoints(called, listing_of(view, fid), formats.commit_names):
        where = find(view, fid, path)
        if where is not None:
            name = (path or called).rpartition(b"/")[2]
            step = step_of(name.decode(errors="surrogateescape"))
            committed_ns = _committed_ns(view, where, name)
            found.append(Candidate(-1 if step is None else step, committed_ns, path, where))
    return sorted(found, reverse=True)


def _committed_ns(view: Replica, fid: int, name: bytes) -> int:
    newest_ns = 0
    for _, commit in commit_files(view, fid, name):
        where = find(view, fid, commit)
        inode = view.inode(where) if where is not None else None
        newest_ns = max(newest_ns, inode.mtime_ns if inode is not None else 0)
    return newest_ns
