"""The supervisor's loop: one epoll over the device, the daemon's sockets, signals and the status socket.

Role: acts on what ``Lifecycle`` decides: starts daemons, hands over, answers EIO, unmounts, ends.
Concurrency: one thread; the only others are the notifier (``pump``) and the one that unmounts. Nothing here
touches the mounted tree. Called by ``__main__``.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import time
from collections.abc import Mapping

from . import messages, mount
from .blame import HANG_WEIGHT, LOOKS, Blame
from .child import Child, Program
from .control import Control
from .lifecycle import EXIT_NOT_DURABLE, Lifecycle, Phase
from .messages import Event
from .passthrough import Backings
from .plan import Plan, log
from .pump import Pump
from .session import Session
from .standby import Ahead
from .status import StatusSocket

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
#: A daemon that served this long is one that can run, even if nobody asked it anything. Seconds.
_STABLE_S = 5.0
#: When the next standby is started after one died. Seconds.
_STANDBY_AGAIN_S = 30.0


class Supervisor:
    """One mount from its first daemon to its end; ``run`` returns the exit code."""

    def __init__(self, plan: Plan, environment: Mapping[str, str]) -> None:
        self._plan = plan
        self._life = Lifecycle(plan.limits)
        self._epoll = select.epoll()
        self._backings = Backings(plan.device_fd, plan.backing_devices)
        self._session = Session(self._backings, plan.payload_bytes_max, plan.no_passthrough)
        self._pump = Pump(plan.device_fd, self._session, self._epoll, plan.spin_s)
        self._pump.on_init = self._init_answered
        self._pump.before_open = self._drain_control
        self._control = Control(self._backings, self._daemon_ready, self._daemon_stopping, self._daemon_draining)
        self._child: Child | None = None
        self._abandoned: list[Child] = []
        self._is_swap_wanted = False
        self._swaps_refused = 0
        self._is_initialised = self._is_ready = False
        self._is_retire_due = self._is_draining = False
        self._answered_at_start = 0
        self._served_s = 0.0
        self._kill_reason = ""
        self._blame = Blame(self._pump, plan.limits)
        self._started_s = time.monotonic()
        self._unmounter: mount.Unmounter | None = None
        self._signal_fd, self._wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._status = StatusSocket(plan.status_path, self._epoll, self._command)
        names = {messages.ENV_MOUNT_ID: secrets.token_hex(8), messages.ENV_MOUNTPOINT: plan.mountpoint}
        #: What daemons are, and what they were while the present one has not served yet.
        self._program = self._program_before = Program(plan.argv, {**environment, **names})
        self._ready_fd = plan.ready_fd
        self._ahead = Ahead(self._program, self._epoll)

    # -- the loop ---------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until the mount is gone; the exit code."""
        signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        self._epoll.register(self._signal_fd, select.EPOLLIN)
        self._check_oldest()
        self._start()
        while not (self._life.phase is Phase.ENDED and self._child is None):
            self._turn()
        self._ahead.discard()
        self._status.close()
        self._pump.close()
        return self._life.exit_code

    def _turn(self) -> None:
        pump = self._pump
        for fd, _ in pump.turn(self._life.timeout_s(time.monotonic())):
            self._other(fd)
        if pump.is_ended and self._life.phase is not Phase.ENDED:
            self._mount_gone()
        is_due = pump.is_peer_gone and not self._is_draining and "exit" not in self._life.deadlines
        if is_due and self._child is not None:
            self._life.deadlines["exit"] = time.monotonic() + self._plan.limits.exit_s
        if self._is_retire_due and not pump.pending_count:
            self._retire_now()
        if self._life.deadlines:
            for name in self._life.due(time.monotonic()):
                self._deadline(name)

    def _other(self, fd: int) -> None:
        child = self._child
        if child is not None and fd == child.control.fileno():
            self._drain_control()
        elif fd == self._ahead.fd:
            if self._ahead.on_readable() and self._is_swap_wanted:
                self._begin_swap()
        elif fd == self._signal_fd:
            for number in set(os.read(self._signal_fd, 512)):
                self._signal(number)
        else:
            self._status.on_event(fd)

    def _drain_control(self) -> None:
        child = self._child
        if child is not None and child.is_asking and not self._control.drain(child.control):
            child.is_asking = False
            self._epoll.unregister(child.control.fileno())

    def _signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            if self._child is not None and self._child.has_exited():
                self._child_gone()
            if self._ahead.has_exited():
                self._standby_gone()
            for child in [c for c in self._abandoned if c.has_exited()]:
                child.reap()
                self._abandoned.remove(child)
        elif number == signal.SIGHUP:
            self.restart()
        else:
            self.stop()

    def _deadline(self, name: str) -> None:
        if name == "oldest":
            self._check_oldest()
        elif name == "stop":
            self._life.exit_code = EXIT_NOT_DURABLE
            log("the daemon did not finish in time: unmounting with its work undone")
            self._unmount()
        elif name == "standby":
            self._start_ahead()
        elif name == "warm":
            self._swap_failed("it did not start in time")
        elif name == "exit":
            self._kill("the daemon did not exit in time")
        elif name == "killed":
            log("the daemon does not die: it hangs in the kernel, and is left to it")
            self._child_gone()
        elif self._life.phase is Phase.BACKOFF:
            self._start()
        elif self._life.phase is Phase.STARTING:
            self._kill("the daemon was not ready in time")
        elif self._life.phase is Phase.RETIRING:
            self._retire_now()
        elif self._life.phase is Phase.UNMOUNTING:
            self._life.exit_code = self._life.exit_code or EXIT_NOT_DURABLE
            said = self._unmounter.said if self._unmounter is not None else ""
            log(f"still in use ({said or 'busy'}): ending the connection")
            self._mount_gone()

    # -- a daemon's life --------------------------------------------------------------------------------

    def _start(self) -> None:
        life, limits = self._life, self._plan.limits
        now = time.monotonic()
        life.enter(Phase.STARTING, now + limits.start_s)
        life.life += 1
        if self._is_swap_wanted:  # the old daemon has died before it was told to end
            self._program = self._ahead.program
        self._is_initialised = self._is_ready = self._is_swap_wanted = False
        self._kill_reason = ""
        life.deadlines.pop("warm", None)
        self._answered_at_start = self._pump.answered
        self._control.no_passthrough = self._session.no_passthrough
        state = messages.pack_state(life.life, self._pump.replays(), self._session.handles())
        try:
            child = Child(
                self._program,
                state,
                passthrough=not self._session.no_passthrough,
                standby=self._ahead.take(),
            )
        except OSError as error:
            self._failed(f"cannot run {self._program.argv[0]}: {error.strerror}")
            return
        self._child = child
        self._epoll.register(child.control.fileno(), select.EPOLLIN)
        self._pump.attach(child.peer_fd)

    def _init_answered(self, why: str) -> None:
        if why:
            self._kill(why)
            return
        self._is_initialised = True
        self._pump.replay()
        self._maybe_serving()

    def _daemon_ready(self) -> None:
        self._is_ready = True
        self._maybe_serving()

    def _maybe_serving(self) -> None:
        life = self._life
        if not (self._is_initialised and self._is_ready and life.phase is Phase.STARTING):
            return
        life.enter(Phase.SERVING)
        self._program_before = self._program
        self._served_s = time.monotonic()
        if not life.has_served:
            life.has_served = True
            self._tell_ready("ready")
        else:
            log(f"daemon {self._child.pid if self._child else 0} serves (life {life.life})")
        if life.is_stop_wanted and self._child is not None:
            self._child.tell(Event.STOP)
        elif self._plan.standby_after_s is not None:
            life.deadlines["standby"] = self._served_s + self._plan.standby_after_s

    # -- swapping ---------------------------------------------------------------------------------------

    def _start_ahead(self) -> None:
        if self._life.phase is not Phase.ENDED and (why := self._ahead.start()):
            self._swap_failed(why)

    def _standby_gone(self) -> None:
        self._ahead.discard()
        self._life.deadlines["standby"] = time.monotonic() + _STANDBY_AGAIN_S
        self._swap_failed("it ended while starting")

    def _swap_failed(self, why: str) -> None:
        self._life.deadlines.pop("warm", None)
        if self._is_swap_wanted:
            self._is_swap_wanted = False
            self._swaps_refused += 1
            self._life.last_failure = f"the new daemon was not taken: {why}"
            log(f"{self._life.last_failure}; the old one goes on")
            self._ahead.discard()
            self._use(self._program)

    def _begin_swap(self) -> None:
        self._is_swap_wanted = False
        self._life.deadlines.pop("warm", None)
        self._program = self._ahead.program
        if self._life.phase is Phase.SERVING:
            self._life.enter(Phase.RETIRING, time.monotonic() + self._plan.limits.grace_s)
            self._is_retire_due = True
            self._pump.pause()

    # -- the end of a daemon ----------------------------------------------------------------------------

    def _daemon_stopping(self, code: int) -> None:
        self._life.exit_code = self._life.exit_code or code & 0xFF
        self._unmount()

    def _daemon_draining(self) -> None:
        """umount(8) cannot drain: the daemon goes on without the mount for as long as it takes, or until ``stop``."""
        if self._life.phase is Phase.ENDED:
            self._is_draining = True
            self._life.deadlines.pop("exit", None)

    def _kill(self, why: str) -> None:
        self._kill_reason = why
        log(why)
        if self._child is not None:
            self._child.kill()
            self._life.deadlines["killed"] = time.monotonic() + self._plan.limits.exit_s

    def _child_gone(self) -> None:
        child, life = self._child, self._life
        assert child is not None
        child.kill()
        self._pump.detach()
        if child.is_asking:
            self._epoll.unregister(child.control.fileno())
        if child.has_exited():
            code = child.reap()
        else:
            code = child.abandon()
            self._abandoned.append(child)
        self._child = None
        self._backings.daemon_gone()
        life.deadlines.pop("exit", None)
        life.deadlines.pop("killed", None)
        if life.phase is Phase.ENDED:
            life.exit_code = life.exit_code or (code if code >= 0 else EXIT_NOT_DURABLE)
        elif life.phase is Phase.UNMOUNTING:
            self._pump.fail_everything()
        elif life.phase is Phase.RETIRING:
            self._is_retire_due = False
            life.restarts += 1
            self._start()
        elif life.is_stop_wanted and code == 0:
            self._unmount()
        else:
            life.restarts += 1
            if code != -signal.SIGKILL and not self._had_progress():
                self._blame.daemon_ended()
            was_killed = code == -signal.SIGKILL and not self._kill_reason
            self._failed(f"daemon {child.pid} ended with {_say_exit(code)}", was_killed=was_killed)

    def _failed(self, why: str, *, was_killed: bool = False) -> None:
        life = self._life
        had_progress = self._had_progress()
        if self._kill_reason:
            why = f"{why}: {self._kill_reason}"
        log(f"{why}; {self._pump.pending_count} requests unanswered")
        if self._program is not self._program_before:
            why = f"the new program was not taken: {why}"
            self._swaps_refused += 1
            self._ahead.discard()
            self._use(self._program_before)
        if life.failed(why, had_progress=had_progress, now=time.monotonic(), was_killed=was_killed) is Phase.FAILED:
            log(f"giving up after {life.failures} failures in a row: every request gets EIO")
            self._pump.fail_everything()
            self._tell_ready(f"failed: {why}")
            if not life.has_served or life.is_stop_wanted:
                self._unmount()

    def _had_progress(self) -> bool:
        return self._is_ready and (
            self._pump.answered > self._answered_at_start or time.monotonic() - self._served_s > _STABLE_S
        )

    def _check_oldest(self) -> None:
        limits = self._plan.limits
        self._life.deadlines["oldest"] = time.monotonic() + limits.request_s / LOOKS
        if self._blame.is_hung(self._life.phase is Phase.SERVING):
            self._blame.daemon_ended(HANG_WEIGHT)
            self._kill(f"a request has been without an answer for {limits.request_s:g} s: the daemon hangs")

    # -- what the user asks -----------------------------------------------------------------------------

    def _use(self, program: Program) -> None:
        self._program = self._ahead.program = program

    def restart(self, interpreter: str = "") -> str:
        """Swap the daemon, or try again after giving up. What is happening, for the user.

        ``interpreter``: the Python that runs the next daemons; if they never serve, the old one's comes back.
        """
        if interpreter and not (os.path.isabs(interpreter) and os.access(interpreter, os.X_OK)):
            return f"not now: {interpreter} is no program that can be run"
        life = self._life
        program = self._program.run_by(interpreter) if interpreter else self._program
        now = time.monotonic()
        if life.phase is Phase.FAILED:
            life.failures = life.deaths = life.exit_code = 0
            self._use(program)
            self._pump.serve_again()
            self._start()
            return "trying again"
        if life.phase is not Phase.SERVING or life.is_stop_wanted or self._is_swap_wanted:
            return "not now: " + str(life.phase.value)
        if self._plan.standby_after_s is not None:
            # The new code is started before the old daemon ends: if it cannot start, nothing has happened.
            self._ahead.discard()
            self._ahead.program = program
            self._is_swap_wanted = True
            life.deadlines["warm"] = now + self._plan.limits.start_s
            self._start_ahead()
        else:
            self._ahead.program = program
            self._begin_swap()
        return "restarting"

    def _retire_now(self) -> None:
        life = self._life
        self._is_retire_due = False
        life.deadlines.pop("phase", None)
        life.deadlines["exit"] = time.monotonic() + self._plan.limits.exit_s
        if self._child is not None and not self._child.tell(Event.RETIRE):
            self._child.kill()

    def stop(self) -> str:
        """Let the daemon finish, then unmount. The second time: unmount now."""
        life = self._life
        if life.phase is Phase.ENDED and self._child is not None and self._is_draining:
            self._is_draining = False
            self._child.tell(Event.STOP)
            life.deadlines["exit"] = time.monotonic() + self._plan.limits.exit_s
        if life.phase in (Phase.UNMOUNTING, Phase.ENDED):
            return str(life.phase.value)
        if life.phase is Phase.FAILED or life.is_stop_wanted:
            self._unmount()
            return "unmounting"
        life.is_stop_wanted = True
        life.deadlines["stop"] = time.monotonic() + self._plan.limits.stop_s
        if life.phase is Phase.SERVING and self._child is not None:
            self._child.tell(Event.STOP)
        return "stopping"

    def _unmount(self) -> None:
        life = self._life
        if life.phase in (Phase.UNMOUNTING, Phase.ENDED):
            return
        limits = self._plan.limits
        life.enter(Phase.UNMOUNTING, time.monotonic() + 2 * limits.unmount_s)
        life.deadlines.pop("stop", None)
        if self._child is None:
            self._pump.fail_everything()
        self._unmounter = mount.Unmounter(self._plan.mountpoint, limits.unmount_s)

    def _mount_gone(self) -> None:
        life = self._life
        if self._child is None and life.has_served:
            life.exit_code = life.exit_code or EXIT_NOT_DURABLE
        life.enter(Phase.ENDED)
        life.deadlines.pop("stop", None)
        self._tell_ready("failed: unmounted")
        self._ahead.discard()
        if self._child is not None:
            life.deadlines["exit"] = time.monotonic() + self._plan.limits.exit_s
            if not self._child.tell(Event.END):
                self._child.kill()

    def _tell_ready(self, text: str) -> None:
        if self._ready_fd is not None:
            try:
                os.write(self._ready_fd, text.encode() + b"\n")
            except OSError:
                pass  # nobody waits any more
            os.close(self._ready_fd)
            self._ready_fd = None

    # -- what the user sees -----------------------------------------------------------------------------

    def _command(self, command: str) -> dict[str, object]:
        if command == "restart" or command.startswith("restart "):
            return {"said": self.restart(command.removeprefix("restart").strip())}
        if command == "stop":
            return {"said": self.stop()}
        if command == "status":
            return self.status()
        return {"error": f"unknown command {command[:32]!r}: status, restart or stop"}

    def status(self) -> dict[str, object]:
        """The mount's state, as the status socket gives it (JSON types only)."""
        life, pump = self._life, self._pump
        return {
            "phase": life.phase.value,
            "mountpoint": self._plan.mountpoint,
            "supervisor_pid": os.getpid(),
            "daemon_pid": self._child.pid if self._child else 0,
            "interpreter": self._program.argv[0],
            "swaps_refused": self._swaps_refused,
            "standby_pid": self._ahead.pid,
            "standby_is_warm": self._ahead.is_warm,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "life": life.life,
            "restarts": life.restarts,
            "failures_in_a_row": life.failures,
            "last_failure": life.last_failure,
            "requests_pending": pump.pending_count,
            "requests_answered": pump.answered,
            "requests_given_up": self._blame.given_up,
            "handles_open": self._session.handle_count,
            "passthrough": not self._session.no_passthrough and self._session.is_agreed,
            "passthrough_reason": self._session.no_passthrough,
            "backings": len(self._backings),
            "payload_bytes_max": self._plan.payload_bytes_max,
            "refused": pump.refused + self._control.refused,
            "last_refusal": self._control.last_refusal or pump.last_refusal,
        }


def _say_exit(code: int) -> str:
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
