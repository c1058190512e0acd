"""What one run of the demo found: numbers for the screen and for ``--json``.

Role: plain records, filled by the scenario, shown by the screen. Times are ms after the first rank entered
``dcp.save``, or None where the boundary was not reached.
"""

from __future__ import annotations

import msgspec


class FileRow(msgspec.Struct, frozen=True):
    """One file of the checkpoint: which node wrote it and when it reached what, as its attributes say."""

    name: str
    node: str
    bytes: int
    returned_ms: float | None
    partner_ms: float | None
    pfs_ms: float | None


class Saved(msgspec.Struct, frozen=True):
    """The save: its files, the checkpoint's own boundaries, its attributes and what lies on the PFS."""

    directory: str
    save_ms: float
    files: list[FileRow]
    restartable_ms: dict[str, float]
    attributes: dict[str, str]
    pfs_listing: list[tuple[str, int]]
    pfs_load_equal: bool


class SourceRow(msgspec.Struct, frozen=True):
    """One file at the restore: who wrote it, which copies outlived the loss (``n1:nvme``), and bytes fetched by
    source, summed over the surviving nodes.

    A node fetches a block of 1 MiB once, however often its ranks read it; its own memory it reads without fetching.
    """

    name: str
    node: str
    copies: list[str]
    sources: dict[str, int]


class Restored(msgspec.Struct, frozen=True):
    """The restore without the lost node and without the PFS."""

    lost: str
    killed: int
    survivors: list[str]
    pfs_states: list[str]
    restore_ms: float
    files: list[SourceRow]
    ranks_equal: int
    ranks: int


class Report(msgspec.Struct):
    """The whole run. ``failed`` names the step that did not hold, None when all did."""

    nodes: int
    ranks: int
    mib: float
    root: str
    mount_ms: float = 0.0
    saved: Saved | None = None
    restored: Restored | None = None
    losses_unbroken: list[float] = []
    losses_resumed: list[float] = []
    failed: str | None = None
    error: str | None = None
    seconds: float = 0.0
