"""Commands against a control socket: what they ask, print and exit with."""

import json
import os
import sys
import time
from pathlib import Path

import msgspec
import pytest
from cli_support import FakeDaemon, Run, list_mount

from cachexfs import staged
from cachexfs.cli import client, mounts, progress, restart, umount, wait
from cachexfs.cli import status as status_module
from cachexfs.cli.protocol import Pong, Progress
from cachexfs.errors import CannotTellError, UsageError

STATUS: dict[str, object] = {
    "done": True,
    "mountpoint": "/m",
    "pfs": "/pfs",
    "node": "n1",
    "job": "j",
    "pid": 7,
    "uptime_s": 61.0,
    "catalogue": "etcd",
    "fsync": "partner",
    "route": "partner",
    "kernel": "handler",
    "kernel_reason": "",
    "supervisor": "off",
    "nodes": [
        {"name": "n1", "live": True, "host": "h1", "port": 1},
        {"name": "n2", "live": True, "host": "h2", "port": 1},
    ],
    "partner": "n2",
    "protected": True,
    "pfs_state": "ok",
    "pfs_error": "",
    "staging_used": 1 << 20,
    "staging_limit": 1 << 30,
    "nvme_used": 0,
    "pending_bytes": 5 << 20,
    "pending_ops": 3,
    "drain_bytes_s": 1e6,
    "replicate_bytes_s": 0.0,
    "failed": None,
    "errors": [],
    "checkpoints": [
        {
            "path": "run/step-10",
            "format": "dcp",
            "stage": "returned",
            "restartable": "partner",
            "t_returned": "2026-01-02T03:04:05.123456Z",
            "t_partner": None,
            "t_pfs": None,
            "t_restartable": None,
            "files": 9,
            "bytes": 1 << 20,
            "pending": 5,
            "missing": [{"name": "__3_0.distcp", "node": "n2", "reason": "not yet on the partner"}],
            "error": None,
            "holders": ["n1", "n2"],
        }
    ],
}


def line(text: str) -> bool:
    """One line of error, as every failing command prints it."""
    return text.startswith("cachexfs: error: ") and text.count("\n") == 1


