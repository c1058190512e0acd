"""After a death: adopting this node's own bytes, and taking over from a lost node.

Role: ``adopt`` runs once before the mount answers. Staged files that a generation refers to stay; newer ones were
being written when the daemon died and are published as if closed; the rest is superseded. ``Takeover`` publishes
what an fsync had made safe on a node that is lost; re-protection and drains follow from the catalogue alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import msgspec
import trio

from cachexfs.core import manifest as manifests
from cachexfs.core import publication
from cachexfs.core import records as rec
from cachexfs.core.manifest import Manifest
from cachexfs.core.order import lists_members
from cachexfs.core.publication import Content
from cachexfs.core.records import Copy, Inode, Life
from cachexfs.core.replica import Applied
from cachexfs.core.routes import PARTNER
from cachexfs.core.stages import parse_stage
from cachexfs.core.transaction import Tx
from cachexfs.engine.damaged import check_stage
from cachexfs.engine.files import Files
from cachexfs.engine.hold import Keeper
from cachexfs.engine.node import Node
from cachexfs.engine.passing import was_passed
from cachexfs.engine.stamps import kept_time, look
from cachexfs.engine.taken import part_open, part_staged
from cachexfs.engine.vnode import PLAIN_MODE
from cachexfs.engine.writing import file_bytes_max
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)

VERIFY_AFTER_S = 1.0  # an application that waited for this daemon is not to wait for the digests, too

RETRY_S = 2.0  # of a takeover that has failed
PEER_DEADLINE_S = 5.0


async def adopt(
    node: Node,
    keeper: Keeper,
    files: Files,
    open_files: Mapping[int, int],
    set_aside: Callable[[str], None] | None = None,
) -> None:
    """Take over the staging directory of this node's previous life.

    ``open_files`` (file id -> inode number) are those that applications still have open through a supervisor: they
    go on with their unpublished bytes. ``set_aside`` is given where the catalogue may have forgotten what it knew: what
    has no name then is not superseded, and is kept; and a commit file that is published only now may have been closed
    before anything beside it was. What is not here any more is not claimed any more.
    """
    stages = sorted(node.staging.stages(), key=_age, reverse=True)
    if set_aside is not None:
        stages.sort(key=lambda stage: not _is_commit(node, stage))
    for found in stages:
        stage = found
        if not node.staging.has(stage):
            continue  # superseded by what was adopted before it
        try:
            fid, gen = parse_stage(stage)
        except ValueError:
            log.warning("staging has a file that is not ours: %r; left alone", stage)
            continue
        if not gen:
            node.staging.remove(stage)  # the copy of a content that was not finished
            continue
        stage = await part_staged(node, files, stage, fid, is_open=fid in open_files)
        gen = parse_stage(stage)[1]
        node.unverified.add(stage)
        if fid in open_files and files.known(fid) is None and _in_progress(node, stage, fid, gen):
            files.resume(fid, open_files[fid], stage, node.catalogue.view.generation(fid))
            if was_passed(node.staging.path(stage)):
                node.unverified.discard(stage)  # the kernel changes it: the digest of what was published tells nothing
            continue
        resumed = files.known(fid) is not None  # with its newest bytes: what those before them have, they have
        await _adopt_one(node, keeper, stage, fid, gen, set_aside, resumed=resumed)
    await _drop_absent(node, files)
    for key, entry in list(node.catalogue.view.items()):
        record = entry.record if key.startswith((b"g/", b"i/")) else None
        if isinstance(record, rec.Generation) and int(key[2:], 16) in open_files:
            continue
        if isinstance(record, Inode) and (vnode := files.known(int(key[2:], 16))) is not None and vnode.dirty:
            continue  # goes on writing; a note without bytes is a leftover, and a replayed write makes it anew
        if isinstance(record, rec.Generation) and record.open and record.origin == node.name:
            fid, ctx = int(key[2:], 16), node.ctx()
            await node.catalogue.mutate(lambda tx: publication.close_created(tx, ctx, fid))  # noqa: B023
        elif isinstance(record, Inode) and record.writing == node.name:
            fid = int(key[2:], 16)
            if record.synced is not None and not node.staging.has(record.synced.stage):
                await _publish_synced(node, fid, record)  # this node's memory is gone, the partner's copy is not
            await node.catalogue.mutate(_clear_writing(fid, node.name))


async def _drop_absent(node: Node, files: Files) -> None:
    """Copies that this node has by the catalogue, and that somebody has removed: no claim rests on them."""
    view = node.catalogue.view
    for fid, inode in list(view.inodes()):
        claimed = {(c.node, c.store) for c in inode.copies if c.node == node.name}
        content = view.generation(fid)
        if not claimed or content is None or content.gen != inode.gen:
            continue
        if (vnode := files.known(fid)) is not None and vnode.dirty and vnode.stage == content.stage:
            continue  # resumed: the kernel's writer has cut what was published, in place
        gone = claimed - {(c.node, c.store) for c in node.own_copies(content.stage, content.size)}
        why = f"the staged file on node {node.name} is gone"
        if not gone:
            continue
        if node.on_pfs(fid, inode):  # the last thing of an eviction, which was not told any more
            await node.catalogue.mutate(lambda tx: publication.forget_copies(tx, fid, content.gen, gone))  # noqa: B023
            continue
        ctx = node.ctx()
        await node.catalogue.mutate(lambda tx: publication.drop_copies(tx, ctx, fid, content.gen, gone, why))  # noqa: B023
        log.error("%s: %s", content.stage, why)


async def verify(node: Node) -> None:
    """Check what was adopted against its digests, in applications' pauses; a damaged copy is not claimed any more."""
    await trio.sleep(VERIFY_AFTER_S)
    for stage in sorted(node.unverified):
        await node.foreground.pause()
        try:
            if stage in node.unverified and node.staging.has(stage):
                await check_stage(node, stage)
        except (CacheXError, OSError) as error:
            log.warning("checking %s: %s", stage, error)
        if not any(op.stage == stage for _, op in node.catalogue.view.ops_of(parse_stage(stage)[0])):
            node.unverified.discard(stage)  # else its drain looks at what exactly it lands


