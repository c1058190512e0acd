"""The pump: whole messages between the kernel and the daemon.

Role: the hot path. Reads ``/dev/fuse``, writes the daemon's socket, and back. The bytes of a large write stay where
they were read to until it is answered, in memory that the daemon sees, too (``payloads``).
Concurrency: one thread, two non-blocking descriptors in one epoll. Notifications (cache invalidation) go
through a second thread, because the kernel may make them wait for a lock that only a reply frees.
Called by ``run``; calls ``Session`` for the few replies that are watched.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import time
from collections import deque
from collections.abc import Callable

from . import wire
from .notifier import Notifier
from .payloads import REFERENCE, referring
from .pending import Pending
from .replay import IDENTIFIED
from .session import WATCHED, IncompatibleError, Session

#: Writes up to this size are sent with their bytes, larger ones as a reference. Bytes.
_INLINE_BYTES_MAX = 32768
#: Room for a reply, on a huge page.
_REPLY_BYTES = 2 << 20
#: Replies that are taken from a dead daemon: more than its socket holds.
_LAST_REPLIES_MAX = 1 << 16
_AGAIN = (errno.EAGAIN, errno.EINTR, errno.ENOENT)
#: The pages of a slot could not be had. The connection goes on.
_SCARCE = (errno.ENOMEM, errno.EFAULT)
_STREAMED = (wire.READ, wire.WRITE)
_FILE_OPENS = (wire.OPEN, wire.CREATE, wire.TMPFILE)
#: The kernel asks for it before every buffered or passed-through write. The mount is nosuid and no daemon keeps
#: file capabilities, so the answer is always the same.
_CAPABILITY = b"security.capability\0"
_CAPABILITY_AT = slice(wire.IN_HEADER.size + 8, wire.IN_HEADER.size + 8 + len(_CAPABILITY))
_ERRNO_MAX = 511
#: How long a turn may take under steady traffic, before deadlines and the others are looked at. Seconds.
_TURN_S_MAX = 1.0
_NO_MEMORY_S = 0.001


def _reply_buffer() -> mmap.mmap:
    """Room for any reply, on a huge page where the machine gives one."""
    buffer = mmap.mmap(-1, _REPLY_BYTES)
    try:
        buffer.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without transparent huge pages
    return buffer


class Pump:
    """Moves messages between one device and one daemon at a time."""

    def __init__(self, device_fd: int, session: Session, epoll: select.epoll, spin_s: float = 0.0) -> None:
        self._device = device_fd
        self._session = session
        self._epoll = epoll
        self._peer = -1
        self._is_open_for_requests = False
        #: What the kernel waits for.
        self.pending = Pending()
        #: Whether the daemon takes the bytes of large writes from the shared memory.
        self.is_sharing = False
        self._outgoing: deque[bytes | int] = deque()  # a message, or the number of a large WRITE
        self._head = bytearray(wire.WRITE_HEAD_BYTES)
        self._slot: int | None = None  # where the bytes of the next request go
        self._is_streaming = False  # the last request was one of many: sleeping in between would cost more than it
        self._reply_view = memoryview(_reply_buffer())
        self._spin_s = spin_s
        self._device_mask = 0
        self._peer_mask = 0
        self._notifier = Notifier(device_fd)
        self._init_unique = 0
        #: Called when a daemon has answered INIT, with what is wrong with the answer (empty: nothing).
        self.on_init: Callable[[str], None] = lambda why: None
        #: Called before the reply to an open is looked at: what the daemon had offered for it is taken now.
        self.before_open: Callable[[], None] = lambda: None
        #: The connection has ended: unmounted or aborted.
        self.is_ended = False
        #: Everything is answered with EIO.
        self.is_failing = False
        #: The daemon's end is closed.
        self.is_peer_gone = False
        self.refused = 0
        self.last_refusal = ""
        self.answered = 0
        epoll.register(device_fd, 0)

    def turn(self, timeout_s: float) -> list[tuple[int, int]]:
        """Move messages for as long as nothing else happens; the events that are somebody else's.

        Returns at the latest after ``timeout_s`` without an event, or ``_TURN_S_MAX`` of steady traffic.
        """
        poll, device, spin_s, now = self._epoll.poll, self._device, self._spin_s, time.monotonic
        until = now() + min(timeout_s, _TURN_S_MAX)
        wait_s = timeout_s
        spin_until = until
        while True:
            events = poll(wait_s)
            others = None
            for fd, mask in events:
                if mask == select.EPOLLIN and fd == device:
                    self.on_device()
                elif mask == select.EPOLLIN and fd == self._peer:
                    self.on_peer()
                elif not self._own_event(fd, mask):
                    others = others or []
                    others.append((fd, mask))
            if others or self.is_ended or self.is_peer_gone:
                return others or []
            at = now()
            if at >= until:
                return []
            if events:
                wait_s = 0.0 if spin_s and self._is_streaming else until - at
                spin_until = at + spin_s
            elif at >= spin_until:
                wait_s = until - at

    def _own_event(self, fd: int, mask: int) -> bool:
        """An event of the device or the daemon that is not plain input; False when it is another's."""
        if fd == self._device:
            if mask & select.EPOLLIN and not self.is_ended:
                self.on_device()
            elif mask & (select.EPOLLERR | select.EPOLLHUP):
                self.device_ended()
        elif fd == self._peer:
            if mask & (select.EPOLLIN | select.EPOLLHUP):
                self.on_peer()
            if mask & select.EPOLLOUT and not self.is_peer_gone:
                self.flush()
        else:
            return False
        return True

    # -- who is at the other end ------------------------------------------------------------------------

    def attach(self, peer_fd: int) -> None:
        """A new daemon's socket. INIT goes first when the kernel has sent it; the rest waits for its answer."""
        self._peer = peer_fd
        self.is_peer_gone = self.is_sharing = False
        self._outgoing.clear()
        self._peer_mask = select.EPOLLIN
        self._epoll.register(peer_fd, self._peer_mask)
        init = self._session.init_request()
        if init:
            self._init_unique = wire.unique_of(init)
            self.pending.add(self._init_unique, init)
            self._send(init)
        else:
            self._is_open_for_requests = True
        self._arm()

    def detach(self) -> None:
        """The daemon is dead: take the answers that it had given, then forget its socket."""
        if self._peer < 0:
            return
        for _ in range(_LAST_REPLIES_MAX):  # a process that it has left behind may go on writing
            if self.is_peer_gone or not self.on_peer():
                break
        if not self.is_peer_gone:
            self._epoll.unregister(self._peer)
        self._peer = -1
        self._outgoing.clear()
        self._is_open_for_requests = False
        self.pending.take(self._init_unique)
        self._arm()

    def replay(self) -> None:
        """Send everything unanswered to the new daemon, oldest first, then open the device."""
        self._outgoing.extend(self.pending.repeatable())
        self._is_open_for_requests = True
        self.flush()

    def renew_memory(self) -> None:
        """Large writes lie elsewhere from now on; no daemon is attached. ``OSError``: as before."""
        self.pending.renew_memory()
        self._slot = None

    def pause(self) -> None:
        """Take no more requests from the kernel; answers still pass."""
        self._is_open_for_requests = False
        self._arm()

    # -- kernel to daemon -------------------------------------------------------------------------------

    def on_device(self) -> None:
        """The device is readable: one request."""
        head, pending = self._head, self.pending
        if self._slot is None:
            self._slot = pending.memory.take()
            if self._slot is None:
                self._arm()  # an answer frees one
                return
        payload = pending.memory.view(self._slot)
        try:
            size = os.readv(self._device, (head, payload))
        except OSError as error:
            if error.errno in _SCARCE:
                self._refuse("a request for which there was no memory: the kernel has failed it")
                time.sleep(_NO_MEMORY_S)
            elif error.errno not in _AGAIN:
                self.device_ended()
            return
        _, opcode, unique = wire.IN_HEAD.unpack_from(head)
        length = size - wire.WRITE_HEAD_BYTES
        self._is_streaming = opcode in _STREAMED
        if self.is_failing:
            self._fail(opcode, unique, bytes(head))
            return
        if opcode == wire.GETXATTR and head[_CAPABILITY_AT] == _CAPABILITY:
            self._answer(wire.error_reply(unique, errno.ENODATA), unique)
            return
        if opcode in IDENTIFIED:
            pending.identify(unique, head)
        if opcode == wire.WRITE and (length > _INLINE_BYTES_MAX or length == REFERENCE.size):
            pending.add_write(unique, bytes(head), self._slot, length)
            self._slot = None
            if pending.is_full:
                self._arm()
            self._send(unique)
            return
        request = bytes(head[:size]) if length <= 0 else b"".join((head, payload[:length]))
        if opcode in wire.NO_REPLY:
            if opcode == wire.INTERRUPT:
                return
        else:
            pending.add(unique, request)
            if pending.is_full:
                self._arm()
            if opcode == wire.RELEASE:
                self._session.releasing(wire.fh_of_release(request))
            elif opcode == wire.INIT:
                self._init_unique = unique
                self._session.remember_init(request)
        self._send(request)

    def _send(self, request: bytes | int) -> None:
        if self._outgoing:
            self._outgoing.append(request)
            return
        try:
            self._put(request)
        except OSError as error:
            self._not_sent(request, error)

    def _put(self, request: bytes | int) -> None:
        """Write one message to the daemon's socket. Raises ``OSError``."""
        if isinstance(request, bytes):
            os.write(self._peer, request)
            return
        write = self.pending.write(request)
        if write is None:
            return  # given up meanwhile
        head, slot, length = write
        if self.is_sharing:
            os.write(self._peer, referring(head, slot, length))
        else:
            os.writev(self._peer, (head, self.pending.memory.view(slot)[:length]))

    def _not_sent(self, request: bytes | int, error: OSError) -> None:
        if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM):
            self._outgoing.appendleft(request)
            if error.errno != errno.EAGAIN:
                time.sleep(_NO_MEMORY_S)  # the socket is writable, the kernel lacks contiguous memory
        else:
            # EPIPE, ECONNRESET: the daemon is dying. What needs an answer is in ``_pending`` and comes back.
            self._is_open_for_requests = False
        self._arm()

    def flush(self) -> None:
        """The daemon's socket takes more: send what waits."""
        outgoing = self._outgoing
        while outgoing:
            request = outgoing.popleft()
            try:
                self._put(request)
            except OSError as error:
                self._not_sent(request, error)
                return
        self._arm()

    def _arm(self) -> None:
        is_ready = self._is_open_for_requests and not self._outgoing and not self.pending.is_full
        is_reading = self.is_failing or is_ready
        mask = select.EPOLLIN if is_reading and not self.is_ended else 0
        if mask != self._device_mask and not self.is_ended:
            self._device_mask = mask
            self._epoll.modify(self._device, mask)
        if self._peer >= 0 and not self.is_peer_gone:
            mask = select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0)
            if mask != self._peer_mask:
                self._peer_mask = mask
                self._epoll.modify(self._peer, mask)

    # -- daemon to kernel -------------------------------------------------------------------------------

    def on_peer(self) -> bool:
        """The daemon's socket is readable: one reply. False when nothing was there or its end is closed."""
        view = self._reply_view
        try:
            size = os.readv(self._peer, (view,))
        except OSError as error:
            if error.errno == errno.ECONNRESET:
                self._peer_closed()
            return False
        if not size:
            self._peer_closed()
            return False
        if size < wire.OUT_HEADER.size:
            self._refuse(f"a reply of {size} bytes")
            return True
        length, error_code, unique = wire.OUT_HEADER.unpack_from(view)
        if not unique:
            self._notify(bytes(view[:size]), length, error_code)
            return True
        was_full = self.pending.is_full
        request = self.pending.take(unique)
        if request is None:
            self._refuse("a reply to no request")
            return True
        if was_full:
            self._arm()
        if request[4] in WATCHED:
            if unique == self._init_unique:
                self._init_replied(view[:size], request)
                return True
            if (not error_code and length == size) or request[4] in (wire.RELEASE, wire.RELEASEDIR):
                if request[4] in _FILE_OPENS:
                    self.before_open()
                error_code = -self._session.replied(request, view[:size]) or error_code
                if error_code and length != wire.OUT_HEADER.size:
                    self._refuse("an open reply of a wrong length, or of no file")
                    view = memoryview(bytearray(wire.error_reply(unique)))
                    length = size = wire.OUT_HEADER.size
        if length != size or not -_ERRNO_MAX <= error_code <= 0 or (error_code and size != 16):
            self._refuse("a reply with a wrong length or error number")
            self._answer(wire.error_reply(unique), unique)
        else:
            self._answer(view[:size], unique)
        self.answered += 1
        return True

    def _answer(self, reply: wire.Buffer, unique: int) -> None:
        try:
            os.write(self._device, reply)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return  # the kernel has given the request up
            if error.errno in (errno.ENODEV, errno.EPERM):
                self.device_ended()
                return
            self._refuse(f"a reply that the kernel does not take ({error.strerror})")
            try:
                os.write(self._device, wire.error_reply(unique))
            except OSError:
                pass  # the kernel had ended the request with the first one

    def _init_replied(self, reply: memoryview, request: bytes) -> None:
        try:
            if self._session.init_replied(reply):
                self._answer(reply, self._init_unique)
        except IncompatibleError as error:
            self.pending.add(self._init_unique, request)
            self.on_init(str(error))
        else:
            self.on_init("")

    def _notify(self, message: bytes, length: int, code: int) -> None:
        if length != len(message) or code not in wire.NOTIFY_CODES:
            self._refuse("a notification of unknown kind or wrong length")
        elif not self._notifier.put(message):
            self._refuse("more notifications than may wait")

    def _refuse(self, what: str) -> None:
        self.refused += 1
        self.last_refusal = what

    def _peer_closed(self) -> None:
        self.is_peer_gone = True
        self._is_open_for_requests = False
        self._epoll.unregister(self._peer)
        self._outgoing.clear()
        self._arm()

    # -- ends -------------------------------------------------------------------------------------------

    def fail_everything(self) -> None:
        """From now on every request is answered with EIO; what is pending first."""
        self.is_failing = True
        init = self._session.init_request()
        if init and not self._session.is_agreed:
            self._answer(wire.minimal_init_reply(init), wire.unique_of(init))
        self.pending.take(self._init_unique)
        for unique in list(self.pending):
            self.give_up_on(unique)
        self._arm()

    def serve_again(self) -> None:
        """Undo ``fail_everything``: a daemon serves, or is to be tried again."""
        self.is_failing = False
        self._arm()

    def _fail(self, opcode: int, unique: int, request: wire.Buffer) -> None:
        if opcode in wire.NO_REPLY:
            return
        if opcode == wire.INIT:
            self._answer(wire.minimal_init_reply(request), unique)
            return
        if opcode in (wire.RELEASE, wire.RELEASEDIR):
            self._session.replied(request, memoryview(b""))
        self._answer(wire.error_reply(unique), unique)

    def give_up_on(self, unique: int) -> None:
        """Answer one request with EIO: it has been with too many daemons that died."""
        request = self.pending.take(unique)
        if request is not None:
            self._fail(request[4], unique, request)
            self._arm()

    def device_ended(self) -> None:
        """The device reports an error (EPOLLERR): unmounted, or the connection was aborted."""
        if not self.is_ended:
            self.is_ended = True
            self._epoll.unregister(self._device)

    def close(self) -> None:
        """End the notifier's thread (it may be waiting in the kernel: it is a daemon thread)."""
        self._notifier.close()
