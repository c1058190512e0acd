"""The catalogue over etcd while answers are lost, requests come late, watches fall silent, members die."""

from __future__ import annotations

import errno
import os
import random
import signal

import pytest
import trio
import trio.testing
from catalogue_support import (
    PATIENCE_S,
    EtcdCluster,
    Fate,
    Proxy,
    RandomWork,
    adder,
    creator,
    finder,
    inode,
    make_client,
    namer,
    own_cluster,
    peeking_creator,
    remover,
    running,
    size_of,
)

from cachexfs.adapters.catalogue_etcd import EtcdCatalogue
from cachexfs.adapters.etcd_client import Empty, EtcdClient, EtcdUnreachableError
from cachexfs.adapters.etcd_outage import Outage
from cachexfs.core.records import FID_STEP, ROOT_FID, AnyRecord, Dirent, dirent_key, inode_key
from cachexfs.core.transaction import Tx
from cachexfs.errors import CatalogueUnavailableError, FsError

FID = 5 * FID_STEP
TXN = b"/v3/kv/txn"
RANGE = b"/v3/kv/range"
WATCH = b"/v3/watch"


async def until(catalogue: EtcdCatalogue, condition: object) -> None:
    """Wait, by the listener, until ``condition()`` holds."""
    assert callable(condition)
    changed = trio.Event()

    def listen(done: list[tuple[bytes, AnyRecord | None, AnyRecord | None]]) -> None:
        changed.set()

    catalogue.listen(listen)
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await changed.wait()
            changed = trio.Event()


# ---- connections
@pytest.mark.parametrize(
    "fates", [[Fate.LOSE_ANSWER], [Fate.LOSE_ANSWER] * 3, [Fate.SILENCE], [Fate.DELAY_REQUEST] * 2]
)
async def test_a_mutation_whose_answer_is_lost_is_applied_once(clear_member: EtcdCluster, fates: list[Fate]) -> None:
    proxy = Proxy(clear_member.endpoints[0])
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        job = f"once-{len(fates)}-{fates[0].name}"
        client = make_client([proxy.endpoint], None, job, "n0")
        async with running(client):
            for number in range(5):
                proxy.fates[TXN] = list(fates) if number in (1, 3) else []
                assert await client.mutate(adder(FID)) == number + 1
            assert sum(fate is not Fate.PASS for fate in proxy.met) == 2 * len(fates)
            entry = client.view.entry(inode_key(FID))
            assert entry is not None
        nursery.cancel_scope.cancel()


async def test_a_request_that_arrives_after_its_repetition_does_nothing(clear_member: EtcdCluster) -> None:
    """Both with the conditions that a delay may make true again, and with none."""
    proxy = Proxy(clear_member.endpoints[0])
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        client = make_client([proxy.endpoint], None, "late", "n0")
        async with running(client):
            await client.mutate(adder(FID))
            proxy.fates[TXN] = [Fate.DELAY_REQUEST]
            await client.mutate(namer(ROOT_FID, b"a", FID))
            await client.mutate(remover(dirent_key(ROOT_FID, b"a")))
            revision = client.view.revision
            proxy.release()
            with trio.fail_after(PATIENCE_S):
                await proxy.delayed_done.wait()
            await client.barrier()
            assert client.view.revision == revision
            assert client.view.lookup(ROOT_FID, b"a") is None
        nursery.cancel_scope.cancel()


async def test_a_late_request_that_wins_counts_and_the_others_are_computed_anew(clear_member: EtcdCluster) -> None:
    """The first attempt takes effect while the second is being made: its callers get its results, once."""
    proxy = Proxy(clear_member.endpoints[0])
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        client = make_client([proxy.endpoint], None, "wins", "n0")
        async with running(client):
            results: list[int] = []

            async def add() -> None:
                results.append(await client.mutate(adder(FID)))

            proxy.fates[TXN] = [Fate.LOSE_ANSWER]
            async with trio.open_nursery() as adders:
                for _ in range(4):
                    adders.start_soon(add)
                await proxy.met_one.wait()
                for _ in range(4):  # these join the second attempt, which finds that the first has won
                    adders.start_soon(add)
            assert sorted(results) == list(range(1, 9))
            assert size_of(client, FID) == 8
        nursery.cancel_scope.cancel()


