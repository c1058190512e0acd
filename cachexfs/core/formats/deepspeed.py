"""DeepSpeed: ``latest`` names a directory of ``mp_rank_*`` and ``zero_pp_rank_*`` files.

Role: no file lists the members. Each family of names must be there for all ranks from 0 to the largest
seen, and ``mp_rank_00_model_states.pt`` says in its pickle how many ranks saved. ``latest`` is written
before the last barrier, so that it may be older than other ranks' files. Pure. Called through
``formats.FORMATS``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from cachexfs.core.commitfiles import is_commit_name, pointer_target
from cachexfs.core.formats.base import Files, FormatError, Members, member_path
from cachexfs.core.formats.huggingface import probed
from cachexfs.core.formats.inert_pickle import DICT, INERT_KIND, Limits, read_pickle
from cachexfs.core.formats.wholeness import torch_save_pickle

_LATEST = b"latest"
_NUMBER = rb"(0|[0-9]{1,6})"
_MODEL = re.compile(rb"mp_rank_" + _NUMBER + rb"_model_states\.pt")
_ZERO = re.compile(rb"(|bf16_|fp16_)zero_pp_rank_" + _NUMBER + rb"_mp_rank_" + _NUMBER + rb"_(optim|model)_states\.pt")
_LAYER = re.compile(rb"layer_" + _NUMBER + rb"-model_" + _NUMBER + rb"-model_states\.pt")
_MODEL_SUFFIX = b"_model_states.pt"
_STATES_SUFFIX = b"_states.pt"
_FIRSTS = (
    b"mp_rank_00_model_states.pt",
    b"zero_pp_rank_0_mp_rank_00_model_states.pt",
    b"bf16_zero_pp_rank_0_mp_rank_00_model_states.pt",
)
_RANKS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class _Said:
    """From inside a model file; 0: not said. ``ranks``: those that save optimizer states."""

    ranks: int = 0
    model_ranks: int = 0
    zero_stage: int = 0


class DeepSpeed:
    """Recognises ``latest`` in the parent, and a step directory by rank 0's model file."""

    name = "deepspeed"
    lists = False

    def recognises(self, names: Collection[bytes]) -> list[bytes]:
        """``latest`` when it is there; else rank 0's model file, which stands for a commit file."""
        return [name for name in (_LATEST, *_FIRSTS) if name in names][:1]

    def reads(self, commit: bytes) -> bool:
        return commit == _LATEST

    def members(self, commit: bytes, data: bytes, names: Collection[bytes], files: Files | None = None) -> Members:
        """All ranks' files. ``data`` counts for ``latest`` only."""
        if commit != _LATEST:
            return _step_members(commit, b"", [n for n in names if b"/" not in n], files)
        target = pointer_target(commit, data)
        if target is None:
            raise FormatError("it names no directory beside it" if data.strip() else "it is empty")
        base = member_path(target) + b"/"
        everything = names if files is None else files.names()
        below = [name[len(base) :] for name in everything if name.startswith(base)]
        names = [name for name in below if b"/" not in name]
        others = [name for name in names if is_commit_name(name)]
        if others and not any(name.endswith(_STATES_SUFFIX) for name in names):
            note = "latest names a checkpoint of another framework"
            return Members(commit, {base + name: 1 for name in others}, note=note)
        return _step_members(commit, base, names, files)


def _step_members(commit: bytes, base: bytes, names: Collection[bytes], files: Files | None) -> Members:
    first = next((name for name in _FIRSTS if name in names), _FIRSTS[0])
    said = _said(files, base + first) if files is not None and first in names else _Said()
    wanted = _expected(names, said)
    if not any(name.endswith(_MODEL_SUFFIX) for name in wanted if not name.startswith(b"layer_")):
        wanted.add(first)
    note = "" if said.ranks else "number of ranks taken from the names"
    found = probed(commit, {base + name for name in wanted}, files, note)
    needs = dict(found.needs)
    needs.pop(commit, None)
    reasons = [found.incomplete_reason] if found.incomplete_reason else []
    if said.zero_stage > 0 and not any(_ZERO.fullmatch(name) for name in wanted):
        reasons.append("no optimizer states (zero_pp_rank_*), though ZeRO is on")
    return Members(commit, needs, False, note, "; ".join(reasons) or None)


def _expected(names: Collection[bytes], said: _Said) -> set[bytes]:
    """The full set of each family of which ``names`` has a part."""
    models = {int(m[1]) for name in names if (m := _MODEL.fullmatch(name))}
    zeros = [m for name in names if (m := _ZERO.fullmatch(name))]
    layers = [m for name in names if (m := _LAYER.fullmatch(name))]
    mp_max = max([said.model_ranks - 1, *models, *(int(m[3]) for m in zeros)], default=-1)
    wanted: set[bytes] = set()
    if models:
        wanted |= {b"mp_rank_%02d_model_states.pt" % mp for mp in range(mp_max + 1)}
    for prefix, kind in {(m[1], m[4]) for m in zeros}:
        ranks = [int(m[2]) for m in zeros if (m[1], m[4]) == (prefix, kind)]
        rank_max = max(said.ranks - 1, *ranks)
        if (rank_max + 1) * (mp_max + 1) > _RANKS_MAX:
            raise FormatError(f"rank {rank_max} of {mp_max + 1} model parts is beyond any job")
        for mp in range(mp_max + 1):
            for rank in range(rank_max + 1):
                wanted.add(b"%szero_pp_rank_%d_mp_rank_%02d_%s_states.pt" % (prefix, rank, mp, kind))
    if layers:
        parts_max = max(int(m[2]) for m in layers)
        layer_ids = {int(m[1]) for m in layers}
        if len(layer_ids) * (parts_max + 1) > _RANKS_MAX:
            raise FormatError(f"{len(layer_ids)} layers in {parts_max + 1} parts are beyond any job")
        for layer in layer_ids:
            wanted |= {b"layer_%02d-model_%02d-model_states.pt" % (layer, part) for part in range(parts_max + 1)}
    return wanted


def _said(files: Files, name: bytes) -> _Said:
    """What the model file's pickle says; nothing when it is of an unknown kind or not there yet.

    Classes in it are whatever the user's arguments hold: all are inert, none is imported. Under MiCS only
    the first shard group saves: ``mics_shard_size`` ranks.
    """
    pickle = torch_save_pickle(files, name)
    if pickle is None:
        return _Said()
    try:
        state = read_pickle(pickle, _admit_all, _drop, Limits())
    except FormatError:
        return _Said()
    zero = _entry(_entry(state, "ds_config"), "zero_optimization")
    shard = _number(_entry(zero, "mics_shard_size"))
    ranks = _number(_entry(state, "dp_world_size"))
    return _Said(shard or ranks, _number(_entry(state, "mp_world_size")), _number(_entry(zero, "stage")))


def _admit_all(module: str, name: str) -> str:
    return DICT if name in ("OrderedDict", "dict") else INERT_KIND


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 < value <= _RANKS_MAX else 0


def _drop(kind: str, state: list[object]) -> object:
    return None


def _entry(table: object, key: str) -> object:
    """Value of ``key`` in a flat list of items; the last one counts; None when there is none."""
    found: object = None
    if isinstance(table, list):
        for name, value in zip(table[::2], table[1::2], strict=False):
            if type(name) is str and name == key:
                found = value
    return found
