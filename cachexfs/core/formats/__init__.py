"""Checkpoint formats: which files must exist, and how long, before a checkpoint can be restarted from.

Role: the registry. To add a format: a module with a class that satisfies ``base.Format``, its line in
``FORMATS``, its commit file's name in ``core.commitfiles``, its tests (``docs/formats.md``). Pure; calls
take up to seconds for large commit files, so they belong outside the event loop.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from cachexfs.core.commitfiles import is_pointer_name, pointer_target
from cachexfs.core.formats.base import (
    Files,
    ForeignError,
    Format,
    FormatError,
    Members,
    Missing,
    combine,
    evaluate,
    member_name,
    prefixed,
)
from cachexfs.core.formats.dcp import Dcp
from cachexfs.core.formats.deepspeed import DeepSpeed
from cachexfs.core.formats.huggingface import Accelerate, HfIndex, HfTrainer
from cachexfs.core.formats.megatron import Megatron
from cachexfs.core.formats.outline import empty_files, may_be_checkpoint, unknown_files
from cachexfs.core.formats.single import LightningSharded, SingleFile

__all__ = [
    "FORMATS",
    "Files",
    "Format",
    "FormatError",
    "Members",
    "Missing",
    "combine",
    "commit_names",
    "describe",
    "describe_file",
    "empty_files",
    "evaluate",
    "listed",
    "may_be_checkpoint",
    "member_name",
    "prefixed",
    "recognise",
    "unknown_files",
]

_POINTER_BYTES = 8192
COMMIT_BYTES_MAX = 1 << 30
"""Largest commit file that is read: DCP's ``.metadata`` of 2200 tensors on 3000 ranks."""

FORMATS: tuple[Format, ...] = (
    DeepSpeed(),
    Megatron(),
    Dcp(),
    LightningSharded(),
    HfTrainer(),
    HfIndex(),
    Accelerate(),
)
"""In the order in which their commit files are tried; the first commit file stands for a combination."""


def recognise(names: Collection[bytes]) -> list[tuple[Format, bytes]]:
    """The formats and commit files in a directory whose listing is ``names``; all of them count.

    A single file has no commit file: ``describe_file``.
    """
    listing = frozenset(names)
    return [(known, commit) for known in FORMATS for commit in known.recognises(listing)]


def commit_names(names: Collection[bytes]) -> list[bytes]:
    """Commit files (pointers included) in a directory whose listing is ``names``."""
    return [commit for _, commit in recognise(names)]


class Below:
    """``Files`` of a sub-directory of another ``Files``."""

    def __init__(self, files: Files, directory: bytes) -> None:
        self._files = files
        self._base = directory + b"/"

    def names(self) -> list[bytes]:
        base = self._base
        return [name[len(base) :] for name in self._files.names() if name.startswith(base)]

    def size(self, name: bytes) -> int | None:
        return self._files.size(self._base + name)

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        return self._files.read(self._base + name, offset, length)


def describe(files: Files) -> Members | None:
    """Everything that the checkpoint directory behind ``files`` asks for, or None when nothing in it is
    recognised.

    Sets in sub-directories (accelerate's ``pytorch_model_fsdp_0/`` and ``optimizer_0/``) are part of it;
    beside a pointer file only those at or below its target. Raises ``FormatError``, its message beginning
    with the commit file's path.
    """
    directories: dict[bytes, set[bytes]] = {b"": set()}
    for name in files.names():
        head, _, tail = name.rpartition(b"/")
        directories.setdefault(head, set()).add(tail)
    parts: list[Members] = []
    targets: set[bytes] = set()
    for known, commit in recognise(directories.pop(b"")):
        if is_pointer_name(commit):
            targets.add(pointer_target(commit, files.read(commit, 0, _POINTER_BYTES)) or b"")
        parts.append(_members(known, commit, files, b""))
    for directory, listing in sorted(directories.items()):
        if targets and not any(directory == t or directory.startswith(t + b"/") for t in targets if t):
            continue
        for known, commit in recognise(listing):
            parts.append(prefixed(directory, _members(known, commit, Below(files, directory), directory)))
    return combine(parts) if parts else None


def listed(files: Files) -> dict[bytes, Collection[bytes]]:
    """What each commit file of the directory itself lists, where ``describe`` cannot tell of all of them. One that is
    surely no commit file lists nothing; those of which nobody knows are left out."""
    found: dict[bytes, Collection[bytes]] = {}
    for known, commit in recognise([name for name in files.names() if b"/" not in name]):
        if not known.lists:
            continue
        try:
            found |= _members(known, commit, files, b"").listed
        except ForeignError:
            found[commit] = ()
        except FormatError:
            continue
    return found


def describe_file(files: Files, name: bytes) -> Members:
    """A file (``*.pt``, ``*.ckpt``, ``*.safetensors``, ...) as its own checkpoint: no members, and
    ``incomplete_reason`` when its own bytes say that it is cut."""
    return SingleFile().members(name, b"", [name], files)


def _content(files: Files, name: bytes) -> bytes:
    size = files.size(name) or 0
    if size > COMMIT_BYTES_MAX:
        raise FormatError(f"{size} bytes long; the limit is {COMMIT_BYTES_MAX}")
    return files.read(name, 0, size)


def _members(known: Format, commit: bytes, files: Files, directory: bytes) -> Members:
    try:
        data = _content(files, commit) if known.reads(commit) else b""
        names = [name for name in files.names() if b"/" not in name]
        found = known.members(commit, data, names, files)
        return replace(found, listed={commit: list(found.needs)}) if known.lists else found
    except FormatError as e:
        path = directory + b"/" + commit if directory else commit
        raise type(e)(f"{path.decode(errors='backslashreplace')}: {e}") from None
