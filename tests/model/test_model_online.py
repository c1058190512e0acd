"""The model inside the mount: learns from records alone, chooses as the full model does, loads no numpy."""

import math
import random
import subprocess
import sys

import pytest

from cachexfs.errors import UsageError
from cachexfs.model.delays import Delay
from cachexfs.model.online import Online, remaining_s
from cachexfs.model.records import BoundaryRecord
from cachexfs.model.route import decide_route

GIB = 2.0**30
ASK = {"interval_s": 600.0, "failures_per_s": 1e-5, "kappa": 0.1}


def feed(
    online: Online, route: str, partner: float, pfs: float, count: int = 60, sd: float = 0.1, start: float = 0.0
) -> None:
    rng = random.Random(f"{route}{pfs}")
    for i in range(count):
        a, b = (math.exp(sd * rng.gauss(0, 1)) for _ in range(2))
        times = (
            {"pfs_s": (pfs * b,) * 2}
            if route == "direct"
            else {"partner_s": (partner * a,) * 2, "pfs_s": (partner * a + pfs * b,) * 2}
        )
        online.observe(BoundaryRecord(start + i, f"/c/{i}", 64, GIB, route, "n", **times))  # type: ignore[arg-type]


def test_it_loads_no_numpy() -> None:
    code = "import sys, cachexfs.model.online; print('numpy' in sys.modules or 'scipy' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


def test_unknown_until_ten_were_seen() -> None:
    online = Online()
    assert online.eta_s("direct", GIB) is None
    choice = online.choose(64 * GIB, now=0.0, **ASK)
    assert (choice.route, choice.sure) == ("partner", False)
    feed(online, "direct", 0.0, 100.0)
    assert "partner copies" in online.choose(64 * GIB, now=60.0, **ASK).why


def test_eta_scales_with_bytes() -> None:
    online = Online()
    feed(online, "direct", 0.0, 100.0)
    median, high = online.eta_s("direct", 64 * GIB) or (0.0, 0.0)
    assert median == pytest.approx(100.0, rel=0.1)
    assert high > median
    assert (online.eta_s("direct", 32 * GIB) or (0.0,))[0] == pytest.approx(median / 2, rel=0.01)


def test_what_is_late_is_never_foretold_to_be_there_already() -> None:
    """It said p50=0 of whatever had waited for longer than usual, for as long as that took."""
    online = Online()
    feed(online, "direct", 0.0, 100.0)
    fresh = online.eta_s("direct", 64 * GIB) or (0.0, 0.0)
    waits = (1e-9, 1.0, 50.0, 90.0, 100.0, 150.0, 400.0, 1e5)
    etas = [online.eta_s("direct", 64 * GIB, waited_s) or (0.0, 0.0) for waited_s in waits]
    assert etas[0] == pytest.approx(fresh, rel=0.1)
    assert etas[2][0] == pytest.approx(fresh[0] - 50.0, rel=0.05)  # nobody arrives so early
    assert all(0.0 < median < most for median, most in etas)
    late = [median for median, _ in etas[4:]]
    assert late[-1] > late[-2]  # who is a thousand times late is not there in a moment


@pytest.mark.parametrize("waited_s", [20.0, 100.0, 130.0, 180.0, 250.0])
def test_what_remains_is_the_quantile_among_those_that_are_not_there_yet(waited_s: float) -> None:
    rng = random.Random(1)
    times = [100.0 * math.exp(0.3 * rng.gauss(0.0, 1.0)) for _ in range(400_000)]
    later = sorted(time - waited_s for time in times if time > waited_s)
    for share in (0.5, 0.05):
        assert remaining_s(100.0, 0.3, waited_s, share) == pytest.approx(later[int(len(later) * (1 - share))], rel=0.1)


def test_the_pfs_is_observed_on_both_routes() -> None:
    online = Online()
    for number in range(60):
        online.observe(BoundaryRecord(number, "/c", 64, GIB, "partner", "n", partner_s=(20, 20), pfs_s=(5, 5)))
    choice = online.choose(64 * GIB, now=60.0, **ASK)
    assert (choice.route, choice.sure) == ("direct", True)
    feed(online, "direct", 0.0, 300.0, start=60.0)
    assert online.choose(64 * GIB, now=120.0, **ASK).route == "partner"


def test_old_knowledge_is_no_knowledge() -> None:
    online = Online()
    feed(online, "partner", 20.0, 300.0)
    assert online.choose(64 * GIB, now=60.0, **ASK).sure
    assert not online.choose(64 * GIB, now=60.0 + 2 * 86400, **ASK).sure


def test_a_backlog_is_a_doubt() -> None:
    online = Online()
    feed(online, "partner", 20.0, 300.0)
    assert online.choose(64 * GIB, now=60.0, backlog=3, **ASK).why == "drains are behind"
    assert not online.choose(64 * GIB, now=60.0, **{**ASK, "interval_s": 200.0}).sure


@pytest.mark.parametrize(
    ("direct", "partner", "kappa"), [(30, 25, 0.1), (30, 28, 0.3), (60, 20, 0.5), (20, 40, 0.1), (30, 22, 0.9)]
)
def test_it_agrees_with_the_full_model(direct: float, partner: float, kappa: float) -> None:
    online = Online()
    feed(online, "direct", 0.0, direct, 100)
    feed(online, "partner", partner, direct, 100)
    ask = {**ASK, "kappa": kappa}
    choice = online.choose(64 * GIB, now=100.0, **ask)
    delays = []
    for leg in ("direct", "partner", "drain"):
        forecast = online._legs[leg].forecast(64.02)
        delays.append(Delay(forecast.median_s, forecast.log_sd))
    full = decide_route(*delays, **ask)
    assert choice.p_partner == pytest.approx(full.p_partner, abs=0.06)


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError):
        Online().choose(0.0, now=0.0, **ASK)


def test_it_leaves_the_direct_route_when_the_pfs_slows_down_and_comes_back() -> None:
    """The partner takes 20 s; the PFS 5 s, then 100 s, then 5 s. Only what is taken is observed, but for the PFS."""
    online, chosen = Online(), []
    for step in range(120):
        pfs_s = 100.0 if 40 <= step < 80 else 5.0
        route = online.choose(64 * GIB, now=float(step), **ASK).route
        chosen.append(route)
        times = {"pfs_s": (pfs_s,) * 2} if route == "direct" else {"partner_s": (20.0,) * 2, "pfs_s": (pfs_s,) * 2}
        online.observe(BoundaryRecord(float(step), f"/c/{step}", 64, GIB, route, "n", **times))  # type: ignore[arg-type]
    assert chosen[:10] == ["partner"] * 10
    assert chosen[20:40] == ["direct"] * 20
    assert chosen[55:80] == ["partner"] * 25
    assert chosen[100:] == ["direct"] * 20