async def test_an_exclusive_create_does_not_meet_its_own_success(clear_member: EtcdCluster) -> None:
    """The watch shows the name before the repetition is computed, which would then say "file exists"."""
    proxy = Proxy(clear_member.endpoints[0])
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        client = make_client([proxy.endpoint], None, "exclusive", "n0")
        async with running(client):
            for number, create in enumerate((creator, peeking_creator)):
                proxy.fates[TXN] = [Fate.LOSE_ANSWER]
                assert await client.mutate(create(b"%d" % number, FID)) == FID
                with pytest.raises(FsError):
                    await client.mutate(create(b"%d" % number, FID))
        nursery.cancel_scope.cancel()


async def test_what_was_refused_does_not_happen_later(clear_member: EtcdCluster) -> None:
    """The first request is still on its way when its repetition is refused, and could succeed when it arrives."""
    proxy = Proxy(clear_member.endpoints[0])
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        client = make_client([proxy.endpoint], None, "refused", "n0")
        other = clear_member.client("refused", "n1")
        async with running(client, other):
            proxy.fates[TXN] = [Fate.DELAY_REQUEST]
            refused = trio.Event()

            async def create() -> None:
                with pytest.raises(FsError):
                    await client.mutate(creator(b"a", FID))
                refused.set()

            nursery.start_soon(create)
            await proxy.met_one.wait()
            await other.mutate(creator(b"a", 2 * FID))
            with trio.fail_after(PATIENCE_S):
                await refused.wait()
                await other.mutate(remover(dirent_key(ROOT_FID, b"a")))
                proxy.release()
                await proxy.delayed_done.wait()
            await other.barrier()
            assert other.view.lookup(ROOT_FID, b"a") is None
        nursery.cancel_scope.cancel()


async def test_a_barrier_survives_a_silent_watch(clear_member: EtcdCluster) -> None:
    proxy = Proxy(clear_member.endpoints[0])
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        quiet = make_client([proxy.endpoint], None, "silent", "n0")
        other = clear_member.client("silent", "n1")
        async with running(other, quiet):
            proxy.silence(WATCH)
            await other.mutate(namer(ROOT_FID, b"a", FID))
            await quiet.barrier()
            assert quiet.view.lookup(ROOT_FID, b"a") is not None
            assert quiet.outage_s == 0
        nursery.cancel_scope.cancel()


async def test_a_lost_barrier_is_repeated(clear_member: EtcdCluster) -> None:
    proxy = Proxy(clear_member.endpoints[0])
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        client = make_client([proxy.endpoint], None, "barrier", "n0")
        async with running(client):
            proxy.fates[RANGE] = [Fate.LOSE_ANSWER, Fate.LOSE_ANSWER]
            await client.barrier()
            assert client.outage_s == 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(3))
async def test_random_transactions_are_serialisable_over_bad_connections(clear_member: EtcdCluster, seed: int) -> None:
    """One node's answers are lost, its requests late, its watch silent, at random; requests that are late arrive."""
    proxy = Proxy(clear_member.endpoints[0])
    work = RandomWork(seed)
    rng = random.Random(seed)
    kinds = [Fate.LOSE_ANSWER] * 2 + [Fate.DELAY_REQUEST] * 3
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        bad = make_client([proxy.endpoint], None, f"random-{seed}", "n0")
        good = clear_member.client(f"random-{seed}", "n1")
        async with running(good, bad):
            proxy.fates[TXN] = [rng.choice(kinds) if rng.random() < 0.4 else Fate.PASS for _ in range(30)]
            proxy.fates[RANGE] = [rng.choice(kinds) if rng.random() < 0.3 else Fate.PASS for _ in range(10)]
            async with trio.open_nursery() as workers:
                for worker in range(6):
                    workers.start_soon(work.run, (bad, good)[worker % 2], worker, 25)
                await trio.sleep(0.5)
                proxy.silence(WATCH)
                await trio.sleep(0.5)
                proxy.release()
            for node in (good, bad):
                await node.barrier()
                work.check(node)
        nursery.cancel_scope.cancel()
    assert sum(fate is not Fate.PASS for fate in proxy.met) > 5
    assert len(work.returned) + work.refused == 150


