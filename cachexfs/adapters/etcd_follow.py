"""The replica that follows etcd: first a load, then a watch.

Role: adaptor; the part of the etcd catalogue that changes ``view``. Called by ``catalogue_etcd``.

Concurrency: ``run`` is the one task that applies revisions, in order, each whole, and then calls the listeners;
``reach`` waits for it. A watch that breaks continues behind the last applied revision; when etcd has compacted
that away, or was set back, everything is loaded anew and the difference is applied as one revision.
"""

from __future__ import annotations

import itertools

import trio

from cachexfs.adapters.etcd_batch import FENCE_PREFIX, HEAD_KEY, range_end
from cachexfs.adapters.etcd_client import (
    EtcdClient,
    EtcdRefusedError,
    EtcdUnreachableError,
    Event,
    KeyValue,
    RangeAnswer,
    WatchAnswer,
)
from cachexfs.adapters.etcd_outage import Outage
from cachexfs.core.replica import Change, Replica
from cachexfs.engine.interfaces import Listener
from cachexfs.errors import CorruptError

LOAD_TIMEOUT_S = 30.0
PAGE_KEYS = 2000
RETRY_S = 0.1
#: A watch that has not delivered a revision known to exist for this long is opened anew, elsewhere.
STALL_S = 1.0


class Follower:
    """Follows the keys below ``prefix``. ``fences`` has the revisions of the ``q/`` keys as of the last load."""

    def __init__(self, client: EtcdClient, prefix: bytes, outage: Outage) -> None:
        self.view = Replica()
        self.fences: dict[bytes, int] = {}
        self.listeners: list[Listener] = []
        self._client = client
        self._prefix = prefix
        self._outage = outage
        self._advanced = trio.Event()
        self._scope = trio.CancelScope()
        self._must_load = False
        self._loading = False
        self._set_backs = 0

    async def load(self) -> None:
        """Read everything at one revision and make the replica equal to it."""
        self._loading = True
        try:
            revision, rows = await self._read_all()
        finally:
            self._loading = False
        self._must_load = False
        start = self._prefix + FENCE_PREFIX
        self.fences = {row.key[len(start) :]: row.mod_revision for row in rows if row.key.startswith(start)}
        self._apply(revision, self._difference(revision, rows))

    async def run(self) -> None:
        """Follow, after a first ``load``, until cancelled. Raises ``CorruptError`` for what is not a record."""
        while True:
            with trio.CancelScope() as self._scope:
                try:
                    if self._must_load:
                        await self.load()
                    await self._watch()
                except (EtcdUnreachableError, EtcdRefusedError) as error:
                    self._outage.why = str(error)
            await trio.sleep(RETRY_S)

    async def reach(self, revision: int) -> bool:
        """Wait until the view includes a revision that etcd has. False at the outage's limit, or when etcd was set
        back meanwhile: then that revision means nothing any more."""
        set_backs = self._set_backs
        while self.view.revision < revision or self._must_load:
            began_s = trio.current_time()
            with trio.move_on_after(STALL_S) as scope:
                await self._advanced.wait()
            if set_backs != self._set_backs:
                return False
            if scope.cancelled_caught:
                self.reopen()
                self._outage.stalled(began_s, f"changes up to revision {revision} do not arrive")
                if self._outage.is_over:
                    return False
        return True

    def reopen(self, *, load: bool = False) -> None:
        """Give the present watch up: the next is opened at another member. With ``load``: read everything anew."""
        self._must_load = self._must_load or load
        if not self._loading:
            self._scope.cancel()

    async def _read_all(self) -> tuple[int, list[KeyValue]]:
        rows: list[KeyValue] = []
        start, end, revision = self._prefix, range_end(self._prefix), 0
        while True:
            request = {"key": start, "range_end": end, "limit": PAGE_KEYS, "revision": revision}
            answer = await self._client.call("/v3/kv/range", request, RangeAnswer, LOAD_TIMEOUT_S)
            revision = revision or answer.header.revision
            rows += answer.kvs
            if not answer.more:
                return revision, rows
            start = answer.kvs[-1].key + b"\0"

    def _difference(self, revision: int, rows: list[KeyValue]) -> list[Change]:
        """Changes that lead from the replica to ``rows``, in the order of creation."""
        set_back = revision < self.view.revision  # equal revisions then say nothing about equal contents
        if set_back:
            self.view.revision = 0
            self._set_backs += 1
        changes = []
        found = set()
        for row in sorted(rows, key=lambda row: (row.create_revision, row.key)):
            key = self._own_key(row.key)
            if key is None:
                continue
            found.add(key)
            old = self.view.entry(key)
            if old is not None and old.created != row.create_revision:
                changes.append(Change(key, None, 0, revision))
                old = None
            if old is None or old.modified != row.mod_revision or (set_back and old.encoded != row.value):
                changes.append(Change(key, row.value, row.create_revision, row.mod_revision))
        gone = [Change(key, None, 0, revision) for key, _ in self.view.items() if key not in found]
        return gone + changes

    def _own_key(self, key: bytes) -> bytes | None:
        """A key without the job's prefix; None for what is not a record."""
        short = key[len(self._prefix) :]
        return None if short == HEAD_KEY or short.startswith(FENCE_PREFIX) else short

    async def _watch(self) -> None:
        request = {
            "create_request": {
                "key": self._prefix,
                "range_end": range_end(self._prefix),
                "start_revision": self.view.revision + 1,
            }
        }
        async with self._client.watch(request) as watch:
            while True:
                for answer in await watch.next():
                    self._take(answer)

    def _take(self, answer: WatchAnswer) -> None:
        if answer.canceled:
            self._must_load = self._must_load or answer.compact_revision > 0
            raise EtcdUnreachableError(f"the watch was cancelled: {answer.cancel_reason or 'compacted'}")
        for revision, events in itertools.groupby(answer.events, key=_revision_of):
            if revision > self.view.revision:
                self._apply(revision, [change for event in events if (change := self._change(event)) is not None])

    def _change(self, event: Event) -> Change | None:
        kv = event.kv
        key = self._own_key(kv.key)
        if key is None:
            return None
        return Change(key, None if event.type == "DELETE" else kv.value, kv.create_revision, kv.mod_revision)

    def _apply(self, revision: int, changes: list[Change]) -> None:
        try:
            done = self.view.apply(revision, changes)
        except ValueError as error:
            raise CorruptError(
                f"the catalogue holds a record at revision {revision} that this program cannot read ({error}): "
                "all nodes of a job must run the same version"
            ) from error
        self._outage.moved()
        self._advanced.set()
        self._advanced = trio.Event()
        if done:
            for listener in self.listeners:
                listener(done)


def _revision_of(event: Event) -> int:
    return event.kv.mod_revision
