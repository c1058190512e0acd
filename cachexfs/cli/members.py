"""The nodes of a job: which there are, which of them this one is, and what the job is called.

Role: asked once, by ``cachexfs.cli.options``. All nodes get the same answers, but for ``own_name``. No concurrency.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping, Sequence

import msgspec

from cachexfs.cli.addresses import is_local
from cachexfs.cli.words import nearest, parse_path, read_lines
from cachexfs.config import NodeAddress
from cachexfs.core import hostlist
from cachexfs.errors import UsageError

PORT_FIRST = 20000
PORT_COUNT = 10000
#: Where launchers leave the id of the job, in the order in which they are asked.
JOB_VARIABLES = (
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "FLUX_JOB_ID",
    "OAR_JOB_ID",
    "COBALT_JOBID",
    "TORCHELASTIC_RUN_ID",
)


def parse_nodes(text: str) -> tuple[NodeAddress, ...]:
    """Addresses of ``@FILE``, a host list, or items ``[NAME=]HOST[:PORT]``; port 0 when none is given."""
    if text.startswith("@"):
        text = ";".join(read_lines(parse_path(text[1:]), "nodes"))
        if not text:
            raise UsageError("the nodes file names no node")
    found: list[NodeAddress] = []
    for item in hostlist.expand(text):
        name, equals, place = item.rpartition("=")
        host, port = hostlist.split_host_port(place)
        if not host:
            raise UsageError(f"'{item}' names no host")
        found.append(NodeAddress(name if equals else host, host, port))
    hosts = [address.name for address in found]
    found = [
        msgspec.structs.replace(address, name=f"{address.name}:{address.port}")
        if hosts.count(address.name) > 1
        else address
        for address in found
    ]
    if len({address.name for address in found}) != len(found):
        raise UsageError(f"two nodes have the same name in '{text}'")
    for address in found:
        hostlist.check_name(address.name, "the node")
    return tuple(found)


def with_ports(addresses: tuple[NodeAddress, ...], port: int) -> tuple[NodeAddress, ...]:
    """The same, with ``port`` where none is given. Raises ``UsageError`` for two nodes of one address."""
    filled = tuple(msgspec.structs.replace(address, port=address.port or port) for address in addresses)
    taken: dict[tuple[str, int], str] = {}
    for address in filled:
        other = taken.setdefault((address.host, address.port), address.name)
        if other != address.name:
            raise UsageError(f"nodes '{other}' and '{address.name}' have one address: give each a port, host:port")
    return filled


def own_name(addresses: tuple[NodeAddress, ...], given: str, environ: Mapping[str, str]) -> str:
    """The name of this node: ``given``, or the one of ``addresses`` that is this machine. Raises ``UsageError``."""
    names = [address.name for address in addresses]
    host = socket.gethostname()
    if not addresses:
        return hostlist.check_name(given or host.partition(".")[0], "the node")
    if given:
        if given in names:
            return given
        raise UsageError(f"node '{given}' is not one of the nodes ({_some(names)}){nearest(given, names)}")
    for wanted in (environ.get("SLURMD_NODENAME", ""), host, host.partition(".")[0]):
        found = [a.name for a in addresses if wanted and wanted in (a.name, a.host)]
        found = found or [
            a.name for a in addresses if wanted and wanted in (a.name.partition(".")[0], a.host.partition(".")[0])
        ]
        if len(found) == 1:
            return found[0]
    found = [address.name for address in addresses if is_local(address.host)]
    if len(found) == 1:
        return found[0]
    raise UsageError(f"this machine, '{host}', is not one of the nodes ({_some(names)}): give node=NAME")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f", and {len(names) - 4} more" if len(names) > 4 else "")


def launcher_job(environ: Mapping[str, str]) -> str:
    """The job's id as the launcher has it; "" when none does."""
    for variable in JOB_VARIABLES:
        text = environ.get(variable, "")
        if text and text != "none":
            return hostlist.check_name(re.sub(r"[^A-Za-z0-9._:-]", "-", text), f"the job in {variable}")
    return ""


def derived_job(pfs: str, mountpoint: str, addresses: Sequence[NodeAddress]) -> str:
    """The same on all nodes of one mount: from the PFS directory, and the nodes or (alone) the mount point."""
    rest = [f"{a.name}={a.host}:{a.port}" for a in addresses] if len(addresses) > 1 else [mountpoint]
    return "m" + hashlib.sha256(os.fsencode("\0".join([pfs, *rest]))).hexdigest()[:15]


def derived_port(job: str) -> int:
    """The TCP port of a job's daemons on nodes that name none: 20000 to 29999."""
    return PORT_FIRST + int.from_bytes(hashlib.sha256(b"port\0" + job.encode()).digest()[:4], "big") % PORT_COUNT
