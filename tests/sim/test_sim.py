"""The engine from seeds: whatever dies and fails, the promises hold. More of it: ``make crashsim SEEDS=A-B``."""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from sim_check import Violation
from sim_cluster import Cluster
from sim_limit import Limits, limited, processor_limit
from sim_one import Run
from sim_run import MEMORY, SCENARIOS, first, inline_threads, simulate

from cachexfs.engine.last_whole import LastWhole

#: Seeds in the suite; a run of the cluster takes ten times as long as one of a node.
SEEDS = {
    "one": [range(at, at + 20) for at in range(0, 60, 20)],
    "cluster": [range(4, 8), range(8, 12)],
    "fill": [range(4)],
    "routes": [range(4)],
    "recover": [range(20, 26)],
    "rotate": [range(300026, 300030)],
}

#: Seeds that broke a promise once: what they found is a test of its own in test_found.py, they go on here.
FOUND = {
    "one": [1026, 1159, 3011, 19, 68, 85, 106, 109, 173, 201, 215],
    "cluster": [391, 1026, 36, 61, 74, 252, 258, 329, 200010, 200130, 220172],
    "behind": [200026],
    "rotate": [1, 300024, 300033],
    "journal": [
        90058,
        90087,
        90130,
        91059,
        91223,
        91255,
        91301,
        91878,
        91930,
        91955,
        71020,
        200144,
        200200,
        200215,
        200229,
        210358,
        210538,
        210624,
        220775,
        820055,
        900049,
    ],
    "steps": [300121, 330007],
    "ram": [1, 34, 42, 47, 58],
    "routes": [1312, 35, 59, 22041, 31048],
    "recover": [31117, 900186],
    "fill": [22046, 31007, 820088, 900206],
    "disks": [61035, 61060, 900165, 930011],
}


def run(seed: int, scenario: str) -> Run | Cluster:
    try:
        return simulate(seed, scenario)
    except BaseException as group:
        raise AssertionError(f"make crashsim SEEDS={seed} ({scenario}): {first(group)}") from group


@pytest.mark.parametrize(
    ("scenario", "seeds"), [(name, seeds) for name, ranges in SEEDS.items() for seeds in ranges], ids=str
)
def test_the_promises_hold_from_every_seed(scenario: str, seeds: range) -> None:
    for seed in seeds:
        run(seed, scenario)


@pytest.mark.parametrize(("scenario", "seed"), [(name, seed) for name, seeds in FOUND.items() for seed in seeds])
def test_a_seed_that_found_something(scenario: str, seed: int) -> None:
    run(seed, scenario)


@pytest.mark.parametrize("scenario", ["cluster", "recover", "disks"])
def test_the_promises_hold_where_files_have_several_blocks(scenario: str) -> None:
    """In a process of its own: it is decided when modules are imported (``sim_sizes``)."""
    program = [
        sys.executable,
        str(Path(__file__).with_name("sim_run.py")),
        "--scenario",
        scenario,
        "--seeds",
        "7020-7024",
    ]
    environment = {**os.environ, "CACHEXFS_SIM_BLOCKS": "1", "PYTHONHASHSEED": "0"}
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert f"5 runs of {scenario}: 0 failed" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_a_seed_gives_the_same_run_again(scenario: str) -> None:
    seen = []
    for _ in range(2):
        with tempfile.TemporaryDirectory(dir=MEMORY) as directory, inline_threads(7):
            again = SCENARIOS[scenario](7, directory)
            trio.run(again.main, clock=trio.testing.MockClock(autojump_threshold=0))
            seen.append([change.key for revision in again.log.revisions for change in revision])
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 20


@pytest.mark.parametrize("how", ["waits", "goes round", "never waits", "drops an error"])
def test_a_run_that_does_not_end_says_what_waits(how: str) -> None:
    async def waits_for_ever() -> None:
        with suppress(Violation if how == "drops an error" else ()):
            while how != "waits":
                if how == "goes round":
                    await trio.lowlevel.checkpoint()
        while time.process_time() < end_s:
            pass
        await trio.sleep_forever()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits_for_ever)

    end_s = time.process_time() + 3.0 if how == "drops an error" else 0.0
    limits = Limits(simulated_s=100.0, steps=1000, processor_s=1.0, again_s=0.5)
    with processor_limit(limits), pytest.raises(BaseExceptionGroup) as error:
        trio.run(limited, main, limits, clock=trio.testing.MockClock(autojump_threshold=0))
    found = first(error.value)
    assert isinstance(found, Violation)
    assert "waits_for_ever" in str(found)
    assert ("hang: 1 s of processor" if how in ("never waits", "drops an error") else "hang: no end") in str(found)


def test_a_last_checkpoint_that_goes_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastWhole, "keeps", lambda self, fid: False)
    seeds = range(300020, 300050)
    with pytest.raises(AssertionError, match=r"rotation: .* is whole in the mount, and on its way"):
        any(run(seed, "rotate") is None for seed in seeds)


#: Scenario -> its seeds in the suite, and what these are to have seen at least once: else they show nothing.
KINDS = {
    "disks": (
        range(12, 24),
        {"a power cut", "a replica", "changed", "cut", "unreadable", "a write is refused", "a sync is refused"},
    ),
    "journal": (range(14), {"tail", "middle", "zeros", "version", "contents in staging"}),
    "ram": (range(8), {"write", "create", "a part"}),
    "steps": (range(8), {"dead before", "dead after", "refused", "stuck", "concealed"}),
    "behind": (
        range(12),
        {"removed", "replaced", "written over", "a directory removed", "evicted", "read as written", "not readable"},
    ),
}


@pytest.mark.parametrize("scenario", list(KINDS))
def test_each_kind_of_fault_happens_and_no_promise_breaks(scenario: str) -> None:
    seeds, kinds = KINDS[scenario]
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += run(seed, scenario).counts  # type: ignore[union-attr]
    assert kinds <= seen.keys()
