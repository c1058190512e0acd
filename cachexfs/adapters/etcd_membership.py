"""Whether this node's member may start over the data that it has, or must join anew.

Role: adaptor. A member that has lost its data must not come back under its old id (it would have forgotten what
it voted for), and one that the others have dropped (``--force-new-cluster``) cannot. Both join as learners, which
never cost the others their majority, and are promoted once they have caught up. Concurrency: called by
``EtcdServer`` before and after a start; each call asks the other members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import trio

from cachexfs.adapters.etcd_batch import FENCE_PREFIX
from cachexfs.adapters.etcd_client import (
    Empty,
    Endpoint,
    EtcdClient,
    EtcdRefusedError,
    EtcdUnreachableError,
    RangeAnswer,
)
from cachexfs.adapters.job_tls import TlsFiles
from cachexfs.errors import CannotTellError

#: How long the others may take to say that there is a cluster. Without an answer the member starts as it is.
ASK_TIMEOUT_S = 1.5
RETRY_S_MIN = 0.5
RETRY_S_MAX = 10.0


class NotAdmittedError(CannotTellError):
    """The others have a cluster that does not take this member in, for now."""


class MemberRecord(msgspec.Struct, frozen=True):
    """A member as the cluster knows it. ``name`` is empty until it has started."""

    ID: int
    peerURLs: list[str] = []
    name: str = ""
    isLearner: bool = False


class MembersAnswer(msgspec.Struct, frozen=True):
    """The cluster's members."""

    members: list[MemberRecord] = []


@dataclass(frozen=True, slots=True)
class Standing:
    """How to start: ``cluster`` is the ``initial-cluster`` of an existing cluster to join ("": start as configured);
    ``is_stale`` says that the data belongs to a past one."""

    cluster: str = ""
    is_stale: bool = False


class Membership:
    """The other members' view of the member ``name`` with the peer address ``peer_url``, in the job ``job``."""

    def __init__(self, others: Sequence[Endpoint], name: str, peer_url: str, job: str, tls: TlsFiles | None) -> None:
        self._others = others
        self._name = name
        self._peer_url = peer_url
        self._fence = f"/cachexfs/{job}/".encode() + FENCE_PREFIX + name.encode()
        self._tls = tls

    async def standing(self, *, has_data: bool) -> Standing:
        """Ask the others, and apply for membership when it is needed. Without a majority of them: as configured.

        Raises ``NotAdmittedError`` when they do not admit it now: etcd refuses changes while a member is away, and
        in its first seconds. To start under the old id all the same would be wrong.
        """
        if not self._others:
            return Standing()
        known = await self._is_known()
        if known is None:
            return Standing()
        client = self._client()
        try:
            return await self._apply(client, has_data=has_data, is_known=known)
        except (EtcdUnreachableError, EtcdRefusedError) as error:
            raise NotAdmittedError(f"the etcd cluster does not admit this node's member yet: {error}") from error
        finally:
            await client.aclose()

    async def settle(self) -> bool:
        """Wait until the others know the running member as a full one, promoting it when it has caught up.

        False when they have dropped it: it must be stopped, and joins at its next start.
        """
        client = self._client()
        pause_s = RETRY_S_MIN
        try:
            while True:
                try:
                    own = await self._own(client)
                    if own is None or not own.isLearner:
                        return own is not None
                    await client.call("/v3/cluster/member/promote", {"ID": own.ID}, Empty)
                except (EtcdUnreachableError, EtcdRefusedError):  # not in sync yet, or no majority: both pass
                    pause_s = min(1.5 * pause_s, RETRY_S_MAX)
                await trio.sleep(pause_s)
        finally:
            with trio.CancelScope(shield=True):
                await client.aclose()

    async def drop(self, peer_urls: Sequence[str], own: Endpoint) -> None:
        """Take other members out, one by one: they end then. Raises ``NotAdmittedError``."""
        client = self._client(own)  # one that is removed does not answer to the end
        try:
            answer = await client.call("/v3/cluster/member/list", {}, MembersAnswer)
            for member in answer.members:
                if set(member.peerURLs) & set(peer_urls):
                    await client.call("/v3/cluster/member/remove", {"ID": member.ID}, Empty)
        except (EtcdUnreachableError, EtcdRefusedError) as error:
            raise NotAdmittedError(f"the etcd cluster does not let members go: {error}") from error
        finally:
            with trio.CancelScope(shield=True):
                await client.aclose()

    async def _is_known(self) -> bool | None:
        """Whether this node has taken part in the job; None when none of the others knows a majority."""
        known: list[bool] = []

        clients = [self._client(endpoint) for endpoint in self._others]  # raises OSError, not a group of them

        async def ask(client: EtcdClient) -> None:
            try:
                fence = await client.call("/v3/kv/range", {"key": self._fence}, RangeAnswer)
                known.append(bool(fence.kvs))
                nursery.cancel_scope.cancel()  # one is enough: it speaks for the majority
            except (EtcdUnreachableError, EtcdRefusedError):
                return
            finally:
                with trio.CancelScope(shield=True):
                    await client.aclose()

        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(ask, client)
        return known[0] if known else None

    async def _apply(self, client: EtcdClient, *, has_data: bool, is_known: bool) -> Standing:
        own = await self._own(client)
        if own is not None and (has_data or not is_known):
            return Standing()  # as ever; or a new cluster whose other members were quicker
        if own is not None:
            await client.call("/v3/cluster/member/remove", {"ID": own.ID}, Empty)
        request = {"peerURLs": [self._peer_url], "isLearner": True}
        answer = await client.call("/v3/cluster/member/add", request, MembersAnswer)
        urls = [
            f"{member.name or self._name}={url}"
            for member in answer.members
            if member.name or self._peer_url in member.peerURLs
            for url in member.peerURLs
        ]
        return Standing(",".join(urls), is_stale=has_data)

    async def _own(self, client: EtcdClient) -> MemberRecord | None:
        answer = await client.call("/v3/cluster/member/list", {}, MembersAnswer)
        return next((member for member in answer.members if self._peer_url in member.peerURLs), None)

    def _client(self, *endpoints: Endpoint) -> EtcdClient:
        tls = self._tls.client_context() if self._tls else None
        return EtcdClient(endpoints or self._others, tls, ASK_TIMEOUT_S)
