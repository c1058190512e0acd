"""What the daemon does all the time must leave time for requests, however much there is to look at."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from cachexfs.core.records import Generation
from cachexfs.engine import passing as passing_module
from cachexfs.engine.foreground import Foreground
from cachexfs.engine.interfaces import ContentSource
from cachexfs.engine.node import Node
from cachexfs.engine.passing import Passing
from cachexfs.engine.vnode import Handle, Vnode


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


def _opened(passing: Passing) -> Handle:
    vnode = Vnode(1, 1, cast("Generation", None), version=1, removed=True)
    handle = Handle(vnode, os.O_WRONLY)
    passing.begin(handle)
    return handle


async def test_late_digests_leave_the_processors_to_writers_that_need_most_of_them(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of the first of four files took a third of what its three fellows wrote with."""
    monkeypatch.setattr(passing_module, "PROCESSORS", 4)
    staging = SimpleNamespace(make_ready=lambda length: None, forget_ready=lambda: None)
    node = cast("Node", SimpleNamespace(foreground=Foreground(), staging=staging))
    passing = Passing(node, cast("ContentSource", None))

    async def waited() -> bool:
        start_s = trio.current_time()
        await passing.spare_processors()
        return trio.current_time() > start_s

    handles = [_opened(passing) for _ in range(4)]
    passing.end(handles.pop())
    assert await waited()
    passing.begin(Handle(handles[0].vnode, os.O_WRONLY))  # the same file once more
    passing.end(handles.pop())
    assert not await waited()
