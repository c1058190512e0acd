"""A daemon that says anything at any time, from a seed: the supervisor goes on, and its books are right at the end."""

from __future__ import annotations

import array
import contextlib
import os
import random
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachexfs.supervisor import passthrough, wire
from cachexfs.supervisor.control import Control
from cachexfs.supervisor.messages import Call, Message
from cachexfs.supervisor.passthrough import Backings
from cachexfs.supervisor.payloads import SLOT_BYTES
from cachexfs.supervisor.pump import Pump
from cachexfs.supervisor.session import Session

STEPS = 1500
#: Often those whose replies are looked at.
OPCODES = [*range(1, 26), *range(27, 80), *[wire.OPEN, wire.CREATE, wire.RELEASE] * 8]
SIZES = (64, 80, 120, 300, 5000, 40_000, 1 << 20)
NOTHING_MORE = (BlockingIOError, BrokenPipeError)


class Deaf:
    """Nobody acts on what the daemon says."""

    def daemon_ready(self) -> None: ...
    def daemon_alive(self) -> None: ...
    def daemon_shares(self) -> None: ...
    def daemon_stopping(self, code: int) -> None: ...
    def daemon_draining(self) -> None: ...


class World:
    """A supervisor's parts between a kernel and a daemon that are played."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.chance = random.Random(seed)
        self.file = (directory / "backing").open("w+b")
        self.device, self.kernel = self.pair()
        self.control_end, self.daemon_control = self.pair()
        self.peer, self.daemon = self.pair()
        self.backings = Backings(self.device.fileno(), frozenset({os.fstat(self.file.fileno()).st_dev}))
        self.session = Session(self.backings, wire.PAYLOAD_BYTES_MAX, "")
        self.epoll = select.epoll()
        self.pump = Pump(self.device.fileno(), self.session, self.epoll)
        self.control = Control(self.backings, Deaf())
        self.pump.before_open = lambda: self.control.drain(self.control_end) and None
        self.pump.attach(self.peer.fileno())
        self.unique = 2
        init = wire.IN_HEADER.pack(104, wire.INIT, self.unique, 0, 0, 0, 0, 0, 0)
        self.kernel.send(init + struct.pack("<IIIII44x", 7, 45, 131072, 0xFFFFFFFF, 0xFFFFFFFF))
        self.pump.turn(0)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        both = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in both:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
            sock.setblocking(False)
        return both

    def close(self) -> None:
        self.pump.close()
        self.epoll.close()
        for thing in (
            self.file,
            self.device,
            self.kernel,
            self.control_end,
            self.daemon_control,
            self.peer,
            self.daemon,
        ):
            thing.close()

    def step(self) -> None:
        does = self.chance.choices(
            (self.request, self.reply, self.say, self.die, self.give_up), (35, 50, 12, 1, 1)
        )[0]  # fmt: skip
        with contextlib.suppress(*NOTHING_MORE):
            does()
        self.pump.turn(0)
        for end in (self.kernel, self.daemon):
            with contextlib.suppress(*NOTHING_MORE):
                while end.recv(1 << 21):
                    pass

    def bytes(self, size: int) -> bytearray:
        return bytearray(self.chance.randbytes(min(size, 200)) + bytes(max(0, size - 200)))

    def request(self) -> None:
        """One of the kernel, which is to be trusted."""
        self.unique += 2
        opcode, size = self.chance.choice(OPCODES), self.chance.choice(SIZES)
        body = self.bytes(size - wire.IN_HEADER.size)
        if opcode in (wire.RELEASE, wire.RELEASEDIR):
            struct.pack_into("<Q", body, 0, self.chance.randrange(8))
        node = self.chance.randrange(1, 6)
        self.kernel.send(wire.IN_HEADER.pack(size, opcode, self.unique, node, 0, 0, 77, 0, 0) + body)

    def reply(self) -> None:
        chance = self.chance
        known = [*self.pump.pending] or [2]
        unique = chance.choice([chance.choice(known), chance.choice(known), 0, chance.randrange(1 << 63)])
        body = self.bytes(chance.choice((0, 0, 16, 64, 128, 144, 5000, 1 << 20)))
        opened = wire.OPEN_OUT.pack(chance.randrange(8), chance.randrange(256), 5)
        if len(body) in (16, 144):
            body[-16:] = opened
        if len(body) == 144:
            struct.pack_into("<Q", body, 0, chance.choice((0, 1, 3, 4, 1 << 63)))
            struct.pack_into("<Q", body, 48, 0)
            struct.pack_into("<I", body, 100, chance.choice((0o100644, 0o40755)))
        code = chance.choice((0, 0, 0, -2, -511, -512, 3, 7, -(1 << 31)))
        length = 16 + len(body) if chance.random() < 0.9 else chance.randrange(1 << 32)
        raw = wire.OUT_HEADER.pack(length, code, unique) + body
        self.daemon.send(raw if chance.random() < 0.95 else raw[: chance.randrange(1, len(raw))])

    def say(self) -> None:
        chance = self.chance
        kind = chance.choice((*Call, Call.OFFER, Call.OFFER, Call.OFFER, 77))
        raw = Message(kind, chance.randrange(-5, 5), chance.randrange(8)).pack()
        raw = raw if chance.random() < 0.8 else chance.randbytes(chance.randrange(60))
        fds = [chance.choice((self.file.fileno(), self.file.fileno(), self.device.fileno()))] * chance.choice(
            (0, 1, 1, 2)
        )
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.daemon_control.sendmsg([raw], rights)
        if chance.random() < 0.5:
            self.control.drain(self.control_end)

    def die(self) -> None:
        self.pump.detach()
        self.backings.daemon_gone()
        self.peer.close()
        self.daemon.close()
        self.peer, self.daemon = self.pair()
        assert len(self.pump.pending.described()) == len(self.pump.pending)
        list(self.session.handles())
        self.pump.attach(self.peer.fileno())
        self.pump.replay()

    def give_up(self) -> None:
        if self.chance.random() < 0.5:
            self.pump.fail_everything()
            self.pump.serve_again()
        elif self.pump.pending.oldest:
            self.pump.give_up_on(self.pump.pending.oldest)


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    numbers = iter(range(1, 1 << 20))
    monkeypatch.setattr(passthrough.fcntl, "ioctl", lambda *_: next(numbers))
    with contextlib.closing(World(request.param, tmp_path)) as one:
        yield one


@pytest.mark.parametrize("world", [1, 2, 3], indirect=True)
def test_whatever_a_daemon_says_the_books_are_right(world: World) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(STEPS):
        world.step()
    pending = world.pump.pending
    held = sum(len(request) for request in pending._requests.values())
    assert held + SLOT_BYTES * len(pending._payloads) == pending._bytes
    assert set(pending._ids) <= set(pending)
    for fh, known in world.backings._by_fh.items():
        assert fh in world.backings._files[known.file].fhs
    opened = {fh for (is_dir, fh), known in world.session._handles.items() if known.passed and not is_dir}
    assert opened == {fh for fh, known in world.backings._by_fh.items() if known.opens}
    assert set(world.session._backed_by) == set(world.session._passed_at)
    assert world.pump.refused > 100
    assert world.control.refused > 10
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor is left"
