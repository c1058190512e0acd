"""Memory that the supervisor shares with its daemons: the bytes of a large write are copied once on their way.

Role: a large WRITE is read from the device into a *slot* of this memory. A daemon that takes it so (``Call.SHARED``)
gets the request with a ``REFERENCE`` in place of the bytes, and its handler writes them from there; for any other
daemon, and for the one after it, they are all still there. Daemons can only read it.
Concurrency: ``PayloadMemory`` is the supervisor's, of its one thread; ``SharedPayloads`` the daemon's. A slot is the
daemon's until it has answered or is dead; one that does not die keeps all of the memory, and the next gets another.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

from . import wire

SLOT_BYTES = wire.PAYLOAD_BYTES_MAX
#: Slots whose memory is kept when they are free: what one burst of background writes needs.
KEPT_SLOTS = 32

#: offset length: where the bytes of a write lie in the memory, in bytes. No write of this many bytes is sent otherwise.
REFERENCE = struct.Struct("<QI1x")

Payload = bytes | memoryview


class PayloadMemory:
    """``count`` slots of ``SLOT_BYTES``; memory is used only for those that were in use at one time."""

    def __init__(self, count: int) -> None:
        size = count * SLOT_BYTES
        fd = os.memfd_create("cachexfs-payloads", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            os.fchmod(fd, 0o400)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(fd, size)
            #: For daemons: opened for reading.
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            what = f"{size >> 20} MiB of address space for what is written (ulimit -v, ulimit -f; /proc mounted?)"
            raise OSError(error.errno, f"{what}: {error.strerror}") from error
        finally:
            os.close(fd)
        whole = memoryview(self._map)
        self._views = [whole[at : at + SLOT_BYTES] for at in range(0, size, SLOT_BYTES)]
        self._free = list(range(count))[::-1]
        self._used: set[int] = set()

    @property
    def is_exhausted(self) -> bool:
        """Whether no slot is free."""
        return not self._free

    def take(self) -> int | None:
        """A free slot, the one freed last: it is still in the CPU's cache. None when there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def give(self, slot: int) -> None:
        """A slot is not needed any more."""
        self._free.append(slot)
        if len(self._used) > KEPT_SLOTS:
            self._used.discard(slot)
            self._map.madvise(mmap.MADV_REMOVE, slot * SLOT_BYTES, SLOT_BYTES)

    def view(self, slot: int) -> memoryview:
        """The memory of a slot."""
        return self._views[slot]

    def close(self) -> None:
        """Leave it to the daemons that still have it; it must not be used any more."""
        os.close(self.fd)


def referring(head: bytes, slot: int, length: int) -> bytes:
    """The WRITE request with this head, for a daemon that finds the ``length`` bytes in the memory."""
    message = bytearray(wire.WRITE_HEAD_BYTES + REFERENCE.size)
    message[: wire.WRITE_HEAD_BYTES] = head
    wire.put_u32(message, 0, len(message))
    wire.put_u32(message, wire.WRITE_SIZE_OFFSET, REFERENCE.size)
    REFERENCE.pack_into(message, wire.WRITE_HEAD_BYTES, slot * SLOT_BYTES, length)
    return bytes(message)


class SharedPayloads:
    """The daemon's view of the memory behind a descriptor, which it takes."""

    def __init__(self, fd: int) -> None:
        """``OSError`` when it cannot be mapped."""
        with os.fdopen(fd, "rb", closefd=True):
            self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)

    def of(self, data: bytes) -> Payload:
        """The bytes to write, of what the write handler was given. They are there until the request is answered."""
        if len(data) != REFERENCE.size:
            return data
        offset, length = REFERENCE.unpack(data)
        return self._view[offset : offset + length]
