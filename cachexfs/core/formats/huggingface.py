"""HuggingFace layouts: ``*.index.json`` over shards, and the Trainer's ``checkpoint-N``.

Role: two formats. The index names its shards; a safetensors shard tells its exact size in its header.
The Trainer has no list of files anywhere: ``trainer_state.json`` is rank 0's last file, and what belongs
to it follows from what is there. Pure. Called through ``formats.FORMATS``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from cachexfs.core.formats.base import Files, ForeignError, FormatError, Members, member_name
from cachexfs.core.formats.wholeness import load_json, probe

_INDEX_SUFFIX = b".index.json"
_STATE = b"trainer_state.json"
_WEIGHTS = (b"model.safetensors", b"adapter_model.safetensors", b"pytorch_model.bin", b"adapter_model.bin")
_WEIGHT_INDEXES = (b"model.safetensors.index.json", b"pytorch_model.bin.index.json")
_NO_WEIGHTS = "no model weights (model.safetensors, its index, or a sharded set)"
_RANDOM_0 = b"random_states_0.pkl"
_OPTIMIZERS = (b"optimizer.pt", b"optimizer.bin")
_FSDP_SETS = (b"pytorch_model_fsdp_0", b"optimizer_0")  # directories with DCP's files
_DEEPSPEED = b"latest"
_RNG = re.compile(rb"rng_state_(0|[1-9][0-9]{0,5})\.pth")
_RANDOM = re.compile(rb"random_states_(0|[1-9][0-9]{0,5})\.pkl")


def probed(commit: bytes, names: Collection[bytes], files: Files | None, note: str = "") -> Members:
    """Members for ``names`` with what each file's own bytes say about its size."""
    needs: dict[bytes, int] = {}
    problems: list[str] = []
    exact = bool(names)
    for name in sorted(names):
        found = probe(files, name)
        needs[name] = found.size_min
        exact = exact and found.exact
        if found.problem is not None:
            problems.append(f"{name.decode(errors='backslashreplace')}: {found.problem}")
    return Members(commit, needs, exact, note, "; ".join(problems) or None)


class HfIndex:
    """``model.safetensors.index.json`` and its like: ``{"weight_map": {tensor: file}}``."""

    name = "huggingface"
    lists = True

    def recognises(self, names: Collection[bytes]) -> list[bytes]:
        return sorted(name for name in names if name.endswith(_INDEX_SUFFIX) and b"/" not in name)

    def reads(self, commit: bytes) -> bool:
        return True

    def members(self, commit: bytes, data: bytes, names: Collection[bytes], files: Files | None = None) -> Members:
        """The shards; sizes exact for safetensors when ``files`` is given."""
        table = load_json(data)
        weight_map = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(weight_map, dict):
            raise ForeignError("an index without weight_map")
        shards = set()
        for shard in set(map(_text, weight_map.values())):
            shards.add(member_name(shard))
        shards.discard(commit)
        return probed(commit, shards, files)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise FormatError("an index whose weight_map names a file by something that is not text")
    return value


class HfTrainer:
    """``checkpoint-N`` of the Trainer: weights, and unless ``save_only_model``: optimizer, scheduler, rng."""

    name = "hf-trainer"
    lists = False

    def recognises(self, names: Collection[bytes]) -> list[bytes]:
        return [_STATE] if _STATE in names else []

    def reads(self, commit: bytes) -> bool:
        return True

    def members(self, commit: bytes, data: bytes, names: Collection[bytes], files: Files | None = None) -> Members:
        """Rank 0 writes ``commit`` after all its own files; other ranks' rng files may still come."""
        state = load_json(data)
        if not isinstance(state, dict) or type(state.get("global_step")) is not int:
            raise FormatError("a trainer state without global_step")
        listing = _top_names(names, files)
        sharded = _FSDP_SETS[0] in listing or _DEEPSPEED in listing
        wanted = _weights(listing) | _sets(listing, _FSDP_SETS[:1])
        reason = None if wanted or sharded else _NO_WEIGHTS
        rng, note = _rng_files(listing)
        optimizers = {name for name in _OPTIMIZERS if name in listing}
        if rng or optimizers or b"scheduler.pt" in listing or _FSDP_SETS[1] in listing:
            wanted |= rng or {b"rng_state.pth"}
            wanted.add(b"scheduler.pt")
            if _FSDP_SETS[0] in listing and not optimizers:
                wanted.add(_FSDP_SETS[1] + b"/.metadata")
            elif _DEEPSPEED not in listing:
                wanted |= optimizers or {_OPTIMIZERS[0]}
        elif not sharded:
            note = "model only: no optimizer, scheduler or rng state"
        return _with_reason(probed(commit, wanted, files, note), reason)


class Accelerate:
    """``save_state``: weights, optimizer and ``random_states_R.pkl`` of every rank, or two DCP sets.

    There is no commit file; rank 0's random states are its last file and stand for one.
    """

    name = "accelerate"
    lists = False

    def recognises(self, names: Collection[bytes]) -> list[bytes]:
        return [_RANDOM_0] if _RANDOM_0 in names else []

    def reads(self, commit: bytes) -> bool:
        return False

    def members(self, commit: bytes, data: bytes, names: Collection[bytes], files: Files | None = None) -> Members:
        listing = _top_names(names, files)
        ranks = {int(found[1]) for name in listing if (found := _RANDOM.fullmatch(name))}
        wanted = {b"random_states_%d.pkl" % rank for rank in range(1, max(ranks, default=0) + 1)}
        weights = _weights(listing) | _sets(listing, _FSDP_SETS)
        reason = None if weights or _DEEPSPEED in listing else _NO_WEIGHTS
        note = f"random states of {len(ranks)} of ? ranks"
        return _with_reason(probed(commit, wanted | weights, files, note), reason)


def _top_names(names: Collection[bytes], files: Files | None) -> set[bytes]:
    """Files and directories of the checkpoint directory itself."""
    return {name.split(b"/", 1)[0] for name in (*names, *(files.names() if files is not None else ()))}


def _weights(listing: Collection[bytes]) -> set[bytes]:
    return {name for name in (*_WEIGHTS, *_WEIGHT_INDEXES) if name in listing}


def _sets(listing: Collection[bytes], directories: Collection[bytes]) -> set[bytes]:
    """The commit files of the DCP sets that have begun."""
    return {name + b"/.metadata" for name in directories if name in listing}


def _with_reason(members: Members, reason: str | None) -> Members:
    reasons = [text for text in (reason, members.incomplete_reason) if text]
    return replace(members, exact=False, incomplete_reason="; ".join(reasons) or None)


def _rng_files(listing: Collection[bytes]) -> tuple[set[bytes], str]:
    """The rng files of ranks 0 to the largest seen. One process writes ``rng_state.pth``, several write
    ``rng_state_R.pth``, so that ``_0`` alone means that ``_1`` is still missing."""
    if b"rng_state.pth" in listing:
        return {b"rng_state.pth"}, ""
    ranks = {int(found[1]) for name in listing if (found := _RNG.fullmatch(name))}
    if not ranks:
        return set(), ""
    expected = {b"rng_state_%d.pth" % rank for rank in range(max(*ranks, 1) + 1)}
    return expected, f"rng states of {len(ranks)} of ? ranks"