def _age(stage: str) -> int:
    """The generation in a stage key: the newest content of a file is looked at first."""
    try:
        return parse_stage(stage)[1]
    except ValueError:
        return -1


def _is_commit(node: Node, stage: str) -> bool:
    """Whether a staged file is a commit file that lists its members."""
    try:
        names = node.catalogue.view.names_of(parse_stage(stage)[0])
    except ValueError:
        return False
    return any(lists_members(name) for _, name in names)


def _in_progress(node: Node, stage: str, fid: int, gen: int) -> bool:
    """Whether a staged file has bytes that were not published, or belongs to a file without a name."""
    generation = node.catalogue.view.generation(fid)
    if generation is None:
        return True
    if generation.stage == stage:
        return node.staging.size(stage) > generation.size or was_passed(node.staging.path(stage))
    return gen > generation.gen


async def _adopt_one(
    node: Node,
    keeper: Keeper,
    stage: str,
    fid: int,
    gen: int,
    set_aside: Callable[[str], None] | None,
    *,
    resumed: bool,
) -> None:
    generation = node.catalogue.view.generation(fid)
    inode = node.catalogue.view.inode(fid)
    size = node.staging.size(stage)
    if generation is not None and inode is not None:
        passed = generation.stage == stage and was_passed(node.staging.path(stage))
        if generation.stage == stage and size < generation.size and not passed:
            gone = {(node.name, node.staging.store)}
            ctx = node.ctx()
            why = f"the staged file on node {node.name} is damaged: {size} of {generation.size} bytes"
            await node.catalogue.mutate(lambda tx: publication.drop_copies(tx, ctx, fid, generation.gen, gone, why))
            log.error("%s: %s", stage, why)
            return
        if generation.stage == stage and not generation.tree:
            await _complete(node, stage, fid, generation, passed=passed)
        newer = size > generation.size or passed if generation.stage == stage else gen > generation.gen
        newer = newer and not resumed
        if newer and size > file_bytes_max(node):
            log.error("%s: not published: %d bytes are more than staging may hold", stage, size)
            return
        if newer:
            forgotten = set_aside is not None and _is_commit(node, stage)
            await _publish(node, stage, fid, generation.gen, size, torn=passed, stale=forgotten)
            return
    if set_aside is not None and generation is None and size:
        keeper.forgotten[stage] = set_aside
    if not keeper.referenced(stage):
        keeper.forgotten.pop(stage, node.staging.remove)(stage)


