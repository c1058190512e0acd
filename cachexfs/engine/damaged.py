"""This node's copies that turn out to be damaged or gone: which one it is, and what falls with it.

Role: asked before bytes are used whose digests nobody has checked in this life: after a restart, from NVMe. What is in
memory and what is on NVMe are two copies: one that is bad takes no claim from the other. A copy that was found bad is
not used any more (``Node.damaged``), but kept until it is replaced: its good blocks may be all that is left.

Concurrency: a look reads a file, in a thread where it is large; changing the catalogue is one mutation.
"""

from __future__ import annotations

import logging
import os

from cachexfs.core import publication
from cachexfs.core.records import Generation
from cachexfs.core.stages import parse_stage
from cachexfs.engine.node import Node
from cachexfs.errors import CorruptError

log = logging.getLogger(__name__)


async def check_stage(node: Node, stage: str) -> bool:
    """Whether this node has bytes of a file's current generation that are what its digest says (True: or unknown).

    The claims of its copies that are not fall.
    """
    fid, _ = parse_stage(stage)
    content = node.catalogue.view.generation(fid)
    if content is None or content.stage != stage:
        return True
    while (path := node.local_path(stage, content.size)) is not None:
        if await is_whole(node, path, content.size, content.tree):
            node.unverified.discard(stage)
            return True
        await drop(node, fid, content, path)
    node.unverified.discard(stage)
    await drop(node, fid, content, None)
    return False


async def is_whole(node: Node, path: str, size: int, tree: bytes) -> bool:
    """Whether a file of this node has a content's bytes. An error of the disk that it lies on says that it has not.

    ``tree``: their digest; empty, where that is not known: then whether its disk can read it is all that is asked.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return (await node.digests(fd, size))[1] == tree or not tree
    except CorruptError as error:  # it is shorter: a writer that the kernel serves may cut what has no digest yet
        log.warning("%s: %s", path, error)
        return not tree
    except OSError as error:
        log.warning("%s: %s", path, error)
        return False
    finally:
        os.close(fd)


async def drop(node: Node, fid: int, content: Generation, path: str | None) -> None:
    """The copy at ``path`` is bad; None: no good copy is left here. What claims it falls."""
    memory = node.staging.store
    stores = [memory] + ([node.replicas.store] if node.replicas is not None else [])
    why = f"the staged file on node {node.name} is gone"
    if path is not None:
        store = memory if path == node.staging.path(content.stage) else stores[-1]
        node.damaged.add((content.stage, store))
        stores = [store]
    if any(stage == content.stage for stage, _ in node.damaged):
        why = f"the bytes on node {node.name} are damaged: their digest is wrong"
    ctx, gone = node.ctx(), [(node.name, store) for store in stores]
    await node.catalogue.mutate(lambda tx: publication.drop_copies(tx, ctx, fid, content.gen, gone, why))
    log.error("%s: %s", content.stage, why)
