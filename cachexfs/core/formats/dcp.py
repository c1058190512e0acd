"""PyTorch Distributed Checkpoint: ``.metadata``, or ``__R.metadata`` of every rank.

Role: which files a DCP checkpoint consists of and how long they must be, from ``storage_data`` of its
pickled metadata, without torch and without executing anything (``inert_pickle``). A member's minimum
size is the largest offset + length of its items; a whole file written by DCP or Megatron has exactly
that size. Empty files of ranks without items and left-overs of larger jobs are named nowhere, so they do
not count. Pure; a call takes seconds for hundreds of MB. Called through ``formats.FORMATS``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from cachexfs.core.formats.base import SIZE_BYTES_MAX, Files, FormatError, Members, member_name
from cachexfs.core.formats.inert_pickle import DICT, INERT_KIND, Kept, Limits, read_pickle
from cachexfs.core.formats.wholeness import probe_shard

COMMIT = b".metadata"
_RANK_COMMIT = re.compile(rb"__(0|[1-9][0-9]{0,5})\.metadata")
_RANK_SHARD = re.compile(rb"__(0|[1-9][0-9]{0,5})_[0-9]+\.distcp")

_METADATA = "Metadata"
_INFO = "_StorageInfo"

_CHECKPOINT = "torch.distributed.checkpoint."
_INFO_MODULES = frozenset({_CHECKPOINT + "filesystem", _CHECKPOINT + "_fsspec_filesystem"})
_INERT_NAMES: dict[str, frozenset[str]] = {
    _CHECKPOINT + "metadata": frozenset(
        {
            "TensorProperties",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "BytesStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    _CHECKPOINT + "filesystem": frozenset({"_StoragePrefix", "SerializationFormat"}),
    # Megatron keeps every rank's plan in the metadata.
    _CHECKPOINT + "planner": frozenset(
        {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData", "_StoragePrefix"}
    ),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(
        {"TensorProperties", "MEM_FORMAT_ENCODING", "ShardedTensorMetadata"}
    ),
    "torch.distributed._shard.metadata": frozenset({"ShardMetadata"}),
    "torch.distributed.remote_device": frozenset({"_remote_device"}),
    "torch.distributed.device_mesh": frozenset({"DeviceMesh"}),
    "torch.distributed.tensor._dtensor_spec": frozenset({"DTensorSpec", "TensorMeta"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size", "device", "bool"}),
    "builtins": frozenset({"set", "frozenset", "list", "tuple", "complex", "slice", "bytearray", "getattr"}),
    "_codecs": frozenset({"encode"}),
}
_PLACEMENTS = frozenset({"Placement", "Shard", "Replicate", "Partial", "_Partial", "_StridedShard"})
for _module in ("torch.distributed.tensor", "torch.distributed._tensor"):
    _INERT_NAMES[_module + ".placement_types"] = _PLACEMENTS
for _module in ("pathlib", "pathlib._local"):
    _INERT_NAMES[_module] = frozenset(
        {"Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
    )
_DICT_NAMES = frozenset({("builtins", "dict"), ("collections", "OrderedDict")})
_MEGATRON = ("megatron.", "nvidia_resiliency_ext.")  # their classes are inert, two names excepted
_DTYPE = re.compile(r"(b?float|complex|u?int|q?u?int|bits)[0-9x_]+(e[0-9]+m[0-9]+[a-z0-9_]*)?")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def admit(module: str, name: str) -> str | None:
    """The classes and functions that DCP, Megatron and their metadata mention (``inert_pickle.Admit``)."""
    if module == _CHECKPOINT + "metadata" and name == _METADATA:
        return _METADATA
    if name == _INFO and module in _INFO_MODULES:
        return _INFO
    if module.startswith(_MEGATRON) and len(module) < 200 and _IDENTIFIER.fullmatch(name):
        return {"MCoreMetadata": _METADATA, _INFO: _INFO}.get(name, INERT_KIND)
    if (module, name) in _DICT_NAMES:
        return DICT
    if name in _INERT_NAMES.get(module, ()) or (module == "torch" and _DTYPE.fullmatch(name)):
        return INERT_KIND
    return None


@dataclass
class _Collector:
    """Turns the attributes of kept objects into what counts (``inert_pickle.Keep``)."""

    names: dict[str, bytes] = field(default_factory=dict)

    def keep(self, kind: str, state: list[object]) -> object:
        if kind == _METADATA:
            return _attributes(state).get("storage_data", "absent")
        # The order in which dataclasses write them; anything else goes the general way.
        if len(state) == 6 and (state[0], state[2], state[4]) == ("relative_path", "offset", "length"):
            path, offset, length = state[1], state[3], state[5]
        else:
            found = _attributes(state)
            path, offset, length = (found.get(key) for key in ("relative_path", "offset", "length"))
        if type(path) is not str or type(offset) is not int or type(length) is not int:
            raise FormatError("an item without relative_path, offset or length")
        if offset < 0 or length < 0 or offset + length > SIZE_BYTES_MAX:
            raise FormatError(f"an item at offset {offset} of length {length}")
        name = self.names.get(path)
        if name is None:
            name = self.names[path] = member_name(path)
        return name, offset + length, length


def _attributes(state: list[object]) -> dict[str, object]:
    """A flat list of items as a dictionary; only text can be an attribute's name."""
    if len(state) % 2 or not all(type(key) is str for key in state[::2]):
        raise FormatError("attributes that are not named by text")
    return {str(key): value for key, value in zip(state[::2], state[1::2], strict=True)}


