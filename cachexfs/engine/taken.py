"""A node that counted as lost and was not: a survivor has published what its last fsync had made safe.

Role: the staged file that was fsynced may have newer bytes by now, or get them, in place of those that are published
under its name (``Generation.taken``). Here the newest bytes part from what is published: they get a stage key of their
own, and are what applications go on with, based on what the survivor has published. Used by ``recover``: when a daemon
adopts what it finds, and when one that goes on hears of it.

Concurrency: nothing is published of a file while its stage key changes (``publish_lock``), nor exchanged
(``change_lock``).
"""

from __future__ import annotations

import os

from cachexfs.core import publication
from cachexfs.core.records import Generation
from cachexfs.engine.files import Files
from cachexfs.engine.node import Node
from cachexfs.engine.passing import was_passed


def taken(node: Node, fid: int, stage: str) -> Generation | None:
    """The generation that others have published of this node's staged file, if it is the newest one."""
    generation = node.catalogue.view.generation(fid)
    ours = generation is not None and generation.stage == stage and generation.taken == node.name
    return generation if ours else None


async def part_staged(node: Node, files: Files, stage: str, fid: int, *, is_open: bool) -> str:
    """Under which key what a daemon has left under ``stage`` is staged from now on."""
    generation = taken(node, fid, stage)
    if generation is None or (node.staging.is_spilled(stage) and not is_open):  # NVMe may give others than were written
        return stage
    fd = node.staging.open_file(stage)
    try:
        is_changing = is_open and was_passed(fd)  # by the kernel, at any time
        if not is_changing and os.fstat(fd).st_size >= generation.size:
            _, tree, _ = await node.digests(fd, generation.size)
            if tree == generation.tree:
                return stage
    finally:
        os.close(fd)
    parted = files.source.new_stage(fid, generation.gen + 1)
    node.staging.rename(stage, parted)
    if is_open:
        ctx = node.ctx()
        await node.catalogue.mutate(lambda tx: publication.begin_change(tx, ctx, fid))
    return parted


async def part_open(node: Node, files: Files, fid: int) -> None:
    """The same of a file that applications are writing. Raises ``CatalogueUnavailableError``."""
    vnode = files.known(fid)
    if vnode is None or vnode.removed or taken(node, fid, vnode.stage) is None:
        return
    ctx = node.ctx()
    await node.catalogue.mutate(lambda tx: publication.begin_change(tx, ctx, fid))
    async with vnode.publish_lock, vnode.change_lock:
        generation = taken(node, fid, vnode.stage)
        if generation is None or not node.staging.has(vnode.stage):
            return
        parted = files.source.new_stage(fid, generation.gen + 1)
        node.staging.rename(vnode.stage, parted)
        vnode.stage, vnode.sealed, vnode.synced = parted, 0, None
        vnode.content = generation
