"""Lightning's sharded checkpoints, and single files.

Role: two small formats. A single file is its own checkpoint: whole when its own bytes say so. Pure.
Called through ``formats.FORMATS``.
"""

from __future__ import annotations

from collections.abc import Collection

from cachexfs.core.formats.base import Files, Members
from cachexfs.core.formats.huggingface import probed
from cachexfs.core.formats.wholeness import probe

_META = b"meta.pt"
_SUFFIXES = (b".pt", b".pth", b".ckpt", b".safetensors", b".bin")


class LightningSharded:
    """DCP's files plus ``meta.pt``, which rank 0 writes last."""

    name = "lightning"

    def recognises(self, names: Collection[bytes]) -> list[bytes]:
        return [_META] if _META in names else []

    def reads(self, commit: bytes) -> bool:
        return False

    def members(self, commit: bytes, data: bytes, names: Collection[bytes], files: Files | None = None) -> Members:
        found = probed(commit, {b".metadata"}, files)
        problem = probe(files, commit).problem
        return Members(commit, found.needs, False, "", f"meta.pt: {problem}" if problem else None)


class SingleFile:
    """A lone ``*.pt``, ``*.pth``, ``*.ckpt``, ``*.bin`` or ``*.safetensors``."""

    name = "single-file"

    def recognises(self, names: Collection[bytes]) -> list[bytes]:
        """The one file of a listing with no other name in it: beside others it may be only a part."""
        return [name for name in names if len(names) == 1 and name.endswith(_SUFFIXES)]

    def reads(self, commit: bytes) -> bool:
        return False

    def members(self, commit: bytes, data: bytes, names: Collection[bytes], files: Files | None = None) -> Members:
        """No other member. The file's own length, as its header has it, is judged here."""
        found = probe(files, commit)
        problem = found.problem
        size = files.size(commit) if files is not None else None
        if problem is None and size is not None and size < found.size_min:
            problem = "empty" if size == 0 else f"{size} bytes, at least {found.size_min} needed"
        return Members(commit, {}, True, "", problem)
