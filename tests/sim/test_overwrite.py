"""A checkpoint that is whole on the PFS and is overwritten in place: who reads the PFS sees the old one until the new
one is complete, and never a mixture."""

from __future__ import annotations

import json
import os

import pytest
import trio
from sim_check import commit_file
from test_found import Scene, _overwrite, die_at, scene

from cachexfs.engine.drain_reasons import why_pending
from cachexfs.engine.turns import CHANGES_MAX

OLD, NEW = {b"m": b"one", b"n": b"1"}, {b"m": b"two", b"n": b"2"}


async def _save(scene: Scene, members: dict[bytes, bytes], number: int) -> None:
    """As DCP saves: members, then the commit file by a rename."""
    for name, data in members.items():
        there = name in [n for n, _ in await scene.fs.names(await scene.ino(b"s"))]
        await (_overwrite if there else Scene.write)(scene, b"s/" + name, data)
    await scene.write(b"s/.metadata.tmp", commit_file(number, members))
    if b".metadata" in [n for n, _ in await scene.fs.names(await scene.ino(b"s"))]:
        await scene.unlink(b"s/.metadata")
    await scene.rename(b"s/.metadata.tmp", b"s/.metadata")


async def _old(scene: Scene) -> None:
    await scene.mkdir(b"s")
    await _save(scene, OLD, 1)
    await scene.drained()


def _seen(scene: Scene) -> dict[bytes, bytes | None]:
    return {name: scene.on_pfs(b"s/" + name) for name in (b"m", b"n", b".metadata")}


OLD_SEEN = {**OLD, b".metadata": commit_file(1, OLD)}
NEW_SEEN = {**NEW, b".metadata": commit_file(2, NEW)}


@scene()
async def test_overwritten_members_stay_hidden_until_a_commit_file_comes(scene: Scene) -> None:
    await _old(scene)
    handle = await scene.fs.open(await scene.ino(b"s/m"), os.O_WRONLY | os.O_TRUNC)
    await scene.fs.write(handle, 0, b"two")
    await scene.fs.fsync(handle)
    await scene.close(handle)
    await trio.sleep(120)
    assert _seen(scene) == OLD_SEEN
    assert b"two" in [ino.kept_data for ino in scene.store.tmp.kept.values()]
    assert await scene.stage(b"s/m") == "returned"
    drainer = scene.life.parts.drainer
    assert [op.path for _, op in drainer.own_pending() if op.kind == "put"] == [b"s/m"]
    assert drainer.is_idle()
    assert all("new commit file" in why_pending(drainer, key) for key, op in drainer.own_pending() if op.kind == "put")
    await _save(scene, NEW, 2)
    await scene.drained()
    assert _seen(scene) == NEW_SEEN
    assert scene.left() == []


@scene()
async def test_a_reader_sees_the_old_checkpoint_until_the_new_one_is_ready(scene: Scene) -> None:
    """The new commit file is there long before the PFS has the last member."""
    await _old(scene)
    seen: list[dict[bytes, bytes | None]] = []
    copied: list[int] = []

    def before(step: str) -> None:
        seen.append(_seen(scene))
        copied.append(len([n for n in scene.store.tmp.entries if n.endswith(b".rec")]))

    scene.before = before
    await _save(scene, NEW, 2)
    await scene.drained()
    gone = next(at for at, there in enumerate(seen) if there != OLD_SEEN)
    assert copied[gone - 1] == 3  # both members and the commit file lay ready
    assert all(there == OLD_SEEN for there in seen[:gone])
    assert all(there[b".metadata"] is None for there in seen[gone:] if there != NEW_SEEN)
    assert _seen(scene) == NEW_SEEN


