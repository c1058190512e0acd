"""What the catalogue's tests stand on: etcd clusters on loopback ports, a proxy that misbehaves, small mutations."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import select
import shutil
import signal
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import trio

from cachexfs.adapters.catalogue_builtin import BuiltinCatalogue
from cachexfs.adapters.catalogue_etcd import EtcdCatalogue
from cachexfs.adapters.etcd_client import Endpoint, EtcdClient, EtcdUnreachableError, RangeAnswer
from cachexfs.adapters.etcd_server import TXN_OPS_MAX, EtcdServer, Member
from cachexfs.adapters.job_tls import JobAuthority, TlsFiles
from cachexfs.core.records import FID_STEP, ROOT_FID, Dirent, Inode, Life, Op, dirent_key, inode_key, op_key
from cachexfs.core.transaction import Tx
from cachexfs.demo.cluster import PORT_FIRST, PORT_LAST
from cachexfs.engine.interfaces import Catalogue
from cachexfs.errors import FsError, enoent

LOOPBACK = "127.0.0.1"
SECRET = b"a secret of the tests, long enough"
#: Longer than any wait of a passing test.
PATIENCE_S = 100.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that the kernel gives to no client: a member may be started again on them."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind((LOOPBACK, random.randrange(PORT_FIRST, PORT_LAST)))
                found.append(sock.getsockname()[1])
        return found


class EtcdCluster:
    """Members in a directory of their own (not below pytest's, which may be slow or deep)."""

    def __init__(self, count: int, *, tls: bool = True) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="cxt-etcd-"))
        ports = free_ports(2 * count)
        self.members = [Member(f"m{i}", LOOPBACK, ports[2 * i], ports[2 * i + 1]) for i in range(count)]
        self.files: TlsFiles | None = None
        self.servers = []
        for member in self.members:
            if tls:
                self.files = JobAuthority(SECRET, "tests").issue(
                    self.root / member.name / "tls", member.name, [LOOPBACK]
                )
            self.servers.append(
                EtcdServer(self.members, member.name, self.root / member.name, self.root.name, self.files)
            )

    @property
    def tls(self) -> ssl.SSLContext | None:
        return self.files.client_context() if self.files else None

    @property
    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(member.host, member.client_port) for member in self.members]

    async def start(self) -> None:
        async with trio.open_nursery() as nursery:
            for server in self.servers:
                nursery.start_soon(server.start)
        raw = EtcdClient(self.endpoints, self.tls, 5.0)
        with trio.fail_after(PATIENCE_S):
            while True:  # until a leader is elected
                try:
                    await raw.call("/v3/kv/range", {"key": b"any"}, RangeAnswer)
                except EtcdUnreachableError:
                    await trio.sleep(0.05)
                else:
                    break
        await raw.aclose()

    def kill(self, *numbers: int) -> None:
        """SIGKILL; they are dead when this returns."""
        for number in numbers:
            pid = self.servers[number].pid
            assert pid is not None
            fd = os.pidfd_open(pid)
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [])
            os.close(fd)

    async def stop(self) -> None:
        """Quickly: etcd takes seconds to say goodbye."""
        self.kill(*(number for number, server in enumerate(self.servers) if server.pid is not None))
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for server in self.servers:
                    nursery.start_soon(server.stop)

    def client(self, job: str, node: str, first: int = 0, **options: float) -> EtcdCatalogue:
        """A node's catalogue; its own member is number ``first``."""
        endpoints = self.endpoints[first:] + self.endpoints[:first]
        return make_client(endpoints, self.tls, job, node, **options)


def make_client(
    endpoints: list[Endpoint],
    tls: ssl.SSLContext | None,
    job: str,
    node: str,
    *,
    outage_limit_s: float = 45.0,
    node_timeout_s: float = 10.0,
    txn_ops_max: float = TXN_OPS_MAX,
) -> EtcdCatalogue:
    return EtcdCatalogue(
        endpoints,
        job,
        node,
        life=Life(node, secrets.token_hex(4)),
        tls=tls,
        outage_limit_s=outage_limit_s,
        node_timeout_s=node_timeout_s,
        txn_ops_max=int(txn_ops_max),
    )


@contextmanager
def module_cluster(count: int, *, tls: bool = True) -> Iterator[EtcdCluster]:
    """A running cluster, for fixtures that outlive one event loop."""
    cluster = EtcdCluster(count, tls=tls)
    try:
        trio.run(cluster.start)
        yield cluster
    finally:
        trio.run(cluster.stop)
        shutil.rmtree(cluster.root)