@dataclass(slots=True)
class _Extent:
    """One member: the largest end of an item, the sum of their lengths (bytes), the items with bytes."""

    end: int = 0
    total: int = 0
    items: int = 0

    def packed(self) -> bool:
        """Whether the items certainly lie one behind the other. torch's SAFETENSORS serialization gives
        every item offset 0 and only its tensor's bytes, so that the file is longer than any end."""
        return self.items > 1 and self.total <= self.end


def needed_files(data: bytes, limits: Limits | None = None) -> dict[bytes, int]:
    """Relative path -> smallest sufficient size in bytes, from the bytes of a ``.metadata``.

    Raises ``FormatError`` for anything that is not a DCP metadata pickle within ``limits``.
    """
    return {name: extent.end for name, extent in _extents(data, limits or Limits()).items()}


def _extents(data: bytes, limits: Limits) -> dict[bytes, _Extent]:
    top = read_pickle(data, admit, _Collector().keep, limits)
    if not isinstance(top, Kept) or top.kind != _METADATA:
        raise FormatError("a pickle, but not of DCP metadata")
    storage = top.value
    if not isinstance(storage, list) or len(storage) % 2:
        raise FormatError("DCP metadata without storage_data")
    extents: dict[bytes, _Extent] = {}
    for info in storage[1::2]:
        if not isinstance(info, Kept) or not isinstance(info.value, tuple):
            raise FormatError("storage_data with an item that names no file")
        name, end, length = info.value
        extent = extents.get(name)
        if extent is None:
            extent = extents[name] = _Extent()
        if end > extent.end:
            extent.end = end
        extent.total += length
        extent.items += length > 0
    return extents


def _needs(extents: dict[bytes, _Extent], files: Files | None) -> tuple[dict[bytes, int], bool, str | None]:
    """(needs, exact, problem): the members' sizes, asking the files themselves where the items do not
    tell."""
    needs = {name: extent.end for name, extent in extents.items()}
    exact, problems = True, []
    for name, extent in extents.items():
        if extent.packed():
            continue
        found = probe_shard(files, name)
        needs[name] = max(needs[name], found.size_min)
        exact = exact and found.exact
        if found.problem is not None:
            problems.append(f"{name.decode(errors='backslashreplace')}: {found.problem}")
    return needs, exact, "; ".join(problems) or None


class Dcp:
    """Format of native DCP (and of Megatron's ``torch_dist``, torchtitan, FSDP of accelerate)."""

    name = "dcp"
    lists = True

    def recognises(self, names: Collection[bytes]) -> list[bytes]:
        """``.metadata``; only where there is none, every ``__R.metadata`` (by rank), as torch reads them."""
        if COMMIT in names:
            return [COMMIT]
        ranks = {int(found[1]): name for name in names if (found := _RANK_COMMIT.fullmatch(name))}
        return [ranks[rank] for rank in sorted(ranks)]

    def reads(self, commit: bytes) -> bool:
        return True

    def members(self, commit: bytes, data: bytes, names: Collection[bytes], files: Files | None = None) -> Members:
        """Files and sizes that ``commit`` names. The lowest rank's ``__R.metadata`` also asks for those of
        all ranks up to the largest seen, be it by a shard; how many ranks saved is written nowhere."""
        needs, exact, problem = _needs(_extents(data, Limits()), files)
        needs.pop(commit, None)
        if commit == COMMIT:
            return Members(commit, needs, exact, "", problem)
        ranks = {int(found[1]) for name in names if (found := _RANK_COMMIT.fullmatch(name))}
        if ranks and commit == b"__%d.metadata" % min(ranks):
            shards = {int(found[1]) for name in names if (found := _RANK_SHARD.fullmatch(name))}
            for rank in range(max(ranks | shards) + 1):
                if (name := b"__%d.metadata" % rank) != commit:
                    needs.setdefault(name, 1)
                    exact = False
        return Members(commit, needs, exact, f"per-rank metadata, {len(ranks)} of ?", problem)
