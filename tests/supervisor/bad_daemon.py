"""A daemon that speaks the FUSE protocol by itself, badly on request: what the security tests put behind."""

import array
import os
import socket
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from cachexfs.supervisor import wire
from cachexfs.supervisor.client import Supervisor
from cachexfs.supervisor.messages import MESSAGE_BYTES

ENOENT = -2


def attributes(node: int) -> bytes:
    times = struct.pack("<QQQIII", 0, 0, 0, 0, 0, 0)
    return struct.pack("<QQQ", node, 0, 0) + times + struct.pack("<IIIIIII", 0o40755, 2, 0, 0, 0, 4096, 0)


def reply(unique: int, body: bytes = b"", error: int = 0) -> bytes:
    return wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(body), error, unique) + body


def init_body() -> bytes:
    return struct.pack("<IIIIHHIIHHII24x", 7, 38, 131072, wire.FLAG_INIT_EXT, 12, 9, 1 << 20, 1, 0, 0, 0, 0)


def garbage(fuse: int, control: socket.socket, unique: int) -> None:
    """Everything that is no message, then nothing that would be an answer."""
    os.write(fuse, b"x")  # too short for a header
    os.write(fuse, reply(unique + 1000))  # answers nobody
    os.write(fuse, wire.OUT_HEADER.pack(16, 7, 0))  # resend: not a notification for daemons
    os.write(fuse, wire.OUT_HEADER.pack(99, 2, 0))  # a notification with a wrong length
    with open("/dev/null", "rb") as null:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null.fileno()] * 3))]
        control.sendmsg([b"y" * MESSAGE_BYTES], rights)
        control.sendmsg([b"z" * 5000], rights)


def main() -> None:
    supervisor = Supervisor.from_environ()
    assert supervisor is not None
    fuse = int(supervisor.fuse_path.rpartition("/")[2])
    control = supervisor._control
    supervisor.ready()
    while request := os.read(fuse, wire.MESSAGE_BYTES_MAX):
        _, opcode, unique = wire.IN_HEAD.unpack_from(request)
        name = wire.names_of(request)[0]
        if opcode == wire.INIT:
            os.write(fuse, reply(unique, init_body()))
        elif opcode == wire.GETATTR:
            os.write(fuse, reply(unique, struct.pack("<QII", 0, 0, 0) + attributes(1)))
        elif opcode in wire.NO_REPLY:
            continue
        elif name == b"too-long":
            os.write(fuse, reply(unique)[:4] + reply(unique)[4:] + b"tail")
        elif name == b"bad-errno":
            os.write(fuse, reply(unique, error=-100000))
        elif name == b"bad-body":
            os.write(fuse, reply(unique, b"abc"))
        else:
            garbage(fuse, control, unique)
            os.write(fuse, reply(unique, error=ENOENT))


if __name__ == "__main__":
    main()
