"""Several nodes, and faults that come at one kind of step on the PFS: every kind, by the seed.

Role: a scenario. As ``Cluster``; besides, a daemon dies or a node is lost just before a step of a kind takes effect or
just after; a kind of step fails every time for a while, with each errno that a filesystem may give; a kind hangs; names
that are there, and all below them, are not found for a while.
"""

from __future__ import annotations

import errno
from collections import Counter

import trio
from sim_cluster import Cluster, Seat
from sim_life import Life

LOOKS = ("list prepared", "stat", "list", "stats", "check", "read")
CHANGES = (
    "create part", "write part", "sync part", "write record", "name record", "name part", "sync tmp", "discard",
    "set attributes", "sync attributes", "land", "sync directory", "mkdir", "symlink", "mknod", "link", "rename",
    "hide", "unhide", "unlink", "rmdir", "attr",
)  # fmt: skip
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ESTALE)


class Steps(Cluster):
    """As ``Cluster``, with faults at kinds of steps."""

    events = (
        "strike", "strike", "strike", "strike", "refuse", "refuse", "stick", "conceal", "conceal", "kill", "cut", "net",
        "outage", "lose", "calm",
    )  # fmt: skip

    def __init__(self, seed: int, directory: str, *, trace: bool = False, fsync: str = "") -> None:
        super().__init__(seed, directory, trace=trace, fsync=fsync)
        self.counts: Counter[str] = Counter()
        self._strike: tuple[str, str] | None = None

    async def happen(self, event: str, seat: Seat) -> None:
        """See ``Cluster``."""
        assert self._nursery is not None
        rng = self.random
        if event == "strike":
            self._strike = (rng.choice([*CHANGES, "read"]), rng.choice(["before", "after"]))
            self.trace(f"{self._strike}")
        elif event in ("refuse", "stick", "conceal"):
            self._nursery.start_soon(getattr(self, f"_{event}"), rng.choice([1, 30, 100]))
        elif event not in ("kill", "lose") or all(s.current is not None and not s.current.dead for s in self.seats):
            await super().happen(event, seat)

    def calm(self) -> None:
        """See ``Cluster``."""
        self._strike = None
        super().calm()

    def struck(self, seat: Seat, life: Life, what: str, when: str) -> None:
        """See ``Cluster``: the daemon dies here if this is the step."""
        if (what, when) != self._strike or seat.current is not life or life.dead:
            return
        assert self._nursery is not None
        self._strike = None
        self.counts[f"dead {when}"] += 1
        if self.random.random() < 0.3:
            self._nursery.start_soon(self._lose, seat)
            return
        self._nursery.start_soon(self._reborn, seat, seat.kill(supervised=self.random.random() < 0.5))
        raise OSError(errno.EIO, "killed")

    async def _reborn(self, seat: Seat, after: Life | None) -> None:
        assert self._nursery is not None
        await trio.sleep(self.random.choice([0.1, 1, 30]))
        await seat.born(self._nursery, after)

    async def _lose(self, seat: Seat) -> None:
        if all(s.current is not None and not s.current.dead for s in self.seats):
            await super()._lose(seat)

    # ---- for a while
    async def _refuse(self, seconds: float) -> None:
        what = self.random.choice([*CHANGES, *LOOKS])
        code = errno.EIO if what in LOOKS else self.random.choice(ERRORS)
        self.trace(f"{what!r} fails with {errno.errorcode[code]} for {seconds} s")
        self.counts["refused"] += 1
        self.faults.refused[what] = code
        await trio.sleep(seconds)
        self.faults.refused.pop(what, None)

    async def _stick(self, seconds: float) -> None:
        what = self.random.choice([*CHANGES, *LOOKS])
        self.trace(f"{what!r} hangs for {seconds} s")
        self.counts["stuck"] += 1
        self.faults.stuck.add(what)
        await trio.sleep(seconds)
        self.faults.stuck.discard(what)

    async def _conceal(self, seconds: float) -> None:
        there = sorted(self.store.walk())
        if not there:
            return
        path = self.random.choice(there)
        self.trace(f"{path!r} is not found for {seconds} s")
        self.counts["concealed"] += 1
        self.faults.hidden.add(path)
        await trio.sleep(seconds)
        self.faults.hidden.discard(path)
