"""What lies ready on the PFS under a hidden name when its node is lost, a scene each."""

from __future__ import annotations

import os

import pytest
import trio
import trio.testing
from sim_check import commit_file
from test_found import Scene, scene
from test_found_nodes import DIRECTORY, Pair, play

from cachexfs.core.records import ROOT_FID

MEMBERS = {b"m": b"old"}


async def _read(pair: Pair, number: int, directory: int, name: bytes) -> bytes:
    fs = pair.fs(number)
    handle = await fs.open((await fs.lookup(directory, name)).ino, os.O_RDONLY)
    try:
        return await fs.read(handle, 0, 1 << 20)
    finally:
        await fs.release(handle)


@pytest.mark.parametrize("away_s", [1.0, 60.0])
def test_a_member_that_waits_ready_for_the_next_commit_file_is_read_though_its_node_is_lost(away_s: float) -> None:
    """EIO, and ``lost``, for ever, though the PFS had its bytes beside the checkpoint that was whole there."""

    async def scene(pair: Pair) -> None:
        pair.faults.away = False
        pair.saves.made[commit_file(1, MEMBERS)] = MEMBERS
        directory = (await pair.fs(0).mkdir(ROOT_FID, b"d", DIRECTORY)).ino
        await pair.write(0, directory, b"m", MEMBERS[b"m"])
        await pair.write(0, directory, b".metadata", commit_file(1, MEMBERS))
        await trio.sleep(30)
        pair.net.parted.add(frozenset(["n0", "n1"]))  # the partner gets nothing more
        fs = pair.fs(0)
        handle = await fs.open((await fs.lookup(directory, b"m")).ino, os.O_WRONLY)
        await fs.write(handle, 0, b"new")
        await fs.flush(handle)
        await fs.release(handle)
        await trio.sleep(5)
        assert [op.ready for _, op, _ in pair.log.state.ops() if op.path == b"d/m"] == [True]
        await pair.lose(0, away_s)
        await trio.sleep(30)
        life = pair.seats[1].current
        assert life is not None
        assert await _read(pair, 1, directory, b"m") == b"new"
        found = await life.parts.attributes.of((await pair.fs(1).lookup(directory, b"m")).ino)
        assert found["stage"] == "returned"
        assert life.parts.losses.errors() == []

    play(scene)


@scene(fsync="returned")
async def test_what_is_not_ready_any_more_is_lost(scene: Scene) -> None:
    """What counted on the PFS alone is told as soon as nothing is there."""
    await scene.mkdir(b"d")
    for name, data in (*MEMBERS.items(), (b".metadata", commit_file(1, MEMBERS))):
        await scene.write(b"d/" + name, data)
    await scene.drained()
    handle = await scene.fs.open(await scene.ino(b"d/m"), os.O_WRONLY)
    await scene.fs.write(handle, 0, b"new")
    await scene.close(handle)
    await trio.sleep(5)
    content = scene.life.catalogue.view.generation(await scene.ino(b"d/m"))
    assert content is not None
    scene.life.kill()
    await trio.testing.wait_all_tasks_blocked()
    os.unlink(scene.life.staging.path(content.stage))
    await scene.start()
    assert await scene.stage(b"d/m") == "returned"
    assert await scene.read(b"d/m") == b"new"
    ((key, op),) = [row for row in scene.life.parts.drainer.own_pending() if row[1].path == b"d/m"]
    for name in [name for name in scene.store.tmp.entries if op.hidden.encode() in name]:
        del scene.store.tmp.entries[name]
    await scene.life.parts.drainer._note_ready(key, ready=False)
    assert await scene.stage(b"d/m") == "lost"
    assert [path for path, _, _ in scene.life.parts.losses.errors()] == [b"d/m"]
