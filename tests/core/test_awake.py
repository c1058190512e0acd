"""A machine that stands still for a while (paused, moved, suspended) makes no deadline run out by that."""

from __future__ import annotations

import time

import pytest
import trio

from cachexfs.adapters.awake import LATE_S, LOOK_S, AwakeClock


class Machine:
    """A real clock that can be put forward as a pause does: without anybody having run."""

    def __init__(self) -> None:
        self.paused_s = 0.0

    def read(self) -> float:
        return time.monotonic() + self.paused_s


def test_what_needs_one_more_turn_is_not_cancelled_by_a_pause() -> None:
    """A lookup that began just before the machine was paused was answered with EIO."""
    machine = Machine()

    async def run() -> None:
        with trio.move_on_after(5.0) as scope:
            machine.paused_s += 60.0
            await trio.lowlevel.checkpoint()
            await trio.sleep(0.01)
        assert not scope.cancelled_caught

    trio.run(run, clock=AwakeClock(machine.read))


def test_what_waits_for_somebody_who_was_paused_too_gets_its_time() -> None:
    machine = Machine()
    clock = AwakeClock(machine.read)
    deadline_s = clock.current_time() + 20.0
    assert clock.deadline_to_sleep_time(deadline_s) == LOOK_S
    machine.paused_s += 60.0  # in the loop's sleep
    assert deadline_s - clock.current_time() > 20.0 - LOOK_S - LATE_S


def test_ordinary_time_counts() -> None:
    seconds = [100.0]
    clock = AwakeClock(lambda: seconds[0])
    began_s = clock.current_time()
    for _ in range(10):
        slept_s = clock.deadline_to_sleep_time(began_s + 60.0)
        seconds[0] += slept_s + LATE_S / 2
        clock.current_time()
        seconds[0] += LATE_S / 2
    assert clock.current_time() - began_s == pytest.approx(10 * (LOOK_S + LATE_S))
    assert clock.deadline_to_sleep_time(began_s) == 0.0
    assert clock.deadline_to_sleep_time(float("inf")) == LOOK_S
