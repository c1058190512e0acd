"""What the daemon does all the time must leave time for requests, however much there is to look at."""

from __future__ import annotations

from typing import cast

import pytest
import trio
from trio.testing import MockClock

from cachexfs.engine.interfaces import ContentSource
from cachexfs.engine.node import Node
from cachexfs.engine.passing import Passing


def test_following_10000_open_files_leaves_time_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with that many files could not be killed for a quarter of an hour: each close waited for a look."""
    clock, looks = MockClock(autojump_threshold=0.0), list[float]()
    passing = Passing(cast("Node", None), cast("ContentSource", None))

    def look(_: trio.Nursery) -> list[object]:
        looks.append(trio.current_time())
        clock.jump(0.5)
        return []

    monkeypatch.setattr(passing, "_look", look)

    async def run() -> None:
        with trio.move_on_after(100.0):
            await passing.watch()

    trio.run(run, clock=clock)
    assert 0.5 * len(looks) < 0.25 * 100.0
