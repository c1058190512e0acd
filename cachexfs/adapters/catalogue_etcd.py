"""The catalogue of a job with several nodes: a replica that follows etcd.

Role: ``Catalogue`` over etcd keys below ``/cachexfs/<job>/``. Called by the engine; made and run by the daemon.

Concurrency: the tasks below ``run`` are all in the trio thread. The *follower* alone changes ``view``, revision by
revision. The *committer* has one transaction in flight and computes the next on a view that includes it. Two *barrier*
tasks ask for the revision of the last mutation and wait until the view has it; whoever arrives meanwhile is
served by the next. The *life keeper* renews this node's lease. The *probe* notices, when nobody asks, that the
majority is gone or back, and that a watch has gone silent. Callers wait for an event that these tasks set.

Outage: begins with the first exchange that fails and ends with the next that succeeds. When it is ``outage_limit_s``
old, all who wait are sent away (``_expire``), and later calls are refused at once. A refused mutation may
still take effect: etcd can have it. It cannot once a later mutation of this node has returned (see ``etcd_batch``).
"""

from __future__ import annotations

import errno
import itertools
import random
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import trio

from cachexfs.adapters.etcd_batch import CALLS_MAX, HEAD_KEY, Batch, Call, Outcome, compute, range_end
from cachexfs.adapters.etcd_client import (
    Endpoint,
    EtcdClient,
    EtcdRefusedError,
    EtcdUnreachableError,
    KeyValue,
    RangeAnswer,
    TxnAnswer,
)
from cachexfs.adapters.etcd_follow import Follower
from cachexfs.adapters.etcd_life import LifeKeeper
from cachexfs.adapters.etcd_outage import Outage
from cachexfs.core.records import Life, life_key
from cachexfs.core.transaction import Tx
from cachexfs.engine.interfaces import Listener
from cachexfs.errors import FsError

T = TypeVar("T")