@scene()
async def test_one_that_is_replaced_just_before_it_lands_does_not_take_the_old_one_with_it(scene: Scene) -> None:
    """All of the second was ready, and the withdrawal of the first waited for its turn."""
    await _old(scene)
    turns, others = scene.life.parts.drainer._meta_slots, [object() for _ in range(CHANGES_MAX)]
    for other in others:
        await turns.acquire_on_behalf_of(other)
    await _save(scene, NEW, 2)
    with trio.fail_after(60):
        while any(op.held for _, op, _ in scene.life.catalogue.view.ops()):  # noqa: ASYNC110
            await trio.sleep(0.1)
    last = {b"m": b"three", b"n": b"3"}
    await _save(scene, last, 3)
    assert _seen(scene) == OLD_SEEN
    ready = {*last.values(), commit_file(3, last)}

    def before(step: str) -> None:
        there = {ino.data for ino in (*scene.store.tmp.entries.values(), *scene.store.walk().values())}
        assert _seen(scene) == OLD_SEEN or ready <= there

    scene.before = before
    for other in others:
        turns.release_on_behalf_of(other)
    await scene.drained()
    assert _seen(scene) == {**last, b".metadata": commit_file(3, last)}


@scene()
async def test_what_is_ready_is_not_copied_again_by_the_next_daemon(scene: Scene) -> None:
    await _old(scene)
    await _overwrite(scene, b"s/m", b"two")
    await _overwrite(scene, b"s/n", b"2")
    await trio.sleep(60)
    await scene.killed()
    steps: list[str] = []
    scene.before = steps.append
    await trio.sleep(60)
    assert "write part" not in steps
    assert _seen(scene) == OLD_SEEN
    await scene.write(b"s/.metadata.tmp", commit_file(2, NEW))
    await scene.rename(b"s/.metadata.tmp", b"s/.metadata")
    await scene.drained()
    assert _seen(scene) == NEW_SEEN
    assert steps.count("sync part") == 1


@scene()
async def test_a_death_between_the_commit_files_is_finished_by_the_next_daemon(scene: Scene) -> None:
    await _old(scene)
    died = die_at(scene, "unlink")
    await _save(scene, NEW, 2)
    await died.wait()
    await scene.killed()
    await scene.drained()
    assert _seen(scene) == NEW_SEEN


@scene()
async def test_a_removed_member_takes_the_commit_file_at_once(scene: Scene) -> None:
    await _old(scene)
    await _overwrite(scene, b"s/m", b"two")
    await trio.sleep(10)
    assert _seen(scene) == OLD_SEEN
    await scene.unlink(b"s/n")
    await scene.drained()
    assert _seen(scene) == {b"m": b"two", b"n": None, b".metadata": None}


@scene()
async def test_a_removed_checkpoint_goes_though_it_was_being_overwritten(scene: Scene) -> None:
    await _old(scene)
    await _overwrite(scene, b"s/m", b"two")
    await trio.sleep(10)
    for name in (b"m", b"n", b".metadata"):
        await scene.unlink(b"s/" + name)
    await scene.fs.rmdir(*await scene.place(b"s"))
    await scene.drained()
    assert scene.store.walk() == {}
    assert scene.left() == []


@scene()
async def test_other_checkpoints_do_not_wait_for_one_that_is_being_overwritten(scene: Scene) -> None:
    await _old(scene)
    await _overwrite(scene, b"s/m", b"two")
    await trio.sleep(10)
    await scene.mkdir(b"t")
    await scene.write(b"t/m", b"x")
    await scene.write(b"t/.metadata", commit_file(3, {b"m": b"x"}))
    await scene.write(b"latest", b"t")
    await scene.mkdir(b"gone")
    await scene.fs.rmdir(*await scene.place(b"gone"))
    await trio.sleep(60)
    assert scene.on_pfs(b"t/.metadata") == commit_file(3, {b"m": b"x"})
    assert scene.on_pfs(b"latest") == b"t"
    assert scene.store.find(b"gone") is None
    assert _seen(scene) == OLD_SEEN


@scene()
async def test_a_renamed_directory_waits_and_lands_with_the_next_commit_file(scene: Scene) -> None:
    await _old(scene)
    await _overwrite(scene, b"s/m", b"two")
    await _overwrite(scene, b"s/n", b"2")
    await scene.rename(b"s", b"t")
    await trio.sleep(60)
    assert _seen(scene) == OLD_SEEN
    await scene.write(b"t/.metadata.tmp", commit_file(2, NEW))
    await scene.rename(b"t/.metadata.tmp", b"t/.metadata")
    await scene.drained()
    assert {name: scene.on_pfs(b"t/" + name) for name in NEW_SEEN} == NEW_SEEN
    assert scene.store.find(b"s") is None


