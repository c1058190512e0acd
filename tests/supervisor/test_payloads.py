"""Large writes through the memory that supervisor and daemon share."""

from __future__ import annotations

import errno
import os
import random
import select
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachexfs.supervisor import payloads, wire
from cachexfs.supervisor.daemons import Daemons
from cachexfs.supervisor.lifecycle import Phase
from cachexfs.supervisor.passthrough import Backings
from cachexfs.supervisor.payloads import KEPT_SLOTS, REFERENCE, SLOT_BYTES, PayloadMemory, SharedPayloads, referring
from cachexfs.supervisor.pending import Pending
from cachexfs.supervisor.pump import Pump
from cachexfs.supervisor.session import Session

from .conftest import Mount

#: Around the limits of what is sent with its bytes, and of what a reference itself has.
SIZES = [
    1,
    REFERENCE.size - 1,
    REFERENCE.size,
    REFERENCE.size + 1,
    32767,
    32768,
    32769,
    SLOT_BYTES,
    5 * SLOT_BYTES + 13,
]


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("inline", ["", "1"])
def test_writes_of_all_sizes_arrive_whole(mount: Mount, inline: str) -> None:
    mount.up("--passthrough", "off", inline=inline)
    for size in SIZES:
        (mount.point / f"f{size}").write_bytes(content(size, size))
    assert [size for size in SIZES if (mount.root / f"f{size}").read_bytes() != content(size, size)] == []


@pytest.mark.parametrize("inline", ["", "1", "2", "1,2"])
def test_what_a_dead_daemon_left_unwritten_is_written_by_the_next(mount: Mount, inline: str) -> None:
    """Whether either of them takes it from the shared memory or not."""
    mount.up("--passthrough", "off", inline=inline, die="write")
    data = content(1, 3 * SLOT_BYTES + 77)
    (mount.point / "a").write_bytes(data)
    assert mount.status()["restarts"] == 1
    assert (mount.root / "a").read_bytes() == data


def test_a_payload_of_the_size_of_a_reference_is_never_taken_for_one(mount: Mount) -> None:
    mount.up("--passthrough", "off")
    forged = REFERENCE.pack(0, 4096)
    (mount.point / "before").write_bytes(content(2, SLOT_BYTES))
    (mount.point / "forged").write_bytes(forged)
    assert (mount.root / "forged").read_bytes() == forged


def test_a_daemon_can_only_read() -> None:
    memory = PayloadMemory(2)
    memory.view(1)[:3] = b"abc"
    head = wire.IN_HEADER.pack(0, wire.WRITE, 7, 1, 0, 0, 0, 0, 0) + bytes(40)
    message = referring(head, 1, 3)
    assert wire.IN_HEAD.unpack_from(message) == (len(message), wire.WRITE, 7)
    assert wire.u32(message, wire.WRITE_SIZE_OFFSET) == len(message) - wire.WRITE_HEAD_BYTES
    seen = SharedPayloads(os.dup(memory.fd)).of(message[wire.WRITE_HEAD_BYTES :])
    assert (bytes(seen), memoryview(seen).readonly) == (b"abc", True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(memory.fd, b"x", 0)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(memory.fd, 0)
    os.close(memory.fd)


def test_what_a_burst_used_is_given_back() -> None:
    memory = PayloadMemory(KEPT_SLOTS + 8)
    slots = [memory.take() for _ in range(KEPT_SLOTS + 8)]
    assert memory.take() is None
    for slot in slots:
        assert slot is not None
        memory.view(slot)[:] = bytes(SLOT_BYTES)
        memory.give(slot)
    assert os.fstat(memory.fd).st_blocks * 512 == KEPT_SLOTS * SLOT_BYTES
    os.close(memory.fd)


def test_a_limit_that_leaves_no_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("cachexfs.supervisor.payloads.os.ftruncate", fails)
    with pytest.raises(OSError, match=r"ulimit -f.*File too large"):
        PayloadMemory(2)


def maps_of_payloads() -> int:
    return Path("/proc/self/maps").read_text().count("cachexfs-payloads")


def test_a_daemon_that_does_not_die_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes later never lies where it may still read, and nothing of the memory is lost, however many hang."""
    monkeypatch.setattr("cachexfs.supervisor.pending.PENDING_BYTES_MAX", 2 * payloads.SLOT_BYTES)
    pending = Pending()
    maps = maps_of_payloads()
    for unique in (2, 4):
        slot = pending.memory.take()
        assert slot is not None
        pending.memory.view(slot)[:9] = b"content %d" % unique
        pending.add_write(unique, bytes(wire.WRITE_HEAD_BYTES), slot, 9)
    for _ in range(5):
        seen = SharedPayloads(os.dup(pending.memory.fd))
        before = [bytes(seen.of(REFERENCE.pack(at * SLOT_BYTES, 9))) for at in range(4)]
        pending.renew_memory()
        for unique in (2, 4):
            write = pending.write(unique)
            assert write is not None
            assert bytes(pending.memory.view(write[1])[: write[2]]) == b"content %d" % unique
        while (slot := pending.memory.take()) is not None:
            pending.memory.view(slot)[:9] = b"of others"
        assert [bytes(seen.of(REFERENCE.pack(at * SLOT_BYTES, 9))) for at in range(4)] == before
        for slot in {0, 1, 2, 3} - {write[1] for u in (2, 4) if (write := pending.write(u))}:
            pending.memory.give(slot)
    assert (pending.take(2), pending.take(4)) == (bytes(wire.WRITE_HEAD_BYTES),) * 2
    assert None not in [pending.memory.take() for _ in range(4)]
    assert pending.memory.take() is None
    del seen
    assert maps_of_payloads() == maps, "the supervisor keeps none of them"
    pending.memory.close()


def test_nothing_is_failed_while_a_daemon_may_still_do_it() -> None:
    """A daemon that hangs is killed and buried first: its slots are free for others only then."""
    done: list[str] = []
    blame = SimpleNamespace(look_s=1.0, look=lambda *_: "hangs", daemon_ended=lambda *_: done.append("EIO"))
    life = SimpleNamespace(deadlines={}, phase=Phase.SERVING)
    daemons: Any = SimpleNamespace(_life=life, blame=blame, kill=lambda _: done.append("kill"), _is_hung=False)
    Daemons.look(daemons)
    assert (done, daemons._is_hung) == (["kill"], True)


def test_a_slot_without_memory_does_not_end_the_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    with select.epoll() as epoll:
        pump = Pump(ours, Session(Backings(ours, frozenset()), SLOT_BYTES, "off"), epoll)

        def fails(fd: int, buffers: object) -> int:
            raise OSError(errno.ENOMEM, "no memory")

        monkeypatch.setattr("cachexfs.supervisor.pump.os.readv", fails)
        pump.on_device()
        assert (pump.is_ended, pump.refused) == (False, 1)
        pump.pending.memory.close()
    os.close(ours)
    os.close(theirs)


def test_an_open_reply_that_is_too_long_counts_no_handle() -> None:
    session = Session(Backings(-1, frozenset()), SLOT_BYTES, "off")
    request = wire.IN_HEADER.pack(48, wire.OPEN, 2, 5, 0, 0, 0, 0, 0) + wire.OPEN_IN.pack(0, 0)
    reply = bytearray(wire.OUT_HEADER.pack(40, 0, 2) + wire.OPEN_OUT.pack(7, 0, 0) + bytes(8))
    assert session.replied(request, memoryview(reply)) == errno.EIO
    assert session.handle_count == 0