async def _complete(node: Node, stage: str, fid: int, generation: rec.Generation, *, passed: bool) -> None:
    """The daemon died between a publication and its digests. Those of what a passed writer has changed since are not
    known any more."""
    fd = node.staging.open_file(stage)
    try:
        if passed and look(fd) != (generation.size, generation.stamp_ns):
            return
        digest, tree, _ = await node.digests(fd, generation.size)
    finally:
        os.close(fd)
    await node.catalogue.mutate(lambda tx: publication.complete(tx, fid, generation, digest, tree))


async def _publish(node: Node, stage: str, fid: int, base: int, size: int, *, torn: bool, stale: bool) -> None:
    fd = node.staging.open_file(stage)
    try:
        digest, tree, _ = await node.digests(fd, size)
        mtime_ns = kept_time(fd)
        os.fchmod(fd, PLAIN_MODE)
    finally:
        os.close(fd)
    before = node.catalogue.view.generation(fid)
    if before is not None and (before.stage, before.size, before.tree) == (stage, size, tree):
        return  # nobody has changed it since it was published
    copies = (Copy(node.name, node.staging.store, "memory", node.clock.now_s()),) if size else ()
    inode = node.catalogue.view.inode(fid)
    route = (inode.route if inode is not None else "") or PARTNER
    content = Content(size, digest, tree, stage if size else "", copies, mtime_ns, torn=torn, route=route)
    ctx = node.ctx()

    def publish(tx: Tx) -> rec.Generation | None:
        was = tx.inode(fid)
        found = publication.publish(tx, ctx, fid, base, content)
        if stale and found is not None and was is not None:
            publication.doubt(tx, fid, late=was.stale)
        return found

    published = await node.catalogue.mutate(publish)
    if published is None or not size:
        node.staging.remove(stage)
    else:
        log.info("published %s as its daemon's death left it: %d bytes", stage, size)


def _clear_writing(fid: int, name: str) -> Callable[[Tx], None]:
    def clear(tx: Tx) -> None:
        inode = tx.inode(fid)
        if inode is not None and inode.writing == name:
            tx.put(rec.inode_key(fid), msgspec.structs.replace(inode, writing="", synced=None))

    return clear


async def _as_held(node: Node, synced: rec.Synced) -> rec.Synced:
    """What an fsync has made safe, as live holders have it.

    A writer's node that died between a later fsync's commit and its note left newer bytes in place of those noted.
    """
    copies = tuple(copy for copy in synced.copies if node.valid(copy))
    for copy in copies:
        try:
            held = await _manifest(node, copy.node, synced.stage)
        except (CacheXError, OSError, trio.TooSlowError) as error:
            log.debug("the manifest of %s at %s: %s", synced.stage, copy.node, error)
            continue
        if held is not None and held.tree != synced.tree:
            return rec.Synced(synced.stage, held.size, held.digest, held.tree, (copy,))
    return msgspec.structs.replace(synced, copies=copies)


async def _manifest(node: Node, holder: str, stage: str) -> Manifest | None:
    if holder == node.name and node.replicas is not None:
        raw = node.replicas.manifest(stage)
        return manifests.decode(raw) if raw is not None else None
    if node.peers is None:
        return None
    with trio.fail_after(PEER_DEADLINE_S):
        return manifests.decode(await node.peers.manifest(holder, stage))