@scene(memory=64 << 10)
async def test_a_save_that_needs_the_memory_does_not_fail_for_the_sake_of_the_old_one(scene: Scene) -> None:
    await scene.mkdir(b"s")
    big = {b"%d" % number: bytes([number]) * 20_000 for number in range(6)}
    await _save(scene, big, 1)
    await scene.drained()
    new = {name: data[::-1] + b"!" for name, data in big.items()}
    await _save(scene, new, 2)
    await scene.drained()
    assert {name: scene.on_pfs(b"s/" + name) for name in new} == new
    assert scene.on_pfs(b"s/.metadata") == commit_file(2, new)


# ---- back again
def _index(*names: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {f"w{at}": name for at, name in enumerate(names)}}).encode()


SHARD = b"\x02\0\0\0\0\0\0\0{}"
INDEX = b"s/model.safetensors.index.json"


async def _weights(scene: Scene) -> None:
    await scene.mkdir(b"s")
    await scene.write(b"s/a.safetensors", SHARD)
    await scene.write(INDEX, _index("a.safetensors"))
    await scene.drained()


@scene()
async def test_an_index_whose_shard_was_written_again_comes_back_after_it(scene: Scene) -> None:
    """Nobody writes the index again: the shard must not stay hidden for ever, nor the index."""
    await _weights(scene)
    seen: list[tuple[bytes | None, bytes | None]] = []
    scene.before = lambda step: seen.append((scene.on_pfs(b"s/a.safetensors"), scene.on_pfs(INDEX)))
    new = b"\x04\0\0\0\0\0\0\0{  }"
    await _overwrite(scene, b"s/a.safetensors", new)
    await scene.drained()
    assert scene.on_pfs(b"s/a.safetensors") == new
    assert scene.on_pfs(INDEX) == _index("a.safetensors")
    assert await scene.stage(INDEX) == "pfs"
    assert (new, None) in seen
    assert scene.left() == []


@scene()
async def test_a_withdrawn_index_comes_back_when_its_member_does(scene: Scene) -> None:
    await _weights(scene)
    await scene.unlink(b"s/a.safetensors")
    await scene.drained()
    assert scene.on_pfs(INDEX) is None
    await scene.write(b"s/a.safetensors", SHARD)
    await trio.sleep(30)
    assert scene.on_pfs(INDEX) == _index("a.safetensors")
    assert await scene.stage(INDEX) == "pfs"
    assert scene.left() == []


@scene()
async def test_a_comeback_whose_answer_died_with_the_daemon_is_recognised(scene: Scene) -> None:
    await _weights(scene)
    await scene.unlink(b"s/a.safetensors")
    await scene.drained()
    await scene.write(b"s/a.safetensors", SHARD)
    await trio.sleep(1)
    calls = [0]

    def before(step: str) -> None:
        calls[0] += step == "unhide"
        if calls[0] > 0 and step == "sync directory":
            calls[0] = -9
            scene.life.kill()

    scene.before = before
    await scene.unlink(b"s/a.safetensors")
    await scene.write(b"s/a.safetensors", SHARD)
    await trio.sleep(30)
    assert calls[0] < 0
    await scene.killed()
    await trio.sleep(30)
    assert scene.on_pfs(INDEX, synced=True) == _index("a.safetensors")
    assert await scene.stage(INDEX) == "pfs"


@scene()
async def test_what_a_commit_file_does_not_list_lands_though_nobody_had_read_that_when_it_changed(scene: Scene) -> None:
    """The next daemon publishes what the dead one had: before it has read any commit file."""
    await scene.mkdir(b"s")
    await scene.write(b"s/.metadata", b"somebody else's")
    await scene.write(b"s/log", b"begin")
    await scene.drained()
    handle = await scene.fs.open(await scene.ino(b"s/log"), os.O_WRONLY)
    await scene.fs.write(handle, 0, b"begin, end")
    await scene.killed()
    await scene.drained()
    assert scene.on_pfs(b"s/log") == b"begin, end"
    assert scene.on_pfs(b"s/.metadata") == b"somebody else's"


