"""A daemon whose journal had lost its end or was mended, a scene each: the PFS has seen what it has forgotten."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest
import trio
import trio.testing
from sim_check import Checkers, Saves
from test_found import NAMES, Scene, _overwrite, scene

from cachexfs.core.records import Generation, Op, OpKind, decode, generation_key, inode_key, op_key
from cachexfs.core.replica import Change, Replica
from cachexfs.core.transaction import Tx
from cachexfs.engine.drain_reasons import UNKNOWN, why_pending
from cachexfs.engine.turns import State

TRIES_MAX = 30  # to carry out a change or two
Lost = Callable[[int, list[Change]], bool]


async def forgets(scene: Scene, lost: Lost) -> None:
    """The daemon dies; the next one's catalogue has not what ``lost`` (revision, its changes) says."""
    scene.life.kill()
    scene.kernel.died(supervised=False)
    await trio.testing.wait_all_tasks_blocked()
    log = scene.log
    log.revisions = [[] if lost(at + 1, changes) else changes for at, changes in enumerate(log.revisions)]
    log.state = Replica()
    for revision, changes in enumerate(log.revisions):
        log.state.apply(revision + 1, changes)
    scene.mended = True
    await scene.start()


def issues(kind: str, path: bytes) -> Lost:
    """Revisions that issue such a change of the PFS."""

    def lost(revision: int, changes: list[Change]) -> bool:
        records = [decode(change.value) for change in changes if change.value is not None]
        return any(isinstance(op, Op) and (op.kind, op.path) == (kind, path) for op in records)

    return lost


def after(scene: Scene) -> Lost:
    """All that comes from now on."""
    end = len(scene.log.revisions)
    return lambda revision, changes: revision > end


async def a_checkpoint(scene: Scene) -> Checkers:
    """On the PFS; who looks at each step sees none that is not whole."""
    checkers = Checkers(scene.store, Saves())
    checkers.saves.made[NAMES] = {b"m": b"one"}
    checkers.kept.excused = True
    await scene.mkdir(b"d")
    await scene.write(b"d/m", b"one")
    await scene.write(b"d/.metadata", NAMES)
    await scene.drained()
    scene.before = lambda step: checkers.commit_last(step)
    return checkers


def counted(scene: Scene, carry_out: Callable[[bytes, Op, State], Awaitable[None]]) -> list[bytes]:
    """The drain carries out what it does by this from now on, until there have been too many. Returns their keys."""
    tries: list[bytes] = []

    async def count(key: bytes, op: Op, state: State) -> None:
        tries.append(key)
        if len(tries) > TRIES_MAX:
            scene.life.kill()
        await carry_out(key, op, state)

    scene.life.parts.drainer._carry_out = count  # type: ignore[method-assign]
    return tries


@scene()
async def test_a_member_is_not_removed_below_a_commit_file_whose_removal_is_forgotten(scene: Scene) -> None:
    checkers = await a_checkpoint(scene)
    scene.faults.away = True
    await scene.unlink(b"d/.metadata")
    await scene.unlink(b"d/m")
    await forgets(scene, issues(OpKind.UNLINK, b"d/.metadata"))
    scene.faults.away = False
    await scene.drained()
    checkers.commit_last("the end")
    assert scene.on_pfs(b"d/m") is None
    assert scene.on_pfs(b"d/.metadata") is None
    assert NAMES in [ino.data for ino in scene.store.held.entries.values()]


@scene()
async def test_a_commit_file_that_is_not_known_leaves_its_name_and_is_kept_and_told(scene: Scene) -> None:
    checkers = await a_checkpoint(scene)
    fid = await scene.ino(b"d/.metadata")
    scene.faults.away = True
    await forgets(scene, lambda revision, changes: any(change.key.endswith(b"/%x" % fid) for change in changes))
    await scene.unlink(b"d/m")
    scene.faults.away = False
    await scene.drained()
    checkers.commit_last("the end")
    assert scene.on_pfs(b"d/m") is None
    assert NAMES in [ino.data for ino in scene.store.held.entries.values()]
    assert ".metadata" in scene.life.node.errors["journal"]


@scene()
async def test_a_rename_that_is_remembered_alone_holds_nothing_up(scene: Scene) -> None:
    """ENOENT for ever: what was to land the file had been forgotten, or the PFS had moved it on."""
    await scene.write(b"a", b"data")
    await scene.drained()
    scene.faults.away = True
    await scene.rename(b"a", b"b")
    lost = after(scene)
    await scene.rename(b"b", b"c")
    scene.faults.away = False
    await scene.drained()
    await forgets(scene, lost)
    await scene.drained()
    assert scene.on_pfs(b"b") == b"data"
    assert await scene.stage(b"b") == "pfs"


@scene()
async def test_a_directory_with_what_is_forgotten_is_not_removed_and_that_is_told(scene: Scene) -> None:
    """ENOTEMPTY for ever."""
    await scene.mkdir(b"d")
    await scene.drained()
    scene.faults.away = True
    await scene.fs.rmdir(*await scene.place(b"d"))
    scene.store.plant({b"d/unknown": ("f", 0o644, b"somebody's")})
    await forgets(scene, lambda revision, changes: False)
    scene.faults.away = False
    await scene.drained()
    assert scene.on_pfs(b"d/unknown") == b"somebody's"
    assert "d" in scene.life.node.errors["journal"]


