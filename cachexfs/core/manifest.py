"""What a partner keeps beside a replica, so that the file can be rebuilt without the catalogue.

Role: pure. The owner of a generation encodes it for ``Peers.commit``; the partner's store checks blocks against
it; ``recover`` reads it. A manifest may come from a peer or a damaged disk: ``decode`` bounds and checks all of it.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from cachexfs.core.digest import BLOCK_BYTES, DIGEST_BYTES, block_count, tree_digest
from cachexfs.core.records import FID_STEP, OpKind
from cachexfs.core.replica import Replica
from cachexfs.errors import CorruptError

MANIFEST_VERSION = 1
#: A manifest travels as one payload of at most 8 MiB; 16 bytes per MiB of file leave room for the attributes.
FILE_BYTES_MAX = 500 << 30
PATH_BYTES_MAX = 4096
#: Files that the manifest of a commit file lists at most, and bytes of their names: they share its payload.
MEMBERS_MAX = 50_000
EARLIER_MAX = 16
MEMBER_BYTES_MAX = 6 << 20
STAGE_PATTERN = r"\A[0-9a-f][0-9a-f.-]{0,99}\Z"

_stage = re.compile(STAGE_PATTERN)

_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Inode = Annotated[int, msgspec.Meta(ge=0)]  # all 64 bits: GlusterFS and others make it out of a random identity
_Time = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Id32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]


class Base(msgspec.Struct, frozen=True, array_like=True):
    """What lay on the PFS under the file's path when this content was made: inode, size in bytes, mtime in ns."""

    ino: _Inode
    size: _Count
    mtime_ns: _Time


#: In the place of a member's digest: it is a later content than the one that the commit file was saved with.
LATER = b"later"


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A file at or below a commit file's directory when that was published: name relative to the directory, size in
    bytes, xxh3_128 of it (empty: not known, as just after a close; or ``LATER``), mtime in ns (0: not known)."""

    name: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PATH_BYTES_MAX)]
    size: _Count
    digest: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]
    mtime_ns: _Time = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One content and the attributes its file had. Sizes in bytes, times in ns since the epoch.

    ``path`` is relative to the mount's root ("" when the file had no name). ``blocks`` are the blocks' digests one
    after the other, ``tree`` the digest of those, ``digest`` the file's. ``revision`` is the catalogue's at
    publication, 0 before it: ``published`` is false for bytes that only an fsync made safe. ``base`` is what the PFS
    had under this path, None for nothing. ``members`` of a commit file are the files beside and below it, so that
    ``recover`` never takes a set of mixed generations for whole; empty: not known. ``earlier``: see ``still_to_land``.
    ``made_ns``: when these bytes were sent; of what several fsyncs have sent before a publication the last counts.

    Fields are only ever added at the end, with a default: older manifests lack them, older readers pass over them.
    """

    version: Annotated[int, msgspec.Meta(ge=MANIFEST_VERSION, le=MANIFEST_VERSION)] = MANIFEST_VERSION
    fid: Annotated[int, msgspec.Meta(ge=FID_STEP, lt=1 << 62, multiple_of=FID_STEP)]
    path: Annotated[bytes, msgspec.Meta(max_length=PATH_BYTES_MAX)]
    stage: Annotated[str, msgspec.Meta(pattern=STAGE_PATTERN)]
    size: Annotated[int, msgspec.Meta(ge=0, le=FILE_BYTES_MAX)]
    digest: _Digest
    tree: _Digest
    blocks: bytes
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
    uid: _Id32
    gid: _Id32
    mtime_ns: _Time
    atime_ns: _Time
    gen: _Count
    origin: Annotated[str, msgspec.Meta(max_length=255)]
    revision: _Count
    published: bool
    base: Base | None = None
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MEMBERS_MAX)] = ()
    earlier: Annotated[tuple[tuple[int, bytes], ...], msgspec.Meta(max_length=EARLIER_MAX)] = ()
    made_ns: _Count = 0

    def block(self, index: int) -> bytes:
        """Digest of block ``index``."""
        return self.blocks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    @property
    def block_count(self) -> int:
        """Number of blocks of 1 MiB, the last one possibly short."""
        return len(self.blocks) // DIGEST_BYTES


def still_to_land(view: Replica, fid: int, gen: int) -> tuple[tuple[int, bytes], ...]:
    """(size, tree digest) of contents of a file before ``gen`` that may land after somebody has noted its base."""
    pending = [op for _, op in view.ops_of(fid) if op.kind == OpKind.PUT and op.gen < gen]
    found = [(op.size, op.tree) for op in pending if op.tree]
    content = view.generation(fid)
    if content is not None and content.gen < gen and content.tree:
        found.append((content.size, content.tree))
    return tuple(found[-EARLIER_MAX:])


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)
#: An upper bound of the encoded size, checked before anything is decoded.
MANIFEST_BYTES_MAX = FILE_BYTES_MAX // BLOCK_BYTES * DIGEST_BYTES + PATH_BYTES_MAX + 4096


def check_stage(stage: str) -> str:
    """``stage`` itself if it may be part of a file's name. Raises ``ValueError``."""
    if not _stage.match(stage):
        raise ValueError(f"not a stage key: {stage[:120]!r}")
    return stage


def encode(manifest: Manifest) -> bytes:
    """Bytes of a manifest; a list of members that does not fit is left out.

    Raises ``CorruptError`` for a manifest that ``decode`` would refuse.
    """
    data = _encoder.encode(manifest)
    if len(data) > MANIFEST_BYTES_MAX and manifest.members:
        data = _encoder.encode(msgspec.structs.replace(manifest, members=()))
    decode(data)
    return data


def decode(data: bytes | bytearray | memoryview) -> Manifest:
    """The manifest in ``data``. Raises ``CorruptError`` when fields are out of bounds or do not agree."""
    if len(data) > MANIFEST_BYTES_MAX:
        raise CorruptError(f"manifest of {len(data)} bytes is longer than {MANIFEST_BYTES_MAX}")
    try:
        manifest = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise CorruptError(f"not a manifest: {error}") from None
    if len(manifest.blocks) != block_count(manifest.size) * DIGEST_BYTES:
        raise CorruptError(
            f"manifest of {manifest.stage}: {len(manifest.blocks)} bytes of digests for {manifest.size} bytes of file"
        )
    if tree_digest([manifest.blocks]) != manifest.tree:
        raise CorruptError(f"manifest of {manifest.stage}: its tree digest is not that of its blocks")
    _check_path(manifest.path)
    if sum(len(member.name) + DIGEST_BYTES for member in manifest.members) > MEMBER_BYTES_MAX:
        raise CorruptError(f"manifest of {manifest.stage}: its list of members is too long")
    for member in manifest.members:
        _check_path(member.name)
    return manifest


def _check_path(path: bytes) -> None:
    if path and (b"\0" in path or any(part in (b"", b".", b"..") or len(part) > 255 for part in path.split(b"/"))):
        raise CorruptError(f"manifest with the path {path[:120]!r}")
