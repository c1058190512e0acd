"""A short ride through chaos; ``make chaos`` is the long one."""

from __future__ import annotations

import pytest
from chaos_run import Plan, run


@pytest.mark.parametrize(
    ("what", "plan"),
    [
        ("ride", Plan("passthrough", savers=2, seconds=6, seed=1)),
        ("ride", Plan("handler", memory="64M", savers=1, bytes_max=30 << 20, seconds=4, seed=2)),
        ("claims", Plan("alone", savers=2, twins=0, seconds=4, seed=3)),
    ],
    ids=["passthrough", "little-memory", "claims"],
)
def test_a_ride(what: str, plan: Plan) -> None:
    """kill -9 and restarts under savers and random operations: no error, no wrong byte, no broken claim."""
    chaos = run(plan, what)
    assert not chaos.wrong, "\n".join([f"{what} {plan}: {chaos.counts}", *chaos.wrong])
    assert chaos.counts.kills or chaos.counts.restarts
