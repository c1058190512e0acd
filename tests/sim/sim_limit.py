"""A run that does not end is a fault: limits of simulated time, of steps and of processor time, and what waits then.

Role: around the whole run of a seed. The first two are the same for the same seed. Processor time is for code that
never waits; it is generous, and does not pass while the process is stopped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import trio
from sim_check import Violation

TASKS_MAX = 60  # of a dump


@dataclass(frozen=True)
class Limits:
    """What a run may take: many times what the longest of some hundred seeds did (1,600 s, 180,000 steps, 9 s).

    ``again_s``: processor time from one error to the next while it does not end.
    """

    simulated_s: float = 100_000.0
    steps: int = 3_000_000
    processor_s: float = 120.0
    again_s: float = 5.0


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks; ``reached`` is set at ``limit``."""

    def __init__(self, limit: int) -> None:
        self.count, self._limit, self.reached = 0, limit, trio.Event()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """See ``trio.abc.Instrument``."""
        self.count += 1
        if self.count == self._limit:
            self.reached.set()


async def limited(main: Callable[[], Awaitable[None]], limits: Limits) -> None:
    """``main``. Raises ``Violation`` with what waits when it takes more."""
    steps = Steps(limits.steps)

    async def watch() -> None:
        with trio.move_on_after(limits.simulated_s):
            await steps.reached.wait()
        raise Violation(f"hang: no end after {trio.current_time():.0f} s and {steps.count} steps{waiting()}")

    trio.lowlevel.add_instrument(steps)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await main()
            nursery.cancel_scope.cancel()
    finally:
        trio.lowlevel.remove_instrument(steps)


@contextmanager
def processor_limit(limits: Limits) -> Iterator[None]:
    """Raises ``Violation`` in code that takes more. Of the main thread only."""

    def over(number: int, frame: FrameType | None) -> None:
        raise Violation(f"hang: {limits.processor_s:.0f} s of processor time, at {_place(frame)}{waiting()}")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, limits.processor_s, limits.again_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def waiting() -> str:
    """Every task and where it is, innermost first, a line each."""
    lines, stack = list[str](), [trio.lowlevel.current_root_task()]
    while stack:
        task = stack.pop()
        if task is None:
            continue
        stack += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        frames = [_place(frame) for frame, _ in task.iter_await_frames() if "/trio/" not in frame.f_code.co_filename]
        lines.append(f"\n  {task.name.rpartition('.')[2]}: {' < '.join(frames[::-1][:6])}")
    more = f"\n  and {len(lines) - TASKS_MAX} more" if len(lines) > TASKS_MAX else ""
    return "".join(lines[:TASKS_MAX]) + more


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "nowhere"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
