"""The catalogue of a job with several nodes: a replica that follows etcd.

Role: ``Catalogue`` over etcd keys below ``/cachexfs/<job>/``. Called by the engine; made and run by the daemon.

Concurrency: five tasks below ``run``, all in the trio thread. The *watch* alone changes ``view``, revision by revision.
The *committer* has one transaction in flight and computes the next on a view that includes it. Two *barrier*
tasks ask for the revision of the last mutation and wait until the view has it; whoever arrives meanwhile is
served by the next. The *lease* task keeps this node's ``Life``. The *probe* notices, when nobody asks, that the
majority is gone or back, and that a watch has gone silent. Callers wait for an event that these tasks set.

Outage: begins with the first exchange that fails and ends with the next that succeeds. When it is ``outage_limit_s``
old, all who wait are sent away (``_expire``), and later calls are refused at once. A refused mutation may
still take effect: etcd can have it. It cannot once a later mutation of this node has returned (see ``etcd_batch``).
"""

from __future__ import annotations

import errno
import itertools
import math
import random
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import trio

from cachexfs.adapters.etcd_batch import CALLS_MAX, FENCE_PREFIX, HEAD_KEY, Batch, Call, Outcome, compute, range_end
from cachexfs.adapters.etcd_client import (
    CODE_NOT_FOUND,
    Empty,
    Endpoint,
    EtcdClient,
    EtcdRefusedError,
    EtcdUnreachableError,
    Event,
    KeepAliveAnswer,
    KeyValue,
    LeaseAnswer,
    RangeAnswer,
    TxnAnswer,
    WatchAnswer,
)
from cachexfs.core.records import Life, encode, life_key
from cachexfs.core.replica import Change, Replica, Tx
from cachexfs.engine.interfaces import Listener
from cachexfs.errors import CatalogueUnavailableError, CorruptError, FsError

T = TypeVar("T")

#: etcd's own limit unless its operator has raised it.
TXN_OPS_DEFAULT = 128
REQUEST_TIMEOUT_S = 2.5
LOAD_TIMEOUT_S = 30.0
PAGE_KEYS = 2000
RETRY_S = 0.1
#: A watch that has not delivered a revision known to exist for this long is opened anew, elsewhere.
STALL_S = 1.0
CONFLICT_PAUSE_S = 0.002
#: After so many conflicts in a row the replica is not trusted any more.
CONFLICTS_MAX = 30
BARRIER_TASKS = 2
LEASE_S_MIN = 2


