"""Starts and ends: umount, SIGTERM, daemons that cannot run, daemons that hang. No mount is ever left."""

import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachexfs.supervisor import client, messages, wire
from cachexfs.supervisor.blame import Blame
from cachexfs.supervisor.lifecycle import EXIT_CANNOT_TELL, EXIT_NOT_DURABLE, Lifecycle, Limits, Phase
from cachexfs.supervisor.messages import EXIT_TRY_AGAIN
from cachexfs.supervisor.mount import Place, unmount
from cachexfs.supervisor.mount import mount as raw_mount
from cachexfs.supervisor.pending import Pending
from cachexfs.supervisor.status import ask
from cachexfs.supervisor.wire import minimal_init_reply

from .conftest import DAEMON, START_S_MAX, Mount, is_mounted, wait_until


def test_umount_ends_daemon_and_supervisor(mount: Mount) -> None:
    mount.up()
    daemon = mount.daemon_pid()
    (mount.point / "f").write_bytes(b"x")
    assert mount.umount() == 0
    assert not os.path.exists(f"/proc/{daemon}")
    assert not mount.socket.exists()
    assert "Traceback" not in mount.said()


def test_sigterm_lets_the_daemon_finish_and_unmounts(mount: Mount) -> None:
    mount.up()
    assert mount.process is not None
    mount.process.send_signal(signal.SIGTERM)
    assert mount.wait() == 0
    assert not is_mounted(mount.point)


def test_sigterm_ends_a_daemon_that_waits_for_others_before_it_serves(mount: Mount) -> None:
    """It was told only once it served: a mount of one of two nodes went on after its time limit, until SIGKILL."""
    code = (
        "import select, sys; from cachexfs.supervisor.client import Supervisor, Event\n"
        "supervisor = Supervisor.from_environ(); open(sys.argv[1], 'w').close()\n"
        "while supervisor.next_event() is not Event.STOP: select.select([supervisor.events_fd], [], [])\n"
        "sys.exit(4)"
    )
    waits = mount.root / "waits"
    options = ["--mountpoint", str(mount.point), "--", sys.executable, "-c", code, str(waits)]
    with mount.log.open("ab") as log:
        mount.process = subprocess.Popen(
            [sys.executable, "-m", "cachexfs.supervisor", *options], cwd=DAEMON.parents[2], stderr=log
        )
    wait_until(waits.exists, "waits")
    mount.process.send_signal(signal.SIGTERM)
    mount.wait()
    assert "not ready in time" not in mount.said()
    assert not is_mounted(mount.point)


def test_the_exit_code_of_a_daemon_that_could_not_finish_is_passed_on(mount: Mount) -> None:
    mount.up(stop="3")
    assert mount.ask("stop") == {"said": "stopping"}
    assert mount.wait() == 3
    assert not is_mounted(mount.point)


def test_sigterm_while_a_file_is_open_ends_loudly(mount: Mount) -> None:
    mount.up("--unmount-timeout", "0.3")
    fd = os.open(mount.point / "f", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"x")
    mount.ask("stop")
    assert mount.wait() == EXIT_NOT_DURABLE
    assert not is_mounted(mount.point)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        os.close(fd)
    assert (mount.root / "f").read_bytes() == b"x"


def test_ready_is_told_to_who_waits_for_it(mount: Mount) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as lines:
        mount.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "cachexfs.supervisor", "--mountpoint", str(mount.point)),
                *("--status-socket", str(mount.socket), "--ready-fd", str(writer)),
                *("--", sys.executable, str(DAEMON)),
            ],
            cwd=DAEMON.parents[2],
            env={**os.environ, "PLAIN_ROOT": str(mount.root)},
            pass_fds=(writer,),
        )
        os.close(writer)
        assert lines.readline() == b"ready\n"
    assert mount.phase() == "serving"
    assert mount.status()["passthrough_reason"] == "no --backing-dir was given"
    assert mount.umount() == 0


def test_a_daemon_that_cannot_start_gives_an_exit_code_and_no_mount(mount: Mount) -> None:
    mount.start(fail="1")
    assert mount.wait() == EXIT_CANNOT_TELL
    assert not is_mounted(mount.point)
    assert "giving up after 3 failures" in mount.said()
    assert "exit code 1" in mount.said()