@scene(fsync="returned")
async def test_nothing_lands_before_the_pfs_has_said_what_it_has(scene: Scene) -> None:
    """An umount would have ended with 0, for nothing was known to be pending."""
    await scene.write(b"a", b"data")
    await scene.drained()
    await forgets(scene, lambda revision, changes: False)
    scene.faults.away = True
    drainer = scene.life.parts.drainer
    assert drainer.left() == 1
    assert not drainer.is_idle()
    await scene.write(b"b", b"more")
    await trio.sleep(60)
    ((key, _),) = [row for row in drainer.own_pending() if row[1].kind == OpKind.PUT]
    assert why_pending(drainer, key) == UNKNOWN
    scene.faults.away = False
    await scene.drained()
    assert scene.on_pfs(b"b") == b"more"
    assert drainer.is_idle()


@scene()
async def test_a_commit_file_does_not_come_back_beside_a_member_that_the_pfs_has_otherwise(scene: Scene) -> None:
    """By the catalogue all was there."""
    await a_checkpoint(scene)
    scene.before = lambda step: None
    fid, directory, held = await scene.ino(b"d/.metadata"), scene.store.find(b"d"), scene.store.held
    assert directory is not None
    held.entries[b"x"] = held.kept[b"x"] = directory.entries.pop(b".metadata")
    del directory.kept[b".metadata"]
    scene.store.plant({b"d/m": ("f", 0o644, b"of a save that is forgotten")})

    def taken_off(tx: Tx) -> None:
        inode = tx.inode(fid)
        assert inode is not None
        assert inode.pfs is not None
        pfs = msgspec.structs.replace(inode.pfs, hidden="x")
        tx.put(inode_key(fid), msgspec.structs.replace(inode, pfs=pfs))

    await scene.life.catalogue.mutate(taken_off)
    await trio.sleep(60)
    await scene.drained()
    assert scene.on_pfs(b"d/.metadata") is None
    assert held.entries[b"x"].data == NAMES


@scene()
async def test_a_commit_file_that_was_taken_off_comes_back_when_the_pfs_has_what_it_lists(scene: Scene) -> None:
    checkers = await a_checkpoint(scene)
    scene.faults.away = True
    await scene.write(b"d/log", b"no member")
    await forgets(scene, lambda revision, changes: False)
    scene.faults.away = False
    await scene.drained()
    await trio.sleep(60)
    await scene.drained()
    checkers.commit_last("the end")
    assert scene.on_pfs(b"d/.metadata", synced=True) == NAMES
    assert scene.on_pfs(b"d/log") == b"no member"


@scene(fsync="returned")
async def test_one_content_that_two_changes_bring_lands_without_going_round(scene: Scene) -> None:
    """Of the same hidden name: the first was taken for a commit file that must not be seen, again and again."""
    scene.faults.away = True
    await scene.write(b"a", b"data")
    drainer, node = scene.life.parts.drainer, scene.life.node
    ((key, op),) = [row for row in drainer.own_pending() if row[1].kind == OpKind.PUT]
    again = op_key(node.ctx().next_op())
    await node.catalogue.mutate(lambda tx: tx.put(again, op))
    assert drainer.waits.order.next_put(key) == again
    tries = counted(scene, drainer._carry_out)
    scene.faults.away = False
    await scene.drained()
    assert len(tries) <= TRIES_MAX
    assert scene.on_pfs(b"a") == b"data"
    assert scene.left() == []


@scene(fsync="returned")
async def test_a_change_that_nothing_comes_of_is_tried_slowly(scene: Scene) -> None:
    """Without end, and nothing else of the daemon went on."""

    async def nothing(key: bytes, op: Op, state: State) -> None:
        await trio.lowlevel.checkpoint()

    carry_out = scene.life.parts.drainer._carry_out
    tries = counted(scene, nothing)
    await scene.write(b"a", b"data")
    await trio.sleep(60)
    assert len(tries) <= TRIES_MAX
    scene.life.parts.drainer._carry_out = carry_out  # type: ignore[method-assign]
    await scene.drained()
    assert scene.on_pfs(b"a") == b"data"


@scene()
async def test_a_commit_file_that_two_changes_are_to_hide_is_hidden_once(scene: Scene) -> None:
    """EEXIST for ever: it had landed under its earlier name, and was copied again."""
    await scene.mkdir(b"d")
    await scene.write(b"d/.metadata.tmp", NAMES)
    await scene.drained()
    scene.faults.away = True
    await scene.write(b"d/m", b"one")
    await scene.rename(b"d/.metadata.tmp", b"d/.metadata")
    fid, node = await scene.ino(b"d/.metadata"), scene.life.node
    content = node.catalogue.view.generation(fid)
    assert content is not None
    put = Op(
        OpKind.PUT, b"d/.metadata", "n0", fid, content.gen, commit=True, below=b"d",
        size=content.size, stage=content.stage, tree=content.tree,
    )  # fmt: skip
    await node.catalogue.mutate(lambda tx: tx.put(op_key(node.ctx().next_op()), put))
    await forgets(scene, lambda revision, changes: False)
    scene.faults.away = False
    await scene.drained()
    await trio.sleep(60)
    await scene.drained()
    assert scene.on_pfs(b"d/.metadata.tmp") is None
    assert scene.on_pfs(b"d/.metadata", synced=True) == NAMES
    assert scene.left() == []


