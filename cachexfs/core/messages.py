"""What two daemons say to each other: one frozen struct per request and reply, bounded when it is decoded.

Role: pure. ``core/wire.py`` puts them into frames. ``id`` pairs a reply with its request on one connection.
Payload travels beside the header, never in it: blocks with ``Push`` and ``Data``, manifests with ``Commit`` and
``Data``.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from cachexfs.core.digest import BLOCK_BYTES, DIGEST_BYTES
from cachexfs.core.manifest import FILE_BYTES_MAX, STAGE_PATTERN

PAYLOAD_BYTES_MAX = 8 << 20
TEXT_CHARS_MAX = 4000
NAME_CHARS_MAX = 255
NONCE_BYTES = 32

Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Stage: TypeAlias = Annotated[str, msgspec.Meta(pattern=STAGE_PATTERN)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
PayloadDigest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Push(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One block of the copy in progress of ``stage``; payload: its bytes. Answered by ``Done`` once written."""

    id: Id
    stage: Stage
    offset: Annotated[int, msgspec.Meta(ge=0, lt=FILE_BYTES_MAX, multiple_of=BLOCK_BYTES)]


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Make the copy durable; payload: the manifest. Answered by ``Done`` with the store's identity."""

    id: Id
    stage: Stage


class Read(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Bytes of a copy in memory or on NVMe. Answered by ``Data``, short at the end of the file."""

    id: Id
    stage: Stage
    offset: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    length: Annotated[int, msgspec.Meta(ge=0, le=PAYLOAD_BYTES_MAX)]


class GetManifest(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The manifest of a copy. Answered by ``Data``."""

    id: Id
    stage: Stage


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The NVMe copy is not needed any more. Answered by ``Done``, also when there is none."""

    id: Id
    stage: Stage


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Answered by ``Clock``."""

    id: Id


class Done(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The request was carried out."""

    id: Id
    text: Text = ""


class Data(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The bytes asked for, as payload."""

    id: Id


class Clock(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The answering node's clock, seconds since the epoch."""

    id: Id
    time_s: float


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The request was not carried out. ``os``: an ``OSError`` with ``errno``; ``missing``: no such copy;
    ``refused``: the request or its bytes are wrong; ``corrupt``: the copy held here is damaged."""

    id: Id
    code: Literal["os", "missing", "refused", "corrupt"]
    errno: Annotated[int, msgspec.Meta(ge=0, le=4095)]
    text: Text


Request: TypeAlias = Push | Commit | Read | GetManifest | Drop | Ping
Reply: TypeAlias = Done | Data | Clock | Failed
Message: TypeAlias = Request | Reply


class ClientHello(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """First frame of a connection: who speaks to whom, of which job."""

    job: Name
    client: Name
    server: Name
    nonce: Nonce


class ServerHello(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """The answer to a ``ClientHello`` that was made with the job's secret."""

    server: Name
    nonce: Nonce


class ClientProof(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """First frame under the session's key: the client knows the secret *now*, and this server's nonce."""

    client: Name


def failed(request_id: int, code: Literal["os", "missing", "refused", "corrupt"], text: str, errno: int = 0) -> Failed:
    """A ``Failed`` within its bounds."""
    return Failed(request_id, code, errno if 0 <= errno <= 4095 else 0, text[:TEXT_CHARS_MAX])
