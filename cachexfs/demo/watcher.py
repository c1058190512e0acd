"""Watches a checkpoint directory through a mount: when each file and the checkpoint reach each boundary.

Role: sees only what any script can see, names and ``user.cachex.*`` attributes. Concurrency: one thread of its own
polls; ``wait`` and the results are for the thread that started it. Called by the demo's scenario and by tests.
"""

from __future__ import annotations

import datetime
import errno
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from cachexfs.demo.control import xattr
from cachexfs.errors import NotDurableError

POLL_S = 0.05
BOUNDARIES = ("returned", "partner", "pfs")
#: A name may vanish between listing and look; a mount may die under the watcher.
GONE = (errno.ENOENT, errno.ENOTCONN, errno.ESTALE)


@dataclass(frozen=True)
class FileTimes:
    """One file of a checkpoint. Times are seconds since the epoch, from the file's own ``t.*`` attributes."""

    name: str
    origin: str
    bytes: int
    reached_s: dict[str, float]


@dataclass
class Seen:
    """What the watcher saw itself: by file, and for the checkpoint, when a value was first shown."""

    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    restartable: dict[str, float] = field(default_factory=dict)
    looks: int = 0


def parse_time_s(text: str) -> float:
    """Seconds since the epoch of an RFC 3339 time."""
    return datetime.datetime.fromisoformat(text).timestamp()


class BoundaryWatcher:
    """Polls ``directory`` from ``start`` to ``stop``. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen = Seen()
        self._settled = threading.Event()
        self._ended = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._watch, name="boundary watcher", daemon=True)

    def __enter__(self) -> BoundaryWatcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def wait(self, timeout_s: float) -> None:
        """Until all files and the checkpoint claim every boundary. Raises ``NotDurableError`` at the deadline.

        ``pfs`` alone is not the end: a file may land there before its copy is at the partner, or while a lost partner's
        copy is made anew.
        """
        settled = self._settled.wait(timeout_s)
        if self._error:
            raise self._error
        if not settled:
            held = [f"{name} {list(stages)[-1]}" for name, stages in self.seen.stages.items() if "pfs" not in stages]
            shown = ", ".join(self.seen.restartable) or "nothing"
            raise NotDurableError(
                f"not all of {self.directory} has reached every boundary after {timeout_s:.0f} s: restartable has been "
                f"{shown}; below pfs: {', '.join(held) or 'no file'}; without a claim: {', '.join(self._unclaimed())}"
            )

    def times(self) -> list[FileTimes]:
        """The files' own account, by name, ``.metadata`` last."""
        return [file_times(self.directory / name) for name in sorted(self.seen.stages, key=_shards_first)]

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            try:
                if self._look():
                    self._settled.set()
                    return
            except OSError as error:
                if error.errno not in GONE:
                    self._error = error
                    self._settled.set()
                    return

    def _look(self) -> bool:
        """One look at everything that is not at ``pfs`` yet. True when all claims are there, the checkpoint's too."""
        self.seen.looks += 1
        value = xattr(self.directory, "restartable")  # before the listing: what it speaks of is then listed
        if value:
            self.seen.restartable.setdefault(value, time.time())
        names = os.listdir(self.directory)
        for gone in set(self.seen.stages) - set(names):  # a temporary name may have been at pfs before its rename
            del self.seen.stages[gone]
        for name in names:
            if "pfs" not in self.seen.stages.get(name, {}):
                self._note(name)
        at_pfs = value == "pfs" and all("pfs" in stages for stages in self.seen.stages.values())
        return at_pfs and not self._unclaimed()

    def _unclaimed(self) -> list[str]:
        """The boundaries that somebody does not claim (``NAME t.BOUNDARY``); ``.`` is the checkpoint."""
        return [
            f"{name} t.{boundary}"
            for name in (*self.seen.stages, ".")
            for boundary in BOUNDARIES
            if not xattr(self.directory / name, f"t.{boundary}")
        ]

    def _note(self, name: str) -> None:
        try:
            stage = xattr(self.directory / name, "stage")
        except FileNotFoundError:
            self.seen.stages.pop(name, None)
            return
        if stage:
            self.seen.stages.setdefault(name, {}).setdefault(stage, time.time())


def file_times(path: Path) -> FileTimes:
    """Read one file's account from its attributes."""
    reached = {boundary: xattr(path, f"t.{boundary}") for boundary in BOUNDARIES}
    return FileTimes(
        name=path.name,
        origin=xattr(path, "origin") or "",
        bytes=path.stat().st_size,
        reached_s={boundary: parse_time_s(text) for boundary, text in reached.items() if text},
    )


def _shards_first(name: str) -> tuple[bool, str, int]:
    """Sort key: shards by rank, then the commit file."""
    parts = name.strip("_").split("_")
    return (name == ".metadata", parts[0] if not parts[0].isdigit() else "", int(parts[0]) if parts[0].isdigit() else 0)
