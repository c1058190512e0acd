"""``status`` of many checkpoints takes long the first time: the client must hear that the daemon lives."""

from __future__ import annotations

from types import SimpleNamespace

import trio
import trio.testing

from cachexfs.cli.client import ANSWER_TIMEOUT_S
from cachexfs.control_answers import Answer
from cachexfs.control_server import ControlServer


def test_a_status_that_takes_minutes_is_no_dead_daemon() -> None:
    """Of five hundred checkpoints that nobody had read it once said: has not answered for 10 s."""
    silences: list[float] = []

    async def ask() -> Answer:
        server = ControlServer.__new__(ControlServer)
        last_s, answers = trio.current_time(), []

        async def resolve(path: object, *, may_be_old: bool) -> tuple[int, SimpleNamespace]:
            return 1, SimpleNamespace(kind="d")

        async def below(fid: int, patience_s: float) -> list[object]:
            await trio.sleep(60)
            return []

        async def send(answer: Answer) -> None:
            nonlocal last_s
            silences.append(trio.current_time() - last_s)
            last_s = trio.current_time()
            answers.append(answer)

        server.__dict__.update(
            _resolve=resolve, _mount_facts=lambda: {"done": True}, completeness=SimpleNamespace(below=below)
        )
        await server._status({"path": None}, send)
        return answers[-1]

    assert trio.run(ask, clock=trio.testing.MockClock(autojump_threshold=0)) == {"done": True, "checkpoints": []}
    assert max(silences) < ANSWER_TIMEOUT_S / 2
