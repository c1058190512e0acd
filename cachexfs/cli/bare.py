"""The newest whole checkpoint of a directory that is read without a daemon, such as the PFS itself.

Role: ``cachexfs latest`` on a bare directory; called in a child process, since a PFS may hang. Candidates are the
checkpoints in it by the mount's own rule (``formats.outline``), the largest step first; each is read until one is
whole. What is found wrong with the others is returned: an unreadable candidate makes "no" uncertain.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field

from cachexfs.cli.protocol import Latest
from cachexfs.core import witnesses
from cachexfs.core.commitfiles import is_pointer_name, is_unfinished_marker, step_of, unfinished_target
from cachexfs.core.formats import (
    Members,
    commit_names,
    describe,
    empty_files,
    evaluate,
    may_be_checkpoint,
    outline,
    unknown_files,
)
from cachexfs.errors import CacheXError, CannotTellError

FILES_MAX = 2_000_000
DEPTH_MAX = 16
PRIVATE = b".cachexfs"


class DirectoryFiles:
    """``formats.Files`` of a real directory. Raises ``CannotTellError`` for what cannot be read."""

    def __init__(self, base: bytes) -> None:
        self._base = base
        self._sizes: dict[bytes, int] = {}
        try:
            self._walk(b"", 0)
        except OSError as error:
            raise _unreadable(base, error) from None

    def _walk(self, relative: bytes, depth: int) -> None:
        if depth > DEPTH_MAX:
            return
        with os.scandir(os.path.join(self._base, relative)) as entries:
            for entry in entries:
                name = os.path.join(relative, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != PRIVATE:
                        self._walk(name, depth + 1)
                    continue
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    if entry.is_symlink():
                        continue  # a dangling link is no file
                    raise
                if stat.S_ISREG(status.st_mode):
                    self._sizes[name] = status.st_size
                if len(self._sizes) > FILES_MAX:
                    raise CannotTellError(f"more than {FILES_MAX} files below '{os.fsdecode(self._base)}'")

    def names(self) -> list[bytes]:
        return list(self._sizes)

    def size(self, name: bytes) -> int | None:
        return self._sizes.get(name)

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        path = os.path.join(self._base, name)
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                return file.read(length)
        except OSError as error:
            raise _unreadable(path, error) from None

    def problem(self, members: Members) -> str | None:
        """What keeps the checkpoint from being whole, or None."""
        if members.incomplete_reason:
            return members.incomplete_reason
        missing = evaluate(members.needs, self._sizes)
        if missing:
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            return f"{os.fsdecode(missing[0].name)}: {missing[0].reason}{more}"
        if members.exact:
            for name, size in members.needs.items():
                if size > 1 and self._sizes[name] != size:
                    return f"{os.fsdecode(name)}: {self._sizes[name]} bytes instead of {size}"
        return None


def _unreadable(path: bytes, error: OSError) -> CannotTellError:
    return CannotTellError(f"cannot read '{os.fsdecode(path)}': {error.strerror}")


@dataclass(slots=True)
class _Verdicts:
    """Why candidates were passed over: certainly not whole, or not known."""

    not_whole: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def newest(directory: str, below: int | None) -> Latest:
    """The newest whole checkpoint in ``directory`` (absolute path) with a step smaller than ``below``.

    Checkpoints without a step count as older than all others; of equal steps the last committed wins. Raises
    ``CannotTellError`` when the directory cannot be listed; a directory that does not exist may be a PFS that is not
    mounted, and is no "no".
    """
    base = os.fsencode(directory)
    _make_sure(base)
    latest = _newest(directory, base, below)
    _make_sure(base)
    return latest


def _make_sure(base: bytes) -> None:
    """Raise ``CannotTellError`` when the PFS does not show all of its files: a newer checkpoint may be among them."""
    while True:
        try:
            seen = os.listdir(os.path.join(base, PRIVATE, witnesses.DIRECTORY))
        except OSError:  # not a directory that a mount has used, or another user's
            if os.path.dirname(base) == base:
                return
            base = os.path.dirname(base)
            continue
        if said := witnesses.complaint(seen):
            raise CannotTellError(said)
        return


def _newest(directory: str, base: bytes, below: int | None) -> Latest:
    verdicts = _Verdicts()
    tree = _Tree(base, verdicts)
    try:
        tree.listing(b"")
    except FileNotFoundError:
        raise CannotTellError(
            f"'{directory}' does not exist: is the PFS mounted? (for a first run, mkdir -p it)"
        ) from None
    except OSError as error:
        raise _unreadable(base, error) from None
    for path in _candidates(base, tree, below):
        if tree.is_unfinished(path):
            verdicts.not_whole.append(f"{os.fsdecode(path)}: marked as unfinished")
        elif _is_whole(base, path, tree.sets(path), verdicts):
            found = os.path.join(directory, os.fsdecode(path)) if path else directory
            return Latest(found, True, "; ".join(verdicts.unknown))
    if not tree.found and (unknown := unknown_files(tree.strange())):
        verdicts.unknown.append(unknown)
    elif not tree.found and (empty := empty_files(tree.strange(empty=True))):
        verdicts.not_whole.append(empty)
    reasons = verdicts.unknown or verdicts.not_whole[:3]
    what = f"no whole checkpoint in '{directory}'" + (f" below step {below}" if below is not None else "")
    return Latest(None, not verdicts.unknown, f"{what}: {'; '.join(reasons)}" if reasons else what)


class _Tree:
    """Names below a directory, listed when they are asked for. What cannot be listed makes "no" uncertain."""

    def __init__(self, base: bytes, verdicts: _Verdicts) -> None:
        self._base = base
        self._verdicts = verdicts
        self._known: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
        self.found = False  # some checkpoint, whole or not

    def listing(self, path: bytes) -> tuple[list[bytes], list[bytes]]:
        """Files and directories of one directory; links are neither. The root's errors are raised."""
        if path not in self._known:
            files: list[bytes] = []
            directories: list[bytes] = []
            try:
                with os.scandir(os.path.join(self._base, path)) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            directories += [entry.name] if entry.name != PRIVATE else []
                        elif not entry.is_symlink() or entry.is_file():
                            files.append(entry.name)
            except OSError as error:
                if not path:
                    raise
                self._verdicts.unknown.append(f"{os.fsdecode(path)}: {_unreadable(path, error)}")
            if path.count(b"/") >= DEPTH_MAX:
                directories = []
            self._known[path] = files, directories
        return self._known[path]

    def is_unfinished(self, path: bytes) -> bool:
        """Whether a marker beside the directory says so."""
        parent, _, name = path.rpartition(b"/")
        files, directories = self.listing(parent) if path else ((), ())
        return any(unfinished_target(m) == name for m in (*files, *directories) if is_unfinished_marker(m))

    def sets(self, path: bytes) -> list[bytes]:
        """Commit files of the sets that a checkpoint consists of; empty when it has one of its own."""
        name = os.path.basename(path or self._base)
        return outline.parts(name, self.listing, path, commit_names)

    def committed_ns(self, path: bytes) -> int:
        """The mtime of the newest commit file of the checkpoint at ``path``; 0 when there is none that can be seen."""
        own = [name for name in commit_names(self.listing(path)[0]) if not is_pointer_name(name)]
        found = 0
        for name in own or self.sets(path):
            with contextlib.suppress(OSError):
                found = max(found, os.stat(os.path.join(self._base, path, name)).st_mtime_ns)
        return found

    def strange(self, *, empty: bool = False) -> list[bytes]:
        """Files with content (or without) in what was listed that may be checkpoints of a kind that is not known."""
        paths = [os.path.join(path, name) for path, (files, _) in self._known.items() for name in files]
        return [path for path in paths if may_be_checkpoint(path) and self._has_bytes(path) != empty]

    def _has_bytes(self, path: bytes) -> bool:
        try:
            return os.stat(os.path.join(self._base, path)).st_size > 0
        except OSError:
            return True