def test_a_program_that_does_not_exist_gives_an_exit_code_and_no_mount(mount: Mount) -> None:
    mount.start("--max-restarts", "1", daemon=("/nonexistent/daemon",))
    assert mount.wait() == EXIT_CANNOT_TELL
    assert not is_mounted(mount.point)
    assert "/nonexistent/daemon: not found" in mount.said()


def test_a_daemon_that_never_gets_ready_is_given_up(mount: Mount) -> None:
    mount.start("--max-restarts", "0", "--start-timeout", "1", silent="1")
    assert mount.wait() == EXIT_CANNOT_TELL
    assert not is_mounted(mount.point)
    assert "not ready in time" in mount.said()


def test_who_waits_for_the_first_daemon_gets_eio(mount: Mount) -> None:
    mount.start("--max-restarts", "0", daemon=("sleep", "600"))
    wait_until(lambda: is_mounted(mount.point) and mount.phase() == "starting", "mounted")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(os.listdir, mount.point)
        wait_until(lambda: mount.status()["requests_pending"] != 0, "a request waits")
        mount.kill_daemon()
        with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
            answer.result(START_S_MAX)
    assert caught.value.errno == errno.EIO
    assert mount.wait() == EXIT_CANNOT_TELL


def test_after_giving_up_everything_is_eio_and_restart_tries_again(mount: Mount) -> None:
    mount.up("--max-restarts", "1")
    (mount.point / "f").write_bytes(b"kept")
    held = os.open(mount.point / "f", os.O_RDONLY)
    Path(f"{mount.root}.fail").touch()
    mount.kill_daemon()
    wait_until(lambda: mount.phase() == "failed", "gives up")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        os.listdir(mount.point)
    assert caught.value.errno == errno.EIO
    assert is_mounted(mount.point), "a dead mount must not look like an empty directory"
    assert "exit code 1" in str(mount.status()["last_failure"])
    Path(f"{mount.root}.fail").unlink()
    assert mount.ask("restart") == {"said": "trying again"}
    wait_until(lambda: mount.phase() == "serving", "serves again")
    assert os.pread(held, 9, 0) == b"kept"
    os.close(held)
    assert mount.umount() == 0


def test_while_what_a_daemon_needs_is_away_callers_get_eio_and_then_it_goes_on(mount: Mount) -> None:
    """A daemon died while the catalogue had no majority: after ten tries the mount was given up for good."""
    mount.up("--max-restarts", "1")
    (mount.point / "f").write_bytes(b"kept")
    held = os.open(mount.point / "f", os.O_RDONLY)
    Path(f"{mount.root}.fail").write_text(f"{EXIT_TRY_AGAIN}")
    mount.kill_daemon()
    for _ in range(3):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.listdir(mount.point)
    wait_until(lambda: int(str(mount.status()["life"])) > 4, "it is tried again")
    assert mount.phase() != "failed"
    Path(f"{mount.root}.fail").unlink()
    wait_until(lambda: mount.phase() == "serving", "serves again")
    assert os.pread(held, 9, 0) == b"kept"
    os.close(held)
    assert mount.umount() == 0


def test_unmounted_after_giving_up_the_exit_code_is_loud(mount: Mount) -> None:
    mount.up("--max-restarts", "0")
    Path(f"{mount.root}.fail").touch()
    daemon = mount.daemon_pid()
    os.kill(daemon, signal.SIGSTOP)
    mount.kill_daemon()
    wait_until(lambda: mount.phase() == "failed", "gives up")
    assert mount.umount() == EXIT_NOT_DURABLE


def test_a_request_that_kills_every_daemon_is_answered_with_eio(mount: Mount) -> None:
    mount.up("--max-suspicions", "1", poison="apple")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        os.stat(mount.point / "apple")
    assert mount.status()["requests_given_up"] == 1
    (mount.point / "pear").write_bytes(b"x")
    assert mount.umount() == 0


def test_a_daemon_that_hangs_is_replaced(mount: Mount) -> None:
    mount.up("--request-timeout", "1")
    os.kill(mount.daemon_pid(), signal.SIGSTOP)
    assert os.listdir(mount.point) == []
    assert mount.status()["restarts"] != 0
    assert "hangs" in mount.said()
    assert mount.umount() == 0


