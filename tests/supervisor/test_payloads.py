"""Large writes through the memory that supervisor and daemon share."""

from __future__ import annotations

import os
import random

import pytest

from cachexfs.supervisor import payloads, wire
from cachexfs.supervisor.payloads import KEPT_SLOTS, REFERENCE, SLOT_BYTES, PayloadMemory, SharedPayloads, referring
from cachexfs.supervisor.pending import Pending

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


def test_what_a_daemon_that_does_not_die_may_read_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachexfs.supervisor.pending.PENDING_BYTES_MAX", 2 * payloads.SLOT_BYTES)
    pending = Pending()
    slots = []
    for unique in (2, 4):
        slot = pending.memory.take()
        assert slot is not None
        pending.add_write(unique, bytes(wire.WRITE_HEAD_BYTES), slot, 9)
        slots.append(slot)
        if unique == 2:
            pending.withdraw_slots()
    assert (pending.take(2), pending.take(4)) == (bytes(wire.WRITE_HEAD_BYTES),) * 2
    left = [pending.memory.take() for _ in range(3)]
    assert slots[1] in left
    assert slots[0] not in left
    assert pending.is_full, "nothing is free"
    os.close(pending.memory.fd)
