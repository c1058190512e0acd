"""How a node of several leaves: it serves the others until they are done, and who goes last settles what the rest left.

Role: daemon layer, called by ``control_umount`` and at the daemon's end. A node that had to leave with its drain undone
is told, through the PFS, that it is done by now (``ended``); etcd members that have stayed for the others end with
them. Concurrency: of the nodes that end together one settles, the first by name.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import msgspec
import trio

from cachexfs import ended
from cachexfs.adapters.etcd_server import EtcdServer
from cachexfs.control_umount import Others
from cachexfs.core.records import Node as NodeRecord
from cachexfs.core.records import node_key
from cachexfs.core.transaction import Tx
from cachexfs.engine.drain_files import STALL_S
from cachexfs.engine.node import Node
from cachexfs.engine.pfs_interface import PfsAttrs
from cachexfs.errors import CacheXError

log = logging.getLogger(__name__)

SETTLE_S = 4.0  # an umount whose daemon says nothing for longer is given up


def others_of(node: Node, etcd: EtcdServer | None, members: Collection[str]) -> Others:
    """``members``: nodes that have a member of the catalogue, of which ``etcd`` is this node's."""
    return Others(
        lambda deadline_s: _leave(node, deadline_s), lambda: settle_the_others(node, etcd),
        lambda: _needed_by(node, etcd, members),
    )  # fmt: skip


async def _leave(node: Node, deadline_s: float | None) -> AsyncIterator[None]:
    """This node is done: go on serving the others until all of them are."""

    def mark(tx: Tx) -> None:
        record = tx.read(node_key(node.name))
        if isinstance(record, NodeRecord):
            tx.put(node_key(node.name), msgspec.structs.replace(record, leaving=True))

    await node.catalogue.mutate(mark)
    view = node.catalogue.view
    while deadline_s is None or trio.current_time() < deadline_s:
        if all(record.leaving for name, record in view.nodes.items() if view.is_live(name)):
            return
        yield
        await trio.sleep(0.1)


async def leave_token(node: Node, staging: Path, *, is_done: bool) -> None:
    """This node ends, and something of it stays: staging, or if it ``is_done`` its etcd member's data on NVMe. By a
    token the others can tell it later that they need that no more."""
    nvme = node.options.nvme_directory
    kept = Path(nvme) if is_done and nvme is not None else staging
    token = secrets.token_hex(16)

    def end(tx: Tx) -> None:
        record = tx.read(node_key(node.name))
        if isinstance(record, NodeRecord):
            tx.put(node_key(node.name), msgspec.structs.replace(record, ended=token))

    try:
        await node.catalogue.mutate(end)
        ended.leave(kept, token)
    except (CacheXError, OSError) as error:
        log.warning("the others cannot tell this node later what they have done: %s", error)


async def settle_the_others(node: Node, etcd: EtcdServer | None) -> None:
    """Do so, if everything of the job is on the PFS and this is the node to do it. What fails is logged: the others'
    data is safe all the same, and their staging goes on saying that it waits."""
    view = node.catalogue.view
    live = [name for name in view.nodes if view.is_live(name)]
    gone = [record for record in view.nodes.values() if not view.is_live(record.name)]
    is_done = view.op_count == 0 and not any(inode.writing for _, inode in view.inodes())
    if not gone or not is_done or node.name != min(live, default=node.name):
        return
    with trio.move_on_after(SETTLE_S):
        try:
            told = [record.name for record in gone if await _mark(node, record)]
            if etcd is not None:
                await etcd.drop(told)
        except (CacheXError, OSError, trio.TooSlowError) as error:
            log.warning("nodes that went before are not told that all is on the PFS: %s", error)


async def _mark(node: Node, record: NodeRecord) -> bool:
    """Say on the PFS that what a node had left is there. False: it has not left in order, and may know better."""
    if not ended.is_token(record.ended) or node.pfs is None:
        return False
    now_ns, hidden = node.clock.now_ns(), f"ended-{record.ended}"
    attrs = PfsAttrs(0o600, None, None, now_ns, now_ns)
    await node.pfs.prepare("/dev/null", 0, hidden, attrs, b"", STALL_S)
    await node.pfs.land(hidden, ended.mark_of(record.ended), attrs, STALL_S)
    log.info("what %s had left behind is on the PFS: it is told so", record.name)
    return True


def _needed_by(node: Node, etcd: EtcdServer | None, members: Collection[str]) -> str:
    """A sentence for who unmounts this node before the others; "" when nobody needs its etcd member any more."""
    view = node.catalogue.view
    others = [n for n, record in view.nodes.items() if n != node.name and view.is_live(n) and not record.leaving]
    if etcd is None or etcd.pid is None or not others:
        return ""
    names = ", ".join(sorted(others))
    by_hand = "" if set(others) & set(members) else f"; end it after them: kill {etcd.pid}"
    return (
        f"left before {names}: this node's etcd member (process {etcd.pid}) stays for them"
        + (by_hand or f", and ends by itself when the last of them is unmounted (else: kill {etcd.pid})")
    )  # fmt: skip
