"""Lightning's sharded checkpoints, and single files.

Role: two small formats. A single file is its own checkpoint: whole when its own bytes say so. It is
never recognised in a directory's listing, because the first file of any checkpoint is alone for a while:
only who asks about the file itself gets this answer. Pure. Called through ``formats``.
"""

from __future__ import annotations

from collections.abc import Collection

from cachexfs.core.formats.base import Files, Members, evaluate
from cachexfs.core.formats.wholeness import probe

_META = b"meta.pt"
_DCP = b".metadata"
_SHARD_SUFFIX = b".distcp"


class LightningSharded:
    """DCP's files plus ``meta.pt``, which rank 0 writes last."""

    name = "lightning"
    lists = False

    def recognises(self, names: Collection[bytes]) -> list[bytes]:
        """``meta.pt`` alone or beside DCP's files; others use the name too."""
        beside = any(name == _DCP or name.endswith(_SHARD_SUFFIX) for name in names)
        return [_META] if _META in names and (beside or len(names) == 1) else []

    def reads(self, commit: bytes) -> bool:
        return False

    def members(self, commit: bytes, data: bytes, names: Collection[bytes], files: Files | None = None) -> Members:
        problem = probe(files, commit).problem
        return Members(commit, {_DCP: 1}, False, "", f"meta.pt: {problem}" if problem else None)


class SingleFile:
    """One ``*.pt``, ``*.ckpt``, ``*.safetensors`` ... asked about by its own name."""

    name = "single-file"
    lists = False

    def recognises(self, names: Collection[bytes]) -> list[bytes]:
        """Nothing: see the module's text."""
        return []

    def reads(self, commit: bytes) -> bool:
        return False

    def members(self, commit: bytes, data: bytes, names: Collection[bytes], files: Files | None = None) -> Members:
        """No other member. The file's own length, as its header has it, is judged here."""
        found = probe(files, commit)
        problem = found.problem
        if problem is None and files is not None:
            size = files.size(commit)
            present = {} if size is None else {commit: size}
            problem = next((m.reason for m in evaluate({commit: found.size_min}, present)), None)
        return Members(commit, {}, True, "", problem)
