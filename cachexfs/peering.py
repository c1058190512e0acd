"""What a daemon is to the other nodes of its job: a server of its copies, a client of theirs, a reader of their clock.

Role: daemon layer; called at the start of a mount with several nodes. Concurrency: the server and ``keep_clock`` are
tasks of the caller's nursery; ``StagedCopies`` is synchronous.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict

import trio

from cachexfs.adapters.clock import ReferenceClock
from cachexfs.adapters.file_digest import digest_file
from cachexfs.adapters.peer_client import PeerClients
from cachexfs.adapters.peer_server import PeerServer
from cachexfs.adapters.replica_store import ReplicaStore
from cachexfs.adapters.staging import Staging
from cachexfs.catalogues import read_secret
from cachexfs.core import manifest as manifests
from cachexfs.engine.node import Node
from cachexfs.errors import CacheXError, PeerError, UsageError

log = logging.getLogger(__name__)

CLOCK_INTERVAL_S = 30.0
CLOCK_ANSWER_S = 5.0
MANIFESTS_MAX = 1024


class StagedCopies:
    """Contents in this node's memory, as its peers read them."""

    def __init__(self, node: Node, staging: Staging) -> None:
        self._node = node
        self._staging = staging
        self._manifests: OrderedDict[str, bytes] = OrderedDict()

    def open(self, stage: str) -> tuple[int, int] | None:
        """(descriptor, which the caller closes; size in bytes) of a staged content; None: it is not here."""
        if not self._node.staged(stage):
            return None
        fd = self._staging.open_file(stage)
        return fd, os.fstat(fd).st_size

    async def manifest(self, stage: str) -> bytes | None:
        """Manifest of a file's published content, computed at the first question and kept; None: it is not here."""
        if not self._node.staged(stage):
            return None
        fid, view = int(stage.partition(".")[0], 16), self._node.catalogue.view
        content, inode = view.generation(fid), view.inode(fid)
        if content is None or inode is None or content.stage != stage:
            return None
        key = f"{stage}-{content.size}"
        if key not in self._manifests:
            fd = self._staging.open_file(stage)
            try:
                digests = await trio.to_thread.run_sync(digest_file, fd, content.size)
            finally:
                os.close(fd)
            manifest = manifests.Manifest(
                fid=fid, path=b"", stage=stage, size=content.size, digest=digests[0], tree=digests[1],
                blocks=b"".join(digests[2]), mode=inode.mode, uid=inode.uid, gid=inode.gid, mtime_ns=inode.mtime_ns,
                atime_ns=inode.atime_ns, gen=content.gen, origin=content.origin, revision=0, published=True,
            )  # fmt: skip
            self._manifests[key] = manifests.encode(manifest)
            while len(self._manifests) > MANIFESTS_MAX:
                self._manifests.popitem(last=False)
        return self._manifests[key]


async def start_peers(
    services: trio.Nursery, node: Node, staging: Staging, store: ReplicaStore, clock: ReferenceClock
) -> None:
    """Serve this node's copies to the others, as a task of ``services``, and reach theirs through ``node.peers``.

    Raises ``UsageError`` (secret, an address that cannot be listened on).
    """
    options = node.options
    addresses = {n.name: (n.host, n.port) for n in options.nodes}

    def resolve(name: str) -> tuple[str, int]:
        if name not in addresses:
            raise PeerError(f"{name} is not a node of this job")
        return addresses[name]

    secret, staged = read_secret(options), StagedCopies(node, staging)
    server = PeerServer(
        node=options.node, job=options.job, secret=secret, store=store, is_member=lambda name: name in addresses,
        open_copy=staged.open, memory_manifest=staged.manifest, now_s=clock.now_s,
    )  # fmt: skip
    own_host, own_port = addresses[options.node]
    host, port = options.listen_host or own_host, options.listen_port or own_port
    try:
        await services.start(server.serve, host, port)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with -o listen=") from error
    node.peers = PeerClients(node=options.node, job=options.job, secret=secret, resolve=resolve)


async def keep_clock(node: Node, clock: ReferenceClock) -> None:
    """Keep the offset to the reference node's clock, until cancelled."""
    while True:
        job = node.catalogue.view.job
        if job is not None and node.peers is not None and job.clock_node != node.name:
            try:
                with trio.fail_after(CLOCK_ANSWER_S):
                    theirs_s = await node.peers.ping(job.clock_node)
                    clock.offset_s += theirs_s - clock.now_s()
            except (CacheXError, OSError, trio.TooSlowError) as error:
                log.debug("the reference clock of %s does not answer: %s", job.clock_node, error)
        await trio.sleep(CLOCK_INTERVAL_S)
