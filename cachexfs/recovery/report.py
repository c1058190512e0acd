"""What the recovery process is asked, and what it answers.

Role: typed lines between ``cachexfs recover`` and its child ``python -m cachexfs.recovery``. Imports nothing that
touches the world, so that the command may. Paths are relative to the PFS directory, ``os.fsdecode``'d; sizes in bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

#: ``there``: the PFS has these very bytes. ``superseded``: a newer content of the file, or of the path, is here.
OutcomeKind = Literal["published", "there", "superseded", "withheld", "conflict", "damaged", "failed"]
#: Outcomes after which something is not on the PFS: exit 3.
LEFT: frozenset[str] = frozenset({"withheld", "conflict", "damaged", "failed"})


class Request(msgspec.Struct, frozen=True):
    """What to do. Without ``to``, or with ``list_only``, nothing is changed anywhere.

    ``is_named``: somebody has given ``nvme`` for this very request, and it is wrong if it is no such directory.
    """

    nvme: str | None
    to: str | None
    list_only: bool = False
    verify: bool = False
    job: str | None = None
    elsewhere: bool = False
    wait_s: float = 0.0
    is_named: bool = False
    journal: str | None = None  # instead of all that: mend the catalogue in this staging directory
    pending: str | None = None  # or count what in this staging directory is not on the PFS


class HeldFile(msgspec.Struct, frozen=True):
    """A replica on NVMe. ``whole``: every block has its digest; None: not looked at."""

    path: str
    size: int
    generation: int
    origin: str
    published: bool
    whole: bool | None = None
    reason: str = ""


class HeldStore(msgspec.Struct, frozen=True):
    """The replicas that one node of a job keeps. ``in_use``: a daemon has the directory."""

    job: str
    node: str
    directory: str
    in_use: bool
    files: tuple[HeldFile, ...] = ()
    damaged: tuple[HeldFile, ...] = ()


class SafeFile(msgspec.Struct, frozen=True):
    """A file that is safe on the PFS under a hidden name, with its record."""

    path: str
    size: int
    generation: int
    job: str
    hidden: str


class Listing(msgspec.Struct, frozen=True):
    """The answer to ``list_only``."""

    stores: tuple[HeldStore, ...] = ()
    records: tuple[SafeFile, ...] = ()


class Mended(msgspec.Struct, frozen=True):
    """The answer to ``journal``: records kept, damaged places left out."""

    kept: int
    skipped: int


class Pending(msgspec.Struct, frozen=True):
    """The answer to ``pending``: changes of the PFS that wait in staging, bytes of the files among them."""

    changes: int
    size: int


class Outcome(msgspec.Struct, frozen=True):
    """What became of one content."""

    path: str
    outcome: OutcomeKind
    size: int = 0
    generation: int = 0
    job: str = ""
    origin: str = ""
    reason: str = ""


class Result(msgspec.Struct, frozen=True):
    """The answer to ``to``."""

    outcomes: tuple[Outcome, ...] = ()

    @property
    def left(self) -> tuple[Outcome, ...]:
        """What is not on the PFS."""
        return tuple(outcome for outcome in self.outcomes if outcome.outcome in LEFT)


class Line(msgspec.Struct, frozen=True):
    """One line from the child: progress, or (``done``) an answer or a failure."""

    done: bool = False
    bytes_done: int = 0
    bytes_total: int = 0
    files_done: int = 0
    files_total: int = 0
    note: str = ""
    error: str = ""
    exit: int = 0
    listing: Listing | None = None
    result: Result | None = None
    mended: Mended | None = None
    pending: Pending | None = None
