"""Requests with an id: applied once over the death of the daemon that had them, on both catalogues."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio
from catalogue_support import PATIENCE_S, EtcdCluster, Fate, Proxy, adder, make_client, running, size_of

from cachexfs.adapters.catalogue_builtin import BuiltinCatalogue
from cachexfs.core.records import FID_STEP, Applied, applied_key
from cachexfs.core.replica import Replica
from cachexfs.core.transaction import Tx
from cachexfs.engine.requests import Requests
from cachexfs.errors import FsError

FID = 5 * FID_STEP
TXN = b"/v3/kv/txn"


def requests(*unanswered: int, mount: str = "m") -> Requests:
    one = Requests("n0")
    one.resume(mount, unanswered)
    return one


def kept(view: Replica) -> dict[int, int]:
    entry = view.entry(applied_key("n0"))
    return dict(entry.record.results) if entry is not None and isinstance(entry.record, Applied) else {}


async def test_a_repeated_request_gets_the_first_result_and_changes_nothing(tmp_path: Path) -> None:
    catalogue = BuiltinCatalogue(tmp_path)
    first = requests()
    with first.answering(7):
        assert await catalogue.mutate(first.once(7, adder(FID))) == 1
        await catalogue.mutate(adder(FID))
    catalogue.close()
    catalogue = BuiltinCatalogue(tmp_path)
    second = requests(7, 8)
    assert (second.result(catalogue.view, 7), second.result(catalogue.view, 8)) == (1, None)
    with second.answering(7):
        assert await catalogue.mutate(second.once(7, adder(FID))) == 1
    with second.answering(8):
        assert await catalogue.mutate(second.once(8, adder(FID))) == 3
    assert size_of(catalogue, FID) == 3
    catalogue.close()


async def test_only_what_may_be_repeated_is_kept(tmp_path: Path) -> None:
    catalogue = BuiltinCatalogue(tmp_path)
    one = requests(1000)
    with one.answering(1), one.answering(2):
        await catalogue.mutate(one.once(1, adder(FID)))
        await catalogue.mutate(one.once(2, adder(FID)))
        assert kept(catalogue.view) == {1: 1, 2: 2}
    for number in range(3, 50):
        with one.answering(number):
            await catalogue.mutate(one.once(number, adder(FID)))
        assert kept(catalogue.view) == {number: number}
    with one.answering(1000):
        await catalogue.mutate(one.once(1000, adder(FID)))
    catalogue.close()


async def test_what_failed_is_decided_anew_and_another_mounts_ids_mean_nothing(tmp_path: Path) -> None:
    def refuse(tx: Tx) -> int:
        tx.inode(FID)
        raise FsError(errno.EEXIST)

    catalogue = BuiltinCatalogue(tmp_path)
    one = requests()
    with one.answering(1), pytest.raises(FsError):
        await catalogue.mutate(one.once(1, refuse))
    assert kept(catalogue.view) == {}
    with one.answering(1):
        assert await catalogue.mutate(one.once(1, adder(FID))) == 1
    other = requests(1, mount="another")
    assert other.result(catalogue.view, 1) is None
    with other.answering(1):
        assert await catalogue.mutate(other.once(1, adder(FID))) == 2
    catalogue.close()


@pytest.mark.parametrize("when", ["before its successor starts", "after it has started"])
async def test_a_transaction_that_outlives_its_daemon_is_applied_once(clear_member: EtcdCluster, when: str) -> None:
    """It is on its way to etcd when the daemon dies; the next daemon is given the request again."""
    proxy = Proxy(clear_member.endpoints[0])
    job = f"outlives-{when.partition(' ')[0]}"
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        dying = make_client([proxy.endpoint], None, job, "n0")
        async with running(dying), trio.open_nursery() as handlers:
            proxy.fates[TXN] = [Fate.DELAY_REQUEST] * 100
            handlers.start_soon(dying.mutate, requests().once(7, adder(FID)))
            await proxy.met_one.wait()
            proxy.fates[TXN] = [Fate.SILENCE] * 100
            handlers.cancel_scope.cancel()

        async def arrive() -> None:
            proxy.release()
            with trio.fail_after(PATIENCE_S):
                await proxy.delayed_done.wait()

        if when.startswith("before"):
            await arrive()
        successor = make_client(clear_member.endpoints, None, job, "n0")
        async with running(successor):
            if when.startswith("after"):
                await arrive()
                await successor.barrier()
            again = requests(7)
            known = again.result(successor.view, 7)
            assert known == (1 if when.startswith("before") else None)
            with again.answering(7):
                assert await successor.mutate(again.once(7, adder(FID))) == 1
            assert size_of(successor, FID) == 1
        nursery.cancel_scope.cancel()


async def test_a_handler_that_was_cancelled_has_given_no_answer(tmp_path: Path) -> None:
    catalogue = BuiltinCatalogue(tmp_path)
    one = requests()

    async def handle() -> None:
        with one.answering(1):
            await catalogue.mutate(one.once(1, adder(FID)))
            await trio.sleep_forever()

    with trio.move_on_after(0.05):
        await handle()
    with one.answering(2):
        await catalogue.mutate(one.once(2, adder(FID)))
    assert kept(catalogue.view) == {1: 1, 2: 2}
    catalogue.close()
