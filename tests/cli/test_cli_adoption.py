"""A mount over what another one left in staging: with the PFS directory that the data is for, or not at all."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_support import FakeDaemon, Ran, Run

from cachexfs import staged, tmpfs
from cachexfs.cli import mount_checks, pfs_check
from cachexfs.cli.options import load_options
from cachexfs.config import PFS_ID

TOKEN, OTHER = "a" * 32, "b" * 32


def make_pfs(path: Path, token: str = "") -> Path:
    """A PFS directory that a mount has used, or (without ``token``) none."""
    path.mkdir()
    if token:
        (path / ".cachexfs" / "tmp").mkdir(parents=True)
        (path / ".cachexfs" / "id").write_text(token + "\n")
    return path


class Left:
    """What a mount of ``pfs`` at ``mountpoint`` left."""

    def __init__(self, root: Path, run: Run) -> None:
        self.pfs, self.mountpoint, self.staging = make_pfs(root / "pfs", TOKEN), root / "m", root / "staging"
        self.mountpoint.mkdir(exist_ok=True)
        self.staging.mkdir()
        self.options = load_options(str(self.pfs), str(self.mountpoint), [f"staging={self.staging}"], None, {})
        (self.staging / tmpfs.PFS_TOKEN).write_text(TOKEN)
        staged.leave(self.staging, self.options, is_confirmed=True)
        self._run = run

    def check(self, pfs: Path) -> Ran:
        return self._run("mount", "--check", pfs, self.mountpoint, "-o", f"staging={self.staging}")

    def adopts(self, pfs: Path) -> str:
        """What it warns of, "" when of nothing."""
        ran = self.check(pfs)
        assert (ran.code, ran.out) == (0, "")
        assert ran.err.count("\n") == ran.err.startswith(f"cachexfs: warning: the PFS directory '{pfs}'")
        assert not ran.err or f"staged in {self.staging} waits for it" in ran.err
        return ran.err

    def refuses(self, pfs: Path) -> None:
        ran = self.check(pfs)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert f"'{pfs}' is not the PFS directory of the last mount" in ran.err
        assert f"data for '{self.pfs}'" in ran.err
        assert f"'cachexfs mount {self.pfs} {self.mountpoint} -o staging={self.staging}'" in ran.err


@pytest.fixture
def left(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Left:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return Left(tmp_path, run)


def test_another_directory_is_refused(left: Left, tmp_path: Path) -> None:
    left.refuses(make_pfs(tmp_path / "other", OTHER))
    left.refuses(make_pfs(tmp_path / "fresh"))
    left.refuses(tmp_path / "none")
    (tmp_path / "file").touch()
    left.refuses(tmp_path / "file")


def test_the_same_directory_under_any_name_is_adopted(left: Left, tmp_path: Path) -> None:
    assert left.adopts(left.pfs) == ""
    (tmp_path / "link").symlink_to(left.pfs)
    assert left.adopts(tmp_path / "link") == ""
    left.pfs.rename(tmp_path / "renamed")
    assert left.adopts(tmp_path / "renamed") == ""


def test_a_directory_that_cannot_be_asked_is_adopted_with_a_warning(
    left: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (left.pfs / ".cachexfs" / "id").rename(tmp_path / "id")
    assert f"where {TOKEN} is expected" in left.adopts(left.pfs)
    (left.pfs / ".cachexfs" / "id").write_text(TOKEN[:5])
    assert "cannot be read (Input/output error)" in left.adopts(left.pfs)
    left.pfs.rename(tmp_path / "away")
    assert "does not exist now" in left.adopts(left.pfs)
    (tmp_path / "link").symlink_to(left.pfs)  # to where it was mounted
    assert "does not exist now" in left.adopts(tmp_path / "link")

    def never(function: object, timeout_s: float) -> object:
        raise TimeoutError

    monkeypatch.setattr(pfs_check, "run_in_child", never)
    assert "has not answered for 10 s" in left.adopts(tmp_path / "away")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_a_directory_that_takes_no_writes_is_adopted_with_a_warning(
    left: Left, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(pfs: str) -> None:
        raise OSError(code, os.strerror(code))

    adoption = pfs_check.Adoption(left.options, change=True)
    monkeypatch.setattr(pfs_check, "_write_and_remove", refuse)
    adoption.check()
    adoption.check()
    said = capfd.readouterr().err
    assert (said.count("\n"), f"takes no writes ({os.strerror(code)})" in said) == (1, True)


def test_a_read_only_filesystem_is_named(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pfs_check.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert f"'{left.pfs}' is read-only" in left.adopts(left.pfs)
    (left.staging / tmpfs.PFS_TOKEN).unlink()  # nothing is staged: there is nothing to go on with
    ran = left.check(left.pfs)
    assert (ran.code, f"'{left.pfs}' is read-only: have" in ran.err) == (2, True)


def test_a_mount_without_the_pfs_does_not_ask_it(left: Left, tmp_path: Path, run: Run) -> None:
    words = f"offline,staging={left.staging}"
    ran = run("mount", "--check", tmp_path / "none", left.mountpoint, "-o", words)
    assert (ran.code, ran.err) == (0, "")


def test_the_probe_of_a_directory_leaves_nothing(left: Left, capfd: pytest.CaptureFixture[str]) -> None:
    pfs_check.Adoption(left.options, change=True).check()
    assert capfd.readouterr().err == ""
    assert [path for path in left.pfs.rglob("*") if path.is_file()] == [left.pfs / ".cachexfs" / "id"]


def test_a_staging_directory_of_before_is_known_by_its_token_alone(left: Left, tmp_path: Path) -> None:
    (left.staging / staged.NAME).unlink()
    other = make_pfs(tmp_path / "other", OTHER)
    assert f"whose .cachexfs/id is {TOKEN}" in left.check(other).err
    assert left.adopts(left.pfs) == ""
    assert "is it mounted" in left.adopts(make_pfs(tmp_path / "fresh")).replace("is the PFS mounted", "is it mounted")


def test_a_dead_mount_stays_when_its_place_is_refused(
    daemon: FakeDaemon, left: Left, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.stop()
    taken: list[str] = []
    monkeypatch.setattr(mount_checks, "detach", taken.append)
    other = make_pfs(tmp_path / "other", OTHER)
    assert run("mount", other, daemon.mountpoint, "-o", f"staging={left.staging}").code == 2
    assert taken == []


def test_replicas_on_nvme_for_another_directory_are_not_taken_over(
    tmp_path: Path, runtime: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, pfs, mountpoint = tmp_path / "secret", make_pfs(tmp_path / "pfs", OTHER), tmp_path / "m"
    mountpoint.mkdir()
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    own = tmp_path / "nvme" / "j" / "a"
    own.mkdir(parents=True)
    words = f"job=j,node=a,nodes=a=127.0.0.1:1;b=127.0.0.2:1,secret={secret},nvme={tmp_path}/nvme,staging={tmp_path}/s"
    (own / PFS_ID).write_text(OTHER)
    assert run("mount", "--check", pfs, mountpoint, "-o", words).code == 0
    (own / PFS_ID).write_text(TOKEN)
    ran = run("mount", "--check", pfs, mountpoint, "-o", words)
    assert ran.code == 2
    assert f"{own} holds replicas of job j for another PFS directory than '{pfs}'" in ran.err
