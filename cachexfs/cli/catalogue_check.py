"""Which members of the catalogue answer: for a mount of several nodes that does not get going.

Role: called by ``cachexfs mount`` when the daemon has not answered, or says that the catalogue has not. Only looks
whether somebody listens; names are looked up in a child, for that may hang. No concurrency.
"""

from __future__ import annotations

import errno
import os
import select
import shlex
import socket
import time
from collections.abc import Sequence
from functools import partial

from cachexfs.cli.child import run_in_child
from cachexfs.config import MountOptions, NodeAddress

LOOK_S = 1.0
CHILD_S = 0.5  # to begin and to answer
CLIENT_PORT = 1  # after the node's own: see ``catalogues``


def without_majority(options: MountOptions) -> str:
    """That the catalogue has no majority, with the members that do not answer, and what to do; "" if it has one."""
    members = options.catalogue_nodes
    if not members:
        return ""
    try:
        silent = run_in_child(partial(_silent, members), LOOK_S + CHILD_S)
    except (OSError, TimeoutError):
        return ""
    if len(silent) < len(members) // 2 + 1 and (len(members) > 2 or not silent):
        return ""
    missing = ", ".join(f"{node.name} ({node.host})" for node in members if node.name in silent)
    there = "mount there, too (a mount waits --timeout for the others)"
    for_good = ""
    if options.nvme_directory is not None:
        command = ["cachexfs", "recover", os.path.dirname(options.nvme_directory), "--to", options.pfs]
        for_good = (
            f"; if they do not come back, '{shlex.join(command)}' brings the replicas that this node holds to the PFS"
        )
    return (
        f"no majority of the catalogue's members ({', '.join(node.name for node in members)}) answers: nobody listens "
        f"on {missing}: {there}{for_good}"
    )


# ---- in the child
def _silent(members: Sequence[NodeAddress]) -> list[str]:
    """Names of the members to which no connection can be made within ``LOOK_S``."""
    open_sockets: dict[socket.socket, str] = {}
    for node in members:
        try:
            found = socket.getaddrinfo(node.host, node.port + CLIENT_PORT, type=socket.SOCK_STREAM)[0]
        except OSError:
            continue
        probe = socket.socket(found[0], found[1], found[2])
        probe.setblocking(False)
        if probe.connect_ex(found[4]) in (0, errno.EINPROGRESS):
            open_sockets[probe] = node.name
    end_s, answered = time.monotonic() + LOOK_S, set[str]()
    while open_sockets and time.monotonic() < end_s:
        _, ready, _ = select.select([], list(open_sockets), [], max(end_s - time.monotonic(), 0))
        for probe in ready:
            name = open_sockets.pop(probe)
            if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                answered.add(name)
    return [node.name for node in members if node.name not in answered]
