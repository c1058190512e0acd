"""What a checkpoint format says: which commit files it knows, and which members one of them names.

Role: the types shared by all formats, the rules for member names, and the comparison of what is needed
with what is there. Pure and synchronous: bytes come in through arguments and the ``Files`` interface.
Called by the completeness rules of the engine and by the commands, outside the event loop (a large
``.metadata`` takes seconds).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cachexfs.errors import CacheXError

NAME_BYTES_MAX = 255
PATH_BYTES_MAX = 4096
SIZE_BYTES_MAX = 2**63 - 1


class FormatError(CacheXError):
    """A commit file cannot be read; the message says why. The checkpoint's state is unknown, not bad."""


class ForeignError(FormatError):
    """A file with a commit file's name is surely something else: no framework takes it, so it claims nothing."""


@dataclass(frozen=True, slots=True)
class Members:
    """What one commit file asks for.

    ``commit``: the commit file's path, relative to the checkpoint directory.
    ``needs``: relative path -> smallest sufficient size in bytes (1: the size is not known, but an
    empty file is not enough). The commit file itself is not in it.
    ``exact``: a whole file has exactly the size given. False: it may be longer.
    ``note``: one line for a person, or empty.
    ``incomplete_reason``: why the checkpoint is incomplete whatever files of ``needs`` exist, or None.
    ``listed``: of each commit file that itself lists its members, what it lists.
    """

    commit: bytes
    needs: Mapping[bytes, int]
    exact: bool = False
    note: str = ""
    incomplete_reason: str | None = None
    listed: Mapping[bytes, Collection[bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Missing:
    """A member that holds a checkpoint back: its relative path and a reason for a person."""

    name: bytes
    reason: str


class Files(Protocol):
    """Read access to the files of one checkpoint directory, given by the caller; paths are relative to it.

    Errors other than "not there" are raised as ``CacheXError`` and pass through the formats unchanged.
    """

    def names(self) -> Collection[bytes]:
        """Paths of all files at any depth below the directory."""
        ...

    def size(self, name: bytes) -> int | None:
        """Size in bytes; None when there is no such file."""
        ...

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        """At most ``length`` bytes from ``offset``; fewer only at the end of the file."""
        ...


class Format(Protocol):
    """One framework's layout. Instances have no state; ``FORMATS`` lists them."""

    name: str
    lists: bool
    """Whether a commit file itself lists its members; else they follow from what is there."""

    def recognises(self, names: Collection[bytes]) -> list[bytes]:
        """The commit files of this format among ``names`` (a listing of the directory)."""
        ...

    def reads(self, commit: bytes) -> bool:
        """Whether ``members`` looks at ``data``. False: pass ``b""``, for the file may be huge."""
        ...

    def members(self, commit: bytes, data: bytes, names: Collection[bytes], files: Files | None = None) -> Members:
        """What ``commit``, whose whole content is ``data``, asks for.

        ``names`` is the listing of the checkpoint directory; a format that needs names further below
        takes them from ``files``. Without ``files`` sizes that only headers tell are lower bounds.
        Raises ``ForeignError`` for what no framework takes, else ``FormatError``, and nothing else for any ``data``.
        """
        ...


def member_name(text: str) -> bytes:
    """The path that a commit file's text names, checked and normalised, as the kernel's bytes.

    Refuses (``FormatError``) what could leave the checkpoint directory or cannot be a file: absolute
    paths, ``..``, NUL, a trailing slash, no name at all, over-long names. Lone surrogates stand for
    bytes that are not UTF-8, as Python's file functions have it.
    """
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise FormatError(f"it names a file that cannot exist: {shown(text)}") from None
    return member_path(raw)


def member_path(raw: bytes) -> bytes:
    """``member_name`` for a path that is bytes already."""
    if not raw or b"\0" in raw or raw.startswith(b"/") or raw.endswith(b"/") or len(raw) > PATH_BYTES_MAX:
        raise FormatError(f"it names a file that is not a relative path: {shown(raw)}")
    parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
    if not parts or raw.endswith(b"/."):
        raise FormatError(f"it names a directory as a file: {shown(raw)}")
    if b".." in parts:
        raise FormatError(f"it names a file outside its directory: {shown(raw)}")
    if any(len(part) > NAME_BYTES_MAX for part in parts):
        raise FormatError(f"it names a file with an over-long name: {shown(raw)}")
    return b"/".join(parts)


def shown(value: object, limit: int = 80) -> str:
    """``repr``, cut: for names from a file in a message. Only for str, bytes and numbers."""
    text = repr(value[: limit + 1]) if isinstance(value, str | bytes) else repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def prefixed(prefix: bytes, members: Members) -> Members:
    """The same members seen from the directory that holds ``prefix``, a relative directory."""
    base = member_path(prefix)
    return Members(
        commit=base + b"/" + members.commit,
        needs={base + b"/" + name: size for name, size in members.needs.items()},
        exact=members.exact,
        note=members.note,
        incomplete_reason=members.incomplete_reason,
        listed={base + b"/" + commit: [base + b"/" + n for n in names] for commit, names in members.listed.items()},
    )


def combine(parts: Sequence[Members]) -> Members:
    """One checkpoint out of several commit files, all relative to the same directory (``prefixed``).

    The first part's commit file stands for all; the others become members. Sizes: the larger. Raises
    ``FormatError`` when there is no part.
    """
    if not parts:
        raise FormatError("no commit file")
    needs: dict[bytes, int] = {}
    for part in parts:
        for name, size in part.needs.items():
            needs[name] = max(needs.get(name, 0), size)
    for part in parts[1:]:
        needs.setdefault(part.commit, 1)
    needs.pop(parts[0].commit, None)
    reasons = [part.incomplete_reason for part in parts if part.incomplete_reason]
    return Members(
        commit=parts[0].commit,
        needs=needs,
        exact=all(part.exact for part in parts),
        note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
        incomplete_reason="; ".join(dict.fromkeys(reasons)) or None,
        listed={commit: names for part in parts for commit, names in part.listed.items()},
    )


def evaluate(needs: Mapping[bytes, int], present: Mapping[bytes, int]) -> list[Missing]:
    """The members that are absent or too short, sorted by name; empty when names and sizes suffice.

    ``present``: relative path -> size in bytes of the files at one boundary. Names and sizes alone do not
    prove that a set is of one generation: the caller checks generations.
    """
    missing = []
    for name in sorted(needs):
        size = present.get(name)
        if size is None:
            missing.append(Missing(name, "absent"))
        elif size < needs[name]:
            least = needs[name]
            why = "empty" if size == 0 and least == 1 else f"{size} bytes, at least {least} needed"
            missing.append(Missing(name, why))
    return missing
