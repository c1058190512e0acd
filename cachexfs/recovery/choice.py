"""Which of the contents found is the one that belongs at a path.

Role: pure. A content is found as a replica on NVMe, or as a file with its record under a hidden name on the PFS, or as
both. The newest generation of each file wins; of several files that had one path, the one published last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from cachexfs.core.manifest import Manifest, Member
from cachexfs.errors import CorruptError


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A recovery record: a msgpack map. ``digest`` (of the file) or ``tree`` (of its blocks' digests) are empty where
    the drain did not know them.

    ``members`` None: a commit file whose list did not fit; only who has its replica may publish it.
    """

    path: bytes
    fid: int
    gen: int
    size: int
    mode: int
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int
    atime_ns: int | None = None
    base: tuple[int, int, int] | None = None
    digest: bytes = b""
    tree: bytes = b""
    job: str = ""
    origin: str = ""
    published: bool = True
    revision: int = 0
    members: tuple[Member, ...] | None = ()
    #: (size, tree) of earlier contents of the file that were still to land when the record was made.
    earlier: tuple[tuple[int, bytes], ...] = ()
    #: Trees of what an earlier fsync had put under the hidden name: that is there until its bytes are exchanged, too.
    before: tuple[bytes, ...] = ()
    #: When the record was made: each fsync of a file that stays open makes one of the same generation. 0: unknown.
    made_ns: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A content and where it is: ``source`` a path on NVMe (``manifest`` says what must be in it), ``ready`` whether
    the PFS has it under ``hidden``."""

    record: Record
    hidden: str
    source: str = ""
    manifest: Manifest | None = None
    ready: bool = False

    @property
    def path(self) -> bytes:
        return self.record.path

    @property
    def members(self) -> Mapping[bytes, Member]:
        return {member.name: member for member in self.record.members or ()}


@dataclass(slots=True)
class Chosen:
    """``wanted`` by path; ``superseded`` by a newer content; ``disputed``: (candidate, why); ``spent``: records without
    their file, which has landed, or was not there yet when somebody ended."""

    wanted: dict[bytes, Candidate] = field(default_factory=dict)
    superseded: list[Candidate] = field(default_factory=list)
    disputed: list[tuple[Candidate, str]] = field(default_factory=list)
    spent: list[Candidate] = field(default_factory=list)


_decoder = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()


def decode_record(data: bytes) -> Record:
    """A record's bytes. Raises ``CorruptError``."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise CorruptError(f"not a recovery record: {error}") from None


def encode_record(record: Record, bytes_max: int) -> bytes:
    """Bytes of a record, of at most ``bytes_max``: without the members if they do not fit."""
    data = _encoder.encode(record)
    if len(data) > bytes_max:
        data = _encoder.encode(msgspec.structs.replace(record, members=None))
    return data


def of_manifest(manifest: Manifest, job: str, source: str) -> Candidate:
    """A replica as a candidate."""
    base = manifest.base
    record = Record(
        path=manifest.path, fid=manifest.fid, gen=manifest.gen, size=manifest.size, mode=manifest.mode,
        uid=manifest.uid, gid=manifest.gid, mtime_ns=manifest.mtime_ns, atime_ns=manifest.atime_ns,
        base=None if base is None else (base.ino, base.size, base.mtime_ns), digest=manifest.digest,
        tree=manifest.tree, job=job, origin=manifest.origin, published=manifest.published,
        revision=manifest.revision, members=manifest.members,
        earlier=manifest.earlier, made_ns=manifest.made_ns,
    )  # fmt: skip
    return Candidate(record, f"{manifest.stage}-{manifest.size:x}", source, manifest)


def _age(candidate: Candidate) -> tuple[int, bool, int, int, int]:
    """Larger is newer, among the contents of one file."""
    record = candidate.record
    return record.gen, record.published, record.revision, record.made_ns, record.mtime_ns


def choose(found: Iterable[Candidate]) -> Chosen:
    """See the module. Contents without a path are superseded: their names were removed."""
    chosen = Chosen()
    same: dict[str, Candidate] = {}
    for candidate in found:
        known = same.get(candidate.hidden)
        same[candidate.hidden] = candidate if known is None else _merge(known, candidate)
    files: dict[int, list[Candidate]] = defaultdict(list)
    for candidate in same.values():
        files[candidate.record.fid].append(candidate)
    paths: dict[bytes, list[Candidate]] = defaultdict(list)
    for versions in files.values():
        versions.sort(key=_age)
        newest = versions.pop()
        chosen.superseded += versions
        if newest.path:
            paths[newest.path].append(newest)
        else:
            chosen.superseded.append(newest)
    for path, rivals in paths.items():
        _settle(chosen, path, rivals)
    return chosen


def _merge(one: Candidate, other: Candidate) -> Candidate:
    """The same content twice: two replicas, or a replica and a file on the PFS. The newest manifest knows best."""
    best, rest = (one, other) if _knows(one) >= _knows(other) else (other, one)
    return Candidate(best.record, best.hidden, best.source or rest.source, best.manifest or rest.manifest,
                     best.ready or rest.ready)  # fmt: skip


def _knows(candidate: Candidate) -> tuple[bool, bool, int, int]:
    record = candidate.record
    return candidate.manifest is not None, record.published, record.revision, len(record.members or ())


def _settle(chosen: Chosen, path: bytes, rivals: list[Candidate]) -> None:
    """Several files that had the same path: the one published last, if that can be told."""
    contents = {(c.record.tree, c.record.size) if c.record.tree else c.hidden for c in rivals}
    jobs = {c.record.job for c in rivals}
    if len(contents) > 1 and len(jobs) > 1:
        why = f"jobs {', '.join(sorted(job or '(unknown)' for job in jobs))} hold different contents: choose with --job"
        chosen.disputed += [(candidate, why) for candidate in rivals]
        return
    counted = all(c.record.revision for c in rivals)
    rivals.sort(key=lambda c: (c.record.revision if counted else 0, c.record.mtime_ns, c.hidden))
    chosen.wanted[path] = rivals.pop()
    chosen.superseded += rivals
