"""Calls to PFS children: lanes, queues, deadlines, abandoned children, the state of the PFS.

Role: the machinery below ``PfsPool``, which knows the operations. Concurrency: all in the trio thread; code between
two awaits is atomic. A child is in one of: its lane's ``idle`` list, its lane's ``busy`` set (one running call),
or with an ``AbandonedCall``. It is abandoned when its call's deadline passes, when the caller is cancelled, or when
it breaks the protocol: SIGKILL, and a task that reaps it should it ever end. A child that is not stuck then ends
at once; one that is does at most the system call that it hangs in (see ``pfs_ops``).
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import trio

from cachexfs.adapters.pfs_child import Child, ChildEndedError, Spawner
from cachexfs.adapters.pfs_dir import PfsIdentity

log = logging.getLogger(__name__)

START_S = 30.0
#: A killed child that is not stuck ends within this; waiting for it keeps its path from looking blocked.
KILL_WAIT_S = 0.1
SHUT_DOWN_S = 1.0
_UNREACHABLE = frozenset(
    {errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN}
    | {errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EREMOTEIO, errno.ESTALE}
)


@dataclass(slots=True, eq=False)
class Request:
    """One call. ``deadline_s`` counts from the start and from each sign of progress. ``paths`` are what it changes,
    ``hidden`` the prepared file that it is about. ``noted``: what the child said should be known if its answer is
    lost. ``on_frame`` is given progress and pages."""

    operation: str
    arguments: list[object]
    deadline_s: float
    paths: tuple[bytes, ...] = ()
    hidden: str = ""
    on_frame: Callable[[str, object], None] = lambda tag, value: None
    noted: int | None = None
    number: int = 0
    since_s: float = 0.0  # when it began, or its last sign of progress
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def name(self) -> str:
        """For people: the operation, or the kind of change."""
        return str(self.arguments[0]) if self.operation == "run" else self.operation

    @property
    def about(self) -> str:
        """For people: which paths or which prepared file."""
        paths = self.paths or tuple(value for value in self.arguments[:1] if isinstance(value, bytes))
        return os.fsdecode(b" ".join(paths)) or self.hidden or "of PFS_DIR"


@dataclass(slots=True, eq=False)
class AbandonedCall:
    """A call whose child was given up and has not ended. ``paths`` are what it may still change, ``hidden`` the
    prepared file that it may still move or remove."""

    operation: str
    paths: tuple[bytes, ...]
    hidden: str
    since_s: float
    pid: int
    ended: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True, eq=False)
class Lane:
    """Children of one class, ``limit`` of them; calls wait in order."""

    limit: int
    paced: bool
    idle: list[Child] = field(default_factory=list)
    busy: set[Child] = field(default_factory=set)
    semaphore: trio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.semaphore = trio.Semaphore(self.limit)


class PfsCalls:
    """See the module. Parameters as of ``PfsPool``."""

    def __init__(
        self,
        pfs_dir: str,
        identity: PfsIdentity | None,
        data_workers: int,
        meta_workers: int,
        bandwidth_bytes_s: float,
        abandoned_max: int,
    ) -> None:
        self.identity = identity
        self.state, self.error = "ok", ""
        self._away_since_s: float | None = None
        self._running: set[Request] = set()
        self._complaints: set[str] = set()  # told once
        self.data = Lane(data_workers, paced=True)
        self.meta = Lane(meta_workers, paced=False)
        self.abandoned: list[AbandonedCall] = []
        self._pfs_dir = pfs_dir
        self._bandwidth_bytes_s = bandwidth_bytes_s
        self._abandoned_max = abandoned_max
        self._nursery: trio.Nursery | None = None
        self._spawner: Spawner | None = None
        self._number = 0

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Keep the children until cancelled."""
        self._spawner = Spawner(self._reap_orphan)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                try:
                    await trio.sleep_forever()
                finally:
                    self._nursery = None  # it takes nobody any more; calls that are given up now end by themselves
        finally:
            await self._shut_down()

    async def _shut_down(self) -> None:
        """Kill all children, wait a moment for them, leave the stuck ones to init."""
        spawner, self._spawner = self._spawner, None
        children = [child for lane in (self.data, self.meta) for child in (*lane.idle, *lane.busy)]
        for child in children:
            child.kill()
        with trio.move_on_after(SHUT_DOWN_S, shield=True):
            for child in children:
                await child.wait()
        for child in children:
            child.forget()
        self.data.idle.clear()
        self.meta.idle.clear()
        if spawner is not None:
            spawner.stop()

    # Abandoned calls

    def refuse(self, request: Request) -> None:
        """Raise OSError when ``request`` cannot be made now: EBUSY while an abandoned call may still change what it
        is about, EIO while too many children hang."""
        for call in self.abandoned:
            ours = call.operation == "land" and request.operation == "land" and call.hidden == request.hidden
            if not ours and any(overlap(path, other) for path in request.paths for other in call.paths):
                why = f"an abandoned {call.operation} that may still change it has not ended (pid {call.pid})"
                raise OSError(errno.EBUSY, why, request.about)
            if call.hidden and request.hidden == call.hidden and request.operation == "prepare":
                why = f"an abandoned {call.operation} of this name has not ended (pid {call.pid})"
                raise OSError(errno.EBUSY, why, request.hidden)
        if len(self.abandoned) >= self._abandoned_max:
            self._note_state("hung", f"{len(self.abandoned)} calls to the PFS hung and their processes do not end")
            raise OSError(errno.EIO, f"the PFS is hung ({len(self.abandoned)} stuck processes); see docs/pfs.md")

    def settle(self, hidden: str) -> None:
        """The prepared file ``hidden`` has landed under another name or is gone: a late landing finds nothing."""
        for call in self.abandoned:
            if call.operation == "land" and call.hidden == hidden:
                call.paths = ()

    async def _abandon(self, child: Child, request: Request) -> None:
        child.kill()
        hidden = "" if request.operation == "prepare" else request.hidden  # late parts harm nobody
        since_s = trio.current_time()
        call = AbandonedCall(request.name, request.paths, hidden, since_s, child.process.pid)
        self.abandoned.append(call)
        if self._nursery is None:
            with trio.move_on_after(KILL_WAIT_S, shield=True):
                await child.wait()
            child.forget()
            return
        self._nursery.start_soon(self._reap, child, call)
        with trio.move_on_after(KILL_WAIT_S, shield=True):
            await call.ended.wait()
        if not call.ended.is_set():
            why = f"{request.name} {request.about}: process {call.pid} cannot be killed"
            self._note_state("hung", why, request.since_s)

    async def _reap(self, child: Child, call: AbandonedCall | None) -> None:
        try:
            await child.wait()
        finally:
            child.forget()
            if call is not None:
                self.abandoned.remove(call)
                call.ended.set()

    def _reap_orphan(self, child: Child) -> None:
        child.kill()
        if self._nursery is None:
            child.forget()
        else:
            self._nursery.start_soon(self._reap, child, None)

    # Calls

    async def call(self, lane: Lane, request: Request) -> object:
        """Make a call and return its answer.

        Raises OSError (of the PFS, or ``refuse``), ``trio.TooSlowError`` at the deadline (in the meta lane the time
        in the queue counts, too).
        """
        self.refuse(request)
        waited_s = float("inf") if lane.paced else request.deadline_s
        with trio.move_on_after(waited_s) as scope:
            await lane.semaphore.acquire()
        if scope.cancelled_caught:
            raise trio.TooSlowError(f"{request.name}: no PFS worker was free within {request.deadline_s} s")
        request.since_s = trio.current_time()
        self._running.add(request)
        try:
            self.refuse(request)
            child = self._take_idle(lane) or await self._start()
            return await self._exchange(lane, child, request)
        finally:
            self._running.discard(request)
            lane.semaphore.release()

    def _take_idle(self, lane: Lane) -> Child | None:
        while lane.idle:
            child = lane.idle.pop()
            if child.process.poll() is None:
                return child
            child.close()
        return None

    async def _start(self) -> Child:
        if self._spawner is None:
            raise RuntimeError("the PFS pool is not running")
        with trio.move_on_after(START_S):
            child = await self._spawner.spawn(self._pfs_dir)
            ready = False
            try:
                ready = (await child.receive())[1] == "ready"
            finally:
                if not ready:
                    self._reap_orphan(child)
            if ready:
                return child
        self._note_state("hung", "a PFS worker process does not start")
        raise OSError(errno.EIO, "a PFS worker process does not start; see docs/pfs.md")

    async def _exchange(self, lane: Lane, child: Child, request: Request) -> object:
        answered = False
        lane.busy.add(child)
        try:
            with trio.CancelScope(deadline=trio.current_time() + request.deadline_s) as scope:
                self._number += 1
                request.number = self._number
                known = self.identity
                identity = None if known is None else [known.dev, known.ino, known.token]
                rate = self._share() if lane.paced else 0.0
                head: list[object] = [request.number, request.operation, request.nonce, identity, rate]
                await child.send([*head, request.arguments])
                self._share_out()
                tag, value = await self._answer(child, request, scope)
                answered = True
        finally:
            lane.busy.discard(child)
            if answered and self._spawner is not None:
                lane.idle.append(child)
            else:
                await self._abandon(child, request)
            self._share_out()
        if not answered:
            why = f"{request.name} {request.about}: no answer"
            self._note_state("hung", f"{why} from the PFS in {request.deadline_s} s", request.since_s)
            raise trio.TooSlowError(self.error)
        if tag == "error":
            self._fail(value)
        self._note_state("ok", "")
        return value

    async def _answer(self, child: Child, request: Request, scope: trio.CancelScope) -> tuple[str, object]:
        while True:
            number, tag, value = await child.receive()
            if number != request.number:
                raise ChildEndedError(errno.EIO, "a PFS child answered what was not asked")
            if tag in ("done", "error"):
                return tag, value
            request.since_s = trio.current_time()
            scope.deadline = request.since_s + request.deadline_s
            if tag == "note" and isinstance(value, int):
                request.noted = value
            elif tag == "complaint":
                self._complain(str(value))
            else:
                request.on_frame(tag, value)

    def _complain(self, text: str) -> None:
        if text not in self._complaints:
            self._complaints.add(text)
            log.warning("%s", text)

    def _fail(self, value: object) -> NoReturn:
        code, text, name, root = value if isinstance(value, list) else (errno.EIO, str(value), "", False)
        error = OSError(code, text, name) if name else OSError(code, text)
        if root or code in _UNREACHABLE:
            self._note_state("unreachable", f"{text} [{errno.errorcode.get(code, code)}]")
        else:
            self._note_state("ok", "")  # it answered
        raise error

    def _note_state(self, state: str, error: str, since_s: float | None = None) -> None:
        self.state, self.error = state, error
        if state == "ok":
            self._away_since_s = None
        elif self._away_since_s is None:
            self._away_since_s = trio.current_time() if since_s is None else since_s

    @property
    def away_s(self) -> float:
        """See ``Pfs``."""
        return 0.0 if self._away_since_s is None else trio.current_time() - self._away_since_s

    def waiting(self) -> tuple[str, float]:
        """See ``Pfs``."""
        if not self._running:
            return "", 0.0
        oldest = min(self._running, key=lambda request: request.since_s)
        return f"{oldest.name} {oldest.about}", trio.current_time() - oldest.since_s

    # Bandwidth

    def _share(self) -> float:
        """Bytes a second for each running copy; 0: no limit."""
        return self._bandwidth_bytes_s / max(1, len(self.data.busy))

    def _share_out(self) -> None:
        if self._bandwidth_bytes_s:
            for child in self.data.busy:
                child.set_rate(self._share())


def overlap(one: bytes, other: bytes) -> bool:
    """Whether two paths are the same, or one lies below the other."""
    return one == other or one.startswith(other + b"/") or other.startswith(one + b"/")