# ---- limits
async def test_many_functions_at_a_small_limit_are_several_transactions(one_member: EtcdCluster) -> None:
    client = one_member.client("small", "n0", txn_ops_max=20)
    async with running(client):
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(client.mutate, namer(ROOT_FID, b"%d" % number, FID))
        assert len(client.view.children(ROOT_FID)) == 100


async def test_a_function_too_large_for_one_transaction_is_refused_and_harms_nobody(one_member: EtcdCluster) -> None:
    client = one_member.client("large", "n0", txn_ops_max=20)

    def large(tx: Tx) -> None:
        for number in range(50):
            tx.put(inode_key(number * FID_STEP), inode(1))

    async with running(client):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(client.mutate, adder(FID))
            with pytest.raises(FsError, match="50 keys") as caught:
                await client.mutate(large)
            assert caught.value.errno == errno.E2BIG
        assert size_of(client, FID) == 5


async def test_a_transaction_larger_than_the_members_allow_fails_alone(one_member: EtcdCluster) -> None:
    """The client believes in a limit that is larger than the cluster's."""
    client = one_member.client("beyond", "n0", txn_ops_max=10_000)

    def large(tx: Tx) -> None:
        for number in range(5000):
            tx.put(inode_key(number * FID_STEP), inode(1))

    async with running(client):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(client.mutate, adder(FID))
            with pytest.raises(FsError, match="too many operations"):
                await client.mutate(large)
        assert size_of(client, FID) == 5


async def test_large_records_are_split_over_transactions(one_member: EtcdCluster) -> None:
    client = one_member.client("bytes", "n0")

    def put(fid: int) -> None:
        def function(tx: Tx) -> None:
            tx.put(inode_key(fid), inode(1))
            tx.put(dirent_key(ROOT_FID, b"%d" % fid), Dirent(fid, "f" * 200_000))

        nursery.start_soon(client.mutate, function)

    async with running(client):
        async with trio.open_nursery() as nursery:
            for number in range(40):
                put(number * FID_STEP)
        assert len(client.view.children(ROOT_FID)) == 40


# ---- the store
async def test_a_watch_that_is_behind_a_compaction_loads_everything_and_tells_the_difference(
    clear_member: EtcdCluster,
) -> None:
    proxy = Proxy(clear_member.endpoints[0])
    heard: dict[bytes, AnyRecord | None] = {}
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        behind = make_client([proxy.endpoint], None, "compacted", "n0")
        told: list[int] = []

        def listen(done: list[tuple[bytes, AnyRecord | None, AnyRecord | None]]) -> None:
            heard.update({key: new for key, _, new in done})
            told.append(behind.view.revision)

        behind.listen(listen)
        other = clear_member.client("compacted", "n1")
        async with running(other):
            await other.mutate(namer(ROOT_FID, b"stays", FID))
            await other.mutate(namer(ROOT_FID, b"goes", FID))
            async with running(behind):
                heard.clear()
                told.clear()
                proxy.silence(WATCH)
                await other.mutate(remover(dirent_key(ROOT_FID, b"goes")))
                await other.mutate(namer(ROOT_FID, b"comes", FID))
                await other.mutate(remover(dirent_key(ROOT_FID, b"stays")))
                await other.mutate(namer(ROOT_FID, b"stays", 2 * FID))
                raw = EtcdClient(clear_member.endpoints, None, 5.0)
                await raw.call("/v3/kv/compaction", {"revision": other.view.revision, "physical": True}, Empty)
                await raw.aclose()
                assert b"comes" not in behind.view.children(ROOT_FID)
                await behind.barrier()
                assert dict(behind.view.children(ROOT_FID)) == dict(other.view.children(ROOT_FID))
                assert dict(behind.view.items()) == dict(other.view.items())
                assert len(told) == 1  # not one by one: those revisions are gone
                assert {key: new is not None for key, new in heard.items() if key.startswith(b"d/")} == {
                    dirent_key(ROOT_FID, b"goes"): False,
                    dirent_key(ROOT_FID, b"comes"): True,
                    dirent_key(ROOT_FID, b"stays"): True,
                }
        nursery.cancel_scope.cancel()


