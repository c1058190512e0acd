"""Network namespaces for the nodes of a local cluster: a private switch, one link a node, shaped or cut.

Role: makes and removes namespaces with ``ip`` and ``tc`` (root only). Nothing is configured in the root namespace: no
address, no route, and no packet leaves. No concurrency. Commands are entered with ``nsenter --net``: ``ip netns exec``
would unshare the mount namespace too, and a FUSE mount made there is invisible outside.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cachexfs.errors import CannotTellError

SUBNET = "10.87.0"
BRIDGE = "br0"
TOOL_TIMEOUT_S = 20.0
BURST_BYTES = 1 << 20
QUEUE_LATENCY_MS = 50


class NetworkError(CannotTellError):
    """``ip`` or ``tc`` refused."""


class NodeNetwork:
    """``nodes`` namespaces ``<prefix>0`` ... at 10.87.0.1 ... on a switch of their own; ``up`` makes them."""

    def __init__(self, prefix: str, nodes: int) -> None:
        self.prefix = prefix
        self.nodes = nodes
        self._switch = f"{prefix}sw"

    def host(self, index: int) -> str:
        """Address of a node."""
        return f"{SUBNET}.{index + 1}"

    def enter(self, index: int) -> list[str]:
        """What to put in front of a command to run it on a node."""
        return ["nsenter", f"--net=/run/netns/{self._name(index)}", "--"]

    def up(self) -> None:
        """Make switch, namespaces and links. Raises ``NetworkError``."""
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "set", "lo", "up")
        _run("ip", "-n", self._switch, "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", BRIDGE, "up")
        for index in range(self.nodes):
            name, port = self._name(index), self._port(index)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run(*("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", name))
            _run("ip", "-n", self._switch, "link", "set", port, "master", BRIDGE, "up")
            _run("ip", "-n", name, "addr", "add", f"{self.host(index)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            # bbr paces by itself; reno behaves like a plain shared link under a token bucket
            _run(*self.enter(index), "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")

    def down(self) -> None:
        """Remove what ``up`` made; what is not there is no error."""
        for name in [*(self._name(index) for index in range(self.nodes)), self._switch]:
            if Path("/run/netns", name).exists():
                _run("ip", "netns", "del", name)

    def shape(self, index: int, rate: str) -> None:
        """Limit a node's link to ``rate`` (as tc writes it: ``2gbit``) in both directions."""
        queue = f"tbf rate {rate} burst {BURST_BYTES} latency {QUEUE_LATENCY_MS}ms".split()
        _run(*self.enter(index), "tc", "qdisc", "replace", "dev", "eth0", "root", *queue)
        _run("tc", "-n", self._switch, "qdisc", "replace", "dev", self._port(index), "root", *queue)

    def partition(self, index: int) -> None:
        """Cut a node off: packets are lost in silence, as with a pulled cable."""
        _run("ip", "-n", self._switch, "link", "set", self._port(index), "down")

    def heal(self, index: int) -> None:
        """Undo ``partition``."""
        _run("ip", "-n", self._switch, "link", "set", self._port(index), "up")

    def _name(self, index: int) -> str:
        return f"{self.prefix}{index}"

    def _port(self, index: int) -> str:
        return f"p{index}"


def usable() -> bool:
    """Whether this user can make namespaces at all."""
    return os.geteuid() == 0


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"cannot run {command[0]}: {error}") from None
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
