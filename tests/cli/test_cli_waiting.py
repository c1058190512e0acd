"""Data in staging without a mount: ``status`` finds it, and says how it goes on."""

import fcntl
import json
import os
from pathlib import Path

import msgspec
import pytest
from cli_support import Run, list_mount

from cachexfs import ended, staged, tmpfs
from cachexfs.adapters import journal_file
from cachexfs.cli import mounts
from cachexfs.cli.options import load_options
from cachexfs.config import mount_id
from cachexfs.core import journal
from cachexfs.core.journal import Mutation
from cachexfs.core.records import Op, OpKind, encode, op_key
from cachexfs.errors import UsageError


@pytest.fixture
def staging(tmp_path: Path, runtime: Path, kernel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a mount of ``/pfs`` at ``tmp_path / "m"`` that has ended: 3 MiB in one change have not landed."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    path, mountpoint = tmp_path / "staging", tmp_path / "m"
    (path / "files").mkdir(parents=True)
    (path / "files" / "1").write_bytes(bytes(5 << 20))
    (path / "lock").touch()
    mountpoint.mkdir(exist_ok=True)
    options = load_options("/pfs", str(mountpoint), ["node=n1", f"staging={path}"], None, {})
    staged.leave(path, options, is_confirmed=True)
    op = Op(kind=OpKind.PUT, path=b"a", fid=5, size=3 << 20, owner="n1")
    frame = journal.encode(Mutation(1, [(op_key("1-n1"), encode(op))]))
    (path / journal_file.JOURNAL_NAME).write_bytes(journal.header() + frame)
    entry = {"mountpoint": str(mountpoint), "pfs": "/pfs", "node": "n1", "job": "j", "pid": 0, "device": "",
             "socket": f"{runtime}/x.sock", "log": "", "staging": str(path)}  # fmt: skip
    (runtime / f"{mount_id(str(mountpoint), 'n1')}.json").write_text(json.dumps(entry))
    return path


def test_status_says_what_waits_where_and_how_it_goes_on(staging: Path, tmp_path: Path, run: Run) -> None:
    command = f"cachexfs mount /pfs {tmp_path}/m -o node=n1,staging={staging}"
    for arguments in (["status"], ["status", tmp_path / "m"], ["status", tmp_path / "m" / "a" / "b"]):
        ran = run(*arguments)
        assert (ran.code, ran.err) == (3, "")
        for said in ("not mounted", f"5.0 MiB in {staging}; 3.0 MiB in 1 change not on the PFS", "/pfs", command):
            assert said in ran.out
    found = json.loads(run("status", tmp_path / "m", "--json").out)
    assert (found["exit"], found["mounted"], found["pending_bytes"], found["pending_ops"]) == (3, False, 3 << 20, 1)
    assert (found["staging"], found["command"]) == (str(staging), command)
    assert json.loads(run("status", "--json").out)["mounts"] == [found]


def test_a_mount_that_would_stage_elsewhere_does_not_hide_it(
    staging: Path, tmp_path: Path, runtime: Path, run: Run
) -> None:
    (tmp_path / "pfs").mkdir()
    for words in ((), ("-o", f"staging={tmp_path}/other"), ("-o", f"node=n2,runtime_dir={runtime}")):
        ran = run("mount", tmp_path / "pfs", tmp_path / "m", *words)
        assert (ran.code, ran.err.count("\n")) == (2, 1)
        assert f"staged 3.0 MiB in 1 change in {staging} that is not on '/pfs'" in ran.err
        assert f"'cachexfs mount /pfs {tmp_path}/m -o node=n1,staging={staging}'" in ran.err
    assert run("status").code == 3
    (tmp_path / "n").mkdir()
    assert run("mount", "--check", tmp_path / "pfs", tmp_path / "n").code == 0
    (staging / journal_file.JOURNAL_NAME).write_bytes(journal.header())
    assert run("mount", "--check", tmp_path / "pfs", tmp_path / "m").code == 0


def test_recover_does_not_pass_over_it(staging: Path, tmp_path: Path, run: Run) -> None:
    pfs = tmp_path / "pfs"
    (pfs / ".cachexfs").mkdir(parents=True)
    (pfs / ".cachexfs" / "id").write_text(IDENTITY)
    assert run("recover", "--to", pfs).code == 0
    owner = json.loads((staging / staged.NAME).read_text())
    (staging / staged.NAME).write_text(json.dumps(owner | {"pfs": str(pfs)}))
    ran = run("recover", "--to", pfs)
    assert (ran.code, ran.err.count("\n")) == (3, 1)
    assert "3.0 MiB in 1 change staged in this node's memory" in ran.err
    assert f"'cachexfs mount {pfs} {tmp_path}/m -o node=n1,staging={staging}'" in ran.err
    assert len(json.loads(run("recover", "--to", pfs, "--json").out)["staged"]) == 1
    assert run("recover", "--to", pfs, "--job", "another").code == 0
    (staging / journal_file.JOURNAL_NAME).write_bytes(journal.header())
    assert run("recover", "--to", pfs).code == 0


def test_what_only_other_nodes_could_tell_may_be_all_that_is_staged(staging: Path, run: Run) -> None:
    (staging / journal_file.JOURNAL_NAME).unlink()
    ran = run("status")
    assert ran.code == 3
    assert "up to 5.0 MiB not on the PFS" in ran.out
    (staging / "files" / "1").unlink()
    assert "at most changes of names not on the PFS" in run("status").out


@pytest.mark.parametrize("spoil", ["empty", "noise", "cut", "flipped", "mended"])
def test_a_catalogue_that_is_not_whole_does_not_say_that_nothing_waits(staging: Path, run: Run, spoil: str) -> None:
    path = staging / journal_file.JOURNAL_NAME
    data = path.read_bytes()
    if spoil == "mended":
        path.write_bytes(journal.header())
        (staging / journal_file.MENDED_NAME).touch()
    else:
        wrong = {"empty": b"", "noise": b"\7" * 2000, "cut": data[:-1], "flipped": data[:-1] + bytes([data[-1] ^ 1])}
        path.write_bytes(wrong[spoil])
    ran = run("status")
    assert (ran.code, "up to 5.0 MiB not on the PFS" in ran.out) == (3, True)
    assert json.loads(run("status", "--json").out)["mounts"][0]["pending_ops"] is None


def test_what_is_all_on_the_pfs_is_no_error_and_takes_memory(staging: Path, run: Run) -> None:
    (staging / journal_file.JOURNAL_NAME).write_bytes(journal.header())
    ran = run("status")
    assert (ran.code, "error" in ran.out, "the memory is given back" in ran.out) == (0, False, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees what others left")
def test_root_reads_no_catalogue_of_another_user(staging: Path, runtime: Path, run: Run) -> None:
    (staging / journal_file.JOURNAL_NAME).unlink()
    os.mkfifo(staging / journal_file.JOURNAL_NAME)  # opening it would wait for ever
    for path in (staging, runtime):
        os.chown(path, 12345, 12345)
    assert "up to 5.0 MiB not on the PFS" in run("status").out


def test_several_nodes_have_a_second_way_on(staging: Path, tmp_path: Path, run: Run) -> None:
    owner = staged.read(str(staging))
    assert owner is not None
    words = ("nodes=n1;n2",)
    changed = msgspec.structs.replace(owner, nvme_directory=f"{tmp_path}/nvme/j/n1", words=words)
    (staging / staged.NAME).write_text(json.dumps(msgspec.to_builtins(changed)))
    lines = run("status").out.splitlines()
    assert f"  go on:  cachexfs mount /pfs {tmp_path}/m -o 'nodes=n1;n2'" in lines
    assert lines[-1].endswith(f":  cachexfs recover {tmp_path}/nvme/j --to /pfs")


def test_a_dead_mount_says_the_same(staging: Path, kernel: Path, tmp_path: Path, run: Run) -> None:
    list_mount(kernel, tmp_path / "m", "0:5")
    ran = run("status", tmp_path / "m")
    assert ran.code == 4
    for said in ("is dead", "3.0 MiB in 1 change staged", f"cachexfs mount /pfs {tmp_path}/m -o node=n1"):
        assert said in ran.err


def test_what_a_daemon_uses_does_not_wait(staging: Path, tmp_path: Path, run: Run) -> None:
    with (staging / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "not inside a CacheX FS mount" in run("status", tmp_path / "m").err
    assert run("status", tmp_path / "m").code == 3


def test_a_daemon_that_lives_has_left_nothing(staging: Path, run: Run) -> None:
    (entry,) = mounts.registry()
    Path(entry.socket).with_name(f"{mount_id(entry.mountpoint, 'n1')}.json").write_text(
        json.dumps(msgspec.to_builtins(msgspec.structs.replace(entry, pid=1, device="0:5")))  # in another namespace
    )
    ran = run("status")
    assert (ran.code, ran.out) == (4, "")


def test_staging_that_is_gone_is_forgotten(staging: Path, tmp_path: Path, run: Run) -> None:
    (staging / staged.NAME).unlink()
    assert run("status").code == 4
    assert "was a mount" not in run("latest", tmp_path / "m").err


TOKEN, IDENTITY = "7" * 32, "a" * 32


@pytest.fixture
def landed(staging: Path, tmp_path: Path) -> Path:
    """The mark on the PFS that tells the staging directory that all of it is there."""
    pfs = tmp_path / "pfs"
    (pfs / ".cachexfs" / "held").mkdir(parents=True)
    (pfs / ".cachexfs" / "id").write_text(IDENTITY)
    (staging / tmpfs.PFS_TOKEN).write_text(IDENTITY)
    owner = json.loads((staging / staged.NAME).read_text())
    (staging / staged.NAME).write_text(json.dumps(owner | {"pfs": str(pfs)}))
    ended.leave(staging, TOKEN)
    mark = pfs / os.fsdecode(ended.mark_of(TOKEN))
    mark.touch()
    return mark


def test_what_another_node_has_landed_waits_no_more_and_umount_gives_it_back(
    landed: Path, staging: Path, tmp_path: Path, run: Run
) -> None:
    ran = run("status")
    assert (ran.code, "another node of the job has brought all of it to the PFS" in ran.out) == (0, True)
    assert f"cachexfs umount {tmp_path}/m" in ran.out
    assert json.loads(run("status", tmp_path / "m", "--json").out)["pending_ops"] == 0
    assert run("umount", tmp_path / "m").code == 0
    assert not staging.exists()
    assert landed.exists()


@pytest.mark.parametrize("spoil", ["mark", "id", "token", "forged", "symlink"])
def test_nothing_less_than_the_mark_of_this_very_end_says_so(
    landed: Path, staging: Path, tmp_path: Path, run: Run, spoil: str
) -> None:
    note = staging / ended.NAME
    if spoil == "mark":
        landed.unlink()
    elif spoil == "id":
        (landed.parents[1] / "id").write_text("b" * 32)
    elif spoil == "token":
        ended.forget(staging)
    elif spoil == "forged":
        (landed.parent / "ended-x").mkdir()
        note.write_text("x/../../id")
    else:
        note.rename(tmp_path / "token")
        note.symlink_to(tmp_path / "token")
    assert run("status").code == 3
    assert run("umount", tmp_path / "m").code == 2
    assert (staging / "files" / "1").exists()


def test_what_a_daemon_uses_is_not_given_back(landed: Path, staging: Path) -> None:
    with (staging / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another daemon"):
            ended.clear(str(staging), None, None)
    assert (staging / "files" / "1").exists()
