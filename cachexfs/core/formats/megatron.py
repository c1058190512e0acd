"""Megatron-LM: tracker file, ``iter_NNNNNNN/`` with DCP's files, ``common.pt`` and ``metadata.json``.

Role: what Megatron adds to DCP. The shards of ``torch_dist`` checkpoints are named by ``.metadata``, which
``dcp`` reads; here is what must stand beside it, and the older ``mp_rank_*`` layout. Pure. Called through
``formats.FORMATS``.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from cachexfs.core.commitfiles import pointer_target
from cachexfs.core.formats.base import Files, FormatError, Members, member_path
from cachexfs.core.formats.huggingface import probed
from cachexfs.core.formats.wholeness import load_json

_TRACKER = b"latest_checkpointed_iteration.txt"
_METADATA = b"metadata.json"
_DCP = b".metadata"
_COMMON = b"common.pt"
_LEGACY = re.compile(rb"mp_rank_([0-9]{2,6})(_[0-9]{3})?(_[0-9]{3})?/(model_optim_rng|distrib_optim)\.pt")


class Megatron:
    """The tracker in the parent, and ``metadata.json`` in an iteration's directory."""

    name = "megatron"
    lists = False

    def recognises(self, names: Collection[bytes]) -> list[bytes]:
        """``metadata.json`` only beside Megatron's other files, for it is a common name."""
        found = [_TRACKER] if _TRACKER in names else []
        if _METADATA in names and (_COMMON in names or _DCP in names):
            found.append(_METADATA)
        return found

    def reads(self, commit: bytes) -> bool:
        return True

    def members(self, commit: bytes, data: bytes, names: Collection[bytes], files: Files | None = None) -> Members:
        """Files beside the shards; for the shards themselves see the iteration's ``.metadata``."""
        if commit == _METADATA:
            wanted = _beside(data)
            return probed(commit, wanted, files, "" if wanted else "metadata.json is not Megatron's")
        target = pointer_target(commit, data)
        if target is None:
            raise FormatError("it names no iteration" if data.strip() else "it is empty")
        base = member_path(target) + b"/"
        everything = names if files is None else files.names()
        below = {name[len(base) :] for name in everything if name.startswith(base)}
        if not below:
            return Members(commit, {}, incomplete_reason=f"{target.decode()} holds no files")
        wanted = _legacy(below)
        if not wanted:
            wanted = {_DCP}
            if _METADATA in below or _COMMON in below:
                wanted |= {_METADATA, _COMMON}
        return probed(commit, {base + name for name in wanted}, files)


def _beside(data: bytes) -> set[bytes]:
    """Members from ``metadata.json``; none when it is somebody else's file of that name."""
    table = load_json(data)
    backend = table.get("sharded_backend") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(backend, str):
        return set()
    wanted = {_COMMON} if table.get("common_backend", "torch") == "torch" else set()
    if backend == "torch_dist":
        wanted.add(_DCP)
    return wanted


def _legacy(below: Collection[bytes]) -> set[bytes]:
    """Files of the ``torch`` format: each kind that any model part has, for all parts from 0 on."""
    found = [m for name in below if (m := _LEGACY.fullmatch(name))]
    if not found:
        return set()
    columns = [sorted({m[i] for m in found}, key=lambda part: part or b"") for i in (2, 3)]
    wanted = set()
    for kind in {m[4] for m in found}:
        for tensor in range(max(int(m[1]) for m in found) + 1):
            for pipeline in _filled(columns[0]):
                for expert in _filled(columns[1]):
                    wanted.add(b"mp_rank_%02d%s%s/%s.pt" % (tensor, pipeline, expert, kind))
    return wanted


def _filled(parts: Collection[bytes | None]) -> list[bytes]:
    """``_000`` to the largest part seen, or only the empty suffix."""
    numbers = [int(part[1:]) for part in parts if part]
    return [b"_%03d" % n for n in range(max(numbers) + 1)] if numbers else [b""]