# ---- files that are dated back
async def _bring(scene: Scene, name: bytes, data: bytes, mtime_s: int) -> None:
    """As rsync does: a hidden name first, the mtime kept, renamed over what is there."""
    hidden = b"s/." + name + b".ABCDEF"
    await scene.write(hidden, data)
    await scene.fs.setattr(await scene.ino(hidden), None, mtime_ns=mtime_s * 10**9)
    await scene.rename(hidden, b"s/" + name)


async def _copy(scene: Scene) -> None:
    """Over the old checkpoint, in the order of names."""
    await _bring(scene, b".metadata", commit_file(2, NEW), 1001)
    for name, data in NEW.items():
        await _bring(scene, name, data, 1000)


async def _restartable(scene: Scene) -> str:
    return (await scene.life.parts.attributes.of(await scene.ino(b"s")))["restartable"]


@scene()
async def test_a_copy_that_keeps_mtimes_lands_though_its_commit_file_comes_first(scene: Scene) -> None:
    await _old(scene)
    await _copy(scene)
    await trio.sleep(30)
    assert _seen(scene) == NEW_SEEN
    assert await _restartable(scene) == "pfs"


@scene()
async def test_a_commit_file_does_not_come_back_beside_a_member_that_was_overwritten_and_dated_back(
    scene: Scene,
) -> None:
    """It passed for a copy that had kept mtimes, though nobody had dated the commit file back."""
    await scene.mkdir(b"s")
    await _save(scene, {b"m": b"one"}, 1)
    await scene.drained()
    seen: list[bytes | None] = []
    scene.before = lambda step: seen.append(scene.on_pfs(b"s/.metadata") if scene.on_pfs(b"s/m") == b"two" else None)
    await _overwrite(scene, b"s/m", b"two")
    await scene.fs.setattr(await scene.ino(b"s/m"), None, mtime_ns=10**9)
    await trio.sleep(60)
    assert await _restartable(scene) == "no"
    await scene.write(b"x", b"the steps go on")
    await trio.sleep(30)
    assert set(seen) == {None}


@scene()
async def test_nor_if_its_close_came_long_after_its_last_write(scene: Scene) -> None:
    """As after an fsync that takes long: it passed for dated back itself."""
    await scene.mkdir(b"s")
    await scene.write(b"s/m", b"one")
    handle = await scene.create(b"s/.metadata.tmp", commit_file(1, {b"m": b"one"}))
    await trio.sleep(10)
    await scene.close(handle)
    await scene.rename(b"s/.metadata.tmp", b"s/.metadata")
    await scene.drained()
    assert await _restartable(scene) == "pfs"
    await _overwrite(scene, b"s/m", b"two")
    await scene.fs.setattr(await scene.ino(b"s/m"), None, mtime_ns=10**9)
    await trio.sleep(60)
    assert await _restartable(scene) == "no"


@scene()
async def test_a_file_of_another_save_that_is_brought_over_a_copy_is_no_part_of_it(scene: Scene) -> None:
    """All members were newer than the commit file already, and all were dated back."""
    await _old(scene)
    await _copy(scene)
    await trio.sleep(30)
    assert await _restartable(scene) == "pfs"
    await _bring(scene, b"m", b"old", 999)
    await trio.sleep(60)
    assert await _restartable(scene) == "no"
    assert scene.on_pfs(b"s/m") == b"two" or scene.on_pfs(b"s/.metadata") is None


@scene(planted={b"a": ("f", 0o644, b"0123456789" * 1000)})
async def test_what_memory_takes_a_part_of_at_first_is_copied_as_a_whole(scene: Scene) -> None:
    """The rest of the private copy was zeros, and was published."""
    write = os.pwrite

    def short(fd: int, data: bytes, offset: int) -> int:
        return write(fd, data[: max(1, len(data) // 2)], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", short)
        handle = await scene.fs.open(await scene.ino(b"a"), os.O_WRONLY)
        await scene.fs.write(handle, 0, b"x")
        await scene.close(handle)
    await scene.drained()
    assert scene.on_pfs(b"a") == b"x" + (b"0123456789" * 1000)[1:]