def test_a_daemon_whose_loop_stands_still_is_replaced_long_before_a_request_may_take_so_long(mount: Mount) -> None:
    mount.up("--pulse-timeout", "1")
    os.kill(mount.daemon_pid(), signal.SIGSTOP)
    assert os.listdir(mount.point) == []
    assert "stood still for 1 s: the daemon hangs" in str(mount.said())
    assert mount.umount() == 0


def test_a_request_that_waits_long_is_no_hang_while_the_loop_runs() -> None:
    pending = Pending()
    pending.add(2, b"a request")
    blame = Blame(pending, lambda unique: None, Limits(request_s=180.0, pulse_s=30.0))
    assert blame.look_s == 5.0
    for _ in range(36):
        assert blame.look(is_serving=True, send_pulse=blame.alive) == ""
    assert "a request" in blame.look(is_serving=True, send_pulse=blame.alive)
    said = [blame.look(is_serving=True, send_pulse=lambda: None) for _ in range(7)]
    assert said == [""] * 6 + ["its loop has stood still for 30 s"]
    assert [blame.look(is_serving=False, send_pulse=lambda: None) for _ in range(50)] == [""] * 50


def test_a_daemon_that_does_not_retire_is_killed(mount: Mount) -> None:
    mount.up("--exit-timeout", "3", "--grace-timeout", "0.3")
    pid = mount.daemon_pid()
    os.kill(pid, signal.SIGSTOP)
    mount.ask("restart")
    assert os.listdir(mount.point) == []
    wait_until(lambda: mount.phase() == "serving", "serves")
    assert mount.daemon_pid() != pid
    assert mount.umount() == 0


Catch = Callable[[Callable[[int], bool]], None]


@contextmanager
def hanging(tmp_path: Path) -> Iterator[tuple[Path, Catch]]:
    """A mount that nobody serves: who looks into it, once its request is read, listens to no signal.

    Yields the mount and what reads requests until one comes from a process that is meant: others look around, too.
    """
    trap = tmp_path / "trap"
    trap.mkdir()
    place = Place.find(str(trap), only_roots=False)
    device = raw_mount(place, "trap", is_shared=True, uid=0, gid=0)
    os.set_blocking(device, True)

    def catch(is_meant: Callable[[int], bool]) -> None:
        while not is_meant(wire.u32(os.read(device, 1 << 20), wire.IN_PID_OFFSET)):
            pass

    try:
        os.write(device, minimal_init_reply(os.read(device, 1 << 20)))
        yield trap, catch
    finally:
        os.close(device)
        unmount(place, is_lazy=True)


def test_a_daemon_that_hangs_in_the_kernel_is_left_to_it(mount: Mount, tmp_path: Path) -> None:
    """A second mount that nobody serves makes the daemon hang in stat: not even SIGKILL ends it."""
    with hanging(tmp_path) as (trap, catch):
        limits = ("--exit-timeout", "0.5", "--request-timeout", "1")
        mount.up("--passthrough", "off", *limits, hang=str(trap / "x"))
        data = os.urandom(3 << 20)
        fd = os.open(mount.point / "f", os.O_CREAT | os.O_WRONLY)
        pid = mount.daemon_pid()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(os.path.exists, mount.point / "hang")
            catch(pid.__eq__)  # taken and never answered: the kernel now waits without listening to signals
            written = pool.submit(os.pwrite, fd, data, 0)  # lies in the memory that the hanging one keeps
            assert answer.result(START_S_MAX) is False
            assert written.result(START_S_MAX) == len(data)
        assert mount.daemon_pid() != pid
        assert "does not die" in mount.said()
        assert os.path.exists(f"/proc/{pid}")
        assert (mount.root / "f").read_bytes() == data
        os.close(fd)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the old one is reaped when it ends at last")
    assert mount.umount() == 0


