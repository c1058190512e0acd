"""Which catalogue a mount uses, and its start: built in for one node, etcd for several.

Role: daemon layer. Up to three nodes run an etcd member each, in different failure domains; the member outlives the
daemon and is adopted by the next one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from cachexfs.adapters.catalogue_builtin import BuiltinCatalogue
from cachexfs.adapters.catalogue_etcd import EtcdCatalogue
from cachexfs.adapters.etcd_client import Endpoint
from cachexfs.adapters.etcd_server import TXN_OPS_MAX, EtcdServer, Member
from cachexfs.adapters.job_tls import JobAuthority
from cachexfs.config import MountOptions
from cachexfs.core.records import Life
from cachexfs.engine.interfaces import Catalogue
from cachexfs.errors import UsageError

log = logging.getLogger(__name__)


async def start_catalogue(
    options: MountOptions, staging: Path, services: trio.Nursery, on_member: Callable[[EtcdServer], None],
    *, follows: bool = False,
) -> Catalogue:  # fmt: skip
    """The catalogue of this mount, followed by a task of ``services``.

    ``on_member`` gets this node's etcd member, if it has one, before it is started. ``follows``: another daemon has
    served this mount, so this one goes on although NVMe takes no writes any more: without a member of its own.
    Raises ``UsageError`` (secret, no etcd, a second daemon), ``CatalogueUnavailableError`` when no majority answers.
    """
    if options.alone:
        builtin = BuiltinCatalogue(staging)
        await services.start(builtin.run)
        return builtin
    secret = read_secret(options)
    assert options.nvme_directory is not None
    own = next(n for n in options.nodes if n.name == options.node)
    directory = Path(options.nvme_directory)
    authority = JobAuthority(secret, options.job)
    try:
        tls = authority.issue(directory / "tls", options.node, [own.host])
    except OSError as error:
        if not follows:
            raise
        log.error("NVMe takes no writes: %s", error)
        tls = authority.issue(staging / "tls", options.node, [own.host])
    if options.catalogue:
        endpoints = [_endpoint(text) for text in options.catalogue]
        context, operations = None, 128
    else:
        members = [Member(n.name, n.host, n.port + 1, n.port + 2) for n in options.catalogue_nodes]
        if options.node in [m.name for m in members]:
            server = EtcdServer(members, options.node, directory / "etcd", options.job, tls)
            on_member(server)
            run = partial(server.run, is_needed=not follows)
            await services.start(run, lambda text: log.error("%s", text))
        turn = [n.name for n in options.nodes].index(options.node) % len(members)
        members = sorted(members[turn:] + members[:turn], key=lambda m: m.name != options.node)
        endpoints = [Endpoint(m.host, m.client_port) for m in members]
        context, operations = tls.client_context(), TXN_OPS_MAX
    etcd = EtcdCatalogue(
        endpoints, options.job, options.node, life=Life(options.node, os.urandom(8).hex()), tls=context,
        outage_limit_s=options.fsync_timeout_s, node_timeout_s=options.node_timeout_s, txn_ops_max=operations,
    )  # fmt: skip
    await services.start(etcd.run)
    return etcd


def read_secret(options: MountOptions) -> bytes:
    """The job's shared secret. Raises ``UsageError``."""
    if options.secret_file is None:
        raise UsageError("several nodes need a shared secret: -o secret=FILE")
    try:
        return Path(options.secret_file).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"secret file {options.secret_file}: {error.strerror}") from error


def _endpoint(text: str) -> Endpoint:
    host, _, port = text.removeprefix("https://").removeprefix("http://").rpartition(":")
    return Endpoint(host.strip("[]"), int(port))
