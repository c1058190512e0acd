"""What the kernel and the daemon have agreed: INIT, open handles, and how each open does its I/O.

Role: remembers INIT for later daemons, keeps the table of handles that a new daemon inherits, and patches the
three replies that the supervisor touches (INIT, OPEN, CREATE). Everything else passes unread.
Concurrency: the supervisor's one thread. Called by ``pump`` for the replies to the operations in ``WATCHED``.

Rules of the kernel (fs/fuse/iomode.c) that decide about passthrough: FOPEN_PASSTHROUGH stands alone, all opens
of an inode that pass through share one backing id, and beside them nothing else is allowed, not even FOPEN_DIRECT_IO;
an open that breaks a rule fails with EIO. So the daemon must offer the same file for every open of an inode that has
passed ones (what it does not is told: ``broken``), and a registered open beside cached ones stays with the handler.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

from . import wire
from .messages import Handle
from .passthrough import Backings
from .plan import log

#: Operations whose replies come through here.
WATCHED = frozenset({wire.INIT, wire.OPEN, wire.CREATE, wire.TMPFILE, wire.OPENDIR, wire.RELEASE, wire.RELEASEDIR})


#: Background requests (read-ahead, write-back) that a daemon may ask for; without a wish the kernel takes 12. The
#: kernel would believe the supervisor, which is privileged, up to 65,535.
BACKGROUND_MAX = 256


class IncompatibleError(Exception):
    """A daemon's INIT answer does not fit the running connection, or is none."""


@dataclass(slots=True)
class _Open:
    node: int
    flags: int
    direct: int = 0
    cached: int = 0
    passed: int = 0
    leaving: int = 0  # of the passed ones: the kernel has ended them, and the daemon has not answered that yet

    @property
    def total(self) -> int:
        return self.direct + self.cached + self.passed


