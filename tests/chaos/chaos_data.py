"""Bytes that say themselves what they are: a file of a save can be checked wherever it is found.

Role: shards are safetensors files whose header names save and shard, and whose data follow from these; commit files
name all shards of their save. Used by the writers (processes of their own) and by whoever checks.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from dataclasses import dataclass
from pathlib import Path

from formats_support import info, metadata

METADATA = ".metadata"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Save:
    """One save of one checkpoint: ``style`` dcp or hf, ``sizes`` bytes of data by shard name."""

    name: str
    style: str
    sizes: dict[str, int]

    @classmethod
    def random(cls, name: str, style: str, chance: random.Random, bytes_max: int) -> Save:
        count = chance.randrange(2, 6)
        sizes = (chance.choice((chance.randrange(1, 5000), chance.randrange(1, bytes_max))) for _ in range(count))
        form = "__{}_0.distcp" if style == "dcp" else "model-{}.safetensors"
        return cls(name, style, {form.format(number): size for number, size in enumerate(sizes)})

    @property
    def commit_name(self) -> str:
        return METADATA if self.style == "dcp" else INDEX

    def shard(self, name: str) -> bytes:
        return shard_bytes(self.name, name, self.sizes[name])

    def commit(self) -> bytes:
        if self.style == "hf":
            table = {"metadata": {"save": self.name, "sizes": self.sizes}}
            return json.dumps(table | {"weight_map": {f"t{n}": n for n in self.sizes}}).encode()
        items = [info(name, 0, len(self.shard(name))) for name in self.sizes]
        return metadata(items, planner_data=self.line())

    def files(self) -> dict[str, bytes]:
        """All of it, commit file last."""
        return {name: self.shard(name) for name in self.sizes} | {self.commit_name: self.commit()}

    def line(self) -> str:
        return json.dumps([self.name, self.style, self.sizes])

    @classmethod
    def of_line(cls, line: str) -> Save:
        name, style, sizes = json.loads(line)
        return cls(name, style, sizes)


def shard_bytes(save: str, name: str, size: int) -> bytes:
    table = {"__metadata__": {"save": save, "name": name}}
    header = json.dumps(table | {"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + random.Random(f"{save}/{name}/{size}").randbytes(size)


def save_of_shard(data: bytes) -> str | None:
    """The save whose shard this is, whole and right; None: it is no such thing."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        about, size = header["__metadata__"], header["t"]["shape"][0]
    except (struct.error, ValueError, KeyError):
        return None
    return str(about["save"]) if data == shard_bytes(about["save"], about["name"], size) else None


def save_of_commit(name: str, data: bytes) -> Save | None:
    """The save that a commit file is of; None: the bytes are nobody's."""
    try:
        if name == INDEX:
            about = json.loads(data)["metadata"]
            save = Save(about["save"], "hf", about["sizes"])
        else:
            save = Save.of_line(data[data.index(b'["') : data.index(b"}]") + 2].decode())  # in planner_data
    except (ValueError, KeyError):
        return None
    return save if save.commit() == data else None


def mixture(directory: Path, commit_name: str) -> str | None:
    """What is wrong with a directory in which there is a commit file. None: all of one save. Raises OSError."""
    save = save_of_commit(commit_name, (directory / commit_name).read_bytes())
    if save is None:
        return "a commit file that nobody wrote"
    for name in save.sizes:
        try:
            found = (directory / name).read_bytes()
        except FileNotFoundError:
            return f"{name} is missing, {save.name} is committed"
        if found != save.shard(name):
            return f"{name} is of {save_of_shard(found)} ({len(found)} bytes), {save.name} is committed"
    return None


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
