"""This machine's addresses.

Role: asked once, when ``cachexfs.cli.options`` and ``members`` fill in defaults.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from cachexfs.config import NodeAddress


def is_local(host: str) -> bool:
    """Whether a numeric address belongs to this machine (a name is not looked up)."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.inet_pton(family, host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def listen_host(own: NodeAddress, addresses: Sequence[NodeAddress]) -> str:
    """The node's own address, or all interfaces ("") where its name leads to the loopback (Debian's 127.0.1.1)."""
    if all(address.host == own.host for address in addresses):
        return own.host
    try:
        found = socket.getaddrinfo(own.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    numeric = [str(entry[4][0]) for entry in found]
    if any(address == own.host for address in numeric):
        return own.host
    return "" if any(address.startswith("127.") or address == "::1" for address in numeric) else numeric[0]
