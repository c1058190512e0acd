"""``recover`` on the command line: what it needs, and a recovery process that hangs."""

import os
import sys
import time
from pathlib import Path

import pytest

from cachexfs.cli import recovery_child
from cachexfs.cli.main import run
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_DONE, EXIT_USAGE


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEXFS_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("CACHEXFS_NVME", raising=False)


def test_a_hung_pfs_is_told_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    script = tmp_path / "hangs"
    script.write_text(f"#!/bin/sh\necho $$ >{pid}\nexec sleep 600\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(recovery_child, "SILENCE_S", 2.0)
    assert run(["recover", "--to", str(tmp_path)]) == EXIT_CANNOT_TELL
    assert "does the PFS hang?" in capsys.readouterr().err
    deadline_s = time.monotonic() + 100
    while os.path.exists(f"/proc/{pid.read_text().strip()}"):
        assert time.monotonic() < deadline_s, "the hung process was left running"
        time.sleep(0.05)


def test_nothing_held_is_done_and_no_directory_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["recover", str(tmp_path)]) == EXIT_DONE
    assert "nothing is held" in capsys.readouterr().out
    assert run(["recover", str(tmp_path / "none")]) == EXIT_CANNOT_TELL
    assert run(["recover"]) == EXIT_USAGE
    monkeypatch.setenv("CACHEXFS_NVME", str(tmp_path))
    assert run(["recover", "--json"]) == EXIT_DONE
    assert run(["recover", "--to", str(tmp_path / "none")]) == EXIT_CANNOT_TELL
    assert run(["recover", "--to", str(tmp_path)]) == EXIT_CANNOT_TELL  # no mount has used it
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [[], ["--list"], ["--verify"], ["--to"]])
def test_a_directory_in_which_no_mount_has_kept_anything_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    wrong, pfs = tmp_path / "wrong", tmp_path / "pfs"
    (wrong / "deep").mkdir(parents=True)
    (pfs / ".cachexfs").mkdir(parents=True)
    (pfs / ".cachexfs" / "id").write_text("a" * 32)
    more = [*more, str(pfs)] if more == ["--to"] else more
    assert run(["recover", str(wrong), *more]) == EXIT_DONE  # empty: of a node that holds nothing
    (wrong / "deep" / "theirs").touch()
    assert run(["recover", str(wrong), *more]) == EXIT_USAGE
    assert "no mount has kept replicas in or below" in capsys.readouterr().err
    (wrong / "drained-7").touch()
    assert run(["recover", str(wrong), *more]) == EXIT_DONE
    (wrong / "drained-7").unlink()
    monkeypatch.setenv("CACHEXFS_NVME", str(wrong))  # the site's, whatever this command is about
    assert run(["recover", "--to", str(pfs)]) == EXIT_DONE


def test_dead_needs_a_daemon_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recover", "--dead", "n1"]) == EXIT_CANNOT_TELL
    assert "no daemon runs" in capsys.readouterr().err
    assert run(["recover", str(tmp_path), "--dead", "n1"]) == EXIT_USAGE
    assert run(["drill", str(tmp_path)]) == EXIT_CANNOT_TELL


def test_what_lies_in_the_current_directory_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('not ours')\n")
    (tmp_path / "nvme").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(["recover", "nvme"]) == EXIT_DONE
    assert "nothing is held" in capsys.readouterr().out
