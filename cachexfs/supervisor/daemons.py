"""One daemon after the other: started, told to go, buried, swapped for another program, given up.

Role: acts on what ``Lifecycle`` decides about daemons; what becomes of the mount is ``run``'s.
Concurrency: the supervisor's one thread. Called by ``run`` and, for INIT, by the pump.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from . import messages
from .blame import HANG_WEIGHT, Blame
from .child import Child, Killed, Program
from .control import Control
from .lifecycle import Lifecycle, Phase
from .messages import Event
from .passthrough import Backings
from .plan import Plan, log
from .pump import Pump
from .session import Session
from .standby import Ahead

#: A daemon that served this long is one that can run, even if nobody asked it anything. Seconds.
_STABLE_S = 5.0
#: When the next standby is started after one died. Seconds.
_STANDBY_AGAIN_S = 30.0
#: The machine has too little of something just now: applications wait, as at a death by SIGKILL.
_SCARCE = (errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE)


class Owner(Protocol):
    """The mount that the daemons serve."""

    def serving(self) -> None:
        """A daemon serves."""

    def gave_up(self, why: str) -> None:
        """No daemon can serve."""


class Daemons:
    """The daemons of one mount, of which one lives at a time (and perhaps one that waits)."""

    def __init__(
        self, plan: Plan, environment: Mapping[str, str], life: Lifecycle, epoll: select.epoll, pump: Pump,
        session: Session, backings: Backings, control: Control, owner: Owner,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._life = life
        self._epoll = epoll
        self._pump = pump
        self._session = session
        self._backings = backings
        self._control = control
        self._owner = owner
        names = {messages.ENV_MOUNT_ID: secrets.token_hex(8), messages.ENV_MOUNTPOINT: plan.place.path}
        #: What daemons are, and what they were while the present one has not served yet.
        self.program = self._program_before = Program(plan.argv, {**environment, **names})
        self.killed = Killed()
        self.ahead = Ahead(self.program, epoll, self.killed)
        self.blame = Blame(pump.pending, pump.give_up_on, plan.limits)
        #: The one that lives, or is being ended.
        self.child: Child | None = None
        self.swaps_refused = 0
        self._is_swap_wanted = self._is_retire_due = False
        self._is_initialised = self._is_ready = False
        self._answered_at_start = 0
        self._served_s = 0.0
        self._kill_reason = ""
        self._is_hung = False
        self._is_memory_anothers = False  # a daemon that did not die has it

    # -- start ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the next one, or give the mount to the one that waits."""
        life = self._life
        life.enter(Phase.STARTING, time.monotonic() + self._plan.limits.start_s)
        life.life += 1
        if self._is_swap_wanted:  # the old daemon has died before it was told to end
            self.program = self.ahead.program
        self._is_initialised = self._is_ready = self._is_swap_wanted = self._is_retire_due = False
        self._kill_reason = ""
        life.deadlines.pop("warm", None)
        self._answered_at_start = self._pump.answered
        why = self._session.no_passthrough
        self._control.no_passthrough = why
        replays, handles = self._pump.pending.described(), self._session.handles()
        state = messages.pack_state(life.life, replays, handles, has_served=life.has_served)
        standby = self.ahead.take()
        try:
            self._renew_memory()
            payloads_fd = self._pump.pending.memory.fd
            child = Child(self.program, state, payloads_fd, passthrough=not why, standby=standby)
        except OSError as error:
            if standby is not None:
                standby.discard()
            self.failed(f"cannot run {self.program.argv[0]}: {error.strerror}", is_passing=error.errno in _SCARCE)
            return
        self.child = child
        self._epoll.register(child.control.fileno(), select.EPOLLIN)
        self._pump.attach(child.peer_fd)

    def drain_control(self) -> None:
        """Take what the daemon has said beside its replies."""
        child = self.child
        if child is not None and child.is_asking and not self._control.drain(child.control):
            child.is_asking = False
            self._epoll.unregister(child.control.fileno())

    def init_answered(self, why: str) -> None:
        """The daemon has answered INIT; ``why`` it does not fit, or the empty string."""
        if why:
            self.kill(why)
            return
        self._is_initialised = True
        self.drain_control()  # how it takes large writes
        self._pump.replay()
        self._maybe_serving()

    def is_ready(self) -> None:
        """The daemon has adopted the state."""
        self._is_ready = True
        self._maybe_serving()

    def _maybe_serving(self) -> None:
        life = self._life
        if not (self._is_initialised and self._is_ready and life.phase is Phase.STARTING):
            return
        life.enter(Phase.SERVING)
        self.blame.alive()
        self._pump.serve_again()
        self._program_before = self.program
        self._served_s = time.monotonic()
        if self._plan.standby_after_s is not None and not life.is_stop_wanted:
            life.deadlines["standby"] = self._served_s + self._plan.standby_after_s
        self._owner.serving()

    # -- end --------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Tell the daemon, if there is one; one that cannot be told is killed, but for a pulse."""
        if self.child is not None and not self.child.tell(event) and event is not Event.PULSE:
            self.child.kill()

    def exit_soon(self) -> None:
        """The daemon is expected to exit: it has so long."""
        self._life.deadlines["exit"] = time.monotonic() + self._plan.limits.exit_s

    def kill(self, why: str) -> None:
        """SIGKILL, and why."""
        self._kill_reason = why
        log(why)
        if self.child is not None:
            self.child.kill()
            self._life.deadlines["killed"] = time.monotonic() + self._plan.limits.exit_s

    def bury(self) -> int:
        """The daemon is dead, or does not die: take its last answers, forget it; its exit code, negative a signal."""
        child, deadlines = self.child, self._life.deadlines
        assert child is not None
        child.kill()
        self._pump.detach()
        if child.is_asking:
            self._epoll.unregister(child.control.fileno())
        child.close()
        if child.has_exited():
            code = child.reap()
        else:
            code = -signal.SIGKILL
            self.killed.add(child)
            self._is_memory_anothers = True
            with suppress(OSError):  # again before the next one starts
                self._renew_memory()
        self.child = None
        self._is_retire_due = False
        if self._is_hung:  # only now: nothing may be failed while somebody could still do it
            self._is_hung = False
            self.blame.daemon_ended(HANG_WEIGHT)
        self._backings.daemon_gone()
        deadlines.pop("exit", None)
        deadlines.pop("killed", None)
        return code

    def _renew_memory(self) -> None:
        if self._is_memory_anothers:
            self._pump.renew_memory()
            self._is_memory_anothers = False

    def died(self, pid: int, code: int) -> None:
        """One has ended unasked."""
        is_passing = code == -signal.SIGKILL and not self._kill_reason
        if code == messages.EXIT_TRY_AGAIN and self._life.has_served:
            is_passing = True
            self._pump.fail_everything()  # until one serves: each would wait as long
        elif code != -signal.SIGKILL and not self._had_progress():
            self.blame.daemon_ended()
        self.failed(f"daemon {pid} ended with {_say_exit(code)}", is_passing=is_passing)

    def failed(self, why: str, *, is_passing: bool = False) -> None:
        """One could not be started or has died: the next one after a while, or none any more."""
        life = self._life
        had_progress = self._had_progress()
        if self._kill_reason:
            why = f"{why}: {self._kill_reason}"
        log(f"{why}; {len(self._pump.pending)} requests unanswered")
        if self.program is not self._program_before:
            why = f"the new program was not taken: {why}"
            self.swaps_refused += 1
            self._go_back(self._program_before)
        if life.failed(why, had_progress=had_progress, now=time.monotonic(), is_passing=is_passing) is Phase.FAILED:
            log(f"giving up after {life.failures} failures in a row: every request gets EIO")
            self._pump.fail_everything()
            self._owner.gave_up(why)

    def _had_progress(self) -> bool:
        return self._is_ready and (
            self._pump.answered > self._answered_at_start or time.monotonic() - self._served_s > _STABLE_S
        )

    def look(self) -> None:
        """Look whether the daemon hangs; again at a deadline."""
        self._life.deadlines["look"] = time.monotonic() + self.blame.look_s
        why = self.blame.look(self._life.phase is Phase.SERVING, lambda: self.tell(Event.PULSE))
        if why:
            self._is_hung = True
            self.kill(f"{why}: the daemon hangs")

    # -- another one ------------------------------------------------------------------------------------

    def restart(self, interpreter: str = "") -> str:
        """Swap the daemon, or try again after giving up. What is happening, for the user.

        ``interpreter``: the Python that runs the next daemons; if they never serve, the old one's comes back.
        """
        if interpreter and not os.path.isabs(interpreter):  # no more is asked: it may lie on a filesystem that hangs
            return f"not now: {interpreter} is no absolute path"
        life = self._life
        program = self.program.run_by(interpreter) if interpreter else self.program
        if life.phase in (Phase.FAILED, Phase.BACKOFF):
            life.failures = life.deaths = life.exit_code = 0
            self.program = self.ahead.program = program
            self._pump.serve_again()
            self.start()
            return "trying again"
        if life.phase is not Phase.SERVING or life.is_stop_wanted or self._is_swap_wanted:
            return "not now: " + str(life.phase.value)
        if self._plan.standby_after_s is not None:
            # The new code is started before the old daemon ends: if it cannot start, nothing has happened.
            self.ahead.discard()
            self.ahead.program = program
            self._is_swap_wanted = True
            life.deadlines["warm"] = time.monotonic() + self._plan.limits.start_s
            self.start_ahead()
        else:
            self.ahead.program = program
            self._begin_swap()
        return "restarting"

    def start_ahead(self) -> None:
        """Start the one that waits."""
        if self._life.phase is not Phase.ENDED and (why := self.ahead.start()):
            self.swap_failed(why)

    def ahead_said(self) -> None:
        """The one that waits has said so, or is ending."""
        is_warm = self.ahead.on_readable()
        if is_warm is False:
            self.ahead_gone()
        elif is_warm and self._is_swap_wanted:
            self._begin_swap()

    def ahead_gone(self) -> None:
        """The one that waited has died, or is of no use."""
        self.ahead.discard()
        self._life.deadlines["standby"] = time.monotonic() + _STANDBY_AGAIN_S
        self.swap_failed("it ended while starting, or is of another version")

    def swap_failed(self, why: str) -> None:
        """The one that was to take over cannot."""
        self._life.deadlines.pop("warm", None)
        if self._is_swap_wanted:
            self._is_swap_wanted = False
            self.swaps_refused += 1
            self._life.last_failure = f"the new daemon was not taken: {why}"
            log(f"{self._life.last_failure}; the old one goes on")
            self._go_back(self.program)

    def _go_back(self, program: Program) -> None:
        self.ahead.discard()
        self.program = self.ahead.program = program

    def _begin_swap(self) -> None:
        self._is_swap_wanted = False
        self._life.deadlines.pop("warm", None)
        self.program = self.ahead.program
        if self._life.phase is Phase.SERVING:
            self._life.enter(Phase.RETIRING, time.monotonic() + self._plan.limits.grace_s)
            self._is_retire_due = True
            self._pump.pause()

    def retire_when_idle(self) -> None:
        """Tell the old daemon to go once nothing is unanswered."""
        if self._is_retire_due and not self._pump.pending:
            self.retire()

    def retire(self) -> None:
        """Tell the old daemon to go."""
        self._is_retire_due = False
        self._life.deadlines.pop("phase", None)
        self.exit_soon()
        self.tell(Event.RETIRE)


def _say_exit(code: int) -> str:
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