@asynccontextmanager
async def own_cluster(count: int, *, tls: bool = True) -> AsyncIterator[EtcdCluster]:
    """A running cluster that one test may harm."""
    cluster = EtcdCluster(count, tls=tls)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()
        shutil.rmtree(cluster.root)


@asynccontextmanager
async def running(*catalogues: BuiltinCatalogue | EtcdCatalogue) -> AsyncIterator[None]:
    """Run catalogues for a while; they must end when they are cancelled."""
    with trio.fail_after(2 * PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for catalogue in catalogues:
                await nursery.start(catalogue.run)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()


class World:
    """One kind of catalogue: makes nodes' views of one job."""

    def __init__(self, cluster: EtcdCluster | None, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.job = secrets.token_hex(4)
        self._open: list[BuiltinCatalogue] = []

    @asynccontextmanager
    async def nodes(self, count: int) -> AsyncIterator[list[Catalogue]]:
        """``count`` nodes' catalogues; of the built-in kind, which has one node, the same one several times."""
        if self.cluster is None:
            builtin = BuiltinCatalogue(self.directory, compact_bytes_min=20_000)
            try:
                async with running(builtin):
                    yield [builtin] * count
            finally:
                builtin.close()
        else:
            clients = [self.cluster.client(self.job, f"n{i}", i % len(self.cluster.members)) for i in range(count)]
            async with running(*clients):
                yield list(clients)


# ---- mutations
def inode(size: int) -> Inode:
    return Inode("f", 0o644, 0, 0, 1, 2, 3, size=size)


def adder(fid: int, amount: int = 1) -> Callable[[Tx], int]:
    """A read-modify-write: returns the new size."""

    def add(tx: Tx) -> int:
        found = tx.inode(fid)
        size = (found.size if found else 0) + amount
        tx.put(inode_key(fid), inode(size))
        return size

    return add


def namer(parent: int, name: bytes, fid: int) -> Callable[[Tx], None]:
    def put(tx: Tx) -> None:
        tx.put(dirent_key(parent, name), Dirent(fid, "f"))

    return put


def creator(name: bytes, fid: int) -> Callable[[Tx], int]:
    """O_EXCL in the root."""

    def create(tx: Tx) -> int:
        if tx.dirent(ROOT_FID, name) is not None:
            raise FsError(errno.EEXIST)
        tx.put(dirent_key(ROOT_FID, name), Dirent(fid, "f"))
        return fid

    return create


def peeking_creator(name: bytes, fid: int) -> Callable[[Tx], int]:
    """The same, with a refusal that has no condition."""

    def create(tx: Tx) -> int:
        if tx.peek(dirent_key(ROOT_FID, name)) is not None:
            raise FsError(errno.EEXIST)
        tx.put(dirent_key(ROOT_FID, name), Dirent(fid, "f"))
        return fid

    return create


def finder(parent: int, name: bytes) -> Callable[[Tx], Dirent]:
    """Refuses with ENOENT what is not there."""

    def find(tx: Tx) -> Dirent:
        found = tx.dirent(parent, name)
        if found is None:
            raise enoent()
        return found

    return find


def size_of(catalogue: Catalogue, fid: int) -> int:
    found = catalogue.view.inode(fid)
    return found.size if found else 0


def remover(key: bytes) -> Callable[[Tx], None]:
    def remove(tx: Tx) -> None:
        tx.delete(key)

    return remove


class RandomWork:
    """Random transactions over a few keys from several workers, and the check that some order explains them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fids = [(20 + i) * FID_STEP for i in range(12)]
        self.returned: list[bytes] = []
        self.refused = 0
        self._read: dict[bytes, dict[int, int | None]] = {}
        self._wrote: dict[bytes, dict[int, int | None]] = {}

    async def run(self, node: Catalogue, worker: int, count: int) -> None:
        for step in range(count):
            try:
                self.returned.append(await node.mutate(self._transaction(worker, 1000 * worker + step)))
            except FsError:
                self.refused += 1

    def _transaction(self, worker: int, number: int) -> Callable[[Tx], bytes]:
        rng = self.rng
        looks, changes = rng.sample(self.fids, rng.randint(1, 3)), rng.sample(self.fids, rng.randint(0, 3))
        gone, refuse = rng.random() < 0.3, rng.random() < 0.1
        key = op_key(f"{worker}-{number:06}")

        def function(tx: Tx) -> bytes:
            seen = {fid: (found.size if (found := tx.inode(fid)) else None) for fid in looks}
            if tx.peek(key) is not None:
                raise AssertionError("this transaction has been applied already")
            tx.put(key, Op("put", b"", str(worker)))
            for fid in changes:
                if gone:
                    tx.delete(inode_key(fid))
                else:
                    tx.put(inode_key(fid), inode(number))
            if refuse:
                raise FsError(errno.EPERM)
            self._read[key] = seen
            self._wrote[key] = {fid: None if gone else number for fid in changes}
            return key

        return function

    def check(self, node: Catalogue) -> None:
        """Replays all on a dict, in the order of their revisions."""
        order = [key for key, _, _ in node.view.ops()]
        assert sorted(order) == sorted(self.returned)
        model: dict[int, int | None] = {}
        for key in order:
            for fid, size in self._read[key].items():
                assert model.get(fid) == size, key
            model.update(self._wrote[key])
        there = {fid: size for fid, size in model.items() if size is not None}
        assert there == {fid: size_of(node, fid) for fid in self.fids if node.view.inode(fid)}


# ---- a proxy between a client and one member, in the clear
class Fate(Enum):
    """What becomes of a request."""

    PASS = "pass"
    LOSE_ANSWER = "forwarded; the connection ends before the answer"
    DELAY_REQUEST = "the connection ends; the request arrives when ``release`` is called"
    SILENCE = "forwarded; nothing comes back, and the connection stays"


@dataclass(eq=False)
class _Exchange:
    """The present request of one connection."""

    path: bytes = b""
    fate: Fate = Fate.PASS


class Proxy:
    """Decides by path: ``fates`` maps a path to the fates of the next requests to it, in order."""

    def __init__(self, target: Endpoint) -> None:
        self.target = target
        self.fates: dict[bytes, list[Fate]] = {}
        self.met: list[Fate] = []
        self.met_one = trio.Event()  # a fate other than PASS
        self.endpoint = Endpoint(LOOPBACK, 0)
        self.delayed_done = trio.Event()
        self._released = trio.Event()
        self._exchanges: list[_Exchange] = []

    def release(self) -> None:
        """Let delayed requests arrive; ``delayed_done`` is set when one has been answered."""
        self._released.set()

    def silence(self, path: bytes) -> None:
        """Nothing more comes back on the connections that have sent a request to ``path`` last."""
        for exchange in self._exchanges:
            if exchange.path == path:
                exchange.fate = Fate.SILENCE

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, self._serve, 0)
            self.endpoint = Endpoint(LOOPBACK, listeners[0].socket.getsockname()[1])
            task_status.started()

    async def _serve(self, client: trio.SocketStream) -> None:
        exchange = _Exchange()
        self._exchanges.append(exchange)
        try:
            server = await trio.open_tcp_stream(self.target.host, self.target.port)
            async with server, trio.open_nursery() as nursery:
                nursery.start_soon(self._answers, server, client, exchange, nursery.cancel_scope)
                await self._requests(client, server, exchange)
                nursery.cancel_scope.cancel()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._exchanges.remove(exchange)

    async def _requests(self, client: trio.SocketStream, server: trio.SocketStream, exchange: _Exchange) -> None:
        async for data in client:
            if data.startswith(b"POST "):
                exchange.path = bytes(data).split(b" ", 2)[1]
                fates = self.fates.get(exchange.path)
                exchange.fate = fates.pop(0) if fates else Fate.PASS
                self.met.append(exchange.fate)
                if exchange.fate is not Fate.PASS:
                    self.met_one.set()
            if exchange.fate is Fate.DELAY_REQUEST:
                await client.aclose()
                await self._released.wait()
            await server.send_all(data)
            if exchange.fate is Fate.DELAY_REQUEST:
                await trio.sleep_forever()  # until it is answered

    async def _answers(
        self, server: trio.SocketStream, client: trio.SocketStream, exchange: _Exchange, scope: trio.CancelScope
    ) -> None:
        async for data in server:
            if exchange.fate is Fate.PASS:
                await client.send_all(data)
            elif exchange.fate is not Fate.SILENCE:
                if exchange.fate is Fate.DELAY_REQUEST:
                    self.delayed_done.set()
                break
        scope.cancel()