def test_a_standby_that_hangs_in_the_kernel_is_not_waited_for(mount: Mount, tmp_path: Path) -> None:
    """The installation lies on a filesystem that has just gone away."""
    with hanging(tmp_path) as (trap, catch):
        code = f"import os, runpy; 'CACHEXFS_STANDBY_FD' in os.environ and os.stat('{trap}/x')\n"
        code += f"runpy.run_path('{DAEMON}', run_name='__main__')"
        mount.start("--standby", "--standby-after", "0.1", "--start-timeout", "4", daemon=(sys.executable, "-c", code))
        wait_until(lambda: mount.phase() == "serving", "the mount serves")
        wait_until(lambda: mount.status()["standby_pid"] != 0, "a standby")
        catch(lambda pid: pid == mount.status()["standby_pid"])
        # Taken and never answered: the standby does not listen to signals any more.
        assert mount.ask("restart") == {"said": "restarting"}
        (mount.point / "f").write_bytes(b"x")
        wait_until(lambda: "not taken" in str(mount.status()["last_failure"]), "the upgrade is given up")
        assert (mount.point / "f").read_bytes() == b"x"
    assert mount.umount() == 0


def test_an_installation_on_a_filesystem_that_hangs_does_not_hold_the_mount(mount: Mount, tmp_path: Path) -> None:
    with hanging(tmp_path) as (trap, catch):
        mount.up("--standby", "--start-timeout", "4")
        assert mount.ask(f"restart {trap}/bin/python") == {"said": "restarting"}
        catch(lambda pid: pid == mount.status()["standby_pid"])  # for the way to the program, and nobody answers
        (mount.point / "f").write_bytes(b"x")
        wait_until(lambda: "not taken" in str(mount.status()["last_failure"]), "the upgrade is given up")
        assert (mount.point / "f").read_bytes() == b"x"
    assert mount.umount() == 0


def test_a_full_disk_under_the_log_does_not_end_the_mount(mount: Mount, tmp_path: Path) -> None:
    mount.log = Path("/dev/full")
    mount.up()
    mount.log = tmp_path / "nothing was logged"
    (mount.point / "f").write_bytes(b"x")
    mount.kill_daemon()
    wait_until(lambda: mount.status()["restarts"] == 1 and mount.phase() == "serving", "the next daemon")
    assert (mount.point / "f").read_bytes() == b"x"
    assert mount.umount() == 0


def test_a_dead_mount_is_replaced(mount: Mount) -> None:
    mount.up()
    (mount.point / "f").write_bytes(b"kept")
    assert mount.process is not None
    daemon = mount.daemon_pid()
    mount.process.kill()
    mount.process.wait()
    wait_until(lambda: not os.path.exists(f"/proc/{daemon}"), "the daemon ends without its supervisor")
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        os.listdir(mount.point)
    mount.up()
    assert (mount.point / "f").read_bytes() == b"kept"
    assert mount.umount() == 0
    assert not is_mounted(mount.point)


def test_a_supervisor_that_fails_leaves_a_dead_mount_and_no_empty_one(mount: Mount) -> None:
    code = (
        "import sys; from cachexfs.supervisor import run\n"
        "run.Supervisor.stop = lambda self: 1 / 0\n"
        "from cachexfs.supervisor.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    options = [
        "--mountpoint",
        str(mount.point),
        "--status-socket",
        str(mount.socket),
        "--",
        sys.executable,
        str(DAEMON),
    ]
    with mount.log.open("ab") as log:
        mount.process = subprocess.Popen(
            [sys.executable, "-c", code, *options],
            cwd=DAEMON.parents[2], env={**os.environ, "PLAIN_ROOT": str(mount.root)}, stderr=log,
        )  # fmt: skip
    wait_until(lambda: mount.phase() == "serving", "serves")
    (mount.point / "f").write_bytes(b"kept")
    daemon = mount.daemon_pid()
    mount.process.send_signal(signal.SIGTERM)
    assert mount.wait() == 1
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        os.listdir(mount.point)
    wait_until(lambda: not os.path.exists(f"/proc/{daemon}"), "the daemon ends without its supervisor")
    mount.up()
    assert (mount.point / "f").read_bytes() == b"kept"
    assert mount.umount() == 0


def test_sighup_swaps_the_daemon(mount: Mount) -> None:
    mount.up()
    assert mount.process is not None
    mount.process.send_signal(signal.SIGHUP)
    wait_until(lambda: mount.phase() == "serving" and mount.status()["life"] == 2, "swapped")
    assert mount.status()["last_failure"] == ""
    assert mount.umount() == 0


