"""What may come between two awaits of one decision, and what is done about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from test_found import FILE, NAMES, Scene, die_at, scene
from test_found_nodes import Pair, play

from cachexfs.core.digest import FileDigest
from cachexfs.core.records import ROOT_FID, Inode, OpKind
from cachexfs.core.replica import Applied
from cachexfs.core.transaction import Tx
from cachexfs.engine import spill
from cachexfs.errors import CatalogueUnavailableError, FsError


def _hold_mutation(scene: Scene, name: str) -> Callable[[], None]:
    """Changes made by a function of this name wait; returns what lets them go on."""
    catalogue, go = scene.life.node.catalogue, trio.Event()
    mutate = catalogue.mutate

    async def waiting(function: Callable[[Tx], Any]) -> Any:
        if name in function.__qualname__:
            await go.wait()
        return await mutate(function)

    catalogue.mutate = waiting  # type: ignore[method-assign]
    return go.set


@scene()
async def test_an_eviction_told_late_does_not_take_the_next_contents_copy(scene: Scene) -> None:
    await scene.write(b"a", b"first")
    await scene.drained()
    fid, keeper = await scene.ino(b"a"), scene.life.parts.keeper
    go = _hold_mutation(scene, "_tell")
    content = scene.life.node.catalogue.view.generation(fid)
    assert content is not None
    keeper.eviction.evict(fid, content.stage)
    scene.faults.away = True
    handle = await scene.fs.open(fid, os.O_WRONLY | os.O_TRUNC)
    await scene.fs.write(handle, 0, b"second")
    await scene.close(handle)
    go()
    await trio.sleep(1)
    assert await scene.stage(b"a") == "returned"
    assert await scene.read(b"a") == b"second"


@scene()
async def test_a_rename_that_is_given_up_while_it_waits_for_its_turn_is_not_seen(scene: Scene) -> None:
    await scene.write(b".metadata.tmp", NAMES)
    await scene.drained()
    drainer, seen = scene.life.parts.drainer, []
    drainer._meta_slots.total_tokens = 1
    busy = object()
    await drainer._meta_slots.acquire_on_behalf_of(busy)
    scene.before = lambda step: seen.append(scene.store.find(b".metadata") is not None)
    await scene.rename(b".metadata.tmp", b".metadata")
    await trio.testing.wait_all_tasks_blocked(0.1)

    def give_up(tx: Tx) -> None:
        for key, op in tx.ops_of(tx.view.lookup(ROOT_FID, b".metadata").fid):  # type: ignore[union-attr]
            if op.kind == OpKind.RENAME:
                tx.put(key, msgspec.structs.replace(op, cancelled=True))

    await scene.life.node.catalogue.mutate(give_up)
    drainer._meta_slots.release_on_behalf_of(busy)
    await scene.drained()
    assert scene.store.find(b".metadata") is None
    assert not any(seen)


@scene()
async def test_a_landing_that_another_life_left_unsynced_is_synced_before_it_is_claimed(scene: Scene) -> None:
    scene.faults.away = True
    await scene.write(b"a", b"landed, not synced")
    fid = await scene.ino(b"a")
    died = die_at(scene, "sync directory")
    scene.faults.away = False

    def note_ready(tx: Tx) -> None:
        for key, op in tx.ops_of(fid):
            tx.put(key, msgspec.structs.replace(op, ready=True))

    await scene.life.node.catalogue.mutate(note_ready)
    with trio.fail_after(300):
        await died.wait()
    assert scene.on_pfs(b"a") == b"landed, not synced"
    assert scene.on_pfs(b"a", synced=True) is None
    for name in os.listdir(scene.life.staging.path("")):
        os.unlink(scene.life.staging.path(name))
    steps: list[str] = []
    scene.before = steps.append
    await trio.testing.wait_all_tasks_blocked()
    await scene.start()
    safe: list[bytes | None] = []

    def claimed(changes: Applied) -> None:
        if any(isinstance(new, Inode) and new.pfs is not None for _, _, new in changes):
            safe.append(scene.on_pfs(b"a", synced=True))

    scene.life.node.catalogue.listen(claimed)
    await scene.drained()
    assert "write part" not in steps
    assert safe[:1] == [b"landed, not synced"]


@scene()
async def test_an_fsync_beside_another_writer_leaves_bytes_that_are_what_its_record_says(scene: Scene) -> None:
    handle = await scene.create(b"a", b"old bytes")
    once = [True]

    def before(step: str) -> None:
        if step == "write part" and once:
            once.clear()
            os.pwrite(handle.vnode.fd, b"new", 0)
            handle.vnode.version += 1

    scene.before = before
    await scene.fs.fsync(handle)
    parts = [ino for name, ino in scene.store.tmp.kept.items() if not name.endswith(b".rec")]
    records = [ino for name, ino in scene.store.tmp.kept.items() if name.endswith(b".rec")]
    assert [ino.kept_data for ino in parts] == [b"new bytes"]
    digest = FileDigest()
    digest.update(b"new bytes")
    assert [msgspec.msgpack.decode(ino.kept_data)["tree"] for ino in records] == [digest.result().tree]
    await scene.close(handle)


@scene()
async def test_a_staged_file_that_is_cut_while_it_moves_ends_no_daemon(scene: Scene) -> None:
    await scene.write(b"a", b"x" * 100)
    await scene.drained()
    content = scene.life.node.catalogue.view.generation(await scene.ino(b"a"))
    assert content is not None

    async def cut(source: int, target: int, length: int) -> None:
        raise FsError(errno.EIO, "the staged file ends at byte 5")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "copy_bytes", cut)
        scene.life.staging.spill_begin = lambda stage: os.open(os.devnull, os.O_WRONLY)  # type: ignore[method-assign]
        scene.life.staging.spill_end = lambda stage, *, keep: None  # type: ignore[method-assign]
        spiller = scene.life.parts.keeper.spiller
        patch.setattr(spiller, "can_take", lambda length: True)
        assert not await spiller.move(content.stage, None)


def test_a_takeover_that_fails_is_tried_again() -> None:
    """Without a majority for a moment, what the lost node had fsynced was never published."""

    async def scene(pair: Pair) -> None:
        handle, _ = await pair.fs(0).create(ROOT_FID, b"a", FILE, os.O_WRONLY)
        await pair.fs(0).write(handle, 0, b"safe at the partner")
        await pair.fs(0).fsync(handle)
        life = pair.seats[1].current
        assert life is not None
        catalogue, failures = life.catalogue, [3]
        mutate = catalogue.mutate

        async def failing(function: Callable[[Tx], Any]) -> Any:
            if "_publish_synced" in function.__qualname__ and failures[0]:
                failures[0] -= 1
                raise CatalogueUnavailableError("no majority")
            return await mutate(function)

        catalogue.mutate = failing  # type: ignore[method-assign]
        pair.seats[0].kill(supervised=False)
        await trio.sleep(120)
        assert await pair.read(1, b"a") == b"safe at the partner"

    play(scene)


@scene()
async def test_what_is_over_of_an_inode_number_leaves_the_file_that_has_it_now(scene: Scene) -> None:
    """ESTALE for whoever came by that number, though lookup gave it."""
    await scene.write(b"a", b"old")
    ino, files = await scene.ino(b"a"), scene.fs.files
    before = files.by_ino(ino)
    handle = files.open(before, os.O_RDONLY)
    before.handles = 0  # forgotten, and dropped, between the open's lookup and its answer
    files.forget(ino, 0)
    assert files.by_ino(ino) is not before
    before.handles = 1
    await scene.fs.release(handle)
    assert (await scene.fs.getattr(await scene.ino(b"a"))).size == 3