def publishes(*fids: int) -> Lost:
    """Revisions that publish bytes of one of these files."""
    keys = {generation_key(fid) for fid in fids}

    def lost(revision: int, changes: list[Change]) -> bool:
        found = [decode(change.value) for change in changes if change.key in keys and change.value is not None]
        return any(isinstance(content, Generation) and content.size for content in found)

    return lost


@pytest.mark.parametrize("forgotten", ["", "commit file", "both"])
def test_a_commit_file_whose_publication_is_forgotten_claims_no_later_member(forgotten: str) -> None:
    """It was published as if closed after all that is beside it."""

    @scene(fsync="returned")
    async def play(scene: Scene) -> None:
        scene.faults.away = True
        await scene.mkdir(b"d")
        await scene.write(b"d/m", b"one")
        await scene.write(b"d/.metadata", NAMES)
        commit, member = await scene.ino(b"d/.metadata"), await scene.ino(b"d/m")
        if forgotten:
            await scene.write(b"d/m", b"two")
        checkers = Checkers(scene.store, Saves())
        checkers.saves.made[NAMES] = {b"m": b"one"}
        checkers.kept.excused = True
        scene.before = lambda step: checkers.commit_last(step)
        await forgets(scene, publishes(commit, *([member] if forgotten == "both" else [])))
        assert await scene.read(b"d/.metadata") == NAMES
        scene.faults.away = False
        await trio.sleep(200)
        checkers.commit_last("the end")
        found = await scene.life.parts.attributes.of(await scene.ino(b"d"))
        assert (found["restartable"], scene.on_pfs(b"d/.metadata")) == (("no", None) if forgotten else ("pfs", NAMES))

    play()


@scene(fsync="returned")
async def test_what_was_still_to_land_of_a_forgotten_file_is_kept(scene: Scene) -> None:
    """A file without a name need not land: its bytes were removed, as those of one that the user had removed."""
    scene.faults.away = True
    await scene.write(b"a", b"data")
    node, end = scene.life.node, len(scene.log.revisions)
    ((key, op),) = [row for row in scene.life.parts.drainer.own_pending() if row[1].kind == OpKind.PUT]
    await node.catalogue.mutate(lambda tx: tx.put(key, op))
    await forgets(scene, lambda revision, changes: revision <= end)
    assert scene.life.staging.has(op.stage)
    scene.faults.away = False
    await scene.drained()
    assert scene.life.staging.orphans() == [op.stage]
    assert scene.life.staging.used_bytes == 0


@scene(fsync="returned")
async def test_a_rename_that_has_been_and_whose_next_content_is_pending_holds_nothing_up(scene: Scene) -> None:
    """ENOENT for ever: what lay there was of a content whose landing had been forgotten, and whose bytes were gone."""
    await scene.write(b"a", b"first")
    await scene.drained()
    scene.faults.away = True
    await _overwrite(scene, b"a", b"second")
    await scene.rename(b"a", b"b")
    await _overwrite(scene, b"b", b"the third")
    lost = after(scene)
    scene.before = lambda step: setattr(scene.faults, "away", scene.faults.away or step == "rename")
    scene.faults.away = False
    with trio.fail_after(100):
        while scene.on_pfs(b"b") is None:  # noqa: ASYNC110
            await trio.sleep(0.1)
    scene.before = lambda step: None
    scene.faults.away = False
    await forgets(scene, lost)
    assert scene.on_pfs(b"b") == b"second"
    await scene.drained()
    assert [scene.on_pfs(name) for name in (b"a", b"b")] == [None, b"the third"]


@scene()
async def test_a_content_that_had_been_superseded_and_is_gone_holds_nothing_up(scene: Scene) -> None:
    """It was tried for ever: that it need not land, and that its file was removed, had been forgotten."""
    scene.faults.away = True
    await scene.write(b"a", b"one")
    await _overwrite(scene, b"a", b"another")
    fid = await scene.ino(b"a")
    first = next(key for key, op in scene.life.catalogue.view.ops_of(fid) if op.kind == OpKind.PUT)
    await scene.unlink(b"a")
    scene.faults.away = False
    await scene.drained()

    def lost(revision: int, changes: list[Change]) -> bool:
        return any(change.value is None and change.key in (first, inode_key(fid)) for change in changes)

    await forgets(scene, lost)
    await scene.write(b"b", b"two")
    await scene.unlink(b"b")
    await scene.drained()
    assert "its bytes are gone" in scene.life.node.errors["journal"]