async def _publish_synced(node: Node, fid: int, inode: Inode) -> None:
    """Publish what an fsync has made safe on other nodes, of a writer whose memory is gone."""
    generation = node.catalogue.view.generation(fid)
    synced = await _as_held(node, inode.synced) if inode.synced is not None else None
    if synced is None or not synced.copies:
        return
    base = generation.gen if generation is not None else 0
    taken = inode.writing if inode.writing != node.name else ""
    content = Content(synced.size, synced.digest, synced.tree, synced.stage, synced.copies, inode.mtime_ns, taken=taken)
    ctx = node.ctx()
    await node.catalogue.mutate(lambda tx: publication.publish(tx, ctx, fid, base, content))


class Takeover:
    """Publishes, for a lost node, what its fsyncs had made safe; and goes on where others have done so for this one."""

    def __init__(self, node: Node, files: Files) -> None:
        self.node = node
        self.files = files
        self._dead: set[str] = set()
        self._taken: dict[int, None] = {}  # files of this node of which another one has published something
        self._wake = trio.Event()

    def notice(self, changes: Applied) -> None:
        """Catalogue listener: a lease has ended, perhaps this node's."""
        for key, old, new in changes:
            if isinstance(new, rec.Generation) and new.taken == self.node.name:
                self._taken[int(key[2:], 16)] = None
                self._wake.set()
            if isinstance(old, Life) and new is None:
                record = self.node.catalogue.view.nodes.get(old.node)
                if record is None or not record.leaving:
                    log.error("node %s is lost: no sign of life for %.0f s", old.node, self.node.options.node_timeout_s)
                self._dead.add(old.node)
                self._wake.set()
            elif isinstance(new, Life):
                self._dead.discard(new.node)

    async def run(self) -> None:
        """Take over, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_for_lost)
            await self._take_over_all()

    async def _look_for_lost(self) -> None:
        """A node may have been lost while no other had a daemon that could see it."""
        await trio.sleep(self.node.options.node_timeout_s)
        view = self.node.catalogue.view
        lost = {inode.writing for _, inode in view.inodes() if inode.writing and not self.node.live(inode.writing)}
        if not lost <= self._dead:
            self._dead |= lost
            self._wake.set()

    async def _take_over_all(self) -> None:
        while True:
            with trio.move_on_after(RETRY_S if self._dead or self._taken else float("inf")):
                await self._wake.wait()
            self._wake = trio.Event()
            await self._part_all()
            for name in list(self._dead):
                record = self.node.catalogue.view.nodes.get(name)
                if record is not None and record.leaving:
                    log.info("node %s has left", name)
                elif name in self._dead and not await self._take_over(name):
                    continue
                self._dead.discard(name)

    async def _part_all(self) -> None:
        for fid in list(self._taken):
            try:
                await part_open(self.node, self.files, fid)
            except CacheXError as error:
                log.warning("going on with %x, which others have published: %s", fid, error)
                continue
            del self._taken[fid]

    async def _take_over(self, dead: str) -> bool:
        """False: something could not be published now."""
        done = True
        for fid, record in list(self.node.catalogue.view.inodes()):
            if record.writing != dead:
                continue
            try:
                await self._one(fid, record, dead)
            except CacheXError as error:
                log.warning("taking over %x from %s: %s", fid, dead, error)
                done = False
        return done

    async def _one(self, fid: int, inode: Inode, dead: str) -> None:
        synced = inode.synced
        holders = sorted(c.node for c in synced.copies if self.node.valid(c)) if synced is not None else []
        if synced is None or not holders:
            if self.node.name == min(n for n in self.node.catalogue.view.nodes if self.node.live(n)):
                await self.node.catalogue.mutate(_clear_writing(fid, dead))
            return
        if holders[0] != self.node.name:
            return
        await _publish_synced(self.node, fid, inode)
        await self.node.catalogue.mutate(_clear_writing(fid, dead))
        log.info("published what the last fsync on the lost node %s had made safe of %x", dead, fid)
