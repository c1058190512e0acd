"""A catalogue in memory: one log, a replica per node, optimistic transactions.

Role: ``Catalogue`` for simulations. What ``mutate`` has returned survives every death; what it had not returned
when its daemon died may have happened. Each call takes a little time before and after its effect.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import trio

from cachexfs.core.records import encode
from cachexfs.core.replica import Change, Guard, Replica, Tx, Write
from cachexfs.engine.interfaces import Listener
from cachexfs.errors import FsError

T = TypeVar("T")


class Log:
    """What all nodes share."""

    def __init__(self) -> None:
        self.state = Replica()
        self.revisions: list[list[Change]] = []

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


class SimCatalogue:
    """One daemon's view of the log."""

    outage_s = 0.0

    def __init__(self, log: Log, rng: random.Random) -> None:
        self._log, self._rng = log, rng
        self.view = Replica()
        self._listeners: list[Listener] = []
        self._order = trio.Lock()
        self._catch_up()

    def listen(self, listener: Listener) -> None:
        """See ``Catalogue``."""
        self._listeners.append(listener)

    def _catch_up(self) -> None:
        for revision in range(self.view.revision + 1, len(self._log.revisions) + 1):
            done = self.view.apply(revision, self._log.revisions[revision - 1])
            for listener in self._listeners:
                listener(done)

    async def _pause(self) -> None:
        await trio.sleep(self._rng.choice([0.0, 0.0, 0.001]))

    async def barrier(self) -> None:
        """See ``Catalogue``."""
        await self._pause()
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
                if not self._log.holds(tx.write):
                    self._catch_up()
                    continue
                if tx.write.puts and refused is None:
                    self._log.append(tx.write)
                self._catch_up()
                break
        if self._rng.random() < 0.3:
            await self._pause()
        if refused is not None:
            raise refused
        return result  # type: ignore[return-value]