def test_status_of_a_mount(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers["status"] = [STATUS]
    ran = run("status")
    assert ran.code == 0
    for said in (
        "run/step-10",
        "dcp",
        "partner",
        "2026-01-02 03:04:05 ",
        "5.0 MiB in 3 changes",
        "2 of 2 live",
        "__3_0.distcp",
    ):
        assert said in ran.out
    assert daemon.asked == [{"op": "status", "path": None}]
    found = json.loads(run("status", "--json").out)
    assert found["mounts"][0]["checkpoints"] == STATUS["checkpoints"]
    assert found["mounts"][0]["exit"] == 0


def test_what_is_over_is_a_note_of_status_and_no_error(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers["status"] = [STATUS | {"notes": ["fsync: 'a' not at 'pfs' (9 s ago; it has got to 'pfs' since)"]}]
    ran = run("status")
    assert ran.code == 0
    assert "note: fsync: 'a' not at 'pfs'" in ran.out
    assert "error" not in ran.out


def test_status_shows_how_far_a_large_copy_is(daemon: FakeDaemon, run: Run) -> None:
    pending = {"pending_bytes": 10 << 30, "pending_ops": 3, "nodes": [{"name": "n1"}]}
    under_way = {"own_copied_bytes": 4 << 30, "own_left_bytes": 6 << 30, "own_left_s": 118.2}
    daemon.answers["status"] = [STATUS | pending | under_way]
    assert "10.0 GiB in 3 changes (4.0 GiB copied, about 1 m 58 s left)" in run("status").out
    several = {"nodes": [{"name": "n1"}, {"name": "n2"}], "pending_bytes": 20 << 30, "own_left_s": None}
    daemon.answers["status"] = [STATUS | pending | under_way | several]
    assert "20.0 GiB in 3 changes (4.0 GiB of 10.0 GiB on this node copied)" in run("status").out


def test_a_long_wait_off_a_terminal_says_what_it_waits_for(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {
        "bytes_done": 4 << 30,
        "bytes_total": 10 << 30,
        "files_total": 1,
        "rate_bytes_s": 50 << 20,
        "left_s": 118.2,
    }
    daemon.answers["wait"] = [{"progress": report}]  # and silence
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.05)
    monkeypatch.setattr(wait, "SILENCE_S", 0.5)
    ran = run("wait", daemon.mountpoint / "f", "--at", "pfs")
    assert "4.0 GiB of 10.0 GiB are there at 50.0 MiB/s, about 1 m 58 s left" in ran.err
    assert "at 'pfs'" not in run("wait", daemon.mountpoint / "f", "--at", "pfs", "--json").err


def test_status_of_a_path(daemon: FakeDaemon, run: Run) -> None:
    file = {
        "path": "run/f",
        "stage": "pfs",
        "size": 3,
        "generation": 2,
        "origin": "n1",
        "holders": ["n1"],
        "digest": "d",
    }
    file |= {"route": "partner", "pending": 0, "error": None, "t_returned": "2026-01-02T03:04:05.123456Z"}
    daemon.answers["status"] = [STATUS | {"file": file, "checkpoints": []}]
    ran = run("status", daemon.mountpoint / "run" / "f")
    assert ran.code == 0
    assert "3 bytes" in ran.out
    assert daemon.asked[-1]["path"] == "run/f"
    assert json.loads(run("status", daemon.mountpoint / "run/f", "--json").out)["file"] == file


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"protected": False}, "no live partner"),
        ({"failed": "ValueError: x"}, "the daemon has failed: ValueError: x"),
        ({"pfs_state": "hung", "pfs_error": "no answer to land a"}, "the PFS is hung: no answer to land a"),
        (
            {"pfs_state": "hung", "pfs_away_s": 30.0, "held_up": 7},
            "the PFS is hung for 30.0 s; 7 changes wait and land",
        ),
        ({"errors": [{"path": "a", "error": "EIO", "node": "n2"}]}, "a (n2): EIO"),
        ({"pfs_refuses": "refuses 2 changes: EROFS (x)"}, "error: the PFS directory /pfs refuses 2 changes: EROFS (x)"),
        ({"checkpoints": [{"path": "c", "error": "bad"}]}, "c: bad"),
    ],
)
def test_status_exits_3_on_any_error_or_lost_protection(
    daemon: FakeDaemon, run: Run, change: dict[str, object], said: str
) -> None:
    daemon.answers["status"] = [STATUS | change]
    ran = run("status")
    assert ran.code == 3
    assert said in ran.out
    assert json.loads(run("status", "--json").out)["mounts"][0]["exit"] == 3


