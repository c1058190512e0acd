"""Where checkpoints lie in a tree of directories, judged by names alone.

Role: one rule for the mount and for ``latest`` on a bare directory. A directory is a checkpoint when it holds a commit
file (a pointer such as ``latest`` is none), or shards that a commit file will name, or when it has a step in its name
and the sets of one checkpoint below it (``global_step_10/model`` and ``/optimizer``). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from cachexfs.core.commitfiles import is_pointer_name, step_of
from cachexfs.core.formats.wholeness import SINGLE_SUFFIXES

_DCP_COMMIT = b".metadata"
_SHARD = re.compile(rb"__([0-9]{1,7})_[0-9]{1,7}\.distcp")
_RANK_COMMIT = re.compile(rb"__[0-9]{1,7}\.metadata")
_PART = re.compile(rb"[^0-9]+|(pytorch_model_fsdp|optimizer)_[0-9]{1,3}")
_PART_DEPTH_MAX = 3
#: Words that tell checkpoints of one run apart, not the sets of one checkpoint: ``run-2/best`` and ``run-2/last``.
_ALTERNATIVES = frozenset(
    b"best last latest newest final current previous prev old new backup initial init emergency "
    b"checkpoint checkpoints ckpt ckpts snapshot snapshots".split()
)
_WORDS = re.compile(rb"[a-z]+")
_NO_CHECKPOINT = (
    b".txt", b".log", b".out", b".err", b".json", b".jsonl", b".yaml", b".yml", b".toml", b".ini", b".cfg", b".csv",
    b".tsv", b".md", b".rst", b".html", b".py", b".sh", b".png", b".svg", b".pdf", b".lock", b".gitignore",
)  # fmt: skip
_EVENTS = b"events.out.tfevents."

Listing = Callable[[bytes], tuple[Collection[bytes], Collection[bytes]]]
"""Path of a directory relative to the root (``b""``) -> its (files, directories)."""
Recognise = Callable[[Collection[bytes]], Collection[bytes]]
"""Names of a directory's files -> those that are commit files."""


def awaited(files: Collection[bytes]) -> bytes | None:
    """The commit file that is still to come: DCP's, where there are shards and no commit file yet."""
    if _DCP_COMMIT in files or any(_RANK_COMMIT.fullmatch(name) for name in files):
        return None
    return _DCP_COMMIT if any(_SHARD.fullmatch(name) for name in files) else None


def covering(name: bytes, commits: Collection[bytes]) -> bytes | None:
    """The DCP commit file that is written after the member ``name`` (paths of one checkpoint), if there is one.

    That of the nearest directory; of several ranks' own ones (``__R.metadata``) that of the rank that wrote it.
    """
    directory, _, last = name.rpartition(b"/")
    while True:
        base = directory + b"/" if directory else b""
        if base + _DCP_COMMIT in commits:
            return base + _DCP_COMMIT if base + _DCP_COMMIT != name else None
        if (found := _SHARD.fullmatch(last)) and (own := b"%s__%d.metadata" % (base, int(found[1]))) in commits:
            return own
        if not directory:
            return None
        directory = directory.rpartition(b"/")[0]


def is_head(files: Collection[bytes], recognise: Recognise) -> bool:
    """Whether a directory with these files is a checkpoint by itself."""
    return any(not is_pointer_name(name) for name in recognise(files)) or awaited(files) is not None


def parts(name: bytes, listing: Listing, directory: bytes, recognise: Recognise) -> list[bytes]:
    """Commit files (relative to ``directory``) of the sets that make one checkpoint of a directory called ``name``.

    Empty unless the name has a step, there is no commit file in it, and all that lies below it belongs to sets whose
    directories are told apart by words, not by numbers, and not by words such as ``best`` and ``last``.
    """
    if step_of(name.decode(errors="replace")) is None or is_head(listing(directory)[0], recognise):
        return []
    found: list[bytes] = []
    stack = [(b"", 0)]
    while stack:
        below, depth = stack.pop()
        files, directories = listing(_join(directory, below))
        if below and is_head(files, recognise):
            commits = [commit for commit in recognise(files) if not is_pointer_name(commit)]
            found += [_join(below, commit) for commit in commits or [awaited(files) or _DCP_COMMIT]]
            continue
        for child in directories:
            path = _join(below, child)
            if _may_be_part(child) and depth < _PART_DEPTH_MAX:
                stack.append((path, depth + 1))
            elif is_head(listing(_join(directory, path))[0], recognise):
                return []
    return sorted(found)


def _may_be_part(name: bytes) -> bool:
    return _PART.fullmatch(name) is not None and _ALTERNATIVES.isdisjoint(_WORDS.findall(name.lower()))


def checkpoints(name: bytes, listing: Listing, recognise: Recognise) -> Iterator[bytes]:
    """Paths of all checkpoints at or below a root called ``name``, outermost only, relative to it."""
    stack = [(b"", name)]
    while stack:
        directory, called = stack.pop()
        files, directories = listing(directory)
        if is_head(files, recognise) or parts(called, listing, directory, recognise):
            yield directory
        else:
            stack += [(_join(directory, child), child) for child in directories]


def may_be_checkpoint(path: bytes) -> bool:
    """Whether a file that no format knows might be one: not a log, a setting or a note, by its name."""
    name = path.rpartition(b"/")[2].lower()
    return not (name.endswith(_NO_CHECKPOINT) or name.startswith(_EVENTS))


def unknown_files(paths: Collection[bytes]) -> str:
    """Why "there is no checkpoint" would not be certain where these files lie; empty without any."""
    if not paths:
        return ""
    first = min(paths).decode(errors="backslashreplace")
    single = min((path for path in paths if path.endswith(SINGLE_SUFFIXES)), default=None)
    if single is not None:
        name = single.decode(errors="backslashreplace")
        return (
            f"'{name}' is a single file, which no commit file calls complete: take the one that was saved last; on the "
            f"mount, 'cachexfs explain {name}' says whether it is whole, and how far it has got (docs/formats.md)"
        )
    some = f"{len(paths)} files there belong" if len(paths) > 1 else "a file there belongs"
    return f"{some} to no checkpoint format that is known, '{first}' for one: see docs/formats.md"


def empty_files(paths: Collection[bytes]) -> str:
    """Why there is no checkpoint where these files lie, which are all that might be one; empty without any."""
    if not paths:
        return ""
    first = min(paths).decode(errors="backslashreplace")
    return f"'{first}' is empty" + (f", and {len(paths) - 1} more" if len(paths) > 1 else "")


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory and name else directory or name
