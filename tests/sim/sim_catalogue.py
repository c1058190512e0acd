"""A catalogue in memory: one log, a replica per node, optimistic transactions, leases, nodes that are cut off.

Role: ``Catalogue`` for simulations. What ``mutate`` has returned survives every death; what it had not returned
when its daemon died may have happened. Each call takes a little time before and after its effect. A node that is cut
off (``Link``) waits, and is refused once its outage is old enough; a change whose answer was cut off has happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import trio

from cachexfs.core.records import Life, encode, life_key
from cachexfs.core.replica import Change, Replica
from cachexfs.core.transaction import Guard, Tx, Write
from cachexfs.engine.interfaces import Listener
from cachexfs.errors import CatalogueUnavailableError, FsError

T = TypeVar("T")


class Log:
    """What all nodes share."""

    def __init__(self) -> None:
        self.state = Replica()
        self.revisions: list[list[Change]] = []
        self.grown = trio.Event()

    def holds(self, write: Write) -> bool:
        """Whether everything that a transaction has read is still so."""
        for (guard, key), revision in write.guards.items():
            entry = self.state.entry(key)
            if guard is Guard.MODIFIED and (entry.modified if entry else 0) != revision:
                return False
            if guard is Guard.CREATED and (entry.created if entry else 0) != revision:
                return False
            if guard is Guard.EMPTY:
                made = [self.state.entry(k) for k in self.state.below(key)]
                if any(e is not None and e.created > revision for e in made):
                    return False
        return True

    def append(self, write: Write) -> None:
        revision = len(self.revisions) + 1
        changes = []
        for key, record in write.puts.items():
            old = self.state.entry(key)
            if record is None and old is None:
                continue
            value = None if record is None else encode(record)
            changes.append(Change(key, value, old.created if old else revision, revision))
        self.revisions.append(changes)
        self.state.apply(revision, changes)
        self.grown.set()
        self.grown = trio.Event()


class Link:
    """Whether one node reaches the catalogue."""

    def __init__(self) -> None:
        self.up = True
        self.since_s = 0.0
        self.changed = trio.Event()

    def set(self, *, up: bool) -> None:
        """Cut the node off, or let it come back."""
        if self.up != up:
            self.up, self.since_s = up, trio.current_time()
            self.changed.set()
            self.changed = trio.Event()


class SimCatalogue:
    """One daemon's view of the log. ``limit_s``: the age of an outage at which calls are refused."""

    def __init__(self, log: Log, rng: random.Random, link: Link | None = None, limit_s: float = 45.0) -> None:
        self._log, self._rng = log, rng
        self.link, self._limit_s = link or Link(), limit_s
        self.view = Replica()
        self._listeners: list[Listener] = []
        self._order = trio.Lock()
        self._catch_up()

    def listen(self, listener: Listener) -> None:
        """See ``Catalogue``."""
        self._listeners.append(listener)

    @property
    def outage_s(self) -> float:
        """See ``Catalogue``."""
        return 0.0 if self.link.up else trio.current_time() - self.link.since_s

    def _catch_up(self, until: int = 1 << 60) -> None:
        for revision in range(self.view.revision + 1, min(until, len(self._log.revisions)) + 1):
            done = self.view.apply(revision, self._log.revisions[revision - 1])
            for listener in self._listeners:
                listener(done)

    async def watch(self, life: Life) -> None:
        """Hear of other nodes' changes some time later, and keep this node's life there. Until cancelled."""
        while True:
            if self.link.up:
                await trio.sleep(self._rng.choice([0, 0.001, 0.02]))
            if not self.link.up:
                await self.link.changed.wait()
                continue
            self._catch_up(self._rng.randint(self.view.revision, len(self._log.revisions)))
            if self._log.state.entry(life_key(life.node)) is None:
                await self.mutate(lambda tx: tx.put(life_key(life.node), life))
            if self.view.revision == len(self._log.revisions):
                await _either(self._log.grown, self.link.changed)

    async def _reach(self) -> None:
        """Wait until the catalogue can be reached."""
        while not self.link.up:
            if self.outage_s >= self._limit_s:
                raise CatalogueUnavailableError("the catalogue is unavailable")
            with trio.move_on_after(self._limit_s - self.outage_s):
                await self.link.changed.wait()

    async def _pause(self) -> None:
        await trio.sleep(self._rng.choice([0.0, 0.0, 0.001]))

    async def barrier(self) -> None:
        """See ``Catalogue``."""
        await self._pause()
        await self._reach()
        self._catch_up()

    async def mutate(self, function: Callable[[Tx], T]) -> T:
        """See ``Catalogue``."""
        async with self._order:
            await self._pause()
            while True:
                tx, refused, result = Tx(self.view), None, None
                mark = tx.mark()
                try:
                    result = function(tx)
                except FsError as error:
                    tx.undo(mark)
                    refused = error
                if self._rng.random() < 0.3:
                    await self._pause()
                await self._reach()
                if not self._log.holds(tx.write):
                    self._catch_up()
                    continue
                if tx.write.puts and refused is None:
                    self._log.append(tx.write)
                self._catch_up()
                break
        if self._rng.random() < 0.3:
            await self._pause()
            await self._reach()
        if refused is not None:
            raise refused
        return result  # type: ignore[return-value]


async def _either(*events: trio.Event) -> None:
    """Return when one of them is set."""
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        for event in events:
            nursery.start_soon(wait, event)