def _candidates(base: bytes, tree: _Tree, below: int | None) -> list[bytes]:
    """Paths of directories that are checkpoints, largest step first, those without a step last.

    Of equal ones the last committed first, by the mtime of the commit file: as the mount says.
    """
    rows = []
    for path in outline.checkpoints(os.path.basename(base), tree.listing, commit_names):
        tree.found = True
        step = step_of(os.fsdecode(os.path.basename(path or base)))
        if below is None or (step is not None and step < below):
            rows.append((-1 if step is None else step, tree.committed_ns(path), path))
    return [path for *_, path in sorted(rows, reverse=True)]


def _is_whole(base: bytes, name: bytes, commits: list[bytes], verdicts: _Verdicts) -> bool:
    try:
        files = DirectoryFiles(os.path.join(base, name))
        members = describe(files)
        problem = files.problem(members) if members is not None else "its commit file is absent: not saved to the end"
    except CacheXError as error:  # an unreadable file, or a commit file that is not understood
        verdicts.unknown.append(f"{os.fsdecode(name) or '.'}: {error}")
        return False
    absent = [commit for commit in commits if files.size(commit) is None]
    if absent:
        problem = f"{os.fsdecode(absent[0])}: absent: not saved to the end"
    if problem is not None:
        verdicts.not_whole.append(f"{os.fsdecode(name) or '.'}: {problem}")
        return False
    return True
