"""Four nodes, nobody harmed: what one node has done, the next look of every other sees."""

import errno
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_support import Template, raises_errno, until, until_stage, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr, xattrs

ROUNDS = 20


@pytest.fixture
def views(four: LocalCluster, request: pytest.FixtureRequest) -> Iterator[list[Path]]:
    """One fresh directory as each of the four nodes sees it."""
    name = request.node.name
    paths = [node.mountpoint / name for node in four.nodes]
    paths[0].mkdir()
    yield paths
    shutil.rmtree(paths[3])


def test_every_change_is_seen_at_once_by_all_others(views: list[Path]) -> None:
    """Each look is made before the change too, so that a cached answer would show."""
    here, others = views[0], views[1:]

    def all_see(look: Callable[[Path], object], wanted: object) -> None:
        assert [look(other) for other in others] == [wanted] * len(others)

    def exists(name: str) -> Callable[[Path], bool]:
        return lambda view: (view / name).exists()

    all_see(exists("step"), False)
    (here / "step").mkdir()
    all_see(exists("step"), True)
    all_see(lambda view: os.listdir(view / "step"), [])
    (here / "step/shard").write_bytes(b"1" * 5000)
    all_see(lambda view: (view / "step/shard").stat().st_size, 5000)
    all_see(lambda view: os.listdir(view / "step"), ["shard"])
    all_see(exists("step/.metadata"), False)
    (here / "step/.metadata.tmp").write_bytes(b"m1")
    (here / "step/.metadata.tmp").rename(here / "step/.metadata")
    all_see(lambda view: (view / "step/.metadata").read_bytes(), b"m1")
    all_see(exists("step/.metadata.tmp"), False)
    (here / "step/shard").write_bytes(b"2" * 5000)
    all_see(lambda view: (view / "step/shard").read_bytes(), b"2" * 5000)
    with (here / "step/shard").open("ab") as file:
        file.write(b"tail")
    all_see(lambda view: (view / "step/shard").read_bytes()[-5:], b"2tail")
    os.truncate(here / "step/shard", 7)
    all_see(lambda view: (view / "step/shard").read_bytes(), b"2" * 7)
    (here / "step/shard").chmod(0o600)
    all_see(lambda view: (view / "step/shard").stat().st_mode & 0o777, 0o600)
    os.utime(here / "step/shard", ns=(10**18, 10**18 + 5))
    all_see(lambda view: (view / "step/shard").stat().st_mtime_ns, 10**18 + 5)
    (here / "latest").symlink_to("step")
    all_see(lambda view: (view / "latest/.metadata").read_bytes(), b"m1")
    (here / "step").rename(here / "step-1")
    all_see(lambda view: sorted(os.listdir(view)), ["latest", "step-1"])
    all_see(lambda view: (view / "step-1/.metadata").read_bytes(), b"m1")
    (here / "step-1/shard").unlink()
    all_see(exists("step-1/shard"), False)
    shutil.rmtree(here / "step-1")
    all_see(lambda view: os.listdir(view), ["latest"])


def test_times_and_numbers_agree_between_nodes(views: list[Path]) -> None:
    for number, view in enumerate(views):
        (view / f"f{number}").write_bytes(b"x" * number)
    seen = [{path.name: path.stat().st_mtime_ns for path in sorted(view.iterdir())} for view in views]
    assert seen[1:] == seen[:-1]
    assert len({view.stat().st_mtime_ns for view in views}) == 1


