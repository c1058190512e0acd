"""The member's process: adopted, restarted, stopped, alone; and closed to strangers."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import stat
from pathlib import Path

import pytest
import trio
from catalogue_support import LOOPBACK, PATIENCE_S, SECRET, EtcdCluster, adder, own_cluster, running, size_of

from cachexfs.adapters.etcd_client import EtcdClient
from cachexfs.adapters.etcd_membership import MembersAnswer, NotAdmittedError
from cachexfs.adapters.etcd_server import RESTART_DELAY_S_MIN, EtcdServer, Member
from cachexfs.adapters.job_tls import JobAuthority, TlsFiles
from cachexfs.core.records import FID_STEP
from cachexfs.errors import CannotTellError, UsageError

FID = 5 * FID_STEP


def again(cluster: EtcdCluster, number: int = 0) -> EtcdServer:
    """The same member as a new daemon sees it."""
    member = cluster.members[number]
    return EtcdServer(cluster.members, member.name, cluster.root / member.name, cluster.root.name, cluster.files)


async def test_a_new_daemon_adopts_the_member_that_runs_and_restarts_one_that_died() -> None:
    async with own_cluster(1) as cluster:
        async with running(client := cluster.client("adopt", "n0")):
            await client.mutate(adder(FID))
        pid = cluster.servers[0].pid
        assert pid is not None
        assert os.getsid(pid) == pid  # of a session of its own: it outlives the daemon
        assert await again(cluster).start()
        assert again(cluster).pid == pid
        cluster.kill(0)
        assert not await again(cluster).start()
        assert again(cluster).pid != pid
        async with running(client := cluster.client("adopt", "n0")):
            assert size_of(client, FID) == 1


async def test_a_pid_file_of_another_process_is_not_believed() -> None:
    async with own_cluster(1) as cluster:
        await cluster.servers[0].stop()
        assert not (cluster.root / "m0" / "etcd.pid").exists()
        await cluster.servers[0].start()
        path = cluster.root / "m0" / "etcd.pid"
        content = path.read_bytes()
        pid = cluster.servers[0].pid
        assert pid is not None
        path.write_bytes(content.replace(b"%d" % pid, b"%d" % os.getpid(), 1))  # the id was given to another
        assert cluster.servers[0].pid is None
        await cluster.servers[0].stop()  # and is not killed
        path.write_bytes(content)
        assert cluster.servers[0].pid == pid


async def test_a_member_that_dies_is_started_again_and_the_reason_is_reported() -> None:
    async with own_cluster(1) as cluster, trio.open_nursery() as nursery:
        reports: list[str] = []
        reported = trio.Event()

        def report(text: str) -> None:
            reports.append(text)
            reported.set()

        assert await nursery.start(cluster.servers[0].run, report)
        async with running(client := cluster.client("run", "n0")):
            await client.mutate(adder(FID))
            cluster.kill(0)
            with trio.fail_after(PATIENCE_S):
                await reported.wait()
                assert await client.mutate(adder(FID)) == 2
        assert "etcd has ended" in reports[0]
        nursery.cancel_scope.cancel()


async def test_cancelling_leaves_the_member_running() -> None:
    async with own_cluster(1) as cluster:
        async with trio.open_nursery() as nursery:
            await nursery.start(cluster.servers[0].run, print)
            nursery.cancel_scope.cancel()
        assert cluster.servers[0].pid is not None


async def test_a_member_that_cannot_start_gives_its_reason() -> None:
    async with own_cluster(1) as cluster:
        await cluster.servers[0].stop()
        reason = r"etcd ended at once: .*address already in use.*etcd\.log"
        with (
            socket.create_server((LOOPBACK, cluster.members[0].client_port)),
            pytest.raises(CannotTellError, match=reason),
        ):
            await cluster.servers[0].start()


async def test_the_users_own_etcd_settings_do_not_reach_the_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_FORCE_NEW_CLUSTER", "nonsense")
    async with own_cluster(1) as cluster, running(client := cluster.client("settings", "n0")):
        await client.mutate(adder(FID))


async def test_without_etcd_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CACHEXFS_ETCD", str(tmp_path / "etcd"))
    with pytest.raises(UsageError, match="etcd-server"):
        EtcdServer([Member("m", LOOPBACK, 1, 2)], "m", tmp_path, "token")


async def test_the_survivor_of_two_goes_on_alone_with_everything() -> None:
    async with own_cluster(2) as cluster, trio.open_nursery() as nursery:
        client = cluster.client("survivor", "n0")
        async with running(client):
            for _ in range(5):
                await client.mutate(adder(FID))
            server = again(cluster)
            assert await nursery.start(server.run, print)  # the daemon looks after it all the while
            cluster.kill(1)
            assert not await server.start(force_new_cluster=True)
            with trio.fail_after(PATIENCE_S):
                assert await client.mutate(adder(FID)) == 6
        await server.stop()
        with trio.fail_after(PATIENCE_S):  # later starts need no vouching
            async with running(client := cluster.client("survivor", "n0")):
                assert await client.mutate(adder(FID)) == 7
        nursery.cancel_scope.cancel()


async def until_full(cluster: EtcdCluster, count: int) -> None:
    """Wait until the first member knows so many with a vote."""
    raw = EtcdClient(cluster.endpoints[:1], cluster.tls, 5.0)
    with trio.fail_after(2 * PATIENCE_S):
        while True:
            answer = await raw.call("/v3/cluster/member/list", {}, MembersAnswer)
            if sum(bool(member.name) and not member.isLearner for member in answer.members) == count:
                break
            await trio.sleep(0.1)
    await raw.aclose()


async def test_a_member_that_lost_its_data_joins_again_and_counts() -> None:
    async with own_cluster(3) as cluster, trio.open_nursery() as nursery:
        job = cluster.root.name
        async with running(cluster.client(job, "m1", 1), client := cluster.client(job, "m0")):
            await client.mutate(adder(FID))
            cluster.kill(1)
            shutil.rmtree(cluster.servers[1].data_directory)
            await client.mutate(adder(FID))
            await nursery.start(again(cluster, 1).run, print)
            await until_full(cluster, 3)
            cluster.kill(2)  # now the new one is needed for a majority
            with trio.fail_after(PATIENCE_S):
                assert await client.mutate(adder(FID)) == 3
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_member_that_the_survivor_has_dropped_does_no_harm_and_joins_again(is_running: bool) -> None:
    async with own_cluster(2) as cluster, trio.open_nursery() as nursery:
        job = cluster.root.name
        async with running(client := cluster.client(job, "m0")):
            await client.mutate(adder(FID))
            cluster.kill(1)
            await again(cluster).start(force_new_cluster=True)
            with trio.fail_after(PATIENCE_S):
                assert await client.mutate(adder(FID)) == 2
            old = again(cluster, 1)
            if is_running:  # its daemon starts it with the past cluster's data, before it can ask the survivor
                old._spawn(old._arguments("", force_new_cluster=False))
            await nursery.start(old.run, print)
            await until_full(cluster, 2)
            with trio.fail_after(PATIENCE_S):
                assert await client.mutate(adder(FID)) == 3
        async with running(client := cluster.client(job, "m1", 1)):
            assert size_of(client, FID) == 3
        nursery.cancel_scope.cancel()


async def test_a_member_that_is_dropped_while_its_node_leaves_is_not_started_again() -> None:
    """It ran on below a daemon that ended just then, with nobody to end it."""
    async with own_cluster(2) as cluster, trio.open_nursery() as nursery:
        leaving = again(cluster, 1)
        assert await nursery.start(leaving.run, print)
        await until_full(cluster, 2)
        leaving.is_leaving = True
        with trio.fail_after(PATIENCE_S):
            while leaving.pid is not None:  # etcd refuses until the members have known each other for some seconds
                with contextlib.suppress(NotAdmittedError):
                    await again(cluster).drop([cluster.members[1].name])
                await trio.sleep(0.5)
        await trio.sleep(20 * RESTART_DELAY_S_MIN)  # it joins again by then
        assert leaving.was_dropped
        nursery.cancel_scope.cancel()


# ---- strangers
def try_tls(port: int, context: ssl.SSLContext) -> bytes:
    """What a server says to a request, over TLS."""
    with (
        socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as raw,
        context.wrap_socket(raw, server_hostname=LOOPBACK) as tls,
    ):
        tls.sendall(b"GET /version HTTP/1.0\r\nHost: x\r\n\r\n")
        return tls.recv(1 << 16)


def careless() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def stranger(files: TlsFiles) -> ssl.SSLContext:
    context = careless()
    context.load_cert_chain(files.node)
    return context


def test_members_answer_to_members_of_the_job_only(one_member: EtcdCluster, tmp_path: Path) -> None:
    member = one_member.members[0]
    mine = JobAuthority(SECRET, "tests").issue(tmp_path / "mine", "m9", ["10.0.0.9"])
    for port in (member.client_port, member.peer_port):
        assert b"200 OK" in try_tls(port, mine.client_context())
        for job, secret in (("tests", b"another secret, long enough"), ("other", SECRET)):
            foreign = JobAuthority(secret, job).issue(tmp_path / job, "m9", [LOOPBACK])
            with pytest.raises((ssl.SSLError, ConnectionError)):
                try_tls(port, stranger(foreign))
            with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
                try_tls(port, foreign.client_context())
        with pytest.raises((ssl.SSLError, ConnectionError)):
            try_tls(port, careless())
        with socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as raw:
            raw.sendall(b"GET /version HTTP/1.0\r\nHost: x\r\n\r\n")
            assert b"etcdserver" not in raw.recv(1 << 16)


def test_credentials_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    files = JobAuthority(SECRET, "j").issue(tmp_path / "tls", "n", ["host.example", "10.0.0.1"])
    for path in (files.ca, files.node):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = files.node.read_bytes()
    JobAuthority(SECRET, "j").issue(tmp_path / "tls", "n", ["host.example"])
    assert files.node.read_bytes() != before
    assert sorted(path.name for path in (tmp_path / "tls").iterdir()) == ["ca.pem", "node.pem"]


def test_the_host_that_is_called_must_be_in_the_certificate(one_member: EtcdCluster, tmp_path: Path) -> None:
    mine = JobAuthority(SECRET, "tests").issue(tmp_path, "m9", [LOOPBACK]).client_context()
    with (
        socket.create_connection((LOOPBACK, one_member.members[0].client_port)) as raw,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        mine.wrap_socket(raw, server_hostname="other.example")


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(UsageError, match="random"):
        JobAuthority(b"too short", "j")
