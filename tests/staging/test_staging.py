"""The staging directory: accounting, spare memory, what a death leaves of a spill."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachexfs.adapters.staging import Staging

MIB = 1 << 20
LIMIT_BYTES = 32 * MIB


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def opened(memory: Path, spill: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> Staging:
    staging = Staging(str(memory), limit_bytes, str(spill) if spill is not None else None)
    staging.open()
    return staging


def write(staging: Staging, stage: str, data: bytes) -> None:
    fd = staging.create(stage)
    assert os.write(fd, data) == len(data)
    staging.recount(stage, fd)
    os.close(fd)


def held_bytes(memory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for name in ("files", "spare") for path in (memory / name).iterdir())


def test_the_memory_of_a_removed_file_is_kept_and_given_to_the_next(memory: Path) -> None:
    staging = opened(memory)
    write(staging, "1.1.a", b"a" * (8 * MIB))
    staging.remove("1.1.a")
    assert (staging.used_bytes, staging.spare_bytes, held_bytes(memory)) == (0, 8 * MIB, 8 * MIB)
    staging.make_ready(MIB)
    assert staging.spare_bytes == 6 * MIB
    write(staging, "1.2.a", b"b" * (2 * MIB))
    assert (staging.used_bytes, held_bytes(memory)) == (2 * MIB, 8 * MIB)


def test_the_page_cache_of_a_reader_gets_spare_memory_too_in_small_pieces(memory: Path) -> None:
    staging = opened(memory)
    write(staging, "1.1.a", b"a" * (8 * MIB))
    staging.remove("1.1.a")
    for _ in range(3 * 8):
        staging.make_cache_ready(MIB // 8)
    assert (staging.spare_bytes, held_bytes(memory), staging.cached_bytes) == (5 * MIB, 5 * MIB, 3 * MIB)
    staging.make_ready(MIB)  # a writer's huge page next, of what is left of one
    assert staging.spare_bytes == held_bytes(memory) == 2 * MIB
    for _ in range(9):
        staging.make_cache_ready(MIB)
    assert staging.spare_bytes == held_bytes(memory) == 0


def test_room_that_is_reserved_anew_counts_once(memory: Path) -> None:
    """Segments of one file that come side by side: what is on its way changes with each."""
    staging = opened(memory)
    fd = staging.create("1.0.a")
    staging.reserve("1.0.a", 4 * MIB)
    staging.reserve("1.0.a", 6 * MIB)
    assert staging.used_bytes == 6 * MIB
    os.pwrite(fd, b"a" * (2 * MIB), 0)
    staging.recount("1.0.a", fd)
    assert staging.used_bytes == 6 * MIB
    staging.reserve("1.0.a", 2 * MIB)
    assert staging.used_bytes == 4 * MIB
    staging.remove("1.0.a")
    assert staging.used_bytes == 0
    os.close(fd)


def test_what_somebody_has_open_is_kept_once_nobody_has(memory: Path) -> None:
    """A copy to the PFS that has just begun must not cost the next file its memory."""
    staging = opened(memory)
    write(staging, "1.1.a", b"a" * (8 * MIB))
    reader = staging.open_file("1.1.a")
    staging.remove("1.1.a")
    write(staging, "1.2.a", b"b" * MIB)
    staging.close()
    staging = opened(memory)  # the next daemon, while the reader is the kernel's
    write(staging, "1.3.a", b"b" * MIB)
    assert staging.spare_bytes == 0
    assert os.pread(reader, 8 * MIB, 0) == b"a" * (8 * MIB)
    os.close(reader)
    write(staging, "1.4.a", b"b" * MIB)
    assert staging.spare_bytes == 8 * MIB


def test_memory_that_is_wanted_does_not_wait_until_all_have_closed_it(memory: Path) -> None:
    staging = opened(memory)
    write(staging, "1.1.a", b"a" * (24 * MIB))
    reader = staging.open_file("1.1.a")
    staging.remove("1.1.a")
    staging.make_ready(LIMIT_BYTES - 16 * MIB)
    os.close(reader)
    assert held_bytes(memory) == 0


def test_files_and_spare_together_stay_within_the_limit(memory: Path) -> None:
    staging = opened(memory)
    for number in range(3):
        write(staging, f"1.{number}.a", b"a" * (8 * MIB))
    for number in range(3):
        staging.remove(f"1.{number}.a")
    assert staging.spare_bytes == 24 * MIB
    for number in range(15):
        staging.make_ready(2 * MIB)
        write(staging, f"2.{number}.a", b"b" * (2 * MIB))
        assert held_bytes(memory) <= LIMIT_BYTES
        assert staging.used_bytes + staging.spare_bytes <= LIMIT_BYTES


def test_a_smaller_limit_after_a_restart_takes_the_spare_down(memory: Path) -> None:
    staging = opened(memory)
    write(staging, "1.1.a", b"a" * (20 * MIB))
    staging.remove("1.1.a")
    write(staging, "1.2.a", b"a" * (4 * MIB))
    staging.close()
    (memory / "spare" / "not ours").touch()
    again = opened(memory, limit_bytes=8 * MIB)
    assert (again.used_bytes, again.spare_bytes) == (4 * MIB, 4 * MIB)
    assert held_bytes(memory) <= 8 * MIB


@pytest.mark.parametrize("moment", ["copied", "both", "done"])
def test_a_death_during_a_spill_leaves_one_whole_file(memory: Path, tmp_path: Path, moment: str) -> None:
    staging = opened(memory, tmp_path)
    write(staging, "1.1.a", b"a" * MIB)
    target = staging.spill_begin("1.1.a")
    os.write(target, b"a" * (MIB // 2 if moment == "copied" else MIB))
    os.close(target)
    place = tmp_path / staging.store
    if moment == "both":
        os.rename(place / "1.1.a.part", place / "1.1.a")
    if moment == "done":
        staging.spill_end("1.1.a", keep=True)
    staging.close()
    again = opened(memory, tmp_path)
    assert again.stages() == ["1.1.a"]
    assert again.is_spilled("1.1.a") == (moment == "done")
    assert (again.used_bytes, again.spilled_bytes) == ((0, MIB) if moment == "done" else (MIB, 0))
    assert Path(again.path("1.1.a")).read_bytes() == b"a" * MIB
    assert [path.name for path in place.iterdir()] == (["1.1.a"] if moment == "done" else [])


def test_memory_of_what_is_removed_while_it_moves_to_nvme_counts_until_the_move_has_ended(
    memory: Path, tmp_path: Path
) -> None:
    """Who copies it has it open: others took the same memory meanwhile, and the node held more than its limit."""
    staging = opened(memory, tmp_path, limit_bytes=8 * MIB)
    write(staging, "1.1.a", b"a" * (4 * MIB))
    target = staging.spill_begin("1.1.a")
    staging.remove("1.1.a")
    assert not staging.has("1.1.a")
    assert (staging.used_bytes, staging.spare_bytes) == (4 * MIB, 0)
    os.close(target)
    staging.spill_end("1.1.a", keep=False)
    assert staging.used_bytes == 0
    write(staging, "1.2.b", b"b" * (4 * MIB))
    target = staging.spill_begin("1.2.b")
    os.write(target, b"b" * (4 * MIB))
    os.close(target)
    staging.spill_end("1.2.b", keep=True)
    assert (staging.used_bytes, staging.spilled_bytes) == (0, 4 * MIB)


def test_what_an_earlier_memory_has_spilled_goes(memory: Path, tmp_path: Path) -> None:
    (tmp_path / "0123456789abcdef").mkdir()
    (tmp_path / "0123456789abcdef" / "1.1.a").write_bytes(b"its catalogue is gone")
    staging = opened(memory, tmp_path)
    assert staging.stages() == []
    assert [path.name for path in tmp_path.iterdir()] == [staging.store]


def test_a_spill_directory_that_is_a_link_is_refused(memory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(Exception, match="symbolic link"):
        opened(memory, tmp_path / "link")
