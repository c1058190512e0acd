"""A daemon whose journal had lost its end or was mended, a scene each: the PFS has seen what it has forgotten."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import trio
import trio.testing
from sim_check import Checkers, Saves
from test_found import NAMES, Scene, scene

from cachexfs.core.records import Op, OpKind, decode, inode_key
from cachexfs.core.replica import Change, Replica
from cachexfs.core.transaction import Tx
from cachexfs.engine.drain import UNKNOWN

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
    assert drainer.reason(key) == UNKNOWN
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
