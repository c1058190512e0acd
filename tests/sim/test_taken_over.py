"""A node that counted as lost and was not: others have published what its last fsync had made safe, and applications
go on with the files that they have open there."""

from __future__ import annotations

import contextlib
import os

import pytest
import trio
import trio.testing
from sim_kernel import OpenFile
from test_found_nodes import FILE, Pair, play

from cachexfs.core.records import ROOT_FID
from cachexfs.errors import CatalogueUnavailableError, FsError

AWAY_S = 30.0  # longer than ``node_timeout``
NAME = b"a"


async def opened_by(pair: Pair, *, passthrough: bool) -> OpenFile:
    """A new file that an application on the first node has open, served by the kernel or not."""
    kernel = pair.seats[0].kernel
    kernel.passthrough = passthrough
    while True:
        handle, _ = await pair.fs(0).create(ROOT_FID, NAME, FILE, os.O_RDWR)
        opened = kernel.opened(pair.fs(0), handle)
        if opened.backed == passthrough:  # the supervisor refuses now and then
            return opened
        kernel.closed(opened)
        await pair.fs(0).release(handle)
        await pair.fs(0).unlink(ROOT_FID, NAME)


async def put(pair: Pair, opened: OpenFile, offset: int, data: bytes) -> None:
    if opened.backed:
        pair.seats[0].kernel.write(opened, offset, data)
    else:
        await pair.fs(0).write(opened.handle, offset, data)


async def seen(pair: Pair, opened: OpenFile) -> bytes:
    """What the application reads that has it open."""
    return os.pread(opened.fd, 100, 0) if opened.backed else await pair.fs(0).read(opened.handle, 0, 100)


async def away(pair: Pair, how: str) -> None:
    """The first node counts as lost meanwhile."""
    seat = pair.seats[0]
    if how == "cut off":
        seat.link.set(up=False)
        await trio.sleep(AWAY_S)
        seat.link.set(up=True)
    else:
        await died(pair, AWAY_S)
    await trio.sleep(5)


async def died(pair: Pair, for_s: float) -> None:
    """Its daemon dies; applications keep their files open."""
    seat = pair.seats[0]
    after = seat.kill(supervised=True)
    await trio.sleep(for_s)
    assert pair._nursery is not None
    await seat.born(pair._nursery, after)


@pytest.mark.parametrize("end", ["closed", "killed and closed", "lost"])
@pytest.mark.parametrize("changed", ["before", "after", "both"])
@pytest.mark.parametrize("how", ["cut off", "killed"])
@pytest.mark.parametrize("passthrough", [False, True])
def test_an_open_file_goes_on_with_its_newest_bytes(how: str, changed: str, end: str, *, passthrough: bool) -> None:
    """Changed in place they passed for damage: what an application had written, and fsynced, was gone."""

    async def scene(pair: Pair) -> None:
        kernel, wanted = pair.seats[0].kernel, bytearray(b"first")
        opened = await opened_by(pair, passthrough=passthrough)
        await put(pair, opened, 0, wanted)
        await pair.fs(0).fsync(opened.handle)
        if changed in ("before", "both"):
            wanted[0:1] = b"F"
            await put(pair, opened, 0, b"F")
        await away(pair, how)
        assert await pair.read(1, NAME) == b"first"
        assert await seen(pair, opened) == wanted
        if changed in ("after", "both"):
            wanted[1:2] = b"I"
            await put(pair, opened, 1, b"I")
        await pair.fs(0).fsync(opened.handle)
        assert await seen(pair, opened) == wanted
        assert await pair.read(1, NAME) == b"first"  # it is not closed
        if end == "lost":
            for of in list(kernel.opens):
                kernel.closed(of)
            await pair.lose(0, AWAY_S)
            await trio.sleep(60)
            assert await pair.read(1, NAME) == wanted
            return
        if end == "killed and closed":
            await died(pair, 1.0)
            assert await seen(pair, opened) == wanted
        await pair.fs(0).flush(opened.handle)
        kernel.closed(opened)
        await pair.fs(0).release(opened.handle)
        await trio.sleep(5)
        for number in 0, 1:
            assert await pair.read(number, NAME) == wanted
        life = pair.seats[1].current
        assert life is not None
        assert (await life.parts.attributes.of((await pair.fs(1).lookup(ROOT_FID, NAME)).ino))["stage"] == "partner"
        assert not any("conflict" in name for seat in pair.seats if seat.current for name in seat.current.node.errors)
        pair.faults.away = False
        with trio.fail_after(300):
            while pair.log.state.op_count:  # noqa: ASYNC110
                await trio.sleep(1)
        there = pair.store.find(NAME)
        assert there is not None
        assert there.data == wanted

    play(scene)


@pytest.mark.parametrize("passthrough", [False, True])
def test_what_was_closed_while_the_node_counted_as_lost_is_published_once_it_is_back(*, passthrough: bool) -> None:
    """It passed for older than what had been published of it."""

    async def scene(pair: Pair) -> None:
        opened = await opened_by(pair, passthrough=passthrough)
        await put(pair, opened, 0, b"first")
        await pair.fs(0).fsync(opened.handle)
        await put(pair, opened, 0, b"F")
        pair.seats[0].link.set(up=False)
        await trio.sleep(AWAY_S)
        with pytest.raises(FsError):
            await pair.fs(0).flush(opened.handle)
        pair.seats[0].kernel.closed(opened)
        with contextlib.suppress(CatalogueUnavailableError):
            await pair.fs(0).release(opened.handle)
        assert await pair.read(1, NAME) == b"first"
        pair.seats[0].link.set(up=True)
        await trio.sleep(60)
        for number in 0, 1:
            assert await pair.read(number, NAME) == b"First"

    play(scene)
