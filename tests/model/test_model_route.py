"""The route: direct when it is sooner, partner when the PFS is slow, nothing when it cannot be told."""

import math

import pytest

from cachexfs.errors import UsageError
from cachexfs.model.delays import Delay
from cachexfs.model.route import ABSTAIN, DIRECT, PARTNER, Decision, Evidence, decide_route


def decide(direct: Delay, partner: Delay, drain: Delay | None = None, kappa: float = 0.1, **kind: object) -> Decision:
    options = {"interval_s": 600.0, "failures_per_s": 1e-5, "kappa": kappa, **kind}
    return decide_route(direct, partner, drain, **options)  # type: ignore[arg-type]


def test_plain_cases() -> None:
    slow, fast = Delay(200, 0.2), Delay(20, 0.2)
    assert decide(slow, fast, slow).route == PARTNER
    assert decide(fast, slow, fast).route == DIRECT
    close = decide(Delay(30, 0.3), Delay(28, 0.3))
    assert (close.route, close.use) == (ABSTAIN, PARTNER)
    assert "too close to call" in close.reasons[0]


def test_probability_of_two_lognormals_is_exact() -> None:
    for a, b, sa, sb, r in (
        (30, 25, 0.3, 0.2, 0.0),
        (30, 25, 0.3, 0.2, 0.5),
        (30, 40, 0.1, 0.4, 0.0),
        (30, 25, 0.3, 0.3, -0.4),
    ):
        z = math.log(a / b) / math.sqrt(sa**2 + sb**2 - 2 * r * sa * sb)
        expected = 0.5 * math.erfc(-z / math.sqrt(2))
        assert decide(Delay(a, sa), Delay(b, sb), kappa=0.0, correlation=r).p_partner == pytest.approx(
            expected, abs=0.03
        )


def test_kappa_one_never_chooses_the_detour() -> None:
    pfs = Delay(100, 0.2)
    assert decide(pfs, Delay(5, 0.2), pfs, kappa=1.0).route != PARTNER
    assert decide(pfs, Delay(5, 0.2), pfs, kappa=0.0).route == PARTNER


def test_the_break_even_of_the_criterion() -> None:
    # drain as long as a direct write: partner wins iff T_direct > T_partner / (1 - kappa)
    kappa, partner = 0.5, Delay(50, 0.0)
    assert decide(Delay(101, 0.0), partner, Delay(101, 0.0), kappa).p_partner == 1.0
    assert decide(Delay(99, 0.0), partner, Delay(99, 0.0), kappa).p_partner == 0.0


def test_a_stall_counts() -> None:
    same = Delay(30, 0.1)
    assert decide(same, same, kappa=0.0, stall_direct_s=5.0).route == PARTNER
    assert decide(same, same, kappa=0.0, stall_partner_s=5.0).route == DIRECT


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (Evidence(observed_direct=3), "only 3 recent checkpoints"),
        (Evidence(observed_partner=0), "only 0 recent checkpoints"),
        (Evidence(changed=True), "changed"),
        (Evidence(backlog=2), "still to be drained"),
        (Evidence(law_reasons=("out of reach",)), "out of reach"),
    ],
)
def test_doubts_win_over_numbers(evidence: Evidence, reason: str) -> None:
    d = decide(Delay(200, 0.1), Delay(20, 0.1), Delay(200, 0.1), evidence=evidence, default=DIRECT)
    assert (d.route, d.use) == (ABSTAIN, DIRECT)
    assert reason in d.reasons[0]


def test_a_drain_slower_than_the_interval_is_a_doubt() -> None:
    d = decide(Delay(200, 0.1), Delay(20, 0.1), Delay(700, 0.1))
    assert "NVMe would fill" in d.reasons[0]


def test_small_gains_do_not_switch() -> None:
    d = decide(Delay(30, 0.001), Delay(29, 0.001), kappa=0.0, current=DIRECT)
    assert (d.route, d.p_partner) == (DIRECT, 1.0)
    assert decide(Delay(60, 0.001), Delay(29, 0.001), kappa=0.0, current=DIRECT).route == PARTNER


def test_failing_routes_cost_more() -> None:
    assert decide(Delay(20, 0.1, failed=0.9), Delay(100, 0.1), kappa=0.0).p_partner > 0.8


def test_same_question_same_answer() -> None:
    args = (Delay(30, 0.3), Delay(25, 0.2), Delay(40, 0.3))
    assert decide(*args) == decide(*args)


@pytest.mark.parametrize(
    "kind",
    [
        {"interval_s": 0.0},
        {"failures_per_s": 0.0},
        {"kappa": 1.5},
        {"alpha": 0.9},
        {"correlation": 1.0},
        {"default": "x"},
    ],
)
def test_nonsense_is_refused(kind: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        decide(Delay(1), Delay(1), **kind)
