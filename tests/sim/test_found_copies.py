"""Copies that are bad, or that stand for something else by now, a scene each."""

from __future__ import annotations

import os

import trio
from sim_check import commit_file
from test_found_nodes import DIRECTORY, FILE, Pair, play

from cachexfs.core.records import ROOT_FID


def test_what_was_overwritten_in_place_before_its_node_was_lost_holds_nothing_up() -> None:
    """Both survivors have what it is now, none what a commit file had named; each asked its own copy for ever."""

    async def scene(pair: Pair) -> None:
        directory = (await pair.fs(0).mkdir(ROOT_FID, b"d", DIRECTORY)).ino
        kernel, life = pair.seats[0].kernel, pair.seats[0].current
        assert life is not None
        opened = None
        while opened is None or not opened.passed:  # the supervisor refuses now and then
            name = b"m%d" % pair.next_save()
            opened = kernel.opened(life.filesystem, (await pair.fs(0).create(directory, name, FILE, 1))[0])
        kernel.write(opened, 0, b"old")
        await pair.fs(0).fsync(opened.handle)
        await pair.fs(0).flush(opened.handle)  # a duplicate is closed
        members = {name: b"old"}
        pair.saves.made[commit_file(1, members)] = members
        await pair.write(0, directory, b".metadata.tmp", commit_file(1, members))
        await pair.fs(0).rename(directory, b".metadata.tmp", directory, b".metadata", 0)
        kernel.write(opened, 0, b"new")
        await pair.fs(0).flush(opened.handle)
        kernel.closed(opened)
        await pair.fs(0).release(opened.handle)
        await trio.sleep(5)
        await pair.lose(0, 30.0)  # another node has a copy by then
        pair.faults.away = False
        with trio.fail_after(600):
            while any(op.path == b"d/" + name for _, op, _ in pair.log.state.ops()):  # noqa: ASYNC110
                await trio.sleep(1)
        found = pair.store.find(b"d/" + name)
        assert found is not None
        assert found.data == b"new"

    play(scene, nodes=3)


def test_what_an_fsync_has_brought_stays_though_the_partner_hears_late_that_the_file_was_emptied() -> None:
    """The staged file goes on with its name: the partner removed the replica as that of what had been there before."""

    async def scene(pair: Pair) -> None:
        fs, kernel, opened = pair.fs(0), pair.seats[0].kernel, None
        while opened is None or not opened.passed:  # the supervisor refuses now and then
            name = b"f%d" % pair.next_save()
            opened = kernel.opened(fs, (await fs.create(ROOT_FID, name, FILE, os.O_RDWR))[0])
        kernel.write(opened, 0, b"first")
        await fs.fsync(opened.handle)
        pair.seats[1].link.set(up=False)
        await fs.setattr(opened.handle.vnode.ino, opened.handle, size=0)
        await fs.flush(opened.handle)  # a duplicate is closed
        kernel.write(opened, 0, b"second")
        await fs.fsync(opened.handle)
        pair.seats[1].link.set(up=True)
        await trio.sleep(2)
        await pair.lose(0, 60)
        assert await pair.read(1, name) == b"second"

    play(scene)
