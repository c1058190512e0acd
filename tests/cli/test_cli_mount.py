"""Wrong calls of ``cachexfs mount`` and ``mount.cachexfs``: one clear line and the right exit code, nothing mounted."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from cli_support import FakeDaemon, Run, list_mount

from cachexfs.cli import identity, mount, mount_checks, pfs_check
from cachexfs.cli.main import COMMANDS
from cachexfs.cli.options import load_options
from cachexfs.config import MountOptions
from cachexfs.errors import CannotTellError, UsageError

HELPER = Path(__file__).parents[2] / "mount_helpers" / "mount.cachexfs"
TIMEOUT_S = 150


def command(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """A real process, as a user's shell starts it."""
    return subprocess.run(
        [sys.executable, "-m", "cachexfs", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={key: value for key, value in os.environ.items() if not key.startswith("CACHEXFS_")} | environ,
    )


@pytest.fixture
def places(tmp_path: Path, runtime: Path) -> tuple[Path, Path]:
    pfs, mountpoint = tmp_path / "pfs", tmp_path / "m"
    pfs.mkdir()
    mountpoint.mkdir()
    return pfs, mountpoint


def refused(run: Run, *arguments: object, code: int = 2) -> str:
    ran = run("mount", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith("cachexfs: error: ")
    assert ran.err.count("\n") == 1
    return ran.err


def test_a_wrong_directory(places: tuple[Path, Path], run: Run, tmp_path: Path) -> None:
    pfs, mountpoint = places
    assert "PFS directory" in refused(run, tmp_path / "none", mountpoint)
    (tmp_path / "file").touch()
    assert "is not a directory" in refused(run, tmp_path / "file", mountpoint)
    assert "mkdir -p" in refused(run, pfs, tmp_path / "none")
    assert "is not a directory" in refused(run, pfs, tmp_path / "file")
    (mountpoint / "x").touch()
    assert "is not empty" in refused(run, pfs, mountpoint)


def test_a_wrong_local_directory(places: tuple[Path, Path], run: Run, tmp_path: Path) -> None:
    pfs, mountpoint = places
    assert "lies in" in refused(run, pfs, mountpoint, "-o", f"nvme={pfs}/nvme")
    assert "lies in" in refused(run, pfs, mountpoint, "-o", f"staging={mountpoint}")
    assert "mkdir -p" in refused(run, pfs, mountpoint, "-o", f"nvme={tmp_path}/no/such")
    (tmp_path / "file").touch()
    assert "is not a directory" in refused(run, pfs, mountpoint, "-o", f"nvme={tmp_path}/file")


def test_a_mount_is_no_pfs_for_another(places: tuple[Path, Path], run: Run, kernel: Path, tmp_path: Path) -> None:
    pfs, mountpoint = places
    list_mount(kernel, pfs)  # of /pfs
    (tmp_path / "link").symlink_to(pfs)
    for words in ((), ("--check",)):
        said = refused(run, *words, tmp_path / "link", mountpoint)
        assert f"lies in the CacheX FS mount {pfs}: give the directory that that one has mounted, /pfs" in said
    assert "has mounted, /pfs/a" in refused(run, pfs / "a", mountpoint)


def test_a_mount_that_is_late_says_what_to_do(places: tuple[Path, Path]) -> None:
    options = load_options(str(places[0]), str(places[1]), [], None, {})
    reader, writer = os.pipe()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as daemon:  # it never says a word
        with pytest.raises(CannotTellError, match="mount again with a longer --timeout"):
            mount._await_ready(daemon, b"", reader, 0.01, options, None)
        daemon.kill()
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("word", ["fsync=partner", "replicas=2"])
def test_what_is_for_a_partner_is_told_to_who_has_none(places: tuple[Path, Path], run: Run, word: str) -> None:
    ran = run("mount", "--check", *places, "-o", word)
    assert (ran.code, f"{word} without nodes=: this node is alone" in ran.err) == (0, True)
    assert "without nodes=" not in run("mount", "--check", *places).err


def test_a_pfs_that_hangs_does_not_hang_mount(
    places: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(function: object, timeout_s: float) -> object:
        raise TimeoutError

    monkeypatch.setattr(pfs_check, "run_in_child", never)
    assert "offline" in refused(run, *places, code=4)
    assert run("mount", "--check", *places, "-o", "offline").code == 0


def test_no_fuse_device(places: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mount_checks, "FUSE_DEVICE", str(tmp_path / "nofuse"))
    assert "modprobe fuse" in refused(run, *places)


def test_more_memory_than_there_is(
    places: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mount_checks, "memory_limit_bytes", lambda: 24 << 30)
    assert "allows (24.0 GiB)" in refused(run, "--check", *places, "-o", "memory=1T")
    assert run("mount", "--check", *places, "-o", "memory=24G").code == 0
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "pfs-id").touch()  # what is staged already is adopted
    ran = run("mount", "--check", *places, "-o", f"memory=1T,staging={tmp_path}/s")
    assert (ran.code, "warning: memory=1.0 TiB is more" in ran.err) == (0, True)


def test_a_user_without_fusermount_or_permission(monkeypatch: pytest.MonkeyPatch, places: tuple[Path, Path]) -> None:
    options = load_options(str(places[0]), str(places[1]), ["allow_other"], None, {})
    monkeypatch.setattr(mount_checks, "FUSE_DEVICE", os.devnull)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(mount_checks.shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match="package fuse3"):
        mount_checks.check_machine(options)
    monkeypatch.setattr(mount_checks.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(mount_checks, "_fuse_conf_allows_other", lambda: False)
    with pytest.raises(UsageError, match="user_allow_other"):
        mount_checks.check_machine(options)


def test_what_is_mounted_already_is_not_mounted_again(daemon: FakeDaemon, run: Run, tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    daemon.answers["ping"] = [{"done": True, "node": "n1", "pid": 1}]
    assert "mounted already" in refused(run, tmp_path / "pfs", daemon.mountpoint)
    ran = run("mount", "--check", tmp_path / "pfs", daemon.mountpoint)
    assert (ran.code, f"mounted at {daemon.mountpoint} already" in ran.err) == (0, True)  # 0 as mount -f wants it


def test_a_dead_mount_is_replaced(
    daemon: FakeDaemon, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pfs").mkdir()
    daemon.stop()
    taken: list[str] = []
    monkeypatch.setattr(mount_checks, "detach", taken.append)
    mount_checks.clear_mountpoint(str(daemon.mountpoint), str(daemon.runtime), change=True)
    assert taken == [str(daemon.mountpoint)]
    assert run("mount", "--check", tmp_path / "pfs", daemon.mountpoint).code == 0
    assert len(taken) == 1


def test_a_mount_whose_daemon_hangs_is_left_alone(
    daemon: FakeDaemon, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pfs").mkdir()
    monkeypatch.setattr(mount_checks.client.ask, "__defaults__", (mount_checks.client._no_progress, 0.2))
    assert "has not answered" in refused(run, tmp_path / "pfs", daemon.mountpoint, code=4)


def test_a_live_mount_of_an_unknown_daemon_is_left_alone(kernel: Path, places: tuple[Path, Path], run: Run) -> None:
    list_mount(kernel, places[1])
    assert "mounted already" in refused(run, *places)


def test_an_address_that_is_taken_or_not_ours(places: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = f"nvme={tmp_path}/nvme,secret={secret},node=a,nodes=a=127.0.0.1:{port};b=127.0.0.2:{port}"
        assert f"127.0.0.1:{port} (Address already in use)" in refused(run, *places, "-o", options)
    assert "no address of this machine" in refused(run, *places, "-o", options + ",listen=192.0.2.1:1")


def test_a_runtime_directory_that_others_made(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(UsageError, match="not ours alone"):
        mount_checks.make_runtime_dir(str(tmp_path / "run"))


def test_a_daemon_that_dies_at_once_is_one_line_with_its_log(
    places: tuple[Path, Path], runtime: Path, tmp_path: Path
) -> None:
    # An interpreter start-up file that ends the daemon, and nothing else, before it begins.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'cachexfs.daemon' in sys.orig_argv: sys.exit('broken on purpose')\n"
    )
    ended = command("mount", *places, CACHEXFS_RUNTIME_DIR=str(runtime), PYTHONPATH=str(tmp_path))
    assert ended.returncode == 4
    assert ended.stderr.count("\n") == 1
    assert "the daemon ended before it mounted" in ended.stderr
    assert str(runtime) in ended.stderr


def test_wrong_calls_exit_2_with_one_line() -> None:
    for arguments in (
        ["staus"],
        ["mount"],
        ["mount", "/a"],
        ["mount", "/a", "/b", "--foregruond"],
        ["wait", "/a"],
        ["wait", "/a", "--at", "returned"],
        ["latest", "/a", "--below", "x"],
        ["status", "--interval", "0"],
        ["umount", "/a", "--timeout", "-1"],
        ["umount", "/a", "--timeout", "nan"],
        ["mount", "/a", "/b", "--timeout", "nan"],
        ["mount", "/a", "/b", "--timeout", "-1"],
        ["wait", "/a", "--at", "pfs", "--timeout", "inf"],
        ["--bogus"],
    ):
        ended = command(*arguments)
        assert ended.returncode == 2, arguments
        assert ended.stdout == ""
        assert ended.stderr.startswith("cachexfs: error: ")
        assert ended.stderr.count("\n") == 1
    assert "did you mean 'status'?" in command("staus").stderr


def test_help_names_each_command_and_imports_none() -> None:
    ended = command("--help")
    assert ended.returncode == 0
    for name in COMMANDS:
        if name in ("mount", "umount", "status", "wait", "latest", "explain", "demo"):
            assert f"  {name} " in ended.stdout
    code = "import sys; from cachexfs.cli.main import run; run(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    for module in ("'rich'", "'msgspec'", "'trio'", "'pyfuse3'", "'torch'", "'numpy'", "'cachexfs.cli.status'"):
        assert module not in listed.stderr


def test_status_imports_no_daemon(runtime: Path) -> None:
    code = "import sys; from cachexfs.cli.main import run; run(['status']); print(sorted(sys.modules))"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    for module in ("'rich'", "'trio'", "'pyfuse3'", "'torch'", "'numpy'", "'httpx'"):
        assert module not in listed.stdout


def test_a_job_secret_is_the_same_everywhere_and_other_for_each_job(tmp_path: Path, run: Run) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    secrets = [run("job-secret", "--key", key, job).out for job in ("1", "1", "2")]
    assert secrets[0] == secrets[1] != secrets[2]
    assert len(secrets[0]) == 65
    key.chmod(0o644)
    assert run("job-secret", "--key", key, "1").code == 2


def helper(*arguments: object) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [str(HELPER), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=os.environ | {"PATH": path},
    )


def test_mount_8_calls_the_helper(places: tuple[Path, Path]) -> None:
    (places[0] / ".cachexfs").mkdir()  # it has been mounted before: no warning that it is not the PFS
    (places[0] / ".cachexfs" / "id").write_text("a" * 32)
    fstab = "rw,_netdev,nofail,x-systemd.requires=lustre.mount,memory=16M"
    done = helper(*places, "-f", "-o", fstab)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert helper(*places, "-fnv", "-t", "cachexfs", "-o", fstab).returncode == 0
    assert helper("-o", fstab, "-f", *places).returncode == 0
    failed = helper(*places, "-f", "-o", "rw,memroy=16M")
    assert failed.returncode == 32
    assert "did you mean 'memory'?" in failed.stderr
    assert helper(*places, "-sf", "-o", "rw,memroy=16M").returncode == 0
    assert helper(*places, "-rf").returncode == 32
    assert helper("/does/not/exist", places[1], "-f").returncode == 32
    for wrong in ([places[0]], [*places, "more"], [*places, "-z"], [*places, "-o"]):
        assert helper(*wrong).returncode == 1


def test_a_libfuse_that_cannot_be_given_a_device_means_no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    options = MountOptions(pfs="/pfs", mountpoint="/mnt", memory=1 << 30)
    assert mount_checks.libfuse_version() >= (3, 3)
    assert mount_checks.choose_supervisor(options) is options
    monkeypatch.setattr(mount_checks, "libfuse_version", lambda: (3, 2))
    chosen = mount_checks.choose_supervisor(options)
    assert chosen.supervisor == "off"
    assert "libfuse 3.2" in chosen.unsupervised_why
    for other in ({"supervisor": "on"}, {"uid": 1000, "gid": 1000}):
        with pytest.raises(UsageError, match=r"libfuse 3\.2"):
            mount_checks.choose_supervisor(msgspec.structs.replace(options, **other))


@pytest.mark.parametrize(("number", "version"), [(32, (3, 2)), (39, (3, 9)), (314, (3, 14)), (317, (3, 17))])
def test_libfuse_says_its_version_in_two_ways(
    monkeypatch: pytest.MonkeyPatch, number: int, version: tuple[int, int]
) -> None:
    class Library:
        @staticmethod
        def fuse_version() -> int:
            return number

    monkeypatch.setattr(mount_checks.ctypes, "CDLL", lambda name: Library)
    assert mount_checks.libfuse_version() == version


@pytest.mark.parametrize(
    ("kind", "below", "is_taken"),
    [("any", "", True), ("mount", "/lustre", True), ("lustre", "/lustre", True), ("nfs", "/home", True),
     ("mount", "", False), ("mount", "/auto", False), ("lustre", "", False), ("lustre", "/home", False)],
)  # fmt: skip
def test_a_pfs_that_is_not_mounted_is_refused_where_its_type_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, below: str, is_taken: bool
) -> None:
    """An empty directory in its place was taken without a word, and had all checkpoints on the node's own disk."""
    table = tmp_path / "mountinfo"
    mounted = [
        ("/", "ext4"),
        (f"{tmp_path}/lustre", "lustre"),
        (f"{tmp_path}/home", "nfs4"),
        (f"{tmp_path}/auto", "autofs"),
    ]
    table.write_text("".join(f"{n} 1 8:{n} / {at} rw - {kind} x rw\n" for n, (at, kind) in enumerate(mounted)))
    monkeypatch.setattr(pfs_check.mountinfo.read, "__defaults__", (str(table),))
    pfs = Path(f"{tmp_path}{below}/pfs")
    pfs.mkdir(parents=True)
    if is_taken:
        assert ("root filesystem (ext4)" in pfs_check.check_new(str(pfs), kind)) == (kind == "any")
        (pfs / ".cachexfs").mkdir()
        (pfs / ".cachexfs" / "id").write_text("a" * 32)
        assert pfs_check.check_new(str(pfs), kind) == ""  # it has been used before
    else:
        with pytest.raises(CannotTellError, match=f"pfs_type={kind}"):
            pfs_check.check_new(str(pfs), kind)


def test_a_directory_of_somebody_else_is_never_advised_to_be_removed(tmp_path: Path) -> None:
    """With user= and CACHEXFS_RUNTIME_DIR it was: that of live mounts."""
    with pytest.raises(UsageError, match=r"of user 4711 alone: leave it out") as raised:
        identity.give_directory(str(tmp_path), (4711, 4711), "runtime directory", "leave it out")
    assert "remove" not in str(raised.value)
