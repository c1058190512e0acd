"""How long a file must be, judged by its own bytes: safetensors headers, ends of torch.save archives.

Role: for members whose size no commit file tells. Only small reads: a header, a tail, a table of
contents. Pure: bytes come through ``Files``. Called by the formats.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from dataclasses import dataclass
from struct import Struct

from cachexfs.core.formats.base import SIZE_BYTES_MAX, Files, ForeignError, FormatError

JSON_BYTES_MAX = 256 << 20
SAFETENSORS_HEADER_BYTES_MAX = 100_000_000  # the library's own limit
_PICKLE_BYTES_MAX = 256 << 20
_TORCH_SUFFIXES = (b".pt", b".pth", b".bin", b".ckpt")
SINGLE_SUFFIXES = (*_TORCH_SUFFIXES, b".safetensors")  # of files whose own bytes say whether they are whole

_HEADER_LENGTH = Struct("<Q")
_ZIP_START = b"PK\x03\x04"
_ZIP_END = Struct("<4s4H2LH")  # end of central directory, 22 bytes; torch writes no comment
_ZIP_END_MAGIC = b"PK\x05\x06"
_ZIP64_LOCATOR_MAGIC = b"PK\x06\x07"
_ZIP64_LOCATOR_BYTES = 20
_U4_MAX = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Probe:
    """``size_min`` in bytes, ``exact`` as in ``Members``, ``problem``: why the file is not whole, or None."""

    size_min: int = 1
    exact: bool = False
    problem: str | None = None


def probe(files: Files | None, name: bytes) -> Probe:
    """What the file's own bytes say, by its suffix. An absent file has no problem: it will be missing."""
    size = files.size(name) if files is not None else None
    if files is None or not size:
        return Probe()
    if name.endswith(b".safetensors"):
        return _probe_safetensors(files, name, size)
    if name.endswith(_TORCH_SUFFIXES):
        return Probe(problem=_torch_problem(files, name, size))
    return Probe()


def probe_shard(files: Files | None, name: bytes) -> Probe:
    """What a DCP shard's own bytes say: a safetensors header, whatever the file is called, or a torch.save
    archive, of which the metadata knows the exact length. ``size_min`` 0: nothing."""
    size = files.size(name) if files is not None else None
    if files is None or not size:
        return Probe(size_min=0)
    head = files.read(name, 0, _HEADER_LENGTH.size + 1)
    if head.endswith(b"{") and len(head) > _HEADER_LENGTH.size:
        return _probe_safetensors(files, name, size)
    return Probe(size_min=0, exact=head.startswith(_ZIP_START))


def load_json(data: bytes) -> object:
    """``data`` as JSON. Raises ``ForeignError`` for what is none, ``FormatError`` at ``JSON_BYTES_MAX`` and depth."""
    if len(data) > JSON_BYTES_MAX:
        raise FormatError(f"{len(data)} bytes of JSON; the limit is {JSON_BYTES_MAX}")
    try:
        loaded: object = json.loads(data)
        return loaded
    except RecursionError:
        raise FormatError("JSON nested too deeply") from None
    except ValueError as e:
        raise ForeignError(f"not JSON: {e}") from None


def safetensors_size(header: bytes) -> int:
    """Size in bytes of the whole file whose JSON header (without its 8 bytes of length) is ``header``.

    Source: the safetensors format: 8 bytes little-endian header length, header, then the data, of which
    ``data_offsets`` are [begin, end). Raises ``FormatError``.
    """
    table = load_json(header)
    if not isinstance(table, dict):
        raise FormatError("a safetensors header that is not a table")
    end_max = 0
    for key, entry in table.items():
        if key == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or any(type(o) is not int for o in offsets):
            raise FormatError("a safetensors header with a tensor without data_offsets")
        if not 0 <= offsets[0] <= offsets[1] <= SIZE_BYTES_MAX:
            raise FormatError("a safetensors header with impossible data_offsets")
        end_max = max(end_max, offsets[1])
    return _HEADER_LENGTH.size + len(header) + end_max


def _probe_safetensors(files: Files, name: bytes, size: int) -> Probe:
    head = files.read(name, 0, _HEADER_LENGTH.size)
    if len(head) < _HEADER_LENGTH.size:
        return Probe(size_min=_HEADER_LENGTH.size + 2)
    length = int(_HEADER_LENGTH.unpack(head)[0])
    if not 2 <= length <= SAFETENSORS_HEADER_BYTES_MAX:
        return Probe(problem="not a safetensors file: its first 8 bytes are no header length")
    if size < _HEADER_LENGTH.size + length:
        return Probe(size_min=_HEADER_LENGTH.size + length)
    header = files.read(name, _HEADER_LENGTH.size, length)
    if len(header) < length:
        return Probe(size_min=_HEADER_LENGTH.size + length)
    try:
        return Probe(size_min=safetensors_size(header), exact=True)
    except FormatError as e:
        return Probe(problem=str(e))


def _torch_problem(files: Files, name: bytes, size: int) -> str | None:
    """None for a whole zip archive and for anything that is not one (torch's old format, other data)."""
    head = files.read(name, 0, len(_ZIP_START))
    if not head.strip(b"\0"):
        return "begins with zeros: its data was never written"
    if head != _ZIP_START:
        return None
    tail = files.read(name, max(0, size - _ZIP_END.size), _ZIP_END.size)
    if len(tail) < _ZIP_END.size or not tail.startswith(_ZIP_END_MAGIC):
        return "cut: the end of its zip archive is not there"
    fields = _ZIP_END.unpack(tail)
    directory_size, directory_at = int(fields[5]), int(fields[6])
    if directory_at == _U4_MAX or directory_size == _U4_MAX or fields[4] == 0xFFFF:
        at = size - _ZIP_END.size - _ZIP64_LOCATOR_BYTES
        if at < 0 or files.read(name, at, 4) != _ZIP64_LOCATOR_MAGIC:
            return "damaged: the end of its zip archive does not fit"
    elif directory_at + directory_size + _ZIP_END.size > size:
        return "cut: its zip archive is longer than the file"
    return None


class _AsStream(io.RawIOBase):
    """One file of ``Files`` as a seekable stream, for ``zipfile``."""

    def __init__(self, files: Files, name: bytes, size: int) -> None:
        self._files, self._name, self._size, self._at = files, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("a position before the start of the file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = self._files.read(self._name, self._at, left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


def torch_save_pickle(files: Files, name: bytes) -> bytes | None:
    """The pickle (``data.pkl``) inside a torch.save archive; None when it is none or is damaged."""
    size = files.size(name)
    if not size:
        return None
    try:
        with zipfile.ZipFile(_AsStream(files, name, size)) as archive:
            for info in archive.infolist():
                small = info.file_size <= _PICKLE_BYTES_MAX and info.compress_size <= _PICKLE_BYTES_MAX
                stored = info.compress_type == zipfile.ZIP_STORED
                if info.filename.endswith("/data.pkl") and small and stored:
                    return archive.read(info)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError):
        return None
    return None