class Session:
    """The agreement of one mount; outlives daemons. ``payload_bytes_max`` is what one message may carry."""

    def __init__(self, backings: Backings, payload_bytes_max: int, no_passthrough: str) -> None:
        self._backings = backings
        self._payload_bytes_max = payload_bytes_max
        #: Why passthrough is not in use; empty when it is.
        self.no_passthrough = no_passthrough
        self._init_request = b""
        self._daemon_flags: int | None = None
        self._max_write = 0
        self._handles: dict[tuple[bool, int], _Open] = {}
        self._passed_at: dict[int, int] = {}
        self._backed_by: dict[int, int] = {}  # the same nodes: the backing id of their passed opens
        #: Opens that the kernel refuses because others of the inode pass through to another file.
        self.broken = 0
        self._cached_at: dict[int, int] = {}

    @property
    def is_agreed(self) -> bool:
        """Whether the kernel has had its INIT answer."""
        return self._daemon_flags is not None

    @property
    def handle_count(self) -> int:
        """Handles that applications hold open."""
        return len(self._handles)

    def remember_init(self, request: bytes) -> None:
        """The kernel's INIT request."""
        self._init_request = request

    def init_request(self) -> bytes:
        """INIT for a new daemon: offers what the first one took, so that the new one can take no more."""
        if self._daemon_flags is None:
            return self._init_request
        request = bytearray(self._init_request)
        offered = self._daemon_flags | wire.FLAG_INIT_EXT
        low = wire.u32(request, wire.INIT_IN_FLAGS_OFFSET) & offered
        wire.put_u32(request, wire.INIT_IN_FLAGS_OFFSET, low)
        if low & wire.FLAG_INIT_EXT:
            high = wire.u32(request, wire.INIT_IN_FLAGS2_OFFSET) & (offered >> 32)
            wire.put_u32(request, wire.INIT_IN_FLAGS2_OFFSET, high)
        return bytes(request)

    def init_replied(self, reply: memoryview) -> bool:
        """A daemon's INIT answer. True: patched, for the kernel. False: the kernel has had one, keep it.

        ``IncompatibleError`` when the daemon refused, or cannot serve what the kernel was promised.
        """
        length, error_code, _ = wire.OUT_HEADER.unpack_from(reply)
        if error_code or not length == len(reply) == wire.INIT_OUT_BYTES:
            raise IncompatibleError("INIT refused or answered in an old format (libfuse 3 is needed)")
        flags = wire.init_reply_flags(reply)
        max_write = wire.u32(reply, wire.INIT_OUT_MAX_WRITE_OFFSET)
        if self._daemon_flags is not None:
            if flags != self._daemon_flags:
                raise IncompatibleError(f"INIT flags {flags:#x}, the mount was made with {self._daemon_flags:#x}")
            if max_write < self._max_write:
                raise IncompatibleError(f"max_write {max_write}, the mount was made with {self._max_write}")
            return False
        self._daemon_flags = flags
        self._patch_init(reply, flags, max_write)
        return True

    def _patch_init(self, reply: memoryview, flags: int, max_write: int) -> None:
        offered = wire.init_request_flags(self._init_request)
        patched = flags & offered & ~wire.FLAG_PASSTHROUGH
        # Set-id bits are the daemon's business: the kernel need not ask for security.capability at every write.
        patched |= offered & wire.FLAG_HANDLE_KILLPRIV_V2
        if not self.no_passthrough:
            if not offered & wire.FLAG_PASSTHROUGH or not offered & wire.FLAG_INIT_EXT:
                self.no_passthrough = "the kernel does not offer it (CONFIG_FUSE_PASSTHROUGH)"
            elif flags & wire.FLAG_WRITEBACK_CACHE:
                self.no_passthrough = "the daemon took the writeback cache"
            else:
                patched |= wire.FLAG_INIT_EXT | wire.FLAG_PASSTHROUGH
        wire.put_u32(reply, wire.INIT_OUT_FLAGS_OFFSET, patched & 0xFFFFFFFF)
        wire.put_u32(reply, wire.INIT_OUT_FLAGS2_OFFSET, patched >> 32)
        wire.put_u32(reply, wire.INIT_OUT_STACK_DEPTH_OFFSET, 0 if self.no_passthrough else 1)
        for offset in (wire.INIT_OUT_MAX_BACKGROUND_OFFSET, wire.INIT_OUT_CONGESTION_OFFSET):
            wire.put_u16(reply, offset, min(wire.u16(reply, offset), BACKGROUND_MAX))
        self._max_write = min(max_write, self._payload_bytes_max)
        wire.put_u32(reply, wire.INIT_OUT_MAX_WRITE_OFFSET, self._max_write)
        if patched & wire.FLAG_MAX_PAGES:
            wire.put_u16(reply, wire.INIT_OUT_MAX_PAGES_OFFSET, max(1, self._max_write // wire.PAGE_BYTES))

    def replied(self, request: wire.Buffer, reply: memoryview) -> int:
        """A successful reply to OPEN, CREATE, OPENDIR, or any reply to RELEASE: account, patch in place.

        Returns 0, or the errno with which the request is to be failed because the reply is malformed.
        """
        opcode = wire.opcode_of(request)
        if opcode in (wire.RELEASE, wire.RELEASEDIR):
            self._released(opcode == wire.RELEASEDIR, wire.fh_of_release(request))
            return 0
        offset = wire.open_out_offset(opcode)
        if len(reply) != offset + wire.OPEN_OUT.size:
            return errno.EIO
        fh, fopen, _ = wire.OPEN_OUT.unpack_from(reply, offset)
        is_created = opcode in (wire.CREATE, wire.TMPFILE)
        if is_created and not wire.is_file_entry(reply):
            return errno.EIO  # the kernel would not take it, and would never release the handle
        node = wire.u64(reply, wire.OUT_HEADER.size) if is_created else wire.nodeid_of(request)
        is_dir = opcode == wire.OPENDIR
        flags = wire.open_flags_of(request)
        known = self._handles.get((is_dir, fh))
        if known is None:
            known = self._handles[is_dir, fh] = _Open(node, flags)
        fopen &= ~wire.FOPEN_PASSTHROUGH
        backing_id = 0
        if is_dir:
            known.direct += 1
        else:
            fopen, backing_id = self._choose_io(known, fh, flags, fopen)
        wire.OPEN_OUT.pack_into(reply, offset, fh, fopen, backing_id)
        return 0

    def _choose_io(self, known: _Open, fh: int, flags: int, fopen: int) -> tuple[int, int]:
        node = known.node
        backing_id = 0 if self.no_passthrough else self._backings.allows(fh, flags)
        if backing_id and node not in self._cached_at and self._backed_by.get(node, backing_id) == backing_id:
            known.passed += 1
            self._passed_at[node] = self._passed_at.get(node, 0) + 1
            self._backed_by[node] = backing_id
            self._backings.opened(fh)
            return wire.FOPEN_PASSTHROUGH | fopen & wire.FOPEN_NOFLUSH, backing_id
        self._backings.unused(fh)
        if node in self._passed_at:
            self.broken += 1
            log(
                f"inode {node:#x} is open with a file behind it that the daemon does not offer again: EIO for this open"
            )
            fopen = (fopen | wire.FOPEN_DIRECT_IO) & ~wire.FOPEN_KEEP_CACHE
        if fopen & wire.FOPEN_DIRECT_IO:
            known.direct += 1
        else:
            known.cached += 1
            self._cached_at[node] = self._cached_at.get(node, 0) + 1
        return fopen, 0

    def releasing(self, fh: int) -> None:
        """The kernel has ended an open of ``fh``, before it says so: others of the inode may go another way now."""
        known = self._handles.get((False, fh))
        if known is not None and not known.direct and not known.cached and known.leaving < known.passed:
            known.leaving += 1
            self._not_passed(known.node)

    def _not_passed(self, node: int) -> None:
        _decrease(self._passed_at, node)
        if node not in self._passed_at:
            del self._backed_by[node]

    def _released(self, is_dir: bool, fh: int) -> None:
        known = self._handles.get((is_dir, fh))
        if known is None:
            return
        # Where a daemon gives one number to several opens, RELEASE does not say which has ended. Taking the
        # harmless kind first errs towards "still passed through", which costs speed, never an error.
        if known.direct:
            known.direct -= 1
        elif known.cached:
            known.cached -= 1
            _decrease(self._cached_at, known.node)
        elif known.passed:
            known.passed -= 1
            if known.leaving:
                known.leaving -= 1
            else:
                self._not_passed(known.node)
            self._backings.released(fh)
        if not known.total:
            del self._handles[is_dir, fh]

    def handles(self) -> Iterator[Handle]:
        """The open handles, for the daemon that takes over."""
        for (is_dir, fh), known in self._handles.items():
            file = self._backings.file_of(fh) if known.passed else 0
            yield Handle(fh, known.node, known.flags, known.total, is_dir, known.passed > 0, file)


def _decrease(counts: dict[int, int], node: int) -> None:
    left = counts.get(node, 0) - 1
    if left > 0:
        counts[node] = left
    else:
        counts.pop(node, None)