async def test_a_store_that_was_set_back_is_taken_over_as_it_is() -> None:
    async with own_cluster(1) as cluster:
        client = cluster.client("back", "n0", node_timeout_s=3)
        async with running(client):
            for _ in range(5):
                await client.mutate(adder(FID))
            cluster.kill(0)
            await cluster.servers[0].stop()
            cluster.servers[0].data_directory.rename(cluster.root / "lost")
            await cluster.servers[0].start()
            with trio.fail_after(PATIENCE_S):
                while client.view.inode(FID) is not None:
                    await client.barrier()
                    await trio.sleep(0.05)
                assert await client.mutate(adder(FID)) == 1
                await until(client, lambda: client.view.is_live("n0"))  # its lease was lost too, and is taken again


# ---- liveness
async def test_the_life_of_a_node_ends_with_its_lease(three_members: EtcdCluster) -> None:
    here = three_members.client("lease", "n0", 0, node_timeout_s=3)
    async with running(here):
        async with running(three_members.client("lease", "n1", 1, node_timeout_s=3)):
            await here.barrier()
            assert set(here.view.lives) == {"n0", "n1"}
            await trio.sleep(4)  # longer than the lease: it is renewed
            assert set(here.view.lives) == {"n0", "n1"}
        await until(here, lambda: not here.view.is_live("n1"))
        assert here.view.is_live("n0")


async def test_a_silent_watch_does_not_hide_that_a_node_is_gone(clear_member: EtcdCluster) -> None:
    """Nobody asks for a barrier, and the end of a lease is no mutation."""
    proxy = Proxy(clear_member.endpoints[0])
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        here = make_client([proxy.endpoint], None, "hidden", "n0", node_timeout_s=2)
        async with running(here):
            async with running(clear_member.client("hidden", "n1", node_timeout_s=2)):
                await here.barrier()
                assert here.view.is_live("n1")
                proxy.silence(WATCH)
            await until(here, lambda: not here.view.is_live("n1"))
        nursery.cancel_scope.cancel()


async def test_a_node_that_leaves_is_gone_at_once_and_one_that_returns_has_a_new_life(
    three_members: EtcdCluster,
) -> None:
    here = three_members.client("leave", "n0", 0)
    async with running(here):
        first = three_members.client("leave", "n1", 1)
        async with running(first):
            await here.barrier()
            boot = here.view.lives["n1"].boot
            await first.leave()
            await here.barrier()
            assert not here.view.is_live("n1")
        async with running(three_members.client("leave", "n1", 1)):
            await here.barrier()
            assert here.view.lives["n1"].boot != boot


async def test_a_lost_lease_is_taken_again(clear_member: EtcdCluster) -> None:
    here = clear_member.client("again", "n0", node_timeout_s=2)
    async with running(here):
        keeper = here._keeper
        assert keeper is not None
        raw = EtcdClient(clear_member.endpoints, None, 5.0)
        await raw.call("/v3/lease/revoke", {"ID": keeper.lease}, Empty)
        await raw.aclose()
        await until(here, lambda: not here.view.is_live("n0"))
        await until(here, lambda: here.view.is_live("n0"))
        await here.mutate(adder(FID))


async def test_a_mutation_beside_a_life_without_lease_does_not_suffer(clear_member: EtcdCluster) -> None:
    client = clear_member.client("beside", "n0")
    async with running(client):
        keeper = client._keeper
        assert keeper is not None
        keeper.lease = 12345  # no such lease: etcd refuses the transaction that wants it
        keeper.ensure()
        assert await client.mutate(adder(FID)) == 1


async def test_an_outage_does_not_begin_before_the_last_answer(autojump_clock: trio.testing.MockClock) -> None:
    """Of two requests one hangs, at a member that hangs: it fails when the other has long been answered."""
    outage = Outage(limit_s=4.0, on_limit=lambda: pytest.fail("this is no outage of 4 s"))
    began_s = trio.current_time()
    await trio.sleep(5)
    outage.answered()
    await trio.sleep(1)
    outage.failed(began_s, EtcdUnreachableError("no answer"))
    assert outage.age_s == pytest.approx(1.0)