def test_a_standby_takes_over(mount: Mount) -> None:
    mount.up("--standby", "--standby-after", "0.1")
    wait_until(lambda: mount.status()["standby_is_warm"] is True, "a standby waits")
    standby = mount.status()["standby_pid"]
    (mount.point / "f").write_bytes(b"x")
    mount.kill_daemon()
    assert (mount.point / "f").read_bytes() == b"x"
    assert mount.daemon_pid() == standby
    wait_until(lambda: mount.status()["standby_pid"] not in (0, standby), "the next standby is started")
    last = mount.status()["standby_pid"]
    assert mount.umount() == 0
    assert not os.path.exists(f"/proc/{last}")


def test_an_upgrade_that_cannot_start_leaves_the_old_daemon(mount: Mount) -> None:
    mount.up("--standby")
    pid = mount.daemon_pid()
    Path(f"{mount.root}.fail").touch()
    assert mount.ask("restart") == {"said": "restarting"}
    wait_until(lambda: "not taken" in str(mount.status()["last_failure"]), "the upgrade is given up")
    assert mount.daemon_pid() == pid
    (mount.point / "f").write_bytes(b"x")
    Path(f"{mount.root}.fail").unlink()
    assert mount.ask("restart") == {"said": "restarting"}
    wait_until(lambda: mount.status()["life"] == 2 and mount.phase() == "serving", "the upgrade")
    assert (mount.point / "f").read_bytes() == b"x"
    assert mount.status()["failures_in_a_row"] == 0
    assert mount.umount() == 0


def test_a_program_of_another_version_does_not_end_the_old_daemon(mount: Mount, tmp_path: Path) -> None:
    """Whichever of the two is the older: one waits, and says so in its own words; the other ends by itself."""
    mount.up("--standby")
    pid = mount.daemon_pid()
    program = tmp_path / "python"
    said = struct.pack("<IIQq", messages.MAGIC - 1, messages.HANDOVER, 0, 0)
    program.write_text(
        f"#!{sys.executable}\nimport os, socket, time\n"
        f"s = socket.socket(fileno=int(os.environ['{messages.ENV_STANDBY_FD}']))\ns.send({said!r})\ns.recv(1)\n"
    )
    program.chmod(0o755)
    assert mount.ask(f"restart {program}") == {"said": "restarting"}
    wait_until(lambda: "another version" in str(mount.status()["last_failure"]), "the upgrade is given up")
    assert (mount.daemon_pid(), mount.status()["swaps_refused"]) == (pid, 1)
    assert mount.umount() == 0


def test_a_daemon_below_a_supervisor_of_another_version_ends_before_it_says_that_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        monkeypatch.setenv(messages.ENV_STANDBY_FD, str(theirs.fileno()))
        monkeypatch.setenv(messages.ENV_VERSION, "43585332")
        with pytest.raises(messages.MalformedError, match="another version"):
            client.Supervisor.from_environ()
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(1)


def test_fusermount_mounts_and_unmounts(mount: Mount) -> None:
    mount.up("--mount-with", "fusermount")
    (mount.point / "f").write_bytes(b"x")
    command = ["fusermount3", "-u", str(mount.point)]
    wait_until(
        lambda: subprocess.run(command, check=False).returncode == 0, "unmounted, as soon as nobody looks into it"
    )
    assert mount.wait() == 0


def test_what_is_no_directory_is_refused_in_one_line(mount: Mount, tmp_path: Path) -> None:
    mount.start("--mountpoint", str(tmp_path / "missing"))
    assert mount.wait() == EXIT_CANNOT_TELL
    assert mount.said().count("\n") == 1
    assert "missing" in mount.said()


def test_invalidations_inside_handlers_do_not_deadlock_and_arrive(mount: Mount) -> None:
    """invalidate_entry needs the lock that the kernel holds until mkdir is answered."""
    mount.up()
    os.mkdir(mount.point / "poke")
    path = mount.point / "f"
    path.write_bytes(b"old")
    with open(path, "rb", buffering=0) as reader:
        assert reader.read() == b"old"
        (mount.root / "f").write_bytes(b"new")
        os.setxattr(path, "user.poke", b"")
        wait_until(lambda: os.pread(reader.fileno(), 3, 0) == b"new", "the cache is dropped")
    assert mount.status()["refused"] == 0
    assert mount.umount() == 0