def test_a_node_alone_has_no_protection_to_lose(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers["status"] = [STATUS | {"nodes": [{"name": "n1"}], "protected": False, "partner": None}]
    assert run("status").code == 0


def test_an_answer_with_unknown_fields_is_understood(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers["status"] = [{"done": True, "mountpoint": "/m", "from_the_future": [1]}]
    assert run("status").code == 0


def test_a_mount_of_another_runtime_directory_is_shown_where_none_was_asked_for(
    daemon: FakeDaemon, kernel: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answers["status"] = [STATUS]
    list_mount(kernel, "/other", "0:5")
    assert run("status").code == 0
    monkeypatch.delenv("CACHEXFS_RUNTIME_DIR")
    monkeypatch.setattr(mounts, "default_runtime_dir", lambda: str(daemon.runtime))
    ran = run("status")
    assert ran.code == 4
    assert "no daemon of /other" in ran.err


def test_no_mount_no_daemon_no_answer_exit_4(
    runtime: Path, kernel: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("status")
    assert ran.code == 4
    assert line(ran.err)
    assert run("status", tmp_path).code == 4
    mountpoint = tmp_path / "m"
    list_mount(kernel, mountpoint)
    ran = run("status", mountpoint)  # a mount without a registered daemon
    assert ran.code == 4
    assert "no daemon of" in ran.err
    fake = FakeDaemon(mountpoint, runtime)
    fake.register(pid=os.getpid())
    monkeypatch.setattr(client, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(client.ask_raw, "__defaults__", (client._no_progress, 0.2))
    ran = run("status", mountpoint)  # a daemon that hangs
    assert ran.code == 4
    assert "has not answered" in ran.err
    for nonsense in (b"", b"nonsense\n", b"[1]\n", b'{"done":true,"errors":7}\n'):
        fake.raw = nonsense
        ran = run("status", mountpoint)
        assert ran.code == 4
        assert line(ran.err)
    fake.stop()
    ran = run("explain", mountpoint)  # kill -9: the socket is there and nobody listens
    assert ran.code == 4
    assert "is dead (its log is /var/log/x.log)" in ran.err
    ran = run("status")
    assert ran.code == 4
    assert line(ran.err)


@pytest.mark.parametrize("code", [1, 2, 3, 4, 124])
def test_the_daemons_errors_keep_their_exit_code(daemon: FakeDaemon, run: Run, code: int) -> None:
    daemon.answers["explain"] = [{"done": True, "error": "no such path\nsecond line", "exit": code}]
    ran = run("explain", daemon.mountpoint / "x")
    assert (ran.code, ran.err) == (code, "cachexfs: error: no such path second line\n")


def test_wait(daemon: FakeDaemon, run: Run) -> None:
    progress = {"progress": {"bytes_done": 1, "bytes_total": 2, "files_done": 0, "files_total": 1}}
    daemon.answers["wait"] = [progress, progress, {"done": True, "reached": True, "reason": "", "exit": 0}]
    ran = run("wait", daemon.mountpoint / "c", "--at", "pfs", "--timeout", "5")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert daemon.asked == [{"op": "wait", "path": "c", "at": "pfs", "timeout_s": 5.0}]
    for code in (3, 4, 124):
        daemon.answers["wait"] = [{"done": True, "reached": False, "reason": "2 files are on no partner", "exit": code}]
        ran = run("wait", daemon.mountpoint / "c", "--at", "partner", "--json")
        assert ran.code == code
        assert line(ran.err)
        assert "2 files" in ran.err
        assert json.loads(ran.out)["reached"] is False


def test_wait_for_a_daemon_that_falls_silent(daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.answers["wait"] = [{"progress": {}}]
    monkeypatch.setattr(wait, "SILENCE_S", 0.2)
    assert run("wait", daemon.mountpoint, "--at", "pfs").code == 4


def test_latest_on_a_mount(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers["latest"] = [{"done": True, "path": "run/step-9", "certain": True, "reason": ""}]
    ran = run("latest", daemon.mountpoint / "run", "--at", "pfs", "--below", "10")
    assert (ran.code, ran.out) == (0, f"{daemon.mountpoint}/run/step-9\n")
    assert daemon.asked == [{"op": "latest", "dir": "run", "at": "pfs", "below": 10}]
    for certain, code in ((True, 1), (False, 4)):
        daemon.answers["latest"] = [{"done": True, "path": None, "certain": certain, "reason": "none is whole"}]
        ran = run("latest", daemon.mountpoint / "run")
        assert (ran.code, ran.out, ran.err) == (code, "", "cachexfs: error: none is whole\n")


def test_a_path_that_is_not_utf8_comes_and_goes(daemon: FakeDaemon, run: Run) -> None:
    name = os.fsdecode(b"caf\xe9")
    daemon.answers["latest"] = [{"done": True, "path": name, "certain": True, "reason": ""}]
    ran = run("latest", daemon.mountpoint / name)
    assert daemon.asked[0]["dir"] == name
    assert ran.code == 0


def test_explain_says_each_piece_its_node_and_the_fix(daemon: FakeDaemon, run: Run) -> None:
    piece = {"path": "c/f", "node": "n2", "boundary": "partner", "reason": "n2 is lost", "fix": "start n2 again"}
    answer = {"done": True, "path": "c", "kind": "checkpoint", "stage": "returned", "restartable": "no"}
    daemon.answers["explain"] = [answer | {"pieces": [piece], "summary": "One file is missing."}]
    ran = run("explain", daemon.mountpoint / "c")
    assert ran.code == 0
    for said in ("checkpoint", "'returned'", "not restartable", "One file is missing.", "c/f on n2", "start n2 again"):
        assert said in ran.out
    assert json.loads(run("explain", daemon.mountpoint / "c", "--json").out)["pieces"] == [piece]


def test_control_characters_of_names_do_not_reach_the_terminal(daemon: FakeDaemon, run: Run) -> None:
    piece = {"path": "\x1b[31mred", "node": "", "boundary": "", "reason": "a\nb", "fix": ""}
    daemon.answers["explain"] = [{"done": True, "path": "c", "pieces": [piece], "summary": "s"}]
    assert "\x1b" not in run("explain", daemon.mountpoint / "c").out


def test_umount_drains_and_waits_until_the_mount_is_gone(daemon: FakeDaemon, kernel: Path, run: Run) -> None:
    daemon.register(pid=2**22 + 1)  # no such process
    listed = kernel.read_text()
    daemon.answers["umount"] = [
        {"progress": {"bytes_left": 5 << 20, "ops_left": 2, "files": ["a", "b"]}},
        {"progress": {"bytes_left": 5 << 20, "ops_left": 1, "files": ["b"]}},
        {"done": True, "left": []},
    ]

    def gone(_: float) -> None:
        kernel.write_text(listed.replace("fuse.cachexfs", "fuse.gone"))
        list_mount(kernel, "/somebody/else")  # the device number is given away at once

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(umount.time, "sleep", gone)
        ran = run("umount", daemon.mountpoint, "--timeout", "60")
    waits = f"cachexfs: unmounting {daemon.mountpoint}: 5.0 MiB in 2 changes still to be copied to /pfs, 'a' first\n"
    assert (ran.code, ran.out, ran.err) == (0, "", waits)  # a log, which gets a line now and then
    assert daemon.asked == [{"op": "umount", "timeout_s": 58.0, "abandon": False}]  # the rest is for the unmount


def test_the_status_of_a_mount_point_whose_daemon_is_still_ending_is_what_it_says(
    daemon: FakeDaemon, kernel: Path, run: Run
) -> None:
    kernel.write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    daemon.answers["status"] = [STATUS]
    assert "5.0 MiB in 3 changes" in run("status", daemon.mountpoint).out


def test_what_a_command_waits_for_is_said_again_and_again(capfd: pytest.CaptureFixture[str]) -> None:
    said = progress.Lines(every_s=0.01)
    said.says("first")
    said.says("second")
    err = capfd.readouterr().err
    while "second" not in err:
        time.sleep(0.01)
        err += capfd.readouterr().err
    said.end()
    assert err.startswith("cachexfs: first\n")
    capfd.readouterr()
    assert not said._thread.is_alive()


def test_the_time_that_umount_is_given_is_all_that_it_takes(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(umount.time, "monotonic", lambda: clock[0])

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(umount.time, "sleep", sleep)
    detached: list[tuple[str, float]] = []
    monkeypatch.setattr(umount, "detach", lambda point: detached.append((point, clock[0])))
    daemon.answers["umount"] = [{"done": True, "left": [{"path": "a", "reason": "full"}]}]  # and it does not end
    ran = run("umount", daemon.mountpoint, "--timeout", "10")
    assert daemon.asked == [{"op": "umount", "timeout_s": 8.0, "abandon": False}]
    assert (ran.code, "full: a; " in ran.err, "is mounted still" in ran.err) == (3, True, True)
    assert clock[0] == pytest.approx(110, abs=0.1)
    assert detached[0] == (str(daemon.mountpoint), pytest.approx(109.5, abs=0.1))
    daemon.answers["umount"] = [{"done": True, "left": []}]
    assert run("umount", daemon.mountpoint, "--timeout", "10").code == 124
    assert run("umount", daemon.mountpoint).code == 4


def test_a_daemon_that_has_unmounted_and_still_ends_is_a_warning(
    daemon: FakeDaemon, kernel: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = kernel.read_text()
    monkeypatch.setattr(umount.time, "sleep", lambda _: kernel.write_text(listed.replace("fuse.cachexfs", "fuse.gone")))
    daemon.answers["umount"] = [{"done": True, "left": []}]
    ran = run("umount", daemon.mountpoint, "--timeout", "1")  # its process does not end: it is this machine's first
    assert (ran.code, "warning: everything is on the PFS, and the daemon (pid 1)" in ran.err) == (0, True)


def test_a_daemon_that_drains_on_beyond_its_time_is_left_mounted(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answers["umount"] = [{"progress": {"bytes_left": 5, "ops_left": 1}}]
    ran = run("umount", daemon.mountpoint, "--timeout", "0")
    assert (ran.code, "is mounted still" in ran.err) == (124, True)


def test_umount_exits_3_with_the_list_of_what_is_left(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(umount, "_await_gone", lambda *_: "")
    left = [{"path": "run/a", "reason": "the PFS is full"}, {"path": "run/b", "reason": "the same"}]
    daemon.answers["umount"] = [{"done": True, "left": left}]
    ran = run("umount", daemon.mountpoint, "--json")
    assert ran.code == 3
    assert line(ran.err)
    assert "2 changes are not on the PFS: the PFS is full: run/a; the same: run/b. What is left" in ran.err
    assert "recoverable" in ran.err
    assert json.loads(ran.out)["left"] == left


def test_umount_says_each_reason_once_and_what_to_do_last(
    daemon: FakeDaemon, kernel: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage's text was there for each file, up to twenty times, and came after what to do."""
    monkeypatch.setattr(umount, "_await_gone", lambda *_: "")
    away = "put: the PFS is hung since 10:12:13 UTC (42 s): no answer to land a/b"
    left = [{"path": f"run/{number}", "reason": away} for number in range(30)] + [{"path": "", "reason": "damaged"}]
    daemon.answers["umount"] = [{"done": True, "left": left}]
    ran = run("umount", daemon.mountpoint)
    assert (ran.code, ran.err.count("hung")) == (3, 1)
    assert f"{away}: run/0, run/1, run/2, run/3, run/4 and 25 more; damaged. What is left stays" in ran.err
    assert ran.err.rstrip().endswith("mount again with the same options ('cachexfs status' says with which)")


def test_umount_of_a_node_alone_says_that_a_reboot_loses_what_is_left(
    daemon: FakeDaemon, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(umount, "_await_gone", lambda *_: "")
    staging = tmp_path / "staging"
    staging.mkdir()
    daemon.register(1, staging=str(staging))
    daemon.answers["umount"] = [{"done": True, "left": [{"path": "a", "reason": "full"}]}]
    for nvme_directory in (None, f"{tmp_path}/nvme/j/n1"):
        owner = staged.Owner("/pfs", str(daemon.mountpoint), "n1", "j", nvme_directory=nvme_directory)
        (staging / staged.NAME).write_text(json.dumps(msgspec.to_builtins(owner)))
        said = run("umount", daemon.mountpoint).err
        assert (f"memory only ({staging}), and a reboot loses it" in said) == (nvme_directory is None)


@pytest.mark.parametrize("name", ["python", "python3"])
def test_upgrade_takes_the_interpreter_that_is_there(tmp_path: Path, name: str) -> None:
    """Of /usr, where Debian has no bin/python, it said that this is no Python."""
    (tmp_path / "bin").mkdir()
    with pytest.raises(UsageError, match=f"at {tmp_path}/bin/python or {tmp_path}/bin/python3: give"):
        restart._interpreter(str(tmp_path))
    (tmp_path / "bin" / name).symlink_to(sys.executable)
    assert restart._interpreter(str(tmp_path)) == f"{tmp_path}/bin/{name}"
    with pytest.raises(UsageError, match="does not exist"):
        restart._interpreter(str(tmp_path / "none"))


def test_umount_of_what_is_no_mount_or_has_no_daemon(daemon: FakeDaemon, run: Run, tmp_path: Path) -> None:
    ran = run("umount", tmp_path)
    assert ran.code == 2
    assert line(ran.err)
    ran = run("umount", daemon.mountpoint / "sub")
    assert ran.code == 2
    assert f"give the mount point, {daemon.mountpoint}" in ran.err
    daemon.stop()
    ran = run("umount", daemon.mountpoint)
    assert ran.code == 4
    assert "--abandon" in ran.err
    assert line(ran.err)


def test_watch_with_json_prints_one_object_a_line(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answers["status"] = [STATUS]
    rounds = []

    def sleep(_: float) -> None:
        rounds.append(1)
        if len(rounds) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_module.time, "sleep", sleep)
    ran = run("status", "--watch", "--json")
    assert ran.code == 0
    assert len([json.loads(text) for text in ran.out.splitlines()]) == 3


def test_watch_goes_on_while_the_daemon_is_away(daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.answers["status"] = [STATUS]
    registered = daemon.socket.with_suffix(".json")
    rounds = []

    def sleep(_: float) -> None:
        rounds.append(1)
        if len(rounds) == 1:
            registered.rename(registered.with_suffix(".away"))
        if len(rounds) == 2:
            registered.with_suffix(".away").rename(registered)
        if len(rounds) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_module.time, "sleep", sleep)
    ran = run("status", str(daemon.mountpoint), "--watch", "--json")
    assert [json.loads(text)["exit"] for text in ran.out.splitlines()] == [0, 4, 0]
    assert ran.code == 0


def test_status_leaves_out_other_users_mounts(
    daemon: FakeDaemon, run: Run, runtime: Path, kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could never end with 0 on a node that several users share."""
    daemon.answers["status"] = [STATUS]
    with kernel.open("a") as file:
        file.write(f"98 22 0:4712 / {tmp_path}/theirs rw - fuse.cachexfs /pfs rw,user_id=4711\n")
    monkeypatch.delenv("CACHEXFS_RUNTIME_DIR")
    monkeypatch.setattr(mounts, "runtime_dirs", lambda: [str(runtime)])
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert run("status").code == 0
    monkeypatch.setattr(mounts, "runtime_dirs", list)
    ran = run("status")
    assert (ran.code, "is another user's: ask as that user, or as root" in ran.err) == (4, True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "no daemon of" in run("status").err  # root is told of all


def test_what_status_and_progress_say_is_readable(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = {**STATUS["checkpoints"][0], "holders": [], "stage": "pfs", "t_pfs": "2026-01-03T03:04:05.123456Z"}
    daemon.answers["status"] = [{**STATUS, "checkpoints": [point]}]
    monkeypatch.setattr(status_module.time, "gmtime", lambda: time.struct_time((2026, 1, 3, 4, 0, 0, 5, 3, 0)))
    words = run("status").out
    assert ("2026-01-02 03:04:05  " in words, "2026-01-03" in words, " 03:04:05.123" in words) == (True, False, True)
    assert next(text for text in words.splitlines() if "run/step-10" in text).rstrip().endswith("  pfs")
    (entry,) = mounts.registry()
    names = Progress(bytes_left=0, ops_left=2, rate_bytes_s=2, left_s=0.0)
    assert umount._pending(entry, names).endswith(": 2 changes of names still to be made on /pfs")
    assert progress.pace(Progress(bytes_done=5, bytes_total=5, rate_bytes_s=2, left_s=0.0)) == ""
    assert progress.pace(Progress(bytes_left=4, rate_bytes_s=2, left_s=2.0)) == " at 2 B/s, about 2.0 s left"
    daemon.answers["ping"] = []
    with pytest.raises(CannotTellError, match=r"has not answered for 0\.1 s"):
        client.ask(entry, {"op": "ping"}, Pong, silence_s=0.10004)
