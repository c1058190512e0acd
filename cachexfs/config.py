"""What a mount is told: ``MountOptions``, and where mounts are registered.

Role: base layer, importable from anywhere. ``cachexfs.cli.options`` makes the options from flags, environment and
file; the daemon gets them as JSON and believes them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import msgspec

from cachexfs import machine

#: What root registers its mounts in, and below, those that it makes for users.
RUNTIME_DIR_ROOT = "/run/cachexfs"
CATALOGUE_MEMBERS_MAX = 3
#: In a node's NVMe directory: the identity of the PFS directory that it has mounted.
PFS_ID = "pfs-id"


class NodeAddress(msgspec.Struct, frozen=True):
    """A node of the job: its name, the address and the TCP port of its daemon."""

    name: str
    host: str
    port: int


class MountOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one mount is told. Sizes in bytes, rates in bytes/s, times in seconds, paths absolute."""

    pfs: str
    mountpoint: str
    memory: int
    staging: str | None = None
    nvme: str | None = None
    spill: str = "auto"
    prefault: int = 0
    nice: int = 0
    nodes: tuple[NodeAddress, ...] = ()
    node: str = ""
    job: str = ""
    domains: dict[str, str] = {}
    replicas: int = 1
    listen_host: str = ""
    listen_port: int = 0
    secret_file: str | None = None
    catalogue: tuple[str, ...] = ()
    node_timeout_s: float = 10.0
    fsync: str = "partner"
    route: str = "auto"
    drain_workers: int = 4
    drain_bandwidth: int | None = None
    keep_fast: int = 2
    full_timeout_s: float = 45.0
    fsync_timeout_s: float = 45.0
    offline: bool = False
    pfs_type: str = "any"
    verify: bool = False
    hide_xattrs: bool = False
    passthrough: str = "auto"
    supervisor: str = "auto"
    unsupervised_why: str = ""  # why ``auto`` became ``off``
    allow_other: bool = False
    log_file: str | None = None
    log_level: str = "info"
    runtime_dir: str = ""
    uid: int | None = None  # of the daemon, where root mounts for another user
    gid: int | None = None
    words: tuple[str, ...] = ()  # what was given, as ``key=value``, from wherever: for messages

    @property
    def nvme_directory(self) -> str | None:
        """What this node of this job has on NVMe: ``<nvme>/<job>/<node>``; None when it is alone or has none."""
        if self.nvme is None or self.alone:
            return None
        return os.path.join(self.nvme, safe_name(self.job), safe_name(self.node))

    @property
    def spill_directory(self) -> str | None:
        """Where staged files go when memory is full; None for nowhere.

        By default on NVMe; without ``nvme`` in a directory of this user's own on the machine's disk, if that is one.
        """
        name = f"spill-{mount_id(self.mountpoint, self.node)}"
        if self.spill == "off":
            return None
        if self.spill != "auto":
            return os.path.join(self.spill, name)
        if self.nvme is not None:
            return os.path.join(self.nvme_directory or self.nvme, name)
        own = "/var/lib/cachexfs" if os.geteuid() == 0 else f"/var/tmp/cachexfs-{os.geteuid()}"
        usable = machine.is_on_disk(os.path.dirname(own)) and machine.is_own(own)
        return os.path.join(own, name) if usable else None

    @property
    def catalogue_nodes(self) -> list[NodeAddress]:
        """Nodes with a member of the catalogue: up to three, in different failure domains as far as there are several.

        Empty alone, and with an etcd of the site's own.
        """
        chosen: list[NodeAddress] = []
        seen: set[str] = set()
        for again in (False, True) if not self.alone and not self.catalogue else ():
            for node in self.nodes:
                domain = self.domains.get(node.name, node.name)
                if len(chosen) < CATALOGUE_MEMBERS_MAX and node not in chosen and (again or domain not in seen):
                    chosen.append(node)
                    seen.add(domain)
        return chosen

    @property
    def alone(self) -> bool:
        """One node, no partner."""
        return len(self.nodes) <= 1


def mount_id(mountpoint: str, node: str) -> str:
    """What a mount is called in the runtime directory: 16 hexadecimal digits."""
    return hashlib.sha256(os.fsencode(mountpoint) + b"\0" + os.fsencode(node)).hexdigest()[:16]


def safe_name(name: str) -> str:
    """A job's or node's name as one component of a path (``<nvme>/<job>/<node>``)."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".") or "_"


def default_runtime_dir(environ: Mapping[str, str] = os.environ) -> str:
    """Where the mounts of this user are registered, when the option ``runtime_dir`` does not say."""
    if environ.get("CACHEXFS_RUNTIME_DIR"):
        return os.path.abspath(environ["CACHEXFS_RUNTIME_DIR"])
    if os.geteuid() == 0:
        return RUNTIME_DIR_ROOT
    if environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(environ["XDG_RUNTIME_DIR"], "cachexfs")
    return f"/tmp/cachexfs-{os.geteuid()}"
