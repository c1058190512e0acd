"""A mount in service: from its first answer to the unmount, by whomever: a command, a signal, umount(8), a supervisor.

Role: daemon layer, between ``cachexfs.daemon`` (start and end) and the kernel. ``exit_code`` is what the daemon ends
with, ``retired`` says that another daemon has taken the mount over.

Concurrency: ``follow`` runs from the start of the daemon on, the rest is started by ``serve``; all are tasks of the
outer nursery and end with it. ``serve`` returns once the mount is gone and, where umount(8) did it, the drain is over.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Callable

import pyfuse3
import trio

from cachexfs import fuse_mount, tmpfs
from cachexfs.config import MountOptions
from cachexfs.control_server import ControlServer
from cachexfs.engine.filesystem import Filesystem
from cachexfs.engine.parts import Parts
from cachexfs.errors import EXIT_NOT_DURABLE, CannotTellError
from cachexfs.frontend.fuse import TASKS_MAX, Operations
from cachexfs.registration import Entry, Registration
from cachexfs.supervisor.client import Supervisor
from cachexfs.supervisor.messages import Event
from cachexfs.supervisor.payloads import SharedPayloads

log = logging.getLogger(__name__)

ALONE_TIMEOUT_S = 60.0  # kernel caching of names and attributes where nobody else can change them
ANSWER_LEAVES_S = 0.05


class Serving:
    """The service of one mount. ``on_answers`` is called when it answers."""

    def __init__(
        self, options: MountOptions, supervisor: Supervisor | None, registration: Registration,
        now_s: Callable[[], float], on_answers: Callable[[], None],
    ) -> None:  # fmt: skip
        self.options = options
        self.supervisor = supervisor
        self.retired = False
        self.exit_code = 0
        self.is_published = False  # at the end: all that is staged is known to the catalogue
        self._registration = registration
        self._now_s = now_s
        self._on_answers = on_answers
        self._control: ControlServer | None = None

    async def serve(self, services: trio.Nursery, parts: Parts, control: ControlServer) -> None:
        """Mount, answer the kernel until the unmount. Raises ``CannotTellError`` when FUSE does not mount."""
        options, supervisor = self.options, self.supervisor
        control.facts.kernel, control.facts.kernel_reason = fuse_mount.mode(options, supervisor)
        operations = Operations(
            Filesystem(parts), _payloads(supervisor),
            timeout_s=ALONE_TIMEOUT_S if options.alone else 0.0, hide_xattrs=options.hide_xattrs,
        )  # fmt: skip
        control.on_stale = operations.forget_entry
        fuse_mount.mount(options, supervisor, operations)
        if supervisor is not None:
            operations.resume(supervisor)
        await services.start(control.serve, str(self._registration.socket))
        self._register(fuse_mount.device(options.mountpoint))
        services.start_soon(self._watch_signals, control)
        services.start_soon(self._say_ready)
        services.start_soon(fuse_mount.read_ahead, options.mountpoint)
        services.start_soon(self._stop_when_asked, control)
        if supervisor is not None:
            services.start_soon(self._learn_mode, supervisor, control)
        self._control = control
        try:
            await pyfuse3.main(min_tasks=2, max_tasks=TASKS_MAX)
        except BaseExceptionGroup as group:
            if supervisor is None or group.split(_is_end)[1] is not None:
                raise
        pyfuse3.close(unmount=supervisor is None)
        if self.retired:
            return
        if not control.ending.requested.is_set():
            await operations.end()
            await self._drain_unmounted(parts, control)

    def _register(self, device: str) -> None:
        options = self.options
        self._registration.write(
            Entry(
                mountpoint=options.mountpoint, pfs=options.pfs, node=options.node, job=options.job, pid=os.getpid(),
                device=device, socket=str(self._registration.socket),
                log=options.log_file or "", started_s=self._now_s(), staging=tmpfs.staging_directory(options),
            )
        )  # fmt: skip

    async def _learn_mode(self, supervisor: Supervisor, control: ControlServer) -> None:
        found = await fuse_mount.settled_mode(supervisor, str(self._registration.supervisor_socket))
        if found is not None:
            control.facts.kernel, control.facts.kernel_reason = found

    async def _say_ready(self) -> None:
        if self.supervisor is not None:
            self.supervisor.ready()
        self._on_answers()
        log.info("mounted %s on %s", self.options.pfs, self.options.mountpoint)

    # ---- the end, by whomever
    async def _watch_signals(self, control: ControlServer) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for number in signals:
                await self._stop(control, f"signal {number}")

    async def _stop(self, control: ControlServer, who: str) -> None:
        """End without waiting for the drain: what is not on the PFS stays in staging, and the exit code says so."""
        log.warning("%s ends the mount; what is not on the PFS yet stays in staging", who)
        failed = await control.parts.files.publish_all()
        for text in failed:
            log.error("not published: %s", text)
        control.ending.is_published = not failed
        kept = control.parts.keeper.kept_for_others()
        control.ending.left = len(failed) + control.parts.drainer.left() + len(kept)
        control.ending.requested.set()

    async def _stop_when_asked(self, control: ControlServer) -> None:
        await control.ending.requested.wait()
        self.exit_code = max(self.exit_code, control.ending.exit_code)
        self.is_published = control.ending.is_published
        await trio.sleep(ANSWER_LEAVES_S)  # the answer to ``umount`` leaves first
        if self.supervisor is not None:
            self.supervisor.stopping(self.exit_code)  # it unmounts, then tells us the end
        else:
            pyfuse3.terminate()

    async def follow(self, supervisor: Supervisor) -> None:
        """Do what the supervisor says; before the mount answers, any word ends the start (``CannotTellError``)."""
        while True:
            await trio.lowlevel.wait_readable(supervisor.events_fd)
            event = supervisor.next_event()
            if event is None:
                continue
            if self._control is None:
                raise CannotTellError("stopped while it was starting")
            if event is Event.STOP:
                await self._stop(self._control, "the supervisor")
                continue
            if event is Event.RETIRE:
                log.info("another daemon takes over")
                self.retired = True
            pyfuse3.terminate()
            break
        while not self.retired:  # END; a STOP after it ends the drain too
            await trio.lowlevel.wait_readable(supervisor.events_fd)
            event = supervisor.next_event()
            if event is Event.STOP:
                self._control.ending.requested.set()
            if event in (Event.STOP, Event.END):
                return

    async def _drain_unmounted(self, parts: Parts, control: ControlServer) -> None:
        """umount(8) cannot drain: go on without the mount until everything is on the PFS, or somebody ends it."""
        control.facts.unmounted = True
        if self._registration.exists():
            self._register(device="")  # the kernel gives the device's number to others
        parts.node.errors["unmounted"] = (
            "the mount was taken away without 'cachexfs umount': what is pending is still being copied to the PFS; "
            "'cachexfs mount' with the same options goes on with it"
        )
        if self.supervisor is not None:
            self.supervisor.draining()
        log.warning("unmounted from outside: draining %d operations before the end", len(parts.drainer.own_pending()))
        failed = await parts.files.publish_all()
        if failed:
            self.exit_code = EXIT_NOT_DURABLE
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_stopped, control, nursery.cancel_scope)
            while not parts.drainer.is_idle():
                await parts.drainer.changed()
            nursery.cancel_scope.cancel()
        left = parts.drainer.left()
        if left:  # perhaps held for a commit file that nobody can write any more, or lost
            log.error("%d operations are not done; 'cachexfs recover' says what they are", left)
            self.exit_code = EXIT_NOT_DURABLE
        if kept := len(parts.keeper.kept_for_others()):
            log.error("%d files of other nodes are not on the PFS yet: their replicas here stay", kept)
            self.exit_code = EXIT_NOT_DURABLE

    @staticmethod
    async def _cancel_when_stopped(control: ControlServer, scope: trio.CancelScope) -> None:
        await control.ending.requested.wait()
        scope.cancel()


def _is_end(error: BaseException) -> bool:
    """libfuse's word (EIO) for a supervisor that is gone; mostly its death is noticed before."""
    return isinstance(error, OSError) and error.errno == errno.EIO


def _payloads(supervisor: Supervisor | None) -> SharedPayloads | None:
    """Where the bytes of large writes lie; None: they come with the requests."""
    if supervisor is None:
        return None
    try:
        return supervisor.share_payloads()
    except OSError as error:
        log.warning("large writes come through the supervisor's socket, which is slower: %s", error)
        return None
