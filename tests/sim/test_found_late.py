"""What a call on the PFS that hangs does late, a scene each; between nodes: ``test_found_nodes``."""

from __future__ import annotations

import errno
import os

import msgspec
import trio
from sim_check import Checkers, Saves, commit_file
from test_found import NAMES, Scene, scene
from test_found_nodes import _After

from cachexfs.core.records import Op, OpKind
from cachexfs.engine.drain_errors import RETRY_FIRST_S
from cachexfs.engine.pfs_interface import PfsStat


@scene(fsync="returned")
async def test_attributes_that_hang_while_their_directory_is_renamed_do_not_come_late_over_newer_ones(
    scene: Scene,
) -> None:
    """The call had opened the directory: what had been set since under its new name went."""
    await scene.mkdir(b"d")
    await scene.drained()
    scene.life.pfs._rng = _After(1)  # what hangs takes effect late
    scene.faults.away = True
    await scene.fs.setattr(await scene.ino(b"d"), None, mtime_ns=10**18)
    await trio.sleep(1)
    scene.faults.away = False
    await scene.rename(b"d", b"e")
    await trio.sleep(1)
    assert scene.store.find(b"e") is not None  # nothing orders the two
    await scene.fs.setattr(await scene.ino(b"e"), None, mtime_ns=2 * 10**18)
    await scene.drained()
    await trio.sleep(200)
    found = scene.store.find(b"e")
    assert found is not None
    assert found.attrs.mtime_ns == 2 * 10**18


@scene(fsync="returned")
async def test_a_removed_file_is_never_renamed_though_the_pfs_says_at_first_that_it_is_not_there(scene: Scene) -> None:
    """A commit file was seen under its name for a moment, after files that it lists had been removed."""
    await scene.write(b"m.tmp", b"old")
    await scene.drained()
    scene.faults.away = True
    await scene.rename(b"m.tmp", b"m")
    await scene.unlink(b"m")
    pfs, denied, seen = scene.life.pfs, list[bytes](), list[str]()
    stat = pfs.stat

    async def denies(path: bytes, deadline_s: float) -> PfsStat:
        if path == b"m.tmp" and not denied:
            denied.append(path)
            raise FileNotFoundError(errno.ENOENT, "a server is down")
        return await stat(path, deadline_s)

    def look(step: str) -> None:
        seen.extend([step] if scene.store.find(b"m") is not None else [])

    pfs.stat, pfs._looked = denies, look  # type: ignore[method-assign]
    scene.faults.away = False
    await scene.drained()
    assert denied
    assert seen == []
    assert scene.store.find(b"m.tmp") is None


@scene(memory=1 << 30)
async def test_what_an_fsync_had_prepared_for_two_contents_of_one_removed_file_goes(scene: Scene) -> None:
    """Both contents, of one staged file, were given up at one moment: each left the prepared file to the other."""
    opened = await scene.passed(b"a")
    for data in (b"first.", b"second"):
        scene.kernel.write(opened, 0, data)
        await scene.fs.flush(opened.handle)  # a duplicate is closed
    scene.kernel.write(opened, 0, b"second")
    await scene.fs.fsync(opened.handle)
    assert scene.left()
    await scene.unlink(b"a")
    scene.kernel.closed(opened)
    await scene.fs.release(opened.handle)
    await scene.drained()
    await trio.sleep(20)
    assert scene.left() == []


@scene(fsync="returned")
async def test_a_rename_of_a_hard_link_is_recognised_after_the_daemon_died_before_it_could_note_it(
    scene: Scene,
) -> None:
    """ENOENT for ever: another name of the file had got new bytes meanwhile, so that what had moved was not known."""
    await scene.write(b"a", b"old")
    await scene.fs.link(await scene.ino(b"a"), *await scene.place(b"c"))
    await scene.drained()
    scene.faults.away = True
    await scene.rename(b"c", b"b")
    handle = await scene.fs.open(await scene.ino(b"a"), os.O_WRONLY)
    await scene.fs.write(handle, 0, b"new")
    await scene.close(handle)
    await scene.unlink(b"b")
    steps: list[str] = []

    def before(what: str) -> None:
        steps.append(what)
        if steps[-2:] == ["rename", "sync directory"]:
            raise OSError(errno.EIO, "refused")

    scene.before = before
    scene.faults.away = False
    with trio.fail_after(100):
        while "rename" not in steps:  # noqa: ASYNC110
            await trio.sleep(0.01)
    await trio.sleep(RETRY_FIRST_S * 0.8)  # what does not wait for the rename lands
    await scene.killed()
    await scene.drained()
    assert scene.on_pfs(b"a") == b"new"
    assert [scene.on_pfs(name) for name in (b"b", b"c")] == [None, None]


@scene(fsync="returned", memory=1 << 30)
async def test_an_open_beside_one_with_pages_is_not_served_by_the_kernel_for_the_sake_of_one_that_is_closed(
    scene: Scene,
) -> None:
    """EIO: the RELEASE of the writer before was late, and the kernel had refused to serve the second open."""
    opened = await scene.passed(b"a")
    await scene.fs.flush(opened.handle)
    scene.kernel.closed(opened)
    files, ino = scene.fs.files, opened.ino
    assert files.backing(await scene.fs.open(ino, os.O_RDWR)) is not None
    second = await scene.fs.open(ino, os.O_RDWR)
    files.keep_pages(second)
    assert files.backing(await scene.fs.open(ino, os.O_RDONLY)) is None
    await scene.fs.release(second)
    assert files.backing(await scene.fs.open(ino, os.O_RDONLY)) is not None


