"""Help for the formats' tests: files of a directory, pickles that mention classes which are not there."""

import copyreg
import io
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar


class DirFiles:
    """``Files`` of a real directory."""

    def __init__(self, root: Path) -> None:
        self.root = os.fsencode(root)

    def names(self) -> list[bytes]:
        walked = ((os.path.join(d, f) for f in files) for d, _, files in os.walk(self.root))
        return [os.path.relpath(path, self.root) for paths in walked for path in paths]

    def size(self, name: bytes) -> int | None:
        try:
            return os.stat(os.path.join(self.root, name)).st_size
        except FileNotFoundError:
            return None

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        with open(os.path.join(self.root, name), "rb") as f:
            f.seek(offset)
            return f.read(length)


class MemoryFiles:
    """``Files`` of a mapping."""

    def __init__(self, content: Mapping[bytes, bytes]) -> None:
        self.content = content

    def names(self) -> list[bytes]:
        return list(self.content)

    def size(self, name: bytes) -> int | None:
        return len(self.content[name]) if name in self.content else None

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        return self.content[name][offset : offset + length]


class Named:
    """An object to be pickled as one of class ``module``.``name`` with attributes ``state``."""

    def __init__(self, module: str, name: str, state: object = None) -> None:
        self.cls = type(name, (), {"__module__": module})
        self.state = state


class Call:
    """Pickled as the call ``module.name(*args)``."""

    def __init__(self, module: str, name: str, *args: object) -> None:
        self.function = type(name, (), {"__module__": module})
        self.args = args


class _Pickler(pickle._Pickler):
    """Writes class names without importing anything."""

    def save_global(self, obj: type, name: str | None = None) -> None:
        if self.proto >= 4:
            self.save(obj.__module__)
            self.save(obj.__name__)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__name__}\n".encode())
        self.memoize(obj)

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, Named):
            return copyreg.__newobj__, (obj.cls,), obj.state
        if isinstance(obj, Call):
            return obj.function, obj.args
        return NotImplemented

    def save_reduce(self, func, args, *rest, obj=None, **kw):  # type: ignore[no-untyped-def]
        # The original insists that obj is of the class that it makes.
        super().save_reduce(func, args, *rest, obj=None, **kw)
        if obj is not None and id(obj) not in self.memo:
            self.memoize(obj)

    dispatch: ClassVar[dict[type, object]] = {**pickle._Pickler.dispatch, type: save_global}


def pickled(obj: object, protocol: int = 4) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol).dump(obj)
    return out.getvalue()


CHECKPOINT = "torch.distributed.checkpoint."


def info(path: object, offset: object, length: object) -> Named:
    state = {"relative_path": path, "offset": offset, "length": length}
    return Named(CHECKPOINT + "filesystem", "_StorageInfo", state)


def metadata(infos: Iterable[object], protocol: int = 4, **more: object) -> bytes:
    """A ``.metadata`` with these items, without torch."""
    index = CHECKPOINT + "metadata"
    storage = {Named(index, "MetadataIndex", {"fqn": f"t{i}", "index": 0}): item for i, item in enumerate(infos)}
    state = {"state_dict_metadata": {}, "planner_data": {}, "storage_data": storage, **more}
    return pickled(Named(index, "Metadata", state), protocol)
