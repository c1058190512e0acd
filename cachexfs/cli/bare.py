"""The newest whole checkpoint of a directory that is read without a daemon, such as the PFS itself.

Role: ``cachexfs latest`` on a bare directory; called in a child process, since a PFS may hang. Candidates are the
directories in it, the largest step first; each is read until one is whole. What is found wrong with the others is
returned: an unreadable candidate makes "no" uncertain.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from cachexfs.cli.protocol import Latest
from cachexfs.core.commitfiles import is_unfinished_marker, step_of, unfinished_target
from cachexfs.core.formats import Members, describe, evaluate, recognise
from cachexfs.core.formats.single import SingleFile
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

    Checkpoints without a step count as older than all others. Raises ``CannotTellError`` when the directory cannot be
    listed; a directory that does not exist may be a PFS that is not mounted, and is no "no".
    """
    base = os.fsencode(directory)
    try:
        listing = os.listdir(base)
    except FileNotFoundError:
        raise CannotTellError(
            f"'{directory}' does not exist: is the PFS mounted? (for a first run, mkdir -p it)"
        ) from None
    except OSError as error:
        raise _unreadable(base, error) from None
    unfinished = {unfinished_target(name) for name in listing if is_unfinished_marker(name)}
    verdicts = _Verdicts()
    for name in _candidates(base, listing, below):
        if name in unfinished:
            verdicts.not_whole.append(f"{os.fsdecode(name)}: marked as unfinished")
        elif _is_whole(base, name, verdicts):
            return Latest(os.path.join(directory, os.fsdecode(name)), True, "; ".join(verdicts.unknown))
    own = [known for known, _ in recognise(listing) if not isinstance(known, SingleFile)]
    step = step_of(os.fsdecode(os.path.basename(base)))
    is_below = below is None or (step is not None and step < below)
    if own and not verdicts.not_whole and not verdicts.unknown and is_below and _is_whole(base, b"", verdicts):
        return Latest(directory, True)
    reasons = verdicts.unknown or verdicts.not_whole[:3]
    what = f"no whole checkpoint in '{directory}'" + (f" below step {below}" if below is not None else "")
    return Latest(None, not verdicts.unknown, f"{what}: {'; '.join(reasons)}" if reasons else what)


def _candidates(base: bytes, listing: list[bytes], below: int | None) -> Iterator[bytes]:
    """Names of directories that may be checkpoints, largest step first, those without a step last."""
    steps = [(step_of(os.fsdecode(name)), name) for name in listing if name != PRIVATE]
    if below is not None:
        steps = [(step, name) for step, name in steps if step is not None and step < below]
    for _, name in sorted(steps, key=lambda item: (-1 if item[0] is None else item[0], item[1]), reverse=True):
        try:
            mode = os.lstat(os.path.join(base, name)).st_mode
        except OSError:
            yield name  # listed and not there: reading it will say why
            continue
        if stat.S_ISDIR(mode):
            yield name


def _is_whole(base: bytes, name: bytes, verdicts: _Verdicts) -> bool:
    try:
        files = DirectoryFiles(os.path.join(base, name))
        members = describe(files)
        problem = files.problem(members) if members is not None else None
    except CacheXError as error:  # an unreadable file, or a commit file that is not understood
        verdicts.unknown.append(f"{os.fsdecode(name) or '.'}: {error}")
        return False
    if members is None:
        return False
    if problem is not None:
        verdicts.not_whole.append(f"{os.fsdecode(name) or '.'}: {problem}")
        return False
    return True
