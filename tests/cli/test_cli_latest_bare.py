"""``cachexfs latest`` on a bare directory, with real DCP checkpoints."""

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from cli_support import Run, list_mount

from cachexfs.cli import bare, latest
from cachexfs.cli.child import run_in_child
from cachexfs.core.witnesses import witnesses
from cachexfs.errors import CannotTellError, UsageError


@pytest.fixture
def run_dir(checkpoint: Path, tmp_path: Path, runtime: Path, kernel: Path) -> Path:
    """step-9, step-10, step-11, all whole."""
    path = tmp_path / "run-2"
    for step in (9, 10, 11):
        shutil.copytree(checkpoint, path / f"step-{step}")
    return path


def test_the_largest_step_wins_not_the_last_name(run_dir: Path, run: Run) -> None:
    ran = run("latest", run_dir)
    assert (ran.code, ran.out, ran.err) == (0, f"{run_dir}/step-11\n", "")
    assert run("latest", run_dir, "--below", "11").out == f"{run_dir}/step-10\n"
    assert run("latest", run_dir, "--below", "10", "--at", "pfs").out == f"{run_dir}/step-9\n"
    assert json.loads(run("latest", run_dir, "--json").out) == {
        "path": f"{run_dir}/step-11",
        "certain": True,
        "reason": "",
    }


def test_of_checkpoints_without_a_step_or_with_the_same_one_the_last_committed_wins(run_dir: Path, run: Run) -> None:
    """No name decides: 'best' would otherwise stand before 'last' for ever, and after a restart another one."""
    for kept, name in ((9, "final"), (10, "best"), (11, "last")):
        (run_dir / f"step-{kept}").rename(run_dir / name)
        os.utime(run_dir / name / ".metadata", ns=(0, kept))
    assert run("latest", run_dir).out == f"{run_dir}/last\n"
    os.utime(run_dir / "best" / ".metadata", ns=(0, 12))
    assert run("latest", run_dir).out == f"{run_dir}/best\n"
    for name in ("final", "best", "last"):
        (run_dir / f"{name}-run").mkdir()
        (run_dir / name).rename(run_dir / f"{name}-run" / "step-3")
    assert run("latest", run_dir).out == f"{run_dir}/best-run/step-3\n"


