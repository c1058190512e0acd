"""This node's lease and the ``Life`` that is there while the lease is.

Role: adaptor; part of the etcd catalogue. Concurrency: one task (``run``); ``give_back`` is called by another one, at
the end. The record is put by the committer like any mutation, under the lease of that moment.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable

import trio

from cachexfs.adapters.etcd_batch import Call, Outcome
from cachexfs.adapters.etcd_client import (
    CODE_NOT_FOUND,
    Empty,
    EtcdClient,
    EtcdRefusedError,
    EtcdUnreachableError,
    KeepAliveAnswer,
    LeaseAnswer,
)
from cachexfs.adapters.etcd_outage import Outage
from cachexfs.core.records import Life, life_key
from cachexfs.core.replica import Replica
from cachexfs.core.transaction import Tx
from cachexfs.errors import FsError

#: etcd grants nothing shorter with an election time of 1 s.
LEASE_S_MIN = 2
RETRY_S_MAX = 0.5


class LifeKeeper:
    """Keeps ``life`` in the catalogue. ``submit`` queues a mutation."""

    def __init__(
        self,
        client: EtcdClient,
        life: Life,
        timeout_s: float,
        view: Replica,
        outage: Outage,
        submit: Callable[[Call[None]], None],
    ) -> None:
        self.lease = 0
        self._client = client
        self._life = life
        self._key = life_key(life.node)
        self._lease_s = max(LEASE_S_MIN, math.ceil(timeout_s))
        self._view = view
        self._outage = outage
        self._submit = submit
        self._lease_put = 0  # the lease under which the record was put last
        self._call: Call[None] | None = None
        self._leaving = False

    @property
    def leases(self) -> dict[bytes, int]:
        """Which key is put under which lease."""
        return {self._key: self.lease} if self.lease else {}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Started once the record is in the view; raises ``CatalogueUnavailableError`` when it does not get there."""
        started = False
        while not self._leaving:
            pause_s = self._lease_s / 3
            try:
                await self._keep_lease()
                self.ensure()
            except (EtcdUnreachableError, EtcdRefusedError) as error:
                self._outage.why = str(error)
                pause_s = min(pause_s / 3, RETRY_S_MAX)
            if not started and self._call is not None:
                await self._call.done.wait()
                started = self._is_there()
                if started:
                    task_status.started()
                elif self._outage.is_over:
                    raise self._outage.error()
                else:
                    pause_s = RETRY_S_MAX
            await trio.sleep(pause_s)

    def ensure(self) -> None:
        """Put the record under the present lease unless it is there or on its way."""
        if not self._leaving and not self._is_there() and (self._call is None or self._call.done.is_set()):
            self._call = Call(self._put)
            self._submit(self._call)

    async def give_back(self) -> None:
        """End the lease, and with it what is still there of the record."""
        self._leaving = True
        try:
            await self._client.call("/v3/lease/revoke", {"ID": self.lease}, Empty)
        except (EtcdUnreachableError, EtcdRefusedError):
            return  # it ends by itself

    def refused(self, error: EtcdRefusedError) -> bool:
        """etcd has refused a transaction: True when it was for the lease, which is then taken anew."""
        if error.code != CODE_NOT_FOUND or self._call is None or self._call.done.is_set():
            return False
        self.lease = 0
        self._call.settle(Outcome(error=error))
        return True

    def _put(self, tx: Tx) -> None:
        if not self.lease:  # without one the record would stay for ever
            raise FsError(errno.ESTALE, "the lease has ended")
        self._lease_put = self.lease
        tx.put(self._key, self._life)

    def _is_there(self) -> bool:
        entry = self._view.entry(self._key)
        return entry is not None and entry.record == self._life and self._lease_put == self.lease

    async def _keep_lease(self) -> None:
        if self.lease:
            kept = await self._client.call("/v3/lease/keepalive", {"ID": self.lease}, KeepAliveAnswer)
            if kept.result.TTL > 0:
                return
            self.lease = 0
        granted = await self._client.call("/v3/lease/grant", {"TTL": self._lease_s}, LeaseAnswer)
        self.lease = granted.ID
