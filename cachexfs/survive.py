"""A survivor of two nodes goes on alone, once somebody confirms that the other one will not come back.

Role: what the control request ``dead`` does; part of the daemon. Without a majority etcd cannot tell a lost node from
one behind a broken link; if both went on, there would be two truths. So a person, or the launcher, says it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import trio

from cachexfs.adapters.etcd_server import EtcdServer
from cachexfs.core.records import life_key
from cachexfs.core.transaction import Tx
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError, CannotTellError, UsageError

log = logging.getLogger(__name__)

PING_S = 3.0
MAJORITY_S = 5.0
RESTART_S = 40.0


async def go_on_without(
    node: Node, etcd: EtcdServer | None, members: Collection[str], dead: Collection[str]
) -> tuple[bool, str]:
    """(whether the catalogue was restarted with this member alone, what that means).

    ``members``: nodes that have a member of the catalogue. Raises ``UsageError`` when one of ``dead`` answers, is not
    in the job, or when more nodes must be confirmed dead; ``CannotTellError`` when the restart fails.
    """
    names = {address.name for address in node.options.nodes}
    for name in dead:
        if name not in names:
            raise UsageError(f"{name} is no node of job {node.options.job}: these are {', '.join(sorted(names))}")
        if name == node.name or await _answers(node, name):
            raise UsageError(f"{name} answers, so it is not dead: end its daemon first")
    if await _decides(node):
        lost = ", ".join(dead)
        return False, f"nothing to do: the catalogue has a majority without {lost}, and goes on"
    if etcd is None:
        raise UsageError(f"this node has no member of the catalogue: run this on one of {', '.join(members)}")
    rest = sorted(set(members) - {node.name} - set(dead))
    if rest:
        raise UsageError(f"{', '.join(rest)} must be confirmed dead, too (--dead), or come back: each has a member")
    log.warning("%s confirmed dead: the catalogue goes on with this member alone", ", ".join(dead))
    await etcd.start(force_new_cluster=True)
    with trio.move_on_after(RESTART_S):
        while not await _decides(node):  # noqa: ASYNC110 (etcd's election has no event here)
            await trio.sleep(0.2)
        await _bury(node, dead)
        gone = ", ".join(dead)
        return True, f"the catalogue goes on with {node.name} alone; {gone} may join again only as a new member"
    raise CannotTellError(
        f"the catalogue does not answer after its restart: {etcd.last_words()} (log: {etcd.log_path})"
    )


async def _bury(node: Node, dead: Collection[str]) -> None:
    """No claim rests on the dead from now on: their leases would hold for a while after the restart."""

    def bury(tx: Tx) -> None:
        for name in dead:
            if tx.read(life_key(name)) is not None:
                tx.delete(life_key(name))

    await node.catalogue.mutate(bury)


async def _answers(node: Node, name: str) -> bool:
    if node.peers is None:
        return False
    try:
        with trio.fail_after(PING_S):
            await node.peers.ping(name)
    except (CacheXError, OSError, trio.TooSlowError):
        return False
    return True


async def _decides(node: Node) -> bool:
    """Whether the catalogue answers questions now."""
    try:
        with trio.fail_after(MAJORITY_S):
            await node.catalogue.barrier()
    except (CacheXError, trio.TooSlowError):
        return False
    return True