# ---- members
async def test_one_of_three_members_may_be_killed_at_any_time() -> None:
    async with own_cluster(3) as cluster:
        clients = [cluster.client("kill", f"n{i}", i) for i in range(3)]
        async with running(*clients):
            for victim in (0, 1):
                results: list[int] = []
                begun = trio.Event()

                async def work(client: EtcdCatalogue, results: list[int] = results, begun: trio.Event = begun) -> None:
                    for _ in range(12):
                        results.append(await client.mutate(adder(FID)))
                        await client.barrier()
                        begun.set()

                before = size_of(clients[0], FID)
                async with trio.open_nursery() as nursery:
                    for client in clients:
                        nursery.start_soon(work, client)
                    await begun.wait()
                    cluster.kill(victim)
                assert sorted(results) == list(range(before + 1, before + 37))
                await cluster.servers[victim].start()
            for client in clients:
                await client.barrier()
                assert size_of(client, FID) == 72


async def test_a_member_that_hangs_is_passed_by() -> None:
    """SIGSTOP: connections stay and nothing answers. It is this node's own member, and may be the leader."""
    async with own_cluster(3) as cluster:
        here, there = (cluster.client("hang", f"n{i}", i) for i in range(2))
        async with running(here, there):
            await here.mutate(adder(FID))
            pid = cluster.servers[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            try:
                for number in range(3):
                    await there.mutate(adder(FID))
                    await here.barrier()
                    assert size_of(here, FID) == number + 2
                assert await here.mutate(adder(FID)) == 5
                with trio.fail_after(PATIENCE_S):
                    while here.outage_s:  # noqa: ASYNC110 (a request to the one that hangs may fail only now)
                        await trio.sleep(0.01)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert await here.mutate(adder(FID)) == 6


async def test_without_a_majority_calls_end_at_the_limit_then_at_once_and_all_heals() -> None:
    async with own_cluster(3) as cluster:
        client = cluster.client("majority", "n0", 0, outage_limit_s=2.0)
        async with running(client):
            await client.mutate(adder(FID))
            cluster.kill(1, 2)
            ended: list[float] = []
            attempts = 0

            async def add() -> int:
                nonlocal attempts
                attempts += 1
                return await client.mutate(adder(FID))

            async def refused(call: object) -> None:
                assert callable(call)
                with pytest.raises(CatalogueUnavailableError, match="etcd"):
                    await call()
                ended.append(client.outage_s)

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(refused, client.barrier)
                    nursery.start_soon(refused, add)
            assert min(ended) >= 2.0
            with trio.move_on_after(0) as scope:  # at once: before the first real wait
                await refused(client.barrier)
                await refused(add)
            assert not scope.cancelled_caught
            assert size_of(client, FID) == 1  # reads go on
            for number in (1, 2):
                await cluster.servers[number].start()
            with trio.fail_after(PATIENCE_S):
                size = None
                while size is None:
                    try:
                        size = await add()
                    except CatalogueUnavailableError:
                        await trio.sleep(0.05)
            assert 2 <= size <= 1 + attempts  # etcd may have heard of refused ones, each once
            await client.barrier()
            assert size_of(client, FID) == size


async def test_without_etcd_the_start_fails_at_the_limit() -> None:
    async with own_cluster(1) as cluster:
        cluster.kill(0)
        client = cluster.client("start", "n0", outage_limit_s=0.5)
        with pytest.raises(CatalogueUnavailableError, match="etcd"):
            await client.run()


async def test_refusals_are_confirmed_by_a_majority() -> None:
    """A member that has lost the others does not let a stale "no such file" pass."""
    async with own_cluster(3) as cluster:
        client = cluster.client("stale", "n0", 0, outage_limit_s=1.0)
        async with running(client):
            cluster.kill(1, 2)
            with pytest.raises(CatalogueUnavailableError):
                await client.mutate(finder(ROOT_FID, b"a"))