def test_exclusive_creation_and_mkdir_have_one_winner(views: list[Path]) -> None:
    results: dict[str, list[str]] = {"open": [], "mkdir": []}
    barrier = threading.Barrier(len(views))

    def race(view: Path) -> None:
        for number in range(ROUNDS):
            barrier.wait()
            for kind in results:
                try:
                    if kind == "open":
                        os.close(os.open(view / f"lock{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                    else:
                        os.mkdir(view / f"dir{number}")
                    results[kind].append(f"won{number}")
                except FileExistsError:
                    results[kind].append("lost")

    threads = [threading.Thread(target=race, args=(view,)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kind, said in results.items():
        assert sorted(word for word in said if word != "lost") == sorted(f"won{n}" for n in range(ROUNDS)), kind
        assert said.count("lost") == ROUNDS * (len(views) - 1)


def test_all_nodes_write_into_one_directory_and_the_listing_is_the_union(views: list[Path]) -> None:
    def fill(index: int) -> None:
        for number in range(ROUNDS):
            (views[index] / f"{index}-{number}").write_bytes(b"%d" % number)

    threads = [threading.Thread(target=fill, args=(index,)) for index in range(len(views))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = sorted(f"{index}-{number}" for index in range(len(views)) for number in range(ROUNDS))
    assert [sorted(os.listdir(view)) for view in views] == [wanted] * len(views)


def test_an_open_old_file_stays_old_and_the_new_one_is_never_read_old(views: list[Path]) -> None:
    """A page fault through the old handle must not poison the new one's pages."""
    old, new = b"o" * 300_000, b"n" * 300_000
    (views[0] / "f").write_bytes(old)
    with (views[1] / "f").open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        assert mapped[:4096] == old[:4096]
        (views[0] / "f").write_bytes(new)
        assert mapped[200_000:204_096] == old[200_000:204_096]
        assert (views[1] / "f").read_bytes() == new
        assert mapped[100_000:100_100] == old[100_000:100_100]
        assert (views[1] / "f").read_bytes() == new
        mapped.close()


def test_a_large_old_file_is_read_or_stale_and_no_fault_of_the_daemon(views: list[Path], four: LocalCluster) -> None:
    """Its first segment was given up by what had begun to bring it: KeyError, EIO, and ``status`` said "failed"."""
    old = os.urandom(24 << 20)
    (views[0] / "large").write_bytes(old)
    with (views[1] / "large").open("rb", buffering=0) as handle:
        (views[0] / "large").write_bytes(b"new")
        try:
            found: bytes | int | None = handle.read(1 << 20)
        except OSError as error:
            found = error.errno
    assert found in (old[: 1 << 20], errno.ESTALE)
    assert four.status(1).failed is None


def test_others_see_the_previous_generation_until_the_close(views: list[Path]) -> None:
    (views[0] / "f").write_bytes(b"previous")
    with (views[0] / "f").open("r+b", buffering=0) as file:
        file.write(b"PARTIAL")
        assert (views[2] / "f").read_bytes() == b"previous"
    assert (views[2] / "f").read_bytes() == b"PARTIALs"


def test_two_writers_of_one_path_give_one_of_both_and_never_a_mixture(views: list[Path]) -> None:
    for _ in range(5):
        threads = [
            threading.Thread(target=write_file, args=(views[index] / "f", bytes([65 + index]) * 400_000))
            for index in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = {(view / "f").read_bytes() for view in views}
        assert len(seen) == 1
        assert seen.pop() in (b"A" * 400_000, b"B" * 400_000)


def test_an_open_file_survives_removal_by_another_node(views: list[Path]) -> None:
    (views[0] / "f").write_bytes(b"still here" * 1000)
    with (views[1] / "f").open("rb") as reader, (views[0] / "f").open("r+b", buffering=0) as writer:
        assert reader.read(10) == b"still here"
        (views[2] / "f").unlink()
        assert reader.read(10) == b"still here"
        writer.write(b"no error for the writer")
    assert os.listdir(views[3]) == []


def test_a_file_tells_where_it_was_written_and_who_holds_it(views: list[Path], four: LocalCluster) -> None:
    (views[1] / "f").write_bytes(b"x" * 100_000)
    until_stage(views[3] / "f", "pfs")
    until("it is at the partner, too", lambda: xattr(views[1] / "f", "t.partner") is not None)
    shown = [xattrs(view / "f") for view in views]
    assert shown[1:] == shown[:-1]
    assert shown[0]["origin"] == "n1"
    assert "n1" in shown[0]["holders"]
    assert four.status(1).partner in shown[0]["holders"].replace(",", " ").replace(":", " ").split()
    assert shown[0]["t.returned"] <= shown[0]["t.partner"]


def test_a_checkpoint_of_four_nodes_is_one_checkpoint(views: list[Path], templates: tuple[Template, Template]) -> None:
    templates[0].save(views, "step-1")
    for view in views:
        assert templates[0].same_as(view / "step-1") == []
    until("restartable", lambda: xattr(views[2] / "step-1", "restartable") == "pfs")
    # At once of a file; of a directory something may still come to its members between two looks.
    until("all say the same", lambda: len({tuple(sorted(xattrs(view / "step-1").items())) for view in views}) == 1)


def test_fsync_on_a_node_returns_at_partner(views: list[Path]) -> None:
    fd = os.open(views[0] / "f", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"x" * 200_000)
    os.fsync(fd)
    os.close(fd)
    assert xattr(views[0] / "f", "stage") in ("partner", "pfs")


def test_names_of_a_directory_that_another_node_removed_are_gone(views: list[Path]) -> None:
    (views[0] / "d").mkdir()
    assert os.listdir(views[1] / "d") == []
    (views[0] / "d").rmdir()
    with raises_errno(errno.ENOENT):
        os.open(views[1] / "d/f", os.O_CREAT | os.O_WRONLY)
    with raises_errno(errno.ENOENT):
        os.listdir(views[1] / "d")
