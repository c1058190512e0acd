"""Answers of the control socket, typed.

Role: what ``client.ask`` decodes and the commands print. Unknown fields are ignored, missing ones have defaults, so
that a command and a daemon of neighbouring versions understand each other. Paths are relative to the mount's root;
sizes in bytes, rates in bytes/s, times RFC 3339.
"""

from __future__ import annotations

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """How far ``wait`` (done and total) or ``umount`` (left) is."""

    bytes_done: int = 0
    bytes_total: int = 0
    files_done: int = 0
    files_total: int = 0
    bytes_left: int = 0
    ops_left: int = 0
    rate_bytes_s: float = 0.0
    left_s: float | None = None
    files: tuple[str, ...] = ()


class Line(msgspec.Struct, frozen=True):
    """What every line may have: progress, or the end, or a failure."""

    done: bool = False
    progress: Progress | None = None
    error: str | None = None
    exit: int | None = None


class Pong(msgspec.Struct, frozen=True):
    """``ping``."""

    node: str = ""
    pid: int = 0


class NodeState(msgspec.Struct, frozen=True):
    """A node as the daemon sees it."""

    name: str
    live: bool = True
    host: str = ""
    port: int = 0


class PathError(msgspec.Struct, frozen=True):
    """A failed replication or drain."""

    path: str
    error: str
    node: str = ""


class MissingMember(msgspec.Struct, frozen=True):
    """A file that holds a checkpoint back."""

    name: str
    node: str = ""
    reason: str = ""


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint directory."""

    path: str
    format: str = ""
    stage: str = ""
    restartable: str = "no"
    t_returned: str | None = None
    t_partner: str | None = None
    t_pfs: str | None = None
    t_restartable: str | None = None
    files: int = 0
    bytes: int = 0
    pending: int = 0
    route: str = ""
    missing: tuple[MissingMember, ...] = ()
    error: str | None = None
    holders: tuple[str, ...] = ()


class FileState(msgspec.Struct, frozen=True):
    """A single file."""

    path: str
    stage: str = ""
    size: int = 0
    generation: int = 0
    origin: str = ""
    holders: tuple[str, ...] = ()
    digest: str | None = None
    route: str | None = None
    pending: int = 0
    error: str | None = None
    t_returned: str | None = None
    t_partner: str | None = None
    t_pfs: str | None = None


class Refreshed(msgspec.Struct, frozen=True):
    """What a look at the PFS has found; paths relative to the mount."""

    new: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    forgotten: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()


class Status(msgspec.Struct, frozen=True):
    """One mount, or one path of it."""

    mountpoint: str = ""
    pfs: str = ""
    node: str = ""
    job: str = ""
    pid: int = 0
    uptime_s: float = 0.0
    catalogue: str = ""
    fsync: str = ""
    route: str = ""
    route_now: str = ""
    route_why: str = ""
    kernel: str = ""
    kernel_reason: str = ""
    supervisor: str = ""
    daemons: int = 1
    nodes: tuple[NodeState, ...] = ()
    partner: str | None = None
    protected: bool = True
    cut_off: bool = False
    pfs_state: str = "ok"
    pfs_error: str | None = None
    pfs_away_s: float = 0.0
    pfs_refuses: str = ""
    held_up: int = 0
    staging_used: int = 0
    staging_limit: int = 0
    nvme_used: int = 0
    pending_bytes: int = 0
    pending_ops: int = 0
    own_copied_bytes: int = 0
    own_left_bytes: int = 0
    own_left_s: float | None = None
    drain_bytes_s: float = 0.0
    replicate_bytes_s: float = 0.0
    failed: str | None = None
    errors: tuple[PathError, ...] = ()
    notes: tuple[str, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    file: FileState | None = None


class Piece(msgspec.Struct, frozen=True):
    """One thing that holds a path back."""

    path: str
    node: str = ""
    boundary: str = ""
    reason: str = ""
    fix: str = ""


class Explanation(msgspec.Struct, frozen=True):
    """``explain``."""

    path: str = ""
    kind: str = ""
    stage: str = ""
    restartable: str | None = None
    pieces: tuple[Piece, ...] = ()
    summary: str = ""


class Reached(msgspec.Struct, frozen=True):
    """``wait``: whether the boundary was reached, why not, and the exit code."""

    reached: bool
    reason: str = ""
    exit: int = 0


class Latest(msgspec.Struct, frozen=True):
    """``latest``: a path relative to the mount's root, or None; then ``certain`` tells no from unknown."""

    path: str | None
    certain: bool = False
    reason: str = ""


class Left(msgspec.Struct, frozen=True):
    """A change that did not reach the PFS."""

    path: str
    reason: str = ""


class Unmounted(msgspec.Struct, frozen=True):
    """``umount``."""

    left: tuple[Left, ...] = ()
    notes: tuple[str, ...] = ()


class Vouched(msgspec.Struct, frozen=True):
    """``dead``: whether the catalogue was restarted, and what that means."""

    changed: bool
    reason: str = ""


class DrilledFile(msgspec.Struct, frozen=True):
    """One file as a drill read it; ``source`` is ``tier:node``. ``reason``: why not, or what else was wrong."""

    file: str
    source: str
    bytes: int
    ok: bool
    reason: str = ""


class Drilled(msgspec.Struct, frozen=True):
    """``drill``. ``certain`` is false when a holder did not answer: the file may be there all the same."""

    path: str
    without: str
    ok: bool
    certain: bool = True
    reason: str = ""
    notes: tuple[str, ...] = ()
    files: tuple[DrilledFile, ...] = ()