def test_small_messages_carry_large_files(mount: Mount) -> None:
    mount.up("--max-payload", "64", "--passthrough", "off")
    data = os.urandom(3 << 20)
    (mount.point / "f").write_bytes(data)
    assert (mount.point / "f").read_bytes() == data
    assert mount.status()["payload_bytes_max"] == 65536
    assert mount.umount() == 0


def test_the_status_socket_takes_only_what_it_knows(mount: Mount) -> None:
    mount.up()
    assert "unknown command" in str(mount.ask("reboot")["error"])
    assert mount.socket.stat().st_mode & 0o777 == 0o600
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(str(mount.socket))
    assert mount.phase() == "serving"
    silent.close()
    with pytest.raises(FileNotFoundError):
        ask(str(mount.socket) + ".none", "status")
    assert mount.umount() == 0


def test_failures_in_a_row_back_off_and_end() -> None:
    life = Lifecycle(Limits(restarts_max=3, backoff_s_first=1.0, backoff_s_max=3.0), has_served=True)
    waits = []
    for _ in range(3):
        assert life.failed("why", had_progress=False, now=100.0) is Phase.BACKOFF
        waits.append(life.deadlines["phase"] - 100.0)
    assert waits == [1.0, 2.0, 3.0]
    assert life.failed("why", had_progress=False, now=100.0) is Phase.FAILED
    assert life.exit_code == EXIT_NOT_DURABLE


def test_a_daemon_that_answers_between_its_deaths_is_never_given_up() -> None:
    life = Lifecycle(Limits(restarts_max=2), has_served=True)
    for _ in range(500):
        assert life.failed("SIGKILL", had_progress=True, now=7.0) is Phase.BACKOFF
        assert life.deadlines["phase"] == 7.0


def test_a_daemon_that_others_kill_is_never_given_up_once_one_has_served() -> None:
    life = Lifecycle(Limits(restarts_max=3, first_starts_max=1, backoff_s_first=1.0, backoff_s_max=3.0))
    assert life.failed("SIGKILL", had_progress=False, now=100.0, is_passing=True) is Phase.BACKOFF
    assert life.failed("SIGKILL", had_progress=False, now=100.0, is_passing=True) is Phase.FAILED
    life = Lifecycle(Limits(restarts_max=3, backoff_s_first=1.0, backoff_s_max=3.0), has_served=True)
    for _ in range(2000):
        assert life.failed("SIGKILL", had_progress=False, now=100.0, is_passing=True) is Phase.BACKOFF
    assert life.deadlines["phase"] == 103.0
    for _ in range(3):
        assert life.failed("exit code 1", had_progress=False, now=100.0) is Phase.BACKOFF
    assert life.failed("exit code 1", had_progress=False, now=100.0) is Phase.FAILED


def test_daemons_that_are_killed_before_they_serve_are_not_given_up(mount: Mount) -> None:
    """A loop of kill -9 that is faster than a start."""
    mount.up("--max-restarts", "1")
    (mount.point / "f").write_bytes(b"kept")
    for life in range(1, 6):
        wait_until(lambda life=life: mount.status()["life"] == life and mount.daemon_pid() != 0, "the next daemon")  # type: ignore[misc]
        mount.kill_daemon()
    assert (mount.point / "f").read_bytes() == b"kept"
    assert mount.status()["failures_in_a_row"] == 0
    assert mount.umount() == 0


@pytest.mark.parametrize("how", ["drained", "stopped", "killed"])
def test_a_daemon_drains_without_its_mount_for_as_long_as_it_takes(mount: Mount, how: str) -> None:
    mount.up("--exit-timeout", "2", drain="1")
    mount.take_away()
    wait_until(lambda: mount.status()["draining"] is True, "the mount has ended, and the daemon drains")
    assert mount.phase() == "ended"
    if how == "drained":
        time.sleep(2.5)  # more than an exit may take
        assert mount.phase() == "ended"
        Path(f"{mount.root}.drained").touch()
    elif how == "stopped":
        mount.ask("stop")
    else:
        mount.kill_daemon()
    assert mount.wait() == (0 if how == "drained" else EXIT_NOT_DURABLE)
