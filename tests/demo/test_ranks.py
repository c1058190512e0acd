"""The demo's training: equal bits from equal steps, and a digest that notices one bit."""

import os
import signal
from pathlib import Path

import pytest

from cachexfs.demo.ranks import RankError, RankPool, block_of

WORLD = 3
MIB = 0.5


def pool(tmp_path: Path, seed: int) -> RankPool:
    return RankPool(WORLD, mib=MIB, seed=seed, log=tmp_path / "log")


def test_a_resumed_run_repeats_the_unbroken_one_to_the_bit(tmp_path: Path) -> None:
    paths = [str(tmp_path / "step-2")] * WORLD
    with pool(tmp_path, seed=1) as ranks:
        before = ranks.train(2)
        saved = ranks.digests()
        ranks.save(paths)
        assert ranks.digests() == saved
        unbroken = ranks.train(3)
        assert ranks.load_digests(paths) == saved
        assert ranks.digests() != saved
    with pool(tmp_path, seed=2) as ranks:
        assert ranks.digests() != saved
        assert ranks.train(1) != before[:1]
        assert ranks.resume(paths) == saved
        assert ranks.train(3) == unbroken


def test_one_changed_bit_in_a_shard_changes_a_digest(tmp_path: Path) -> None:
    directory = tmp_path / "step-1"
    with pool(tmp_path, seed=1) as ranks:
        ranks.train(1)
        ranks.save([str(directory)] * WORLD)
        saved = ranks.digests()
        shard = directory / "__1_0.distcp"
        data = bytearray(shard.read_bytes())
        data[len(data) // 3] ^= 1  # inside a tensor, not in the archive's own bytes
        shard.write_bytes(data)
        assert ranks.load_digests([str(directory)] * WORLD) != saved


def test_a_missing_checkpoint_is_an_error_with_its_reason(tmp_path: Path) -> None:
    with pool(tmp_path, seed=1) as ranks, pytest.raises(RankError, match="rank 0"):
        ranks.resume([str(tmp_path / "nothing")] * WORLD)


def test_a_rank_that_dies_is_told_and_closing_ends_the_others(tmp_path: Path) -> None:
    with pool(tmp_path, seed=1) as ranks:
        pids = ranks.pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank \d"):
            ranks.train(1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("world", "places", "wanted"),
    [(8, 4, [0, 0, 1, 1, 2, 2, 3, 3]), (8, 3, [0, 0, 0, 1, 1, 1, 2, 2]), (3, 3, [0, 1, 2])],
)
def test_ranks_are_dealt_out_in_blocks(world: int, places: int, wanted: list[int]) -> None:
    assert [block_of(rank, world, places) for rank in range(world)] == wanted