class EtcdCatalogue:
    """See ``Catalogue``. ``run`` must be running.

    Parameters: ``endpoints`` in order of preference (this node's member first); ``life`` is kept while ``run`` runs
    (None: an observer); ``txn_ops_max`` as the members were started with.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        job: str,
        node: str,
        *,
        life: Life | None,
        tls: ssl.SSLContext | None,
        outage_limit_s: float = 45.0,
        node_timeout_s: float = 10.0,
        txn_ops_max: int = TXN_OPS_DEFAULT,
    ) -> None:
        self.view = Replica()
        self._client = EtcdClient(endpoints, tls, min(REQUEST_TIMEOUT_S, outage_limit_s))
        self._prefix = f"/cachexfs/{job}/".encode()
        self._node = node
        self._life = life
        self._outage_limit_s = outage_limit_s
        self._lease_s = max(LEASE_S_MIN, math.ceil(node_timeout_s))
        self._txn_ops_max = txn_ops_max
        self._listeners: list[Listener] = []
        self._closed = False
        # committer
        self._queue: deque[Call[object]] = deque()
        self._queued = trio.Event()
        self._batch_ids = (b"%s-%d" % (secrets.token_hex(8).encode(), number) for number in itertools.count())
        self._fence_revision = 0
        self._sent: dict[bytes, Batch] = {}  # batches since the fence last moved: at most one of them took effect
        self._conflicts = 0
        self._calls_max = CALLS_MAX
        # barriers
        self._waiting: list[Call[None]] = []  # for the next exchange
        self._barriers: set[Call[None]] = set()  # all
        self._wanted = trio.Event()
        # watch
        self._advanced = trio.Event()
        self._watch_scope = trio.CancelScope()
        self._reload = False
        self._loading = False
        # lease
        self._lease = 0
        self._life_lease = 0
        self._life_call: Call[None] | None = None
        # outage
        self._outage_since_s: float | None = None
        self._stall_since_s: float | None = None
        self._why = "no answer yet"

    # ---- the interface
    @property
    def outage_s(self) -> float:
        """See ``Catalogue``."""
        since = [at for at in (self._outage_since_s, self._stall_since_s) if at is not None]
        return trio.current_time() - min(since) if since else 0.0

    def listen(self, listener: Listener) -> None:
        """See ``Catalogue``."""
        self._listeners.append(listener)

    async def barrier(self) -> None:
        """See ``Catalogue``."""
        self._refuse_if_out()
        call: Call[None] = Call(_nothing)
        self._waiting.append(call)
        self._barriers.add(call)
        self._wanted.set()
        try:
            await call.done.wait()
        finally:
            self._barriers.discard(call)
        call.result()

    async def mutate(self, function: Callable[[Tx], T]) -> T:
        """See ``Catalogue``. A function that changes too many keys for one transaction fails with E2BIG."""
        self._refuse_if_out()
        call = Call(function)
        self._submit(cast("Call[object]", call))
        try:
            await call.done.wait()
        finally:
            if not call.done.is_set():  # cancelled: it is not sent again, but may have been sent
                self._queue.remove(cast("Call[object]", call))
        return call.result()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow etcd until cancelled. Started once the replica is whole and this node's ``Life`` is in it.

        Raises ``CatalogueUnavailableError`` when etcd does not answer for ``outage_limit_s`` at the start,
        ``CorruptError`` for a record that cannot be read.
        """
        try:
            await self._load_first()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_loop)
                nursery.start_soon(self._commit_loop)
                for _ in range(BARRIER_TASKS):
                    nursery.start_soon(self._barrier_loop)
                nursery.start_soon(self._probe_loop)
                if self._life is not None:
                    await nursery.start(self._lease_loop)
                task_status.started()
        finally:
            self._closed = True
            self._why = "this node has left the catalogue"
            self._expire()
            with trio.CancelScope(shield=True):
                await self._client.aclose()

    async def leave(self) -> None:
        """Take this node's ``Life`` away at once instead of when the lease ends. Nothing works afterwards but reads."""
        if self._life is not None:
            key, self._life = life_key(self._life.node), None  # the lease task ends
            await self.mutate(lambda tx: tx.delete(key))
            try:
                await self._client.call("/v3/lease/revoke", {"ID": self._lease}, Empty)
            except (EtcdUnreachableError, EtcdRefusedError):
                return  # it ends by itself

    # ---- outage
    def _refuse_if_out(self) -> None:
        if self._closed or self.outage_s >= self._outage_limit_s:
            raise self._unavailable()

    def _unavailable(self) -> CatalogueUnavailableError:
        return CatalogueUnavailableError(f"the catalogue (etcd) is unavailable for {self.outage_s:.0f} s: {self._why}")

    def _answered(self) -> None:
        self._outage_since_s = None

    def _failed(self, began_s: float, error: Exception) -> None:
        self._why = str(error)
        if self._outage_since_s is None:
            self._outage_since_s = began_s
        if self.outage_s >= self._outage_limit_s:
            self._expire()

    def _expire(self) -> None:
        """Send away all who wait."""
        outcome = Outcome(error=self._unavailable())
        while self._queue:
            self._queue.popleft().settle(outcome)
        for call in self._barriers:
            call.settle(outcome)
        self._waiting.clear()

    def _timeout_s(self) -> float:
        """Time for one exchange: not beyond the end of all patience."""
        left_s = self._outage_limit_s - self.outage_s
        return self._client.timeout_s if left_s <= 0 else min(self._client.timeout_s, left_s)

    # ---- barriers
    async def _barrier_loop(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            calls, self._waiting = self._waiting, []
            while not all(call.done.is_set() for call in calls):
                revision = await self._head()
                if revision is None:
                    await trio.sleep(RETRY_S)
                elif await self._reach(revision):
                    for call in calls:
                        call.settle(_DONE)

    async def _head(self, *, probe: bool = False) -> int | None:
        """Revision of the last mutation of any node; None when there was no answer."""
        began_s = trio.current_time()
        try:
            answer = await self._client.call(
                "/v3/kv/range", {"key": self._prefix + HEAD_KEY}, RangeAnswer, self._timeout_s(), probe=probe
            )
        except (EtcdUnreachableError, EtcdRefusedError) as error:
            self._failed(began_s, error)
            return None
        self._answered()
        if answer.header.revision < self.view.revision:  # etcd was set back: restored, or made anew
            self._reload = True
            self._reopen_watch()
        return answer.kvs[0].mod_revision if answer.kvs else 0

    async def _reach(self, revision: int) -> bool:
        """Wait until the view includes a revision that etcd has; False at the outage's limit."""
        while self.view.revision < revision or self._reload:
            with trio.move_on_after(STALL_S) as scope:
                await self._advanced.wait()
            if not scope.cancelled_caught:
                continue
            if self._stall_since_s is None:
                self._stall_since_s = trio.current_time() - STALL_S
            self._why = f"changes up to revision {revision} do not arrive"
            self._reopen_watch()
            if self.outage_s >= self._outage_limit_s:
                self._expire()
                return False
        return True

    # ---- mutations
    def _submit(self, call: Call[object]) -> None:
        self._queue.append(call)
        self._queued.set()

    async def _commit_loop(self) -> None:
        while True:
            if not self._queue:
                self._queued = trio.Event()
                await self._queued.wait()
            if self._conflicts:
                await trio.sleep(random.random() * CONFLICT_PAUSE_S * min(self._conflicts, 10))
            calls_max = max(1, self._calls_max >> self._conflicts)
            batch = compute(self.view, self._queue, next(self._batch_ids), self._txn_ops_max, calls_max)
            if batch.is_empty:
                self._finish(batch)
            else:
                await self._commit(batch)

    async def _commit(self, batch: Batch) -> None:
        """One attempt. Afterwards calls that have got their outcome are out of the queue."""
        began_s = trio.current_time()
        leases = {life_key(self._node): self._lease} if self._lease else {}
        request = batch.request(self._prefix, self._node, self._fence_revision, leases)
        if batch.values:
            self._sent[batch.id] = batch
        try:
            answer = await self._client.call("/v3/kv/txn", request, TxnAnswer, self._timeout_s())
        except EtcdUnreachableError as error:
            self._failed(began_s, error)
            await trio.sleep(RETRY_S)
            return
        except EtcdRefusedError as error:
            self._sent.pop(batch.id, None)
            await self._refused(batch, began_s, error)
            return
        self._answered()
        if answer.succeeded and batch.values:
            self._fence_revision = answer.header.revision
            self._sent.clear()
            await self._succeeded(batch, answer.header.revision)
            return
        fences, heads = (_kvs(answer, index) for index in range(2))
        head = heads[0].mod_revision if heads else 0
        if answer.succeeded:
            await self._succeeded(batch, head)
        else:
            await self._conflicted(fences[0] if fences else None, head)

    async def _succeeded(self, batch: Batch, revision: int) -> None:
        self._conflicts = 0
        self._calls_max = CALLS_MAX
        if await self._reach(revision):
            self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        batch.settle()
        self._forget_done()

    def _forget_done(self) -> None:
        self._queue = deque(call for call in self._queue if not call.done.is_set())

    async def _conflicted(self, fence: KeyValue | None, head: int) -> None:
        """A condition did not hold: because an earlier attempt took effect after all, or as others were first."""
        revision = fence.mod_revision if fence else 0
        if revision != self._fence_revision:
            applied = self._sent.get(fence.value) if fence else None
            self._fence_revision = revision
            self._sent.clear()
            if applied is not None:
                await self._succeeded(applied, revision)
                return
        self._conflicts += 1
        if self._conflicts % CONFLICTS_MAX == 0:
            self._reload = True
            self._reopen_watch()
        await self._reach(head)

    async def _refused(self, batch: Batch, began_s: float, error: EtcdRefusedError) -> None:
        """etcd will not carry out this batch: its fault, or that of one of its functions."""
        if error.code == CODE_NOT_FOUND and self._life_call in batch.calls and self._life_call is not None:
            self._lease = 0  # it has ended; the lease task takes another
            self._life_call.settle(Outcome(error=error))
            self._forget_done()
        elif len(batch.calls) > 1:
            self._calls_max = len(batch.calls) // 2
        elif "space" in str(error):  # etcd's quota is used up: nobody's fault here, and it may pass
            self._failed(began_s, error)
            await trio.sleep(RETRY_S)
        else:
            batch.calls[0].settle(Outcome(error=FsError(errno.EIO, f"the catalogue refuses a change: {error}")))
            self._forget_done()

    # ---- the watch
    async def _load_first(self) -> None:
        while True:
            began_s = trio.current_time()
            try:
                await self._load()
            except (EtcdUnreachableError, EtcdRefusedError) as error:
                self._failed(began_s, error)
                self._refuse_if_out()
                await trio.sleep(RETRY_S)
            else:
                self._answered()
                return

    def _reopen_watch(self) -> None:
        """Give the present watch up: the next is opened at another member."""
        if not self._loading:
            self._watch_scope.cancel()

    async def _load(self) -> None:
        """Read everything at one revision and make the replica equal to it."""
        self._loading = True
        try:
            revision, rows = await self._read_all()
        finally:
            self._loading = False
        self._reload = False
        fence = self._prefix + FENCE_PREFIX + self._node.encode()
        if not self.view.revision:
            self._fence_revision = next((row.mod_revision for row in rows if row.key == fence), 0)
        self._apply(revision, self._difference(revision, rows))

    async def _read_all(self) -> tuple[int, list[KeyValue]]:
        rows: list[KeyValue] = []
        start, end, revision = self._prefix, range_end(self._prefix), 0
        while True:
            request = {"key": start, "range_end": end, "limit": PAGE_KEYS, "revision": revision}
            answer = await self._client.call("/v3/kv/range", request, RangeAnswer, LOAD_TIMEOUT_S)
            revision = revision or answer.header.revision
            rows += answer.kvs
            if not answer.more:
                break
            start = answer.kvs[-1].key + b"\0"
        return revision, rows

    def _difference(self, revision: int, rows: list[KeyValue]) -> list[Change]:
        """Changes that lead from the replica to ``rows``, in the order of creation."""
        set_back = revision < self.view.revision  # equal revisions then say nothing about equal contents
        if set_back:
            self.view.revision = 0
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
            if old is None or old.modified != row.mod_revision or (set_back and encode(old.record) != row.value):
                changes.append(Change(key, row.value, row.create_revision, row.mod_revision))
        gone = [Change(key, None, 0, revision) for key, _ in self.view.items() if key not in found]
        return gone + changes

    def _own_key(self, key: bytes) -> bytes | None:
        """A key without the job's prefix; None for what is not a record."""
        short = key[len(self._prefix) :]
        return None if short == HEAD_KEY or short.startswith(FENCE_PREFIX) else short

    async def _watch_loop(self) -> None:
        while True:
            with trio.CancelScope() as self._watch_scope:
                try:
                    if self._reload:
                        await self._load()
                    await self._watch()
                except (EtcdUnreachableError, EtcdRefusedError) as error:
                    self._why = str(error)
            await trio.sleep(RETRY_S)

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
            self._reload = answer.compact_revision > 0
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
        self._stall_since_s = None
        self._advanced.set()
        self._advanced = trio.Event()
        if done:
            for listener in self._listeners:
                listener(done)

    # ---- liveness
    async def _lease_loop(self, task_status: trio.TaskStatus[None]) -> None:
        started = False
        while self._life is not None:
            pause_s = self._lease_s / 3
            try:
                await self._keep_lease()
                self._keep_life(self._life)
            except (EtcdUnreachableError, EtcdRefusedError) as error:
                self._why = str(error)
                pause_s = min(pause_s / 3, 0.5)
            if not started and self._life_call is not None:
                await self._life_call.done.wait()
                started = self._life_there(self._life)
                if started:
                    task_status.started()
                elif self._closed or self.outage_s >= self._outage_limit_s:
                    raise self._unavailable()
                else:
                    pause_s = RETRY_S
            await trio.sleep(pause_s)

    def _life_there(self, life: Life) -> bool:
        entry = self.view.entry(life_key(life.node))
        return entry is not None and entry.record == life and self._life_lease == self._lease

    async def _keep_lease(self) -> None:
        if self._lease:
            kept = await self._client.call("/v3/lease/keepalive", {"ID": self._lease}, KeepAliveAnswer)
            if kept.result.TTL > 0:
                return
            self._lease = 0
        granted = await self._client.call("/v3/lease/grant", {"TTL": self._lease_s}, LeaseAnswer)
        self._lease = granted.ID

    def _keep_life(self, life: Life) -> None:
        """Put our ``Life`` under the present lease unless it is there."""
        if self._life_call is not None and not self._life_call.done.is_set():
            return
        if self._life_there(life):
            return
        key = life_key(life.node)

        def put(tx: Tx) -> None:
            if not self._lease:  # it would stay for ever
                raise FsError(errno.ESTALE, "the lease has ended")
            self._life_lease = self._lease
            tx.put(key, life)

        self._life_call = Call(put)
        self._submit(cast("Call[object]", self._life_call))

    async def _probe_loop(self) -> None:
        suspect: tuple[int, set[bytes]] | None = None
        while True:
            revision = await self._head(probe=True)
            if revision is None:
                await trio.sleep(RETRY_S)
                continue
            await self._reach(revision)
            suspect = await self._compare_lives(suspect)
            await trio.sleep(self._lease_s / 3)

    async def _compare_lives(self, suspect: tuple[int, set[bytes]] | None) -> tuple[int, set[bytes]] | None:
        """The end of a lease changes no ``head``: a silent watch that misses it is found by looking.

        Returns what to compare with the next time when the replica differs now.
        """
        prefix = self._prefix + life_key("")
        request = {"key": prefix, "range_end": range_end(prefix), "keys_only": True}
        try:
            answer = await self._client.call("/v3/kv/range", request, RangeAnswer)
        except (EtcdUnreachableError, EtcdRefusedError):
            return suspect
        there = {row.key[len(prefix) :] for row in answer.kvs}
        if there == {name.encode() for name in self.view.lives}:
            return None
        found = (self.view.revision, there)
        if found == suspect:
            self._reopen_watch()
        return found


_DONE = Outcome()


def _nothing(tx: Tx) -> None:
    """What a barrier does."""


def _revision_of(event: Event) -> int:
    return event.kv.mod_revision


def _kvs(answer: TxnAnswer, index: int) -> list[KeyValue]:
    found = answer.responses[index].response_range if len(answer.responses) > index else None
    return found.kvs if found else []