#: etcd's own limit unless its operator has raised it.
TXN_OPS_DEFAULT = 128
REQUEST_TIMEOUT_S = 2.5
RETRY_S = 0.1
CONFLICT_PAUSE_S = 0.002
#: After so many conflicts in a row the replica is not trusted any more.
CONFLICTS_MAX = 30
START_S_MIN, START_S_MAX = 15.0, 45.0  # other members may start later; a supervisor waits for a minute
BARRIER_TASKS = 2


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
        self._prefix = f"/cachexfs/{job}/".encode()
        self._node = node
        self._node_timeout_s = node_timeout_s
        self._txn_ops_max = txn_ops_max
        self._closed = False
        self._client = EtcdClient(endpoints, tls, min(REQUEST_TIMEOUT_S, outage_limit_s))
        self._outage = Outage(outage_limit_s, self._expire)
        self._follower = Follower(self._client, self._prefix, self._outage)
        self.view = self._follower.view
        self._keeper: LifeKeeper | None = None
        if life is not None:
            self._keeper = LifeKeeper(self._client, life, node_timeout_s, self.view, self._outage, self._submit)
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

    # ---- the interface
    @property
    def outage_s(self) -> float:
        """See ``Catalogue``."""
        return self._outage.age_s

    def listen(self, listener: Listener) -> None:
        """See ``Catalogue``."""
        self._follower.listeners.append(listener)

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
        self._submit(call)
        try:
            await call.done.wait()
        finally:
            if not call.done.is_set():  # cancelled: it is not sent again, but may have been sent
                self._queue.remove(cast("Call[object]", call))
        return call.result()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow etcd until cancelled. Started once the replica is whole and this node's ``Life`` is in it.

        Raises ``CatalogueUnavailableError`` when etcd does not answer for about ``outage_limit_s`` at the start,
        ``CorruptError`` for a record that cannot be read.
        """
        try:
            await self._load()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follower.run)
                nursery.start_soon(self._commit_loop)
                for _ in range(BARRIER_TASKS):
                    nursery.start_soon(self._barrier_loop)
                nursery.start_soon(self._probe_loop)
                if self._keeper is not None:
                    await nursery.start(self._keeper.run)
                task_status.started()
        finally:
            self._closed = True
            self._outage.why = "this node has left the catalogue"
            self._expire()
            with trio.CancelScope(shield=True):
                await self._client.aclose()

    async def leave(self) -> None:
        """Take this node's ``Life`` away at once instead of when the lease ends; ``run`` must still be running."""
        if self._keeper is not None:
            await self._keeper.give_back()
            key = life_key(self._node)
            await self.mutate(lambda tx: tx.delete(key))  # so that every node's next barrier sees it

    async def _load(self) -> None:
        while True:
            began_s = trio.current_time()
            try:
                await self._follower.load()
            except (EtcdUnreachableError, EtcdRefusedError) as error:
                self._outage.failed(began_s, error)
                if self._outage.age_s >= min(max(self._outage.limit_s, START_S_MIN), START_S_MAX):
                    raise self._outage.error() from None
                await trio.sleep(RETRY_S)
            else:
                self._outage.answered()
                self._fence_revision = self._follower.fences.get(self._node.encode(), 0)
                return

    # ---- outage
    def _refuse_if_out(self) -> None:
        if self._closed or self._outage.is_over:
            raise self._outage.error()

    def _expire(self) -> None:
        """Send away all who wait."""
        outcome = Outcome(error=self._outage.error())
        while self._queue:
            self._queue.popleft().settle(outcome)
        for call in self._barriers:
            call.settle(outcome)
        self._waiting.clear()

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
                elif await self._follower.reach(revision):
                    for call in calls:
                        call.settle(_DONE)

    async def _head(self, *, probe: bool = False) -> int | None:
        """Revision of the last mutation of any node; None when there was no answer."""
        began_s = trio.current_time()
        known = self.view.revision
        try:
            answer = await self._client.call(
                "/v3/kv/range",
                {"key": self._prefix + HEAD_KEY},
                RangeAnswer,
                self._outage.timeout_s(self._client.timeout_s),
                probe=probe,
            )
        except (EtcdUnreachableError, EtcdRefusedError) as error:
            self._outage.failed(began_s, error)
            return None
        self._outage.answered()
        if answer.header.revision < known:  # etcd was set back: restored, or made anew
            self._follower.reopen(load=True)
        return answer.kvs[0].mod_revision if answer.kvs else 0

    # ---- mutations
    def _submit(self, call: Call[T]) -> None:
        self._queue.append(cast("Call[object]", call))
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
            if batch.is_empty and not self._sent:
                self._finish(batch)
            else:
                await self._commit(batch)

    async def _commit(self, batch: Batch) -> None:
        """One attempt. Afterwards calls that have got their outcome are out of the queue."""
        began_s = trio.current_time()
        leases = self._keeper.leases if self._keeper else {}
        is_fenced = bool(batch.values or self._sent)
        request = batch.request(self._prefix, self._node, self._fence_revision, leases, must_fence=is_fenced)
        if is_fenced:
            self._sent[batch.id] = batch
        try:
            answer = await self._client.call(
                "/v3/kv/txn", request, TxnAnswer, self._outage.timeout_s(self._client.timeout_s)
            )
        except EtcdUnreachableError as error:
            self._outage.failed(began_s, error)
            await trio.sleep(RETRY_S)
            return
        except EtcdRefusedError as error:
            self._sent.pop(batch.id, None)
            await self._refused(batch, began_s, error)
            return
        self._outage.answered()
        if answer.succeeded and is_fenced:
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
        if await self._follower.reach(revision):
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
            self._follower.reopen(load=True)
        await self._follower.reach(head)

    async def _refused(self, batch: Batch, began_s: float, error: EtcdRefusedError) -> None:
        """etcd will not carry out this batch: its fault, or that of one of its functions."""
        if self._keeper is not None and self._keeper.refused(error):
            self._forget_done()
        elif len(batch.calls) > 1:
            self._calls_max = len(batch.calls) // 2
        elif "space" in str(error):  # etcd's quota is used up: nobody's fault here, and it may pass
            self._outage.failed(began_s, error)
            await trio.sleep(RETRY_S)
        else:
            batch.calls[0].settle(Outcome(error=FsError(errno.EIO, f"the catalogue refuses a change: {error}")))
            self._forget_done()

    # ---- the probe
    async def _probe_loop(self) -> None:
        suspect: tuple[int, set[bytes]] | None = None
        while True:
            revision = await self._head(probe=True)
            if revision is None:
                await trio.sleep(RETRY_S)
                continue
            await self._follower.reach(revision)
            suspect = await self._compare_lives(suspect)
            await trio.sleep(self._node_timeout_s / 3)

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
            self._follower.reopen()
        return found


_DONE = Outcome()


def _nothing(tx: Tx) -> None:
    """What a barrier does."""


def _kvs(answer: TxnAnswer, index: int) -> list[KeyValue]:
    found = answer.responses[index].response_range if len(answer.responses) > index else None
    return found.kvs if found else []
