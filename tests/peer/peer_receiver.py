"""A receiving node as a process of its own, for tests that kill it: ``python peer_receiver.py DIR PORT``."""

from __future__ import annotations

import sys

import trio

from cachexfs.adapters.peer_server import PeerServer
from cachexfs.adapters.replica_store import ReplicaStore


async def main(directory: str, port: int) -> None:
    store = await ReplicaStore.open(directory)
    secret = b"0123456789abcdef0123456789abcdef"
    server = PeerServer(node="n2", job="job", secret=secret, store=store, is_member={"n1", "n2"}.__contains__)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(server.serve, "127.0.0.1", port)
        print(address[1], flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
