"""The engine from seeds: whatever dies and fails, the promises hold. More of it: ``make crashsim SEEDS=A-B``."""

import pytest
from sim_run import first, simulate

SEEDS_EACH = 50
BATCHES = 5

#: Seeds that broke a promise once: what they found is a test of its own in test_found.py, they go on here.
FOUND = [3, 8, 10, 14, 43, 48, 51, 58, 66, 78, 101, 147, 172, 308, 372]


def run(seed: int) -> None:
    try:
        simulate(seed)
    except BaseException as group:
        raise AssertionError(f"seed {seed} (make crashsim SEEDS={seed}): {first(group)}") from group


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_promises_hold_from_every_seed(batch: int) -> None:
    for seed in range(batch * SEEDS_EACH, (batch + 1) * SEEDS_EACH):
        run(seed)


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_found_something(seed: int) -> None:
    run(seed)


def test_a_seed_gives_the_same_run_again() -> None:
    import tempfile

    import trio
    import trio.testing
    from sim_run import Run, inline_threads  # what a run has done is compared in detail

    seen = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as directory, inline_threads(7):
            again = Run(7, directory)
            trio.run(again.main, clock=trio.testing.MockClock(autojump_threshold=0))
            seen.append([(c.key, c.value) for revision in again.log.revisions for c in revision])
    store = {key for key, _ in seen[0]}
    assert [key for key, _ in seen[0]] == [key for key, _ in seen[1]]
    assert len(store) > 20