def test_a_checkpoint_with_a_missing_or_cut_shard_is_passed_over(run_dir: Path, run: Run) -> None:
    shard = next((run_dir / "step-11").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    (run_dir / "step-10" / ".metadata").unlink()
    assert run("latest", run_dir).out == f"{run_dir}/step-9\n"
    for path in (run_dir / "step-9").glob("*.distcp"):
        path.unlink()
    ran = run("latest", run_dir)
    assert (ran.code, ran.out) == (1, "")
    assert "step-9: " in ran.err
    assert ran.err.count("\n") == 1


def test_what_is_marked_unfinished_or_only_linked_does_not_count(run_dir: Path, run: Run) -> None:
    (run_dir / "step-11-unfinished").touch()
    (run_dir / "step-99").symlink_to("step-9")
    assert run("latest", run_dir).out == f"{run_dir}/step-10\n"


def test_a_checkpoint_named_as_the_directory_is_the_answer(run_dir: Path, run: Run) -> None:
    assert run("latest", run_dir / "step-10").out == f"{run_dir}/step-10\n"
    assert run("latest", run_dir / "step-10", "--below", "10").code == 1


def test_no_is_certain_only_when_all_was_read(run_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir / "step-11" / ".metadata").write_bytes(b"not a pickle")
    ran = run("latest", run_dir)
    assert (ran.code, ran.out) == (0, f"{run_dir}/step-10\n")
    assert "warning" in ran.err
    for step in (9, 10):
        shutil.rmtree(run_dir / f"step-{step}")
    assert run("latest", run_dir).code == 4
    shutil.rmtree(run_dir / "step-11")
    assert run("latest", run_dir).code == 1
    real = os.scandir

    def broken(path: bytes) -> object:
        if os.fsencode(path).rstrip(b"/").endswith(b"step-5"):
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    (run_dir / "step-5").mkdir()
    monkeypatch.setattr(bare.os, "scandir", broken)
    ran = run("latest", run_dir)
    assert ran.code == 4
    assert "Input/output error" in ran.err


def test_what_is_empty_is_no_checkpoint_and_named(run_dir: Path, run: Run) -> None:
    new = run_dir.parent / "new"
    new.mkdir()
    (new / "model.bin").touch()
    ran = run("latest", new)
    assert (ran.code, ran.out) == (1, "")
    assert "'model.bin' is empty" in ran.err


def test_a_directory_that_is_not_there_is_no_no(run_dir: Path, run: Run) -> None:
    ran = run("latest", run_dir / "none")
    assert ran.code == 4
    assert "is the PFS mounted?" in ran.err
    assert run("latest", next((run_dir / "step-9").glob("*.distcp"))).code == 4


def test_a_mount_point_without_its_mount_is_no_no(run_dir: Path, run: Run, runtime: Path) -> None:
    entry = {"mountpoint": str(run_dir), "pfs": "/p", "node": "n", "job": "j", "pid": 1, "socket": "/s", "log": ""}
    (runtime / "1.json").write_text(json.dumps(entry | {"device": "0:1"}))
    ran = run("latest", run_dir)
    assert ran.code == 4
    assert "is not mounted now" in ran.err


def test_an_empty_mount_point_that_was_unmounted_is_no_no(run_dir: Path, run: Run, runtime: Path) -> None:
    empty = run_dir / "empty"
    empty.mkdir()
    assert run("latest", empty).code == 1
    (runtime / "0123456789abcdef.options").write_text(json.dumps({"mountpoint": str(empty)}))  # stays when it ends
    ran = run("latest", empty)
    assert (ran.code, f"{empty} was a mount" in ran.err) == (4, True)
    assert run("latest", run_dir).code == 0


def test_what_was_saved_into_the_bare_directory_of_a_mount_is_no_yes(run_dir: Path, run: Run, runtime: Path) -> None:
    (runtime / "0123456789abcdef.options").write_text(json.dumps({"mountpoint": str(run_dir)}))
    for arguments in ((), ("--at", "pfs")):
        ran = run("latest", run_dir, *arguments)
        assert (ran.code, ran.out, f"{run_dir} was a mount" in ran.err) == (4, "", True)
    (run_dir / ".cachexfs").mkdir()
    (run_dir / ".cachexfs" / "id").write_text("a" * 32)  # the PFS is mounted there now
    assert run("latest", run_dir, "--at", "pfs").out == f"{run_dir}/step-11\n"


def test_a_dead_mount_is_no_no(run_dir: Path, run: Run, kernel: Path) -> None:
    list_mount(kernel, run_dir)
    assert run("latest", run_dir).code == 4


def test_a_directory_that_hangs_is_no_no(run_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def hang(path: str | bytes) -> object:
        if os.fsdecode(path).rstrip("/") == str(run_dir):
            time.sleep(3600)
        return real(path)

    monkeypatch.setattr(bare.os, "scandir", hang)
    monkeypatch.setattr(latest, "BARE_TIMEOUT_S", 0.3)
    ran = run("latest", run_dir)
    assert ran.code == 4
    assert "does the PFS hang?" in ran.err


def test_results_and_errors_come_back_from_a_child() -> None:
    assert run_in_child(lambda: b"x" * (3 << 20), 30) == b"x" * (3 << 20)
    with pytest.raises(FileNotFoundError):
        run_in_child(lambda: os.stat("/does/not/exist"), 30)

    def refuse() -> None:
        raise UsageError("no")

    def die() -> None:
        os._exit(7)

    with pytest.raises(UsageError, match="no"):
        run_in_child(refuse, 30)
    with pytest.raises(OSError, match="ended without an answer"):
        run_in_child(die, 30)
    with pytest.raises(CannotTellError):
        bare.newest("/does/not/exist", None)


def test_a_child_that_may_hang_for_ever_holds_nothing_of_its_parent() -> None:
    """Else whoever reads the command's output would wait for it."""
    held = run_in_child(lambda: [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")], 30)
    strange = [path for path in held if path != "/dev/null" and not path.startswith("/proc/")]
    assert not strange
    assert sum("pipe:" in path for path in held) == 1


def test_while_a_server_of_the_pfs_is_down_nothing_is_certain(run_dir: Path, run: Run) -> None:
    """Its files are left out of listings: a newer checkpoint may be among them."""
    names = run_dir.parent / ".cachexfs/names"
    names.mkdir(parents=True)
    for name in witnesses(4):
        (names / os.fsdecode(name)).touch()
    assert run("latest", run_dir).code == 0
    (names / "02.04").unlink()
    ran = run("latest", run_dir)
    assert (ran.code, ran.out) == (4, "")
    assert "1 of the 4 names in .cachexfs/names are missing" in ran.err