@scene(fsync="returned")
async def test_a_commit_file_whose_rename_could_not_be_noted_stays_until_the_next_is_ready(scene: Scene) -> None:
    """It had got its name on the PFS, an fsync of the directory failed, and meanwhile the next save had replaced it."""
    checkers, after = Checkers(scene.store, Saves()), {b"m": b"two"}
    checkers.saves.made[NAMES], checkers.saves.made[commit_file(9, after)] = {b"m": b"one"}, after
    checkers.kept.view = lambda: scene.life.catalogue.view
    await scene.mkdir(b"d")
    await scene.write(b"d/m", b"one")
    await scene.write(b"d/.metadata.tmp", NAMES)
    await scene.drained()
    steps: list[str] = []

    def before(what: str) -> None:
        checkers.commit_last(what)
        steps.append(what)
        if steps[-2:] == ["rename", "sync directory"] and steps.count("rename") == 1:
            raise OSError(errno.EIO, "refused")

    scene.before = before
    await scene.rename(b"d/.metadata.tmp", b"d/.metadata")
    with trio.fail_after(100):
        while "rename" not in steps:  # noqa: ASYNC110
            await trio.sleep(0.01)
    scene.faults.refused["create part"] = errno.EIO  # the next is not ready for a while
    handle = await scene.fs.open(await scene.ino(b"d/m"), os.O_WRONLY)
    await scene.fs.write(handle, 0, b"two")
    await scene.close(handle)
    await scene.write(b"d/.metadata.tmp", commit_file(9, after))
    await scene.rename(b"d/.metadata.tmp", b"d/.metadata")
    await trio.sleep(5)
    scene.faults.refused.clear()
    await scene.drained()
    checkers.commit_last("the end")
    assert checkers.kept.checked
    assert scene.on_pfs(b"d/.metadata") == commit_file(9, after)


@scene(fsync="returned")
async def test_a_file_that_is_removed_while_it_is_open_and_memory_refuses_lands_its_removal(scene: Scene) -> None:
    """unlink(2) gave ENOSPC, though it was done; and the drain never heard of it."""
    await scene.write(b"a", b"")
    await scene.drained()
    handle = await scene.fs.open(await scene.ino(b"a"), os.O_WRONLY)

    def refuse(what: str) -> None:
        raise OSError(errno.ENOSPC, what)

    scene.life.staging.on_memory = refuse
    await scene.unlink(b"a")
    await scene.drained()
    assert scene.on_pfs(b"a") is None
    await scene.fs.release(handle)


@scene(fsync="returned")
async def test_a_commit_file_that_the_pfs_denies_for_a_while_is_hidden_and_not_removed(scene: Scene) -> None:
    """At the second try it was taken for one that had been hidden before."""
    await scene.mkdir(b"d")
    await scene.write(b"d/m", b"one")
    await scene.write(b"d/.metadata", NAMES)
    await scene.drained()
    scene.faults.hidden.add(b"d")
    await scene.unlink(b"d/m")
    await trio.sleep(60)
    assert scene.on_pfs(b"d/.metadata") == NAMES
    scene.faults.hidden = {b"d/.metadata"}
    await trio.sleep(60)
    assert scene.on_pfs(b"d/.metadata") == NAMES
    scene.faults.hidden.clear()
    await scene.drained()
    assert scene.on_pfs(b"d/.metadata") is None
    assert [ino.data for ino in scene.store.held.entries.values()] == [NAMES]


@scene(fsync="pfs")
async def test_what_an_fsync_still_copies_when_it_lands_does_not_stay(scene: Scene) -> None:
    """After a daemon's death the drain did not know yet that a writer had the file open, and was faster."""
    await scene.write(b"f", b"bytes")
    await scene.drained()
    fid = await scene.ino(b"f")
    content, inode = scene.life.node.catalogue.view.generation(fid), scene.life.node.catalogue.view.inode(fid)
    assert content is not None
    op = Op(OpKind.PUT, b"f", "n0", fid, content.gen, size=5, stage=content.stage)
    await scene.life.parts.drainer.ready.prepare(op, inode, content.tree)
    await trio.sleep(1)
    assert scene.left() == []
    assert scene.on_pfs(b"f") == b"bytes"


@scene(fsync="returned")
async def test_what_another_node_has_made_ready_lands_though_this_one_had_begun_with_it_before(scene: Scene) -> None:
    """A node was lost, came back, and was lost again: who took over twice knew its own state of the first time."""
    await scene.write(b"before", b"")
    await scene.drained()
    fail = [True]

    def before(step: str) -> None:
        if step == "land" and fail[0]:
            raise OSError(errno.EIO, "not yet")

    scene.before = before
    await scene.write(b"f", b"bytes")
    await trio.sleep(1)
    drainer, catalogue = scene.life.parts.drainer, scene.life.node.catalogue
    ((key, op),) = [(key, op) for key, op in drainer.own_pending() if op.kind == OpKind.PUT]
    assert scene.left() != []
    drainer._turns.state(key, ready=False).ready = False
    await catalogue.mutate(lambda tx: tx.put(key, msgspec.structs.replace(op, ready=True)))
    scene.life.staging.remove(op.stage)  # this node is not the one that has the bytes
    fail[0] = False
    await scene.drained()
    assert scene.on_pfs(b"f") == b"bytes"
