"""The supervisor's loop: one epoll over the device, the daemon's sockets, signals and the status socket.

Role: the mount from its first daemon to its end: signals, deadlines, commands, the unmount, the exit code.
Concurrency: one thread; the only others are the notifier (``pump``) and the one that unmounts. Nothing here
touches the mounted tree. Called by ``__main__``.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping

from . import mount
from .control import Control
from .daemons import Daemons
from .lifecycle import EXIT_NOT_DURABLE, Lifecycle, Phase
from .messages import Event
from .passthrough import Backings
from .plan import Plan, log
from .pump import Pump
from .session import Session
from .status import StatusSocket

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class Supervisor:
    """One mount; ``run`` returns the exit code."""

    def __init__(self, plan: Plan, environment: Mapping[str, str]) -> None:
        self._plan = plan
        self._life = Lifecycle(plan.limits)
        self._epoll = select.epoll()
        self._backings = Backings(plan.device_fd, plan.backing_devices)
        self._session = Session(self._backings, plan.payload_bytes_max, plan.no_passthrough)
        self._pump = Pump(plan.device_fd, self._session, self._epoll, plan.spin_s)
        self._control = Control(self._backings, self)
        self._daemons = Daemons(
            plan, environment, self._life, self._epoll, self._pump, self._session, self._backings, self._control, self
        )
        self._pump.on_init = self._daemons.init_answered
        self._pump.before_open = self._daemons.drain_control
        self._is_draining = False
        self._started_s = time.monotonic()
        self._unmounter: mount.Unmounter | None = None
        self._signal_fd, self._wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._status = StatusSocket(plan.status_path, self._epoll, self._command)
        self._ready_fd = plan.ready_fd
        self._on_deadline: dict[str, Callable[[], None]] = {
            "phase": self._phase_over,
            "look": self._daemons.look,
            "standby": self._daemons.start_ahead,
            "warm": lambda: self._daemons.swap_failed("it did not start in time"),
            "exit": lambda: self._daemons.kill("the daemon did not exit in time"),
            "killed": self._does_not_die,
            "stop": self._does_not_finish,
        }

    @property
    def has_served(self) -> bool:
        """Whether applications may rely on the mount."""
        return self._life.has_served

    # -- the loop ---------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until the mount is gone; the exit code."""
        signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        self._epoll.register(self._signal_fd, select.EPOLLIN)
        self._daemons.look()
        self._daemons.start()
        while not (self._life.phase is Phase.ENDED and self._daemons.child is None):
            self._turn()
        self._daemons.ahead.discard()
        self._status.close()
        self._pump.close()
        self._daemons.killed.wait()
        return self._life.exit_code

    def _turn(self) -> None:
        pump, life = self._pump, self._life
        for fd, _ in pump.turn(life.timeout_s(time.monotonic())):
            self._other(fd)
        if pump.is_ended and life.phase is not Phase.ENDED:
            self._mount_gone()
        if pump.is_peer_gone and not self._is_draining and "exit" not in life.deadlines and self._daemons.child:
            self._daemons.exit_soon()
        self._daemons.retire_when_idle()
        for name in life.due(time.monotonic()):
            self._on_deadline[name]()

    def _other(self, fd: int) -> None:
        child = self._daemons.child
        if child is not None and fd == child.control.fileno():
            self._daemons.drain_control()
        elif fd == self._daemons.ahead.fd:
            self._daemons.ahead_said()
        elif fd == self._signal_fd:
            for number in set(os.read(self._signal_fd, 512)):
                self._signal(number)
        else:
            self._status.on_event(fd)

    def _signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            if self._daemons.child is not None and self._daemons.child.has_exited():
                self._child_gone()
            if self._daemons.ahead.has_exited():
                self._daemons.ahead_gone()
            self._daemons.killed.reap()
        elif number == signal.SIGHUP:
            self._daemons.restart()
        else:
            self.stop()

    # -- deadlines --------------------------------------------------------------------------------------

    def _phase_over(self) -> None:
        phase = self._life.phase
        if phase is Phase.BACKOFF:
            self._daemons.start()
        elif phase is Phase.STARTING:
            self._daemons.kill("the daemon was not ready in time")
        elif phase is Phase.RETIRING:
            self._daemons.retire()
        elif phase is Phase.UNMOUNTING:
            self._life.exit_code = self._life.exit_code or EXIT_NOT_DURABLE
            said = self._unmounter.said if self._unmounter is not None else ""
            log(f"still in use ({said or 'busy'}): ending the connection")
            self._mount_gone()

    def _does_not_die(self) -> None:
        log("the daemon does not die: it hangs in the kernel, and is left to it")
        self._child_gone()

    def _does_not_finish(self) -> None:
        self._life.exit_code = EXIT_NOT_DURABLE
        log("the daemon did not finish in time: unmounting with its work undone")
        self._unmount()

    # -- what becomes of daemons (``control.Listener``, ``daemons.Owner``) -------------------------------

    def daemon_ready(self) -> None:
        """The daemon has adopted the state."""
        self._daemons.is_ready()

    def daemon_alive(self) -> None:
        """The daemon's loop runs."""
        self._daemons.blame.alive()

    def daemon_shares(self) -> None:
        """The daemon takes the bytes of large writes from the shared memory."""
        self._pump.is_sharing = True

    def daemon_stopping(self, code: int) -> None:
        """The daemon has finished on purpose."""
        self._life.exit_code = self._life.exit_code or code & 0xFF
        self._unmount()

    def daemon_draining(self) -> None:
        """umount(8) cannot drain: the daemon goes on without the mount for as long as it takes, or until ``stop``."""
        if self._life.phase is Phase.ENDED:
            self._is_draining = True
            self._life.deadlines.pop("exit", None)

    def serving(self) -> None:
        """A daemon serves."""
        life, child = self._life, self._daemons.child
        if not life.has_served:
            life.has_served = True
            self._tell_ready("ready")
        else:
            log(f"daemon {child.pid if child else 0} serves (life {life.life})")
        if life.is_stop_wanted and child is not None:
            child.tell(Event.STOP)

    def gave_up(self, why: str) -> None:
        """No daemon can serve: the mount stays, for an empty directory would look like deleted files."""
        self._tell_ready(f"failed: {why}")
        if not self._life.has_served or self._life.is_stop_wanted:
            self._unmount()

    def _child_gone(self) -> None:
        life, child = self._life, self._daemons.child
        assert child is not None
        code = self._daemons.bury()
        if life.phase is Phase.ENDED:
            life.exit_code = life.exit_code or (code if code >= 0 else EXIT_NOT_DURABLE)
        elif life.phase is Phase.UNMOUNTING:
            self._pump.fail_everything()
        elif life.phase is Phase.RETIRING:
            life.restarts += 1
            self._daemons.start()
        elif life.is_stop_wanted and (code == 0 or not life.has_served):
            self._unmount()
        else:
            life.restarts += 1
            self._daemons.died(child.pid, code)

    # -- the end ----------------------------------------------------------------------------------------

    def stop(self) -> str:
        """Let the daemon finish, then unmount. The second time: unmount now."""
        life, child = self._life, self._daemons.child
        if life.phase is Phase.ENDED and child is not None and self._is_draining:
            self._is_draining = False
            child.tell(Event.STOP)
            self._daemons.exit_soon()
        if life.phase in (Phase.UNMOUNTING, Phase.ENDED):
            return str(life.phase.value)
        if life.phase is Phase.FAILED or life.is_stop_wanted:
            self._unmount()
            return "unmounting"
        life.is_stop_wanted = True
        life.deadlines["stop"] = time.monotonic() + self._plan.limits.stop_s
        is_first = life.phase is Phase.STARTING and not life.has_served  # it may wait for others for ever
        if child is not None and (life.phase is Phase.SERVING or is_first):
            child.tell(Event.STOP)
        return "stopping"

    def _unmount(self) -> None:
        life = self._life
        if life.phase in (Phase.UNMOUNTING, Phase.ENDED):
            return
        limits = self._plan.limits
        life.enter(Phase.UNMOUNTING, time.monotonic() + 2 * limits.unmount_s)
        life.deadlines.pop("stop", None)
        if self._daemons.child is None:
            self._pump.fail_everything()
        self._unmounter = mount.Unmounter(self._plan.place, limits.unmount_s)

    def _mount_gone(self) -> None:
        life = self._life
        if self._daemons.child is None and life.has_served:
            life.exit_code = life.exit_code or EXIT_NOT_DURABLE
        life.enter(Phase.ENDED)
        life.deadlines.pop("stop", None)
        self._tell_ready("failed: unmounted")
        self._daemons.ahead.discard()
        if self._daemons.child is not None:
            self._daemons.exit_soon()
            self._daemons.tell(Event.END)

    def _tell_ready(self, text: str) -> None:
        if self._ready_fd is not None:
            try:
                os.write(self._ready_fd, text.encode(errors="backslashreplace") + b"\n")
            except OSError:
                pass  # nobody waits any more
            os.close(self._ready_fd)
            self._ready_fd = None

    # -- what the user asks and sees --------------------------------------------------------------------

    def _command(self, command: str) -> dict[str, object]:
        if command == "restart" or command.startswith("restart "):
            return {"said": self._daemons.restart(command.removeprefix("restart").strip())}
        if command == "stop":
            return {"said": self.stop()}
        if command == "status":
            return self.status()
        return {"error": f"unknown command {command[:32]!r}: status, restart or stop"}

    def status(self) -> dict[str, object]:
        """The mount's state, as the status socket gives it (JSON types only)."""
        life, pump, daemons = self._life, self._pump, self._daemons
        return {
            "phase": life.phase.value,
            "draining": self._is_draining,
            "mountpoint": self._plan.place.path,
            "supervisor_pid": os.getpid(),
            "daemon_pid": daemons.child.pid if daemons.child else 0,
            "interpreter": daemons.program.argv[0],
            "swaps_refused": daemons.swaps_refused,
            "standby_pid": daemons.ahead.pid,
            "standby_is_warm": daemons.ahead.is_warm,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "life": life.life,
            "restarts": life.restarts,
            "failures_in_a_row": life.failures,
            "last_failure": life.last_failure,
            "requests_pending": len(pump.pending),
            "requests_answered": pump.answered,
            "requests_given_up": daemons.blame.given_up,
            "handles_open": self._session.handle_count,
            "passthrough": not self._session.no_passthrough and self._session.is_agreed,
            "passthrough_reason": self._session.no_passthrough,
            "backings": len(self._backings),
            "opens_broken": self._session.broken,
            "payload_bytes_max": self._plan.payload_bytes_max,
            "refused": pump.refused + self._control.refused,
            "last_refusal": self._control.last_refusal or pump.last_refusal,
        }
