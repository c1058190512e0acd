"""What a hostile or broken daemon can do to the supervisor: nothing. And what the supervisor may do: little."""

import array
import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachexfs.supervisor import passthrough, wire
from cachexfs.supervisor.control import Control
from cachexfs.supervisor.lifecycle import EXIT_NOT_DURABLE
from cachexfs.supervisor.messages import (
    MAGIC,
    MESSAGE_BYTES,
    Call,
    Handle,
    MalformedError,
    Message,
    Replayed,
    pack_state,
    unpack_state,
)
from cachexfs.supervisor.passthrough import Backings, RefusedError
from cachexfs.supervisor.privileges import PrivilegeError, find_user
from cachexfs.supervisor.session import IncompatibleError, Session

from .conftest import DAEMON, Mount, wait_until

NOBODY = 65534
BAD_DAEMON = Path(__file__).with_name("bad_daemon.py")


# -- descriptors -------------------------------------------------------------------------------------------


@pytest.fixture
def backings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backings:
    """Registrations on the filesystem of ``tmp_path``, with a kernel that numbers them and forgets nothing."""
    numbers = iter(range(1, 1000))

    def ioctl(fd: int, request: int, argument: object) -> int:
        return next(numbers) if request == 0x4010E501 else 0

    monkeypatch.setattr(passthrough.fcntl, "ioctl", ioctl)
    return Backings(-1, frozenset({os.stat(tmp_path).st_dev}))


def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("what", ["directory", "fifo", "socket", "device", "memory", "elsewhere", "path", "append"])
def test_descriptors_that_may_not_back_a_file_are_refused(backings: Backings, tmp_path: Path, what: str) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    os.mkfifo(tmp_path / "fifo")
    pair = socket.socketpair()
    fd = {
        "directory": lambda: os.open(tmp_path, os.O_RDONLY),
        "fifo": lambda: os.open(tmp_path / "fifo", os.O_RDWR),
        "socket": lambda: os.dup(pair[0].fileno()),
        "device": lambda: os.open("/dev/null", os.O_RDWR),
        "memory": lambda: os.memfd_create("x"),
        "elsewhere": lambda: os.open("/proc/self/status", os.O_RDONLY),
        "path": lambda: os.open(plain, os.O_PATH),
        "append": lambda: os.open(plain, os.O_RDWR | os.O_APPEND),
    }[what]()
    with pytest.raises(RefusedError):
        backings.register(1, fd)
    os.close(fd)
    for end in pair:
        end.close()
    assert len(backings) == 0


@pytest.mark.parametrize(
    ("daemon", "application", "is_allowed"),
    [
        (os.O_RDONLY, os.O_RDONLY, True),
        (os.O_RDONLY, os.O_WRONLY, False),
        (os.O_RDONLY, os.O_RDWR, False),
        (os.O_WRONLY, os.O_WRONLY, True),
        (os.O_WRONLY, os.O_RDONLY, False),
        (os.O_RDWR, os.O_RDONLY, True),
        (os.O_RDWR, os.O_RDWR | os.O_APPEND, True),
    ],
)
def test_a_daemon_gives_no_right_that_it_does_not_have(
    backings: Backings, tmp_path: Path, daemon: int, application: int, is_allowed: bool
) -> None:
    (tmp_path / "f").touch()
    fd = os.open(tmp_path / "f", daemon)
    backing_id = backings.register(9, fd)
    os.close(fd)
    assert backings.allows(9, application) == (backing_id if is_allowed else 0)
    assert backings.allows(10, application) == 0


def test_one_file_has_one_backing_id_until_its_last_handle_ends(backings: Backings, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "f", os.O_CREAT | os.O_RDWR)
    first = backings.register(1, fd)
    assert backings.register(2, fd) == first
    backings.opened(1)
    backings.unused(1)
    assert len(backings) == 2, "it is open"
    backings.released(1)
    assert len(backings) == 1
    backings.daemon_gone()
    assert len(backings) == 0
    backings.register(1, fd)
    backings.unused(1)
    assert len(backings) == 0, "offered, and the open went another way"
    assert backings.register(1, fd) != first
    os.close(fd)


def test_a_handle_that_is_open_keeps_its_file(backings: Backings, tmp_path: Path) -> None:
    one, two = (os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in "ab")
    backings.register(1, one)
    backings.opened(1)
    with pytest.raises(RefusedError, match="another file"):
        backings.register(1, two)
    os.close(one)
    os.close(two)


# -- messages ----------------------------------------------------------------------------------------------


class Heard:
    """What a daemon said and was acted upon."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def daemon_ready(self) -> None:
        self.said.append("ready")

    def daemon_alive(self) -> None:
        self.said.append("alive")

    def daemon_shares(self) -> None:
        self.said.append("shares")

    def daemon_stopping(self, code: int) -> None:
        self.said.append(f"stopping {code}")

    def daemon_draining(self) -> None:
        self.said.append("draining")


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def control(backings: Backings, heard: Heard) -> Control:
    return Control(backings, heard)


def say(control: Control, raw: bytes, fds: list[int]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        theirs.sendmsg([raw], rights)
        before = set(os.listdir("/proc/self/fd"))
        assert control.on_readable(ours)
        assert set(os.listdir("/proc/self/fd")) == before, "descriptors that came along are closed"


@pytest.mark.parametrize(
    ("raw", "fds"),
    [
        (b"x", 0),
        (Message(Call.READY).pack() + b"x", 0),
        (b"\0" * MESSAGE_BYTES, 0),
        (Message(77).pack(), 0),
        (b"x" + Message(Call.READY).pack()[1:], 0),
        (Message(Call.READY).pack(), 1),
        (Message(Call.OFFER, fh=3).pack(), 0),
        (Message(Call.OFFER, fh=3).pack(), 2),
        (Message(Call.OFFER, fh=3).pack(), 20),
    ],
)
def test_what_is_no_message_is_refused(control: Control, heard: Heard, raw: bytes, fds: int) -> None:
    with open("/dev/null", "rb") as null:
        say(control, raw, [null.fileno()] * fds)
    assert heard.said == []
    assert control.refused == 1


def test_what_a_daemon_says_is_acted_upon(control: Control, heard: Heard) -> None:
    for message in (Message(Call.READY), Message(Call.ALIVE), Message(Call.STOPPING, 3), Message(Call.DRAINING)):
        say(control, message.pack(), [])
    assert heard.said == ["ready", "alive", "stopping 3", "draining"]
    assert control.refused == 0


def test_a_refused_descriptor_is_told_with_its_reason(control: Control) -> None:
    with open("/dev/null", "rb") as null:
        say(control, Message(Call.OFFER, fh=3).pack(), [null.fileno()])
    assert control.refused == 1
    assert "not a regular file" in control.last_refusal


def test_state_files_round_trip_and_are_checked() -> None:
    replays = (Replayed(wire.RENAME, 4, 9, 1, b"a" * 255, 7, b"b"), Replayed(wire.READ, 6, 0, 2, b"", 0, b""))
    handles = (Handle(1 << 40, 3, os.O_RDWR, 2, False, True, 1 << 50), Handle(3, 3, 0, 1, True, False))
    raw = pack_state(3, replays, handles, has_served=True)
    state = unpack_state(raw)
    assert (state.life, state.has_served, state.replays, state.handles) == (3, True, replays, handles)
    for broken in (raw[:-1], raw + b"x", b"", struct.pack("<I", MAGIC + 1) + raw[4:]):
        with pytest.raises(MalformedError):
            unpack_state(broken)


# -- replies -----------------------------------------------------------------------------------------------


def session(backings: Backings) -> Session:
    return Session(backings, wire.PAYLOAD_BYTES_MAX, "")


def init_pair(flags: int, offered: int, max_write: int = 1 << 20) -> tuple[bytes, memoryview]:
    offered |= wire.FLAG_INIT_EXT
    request = wire.IN_HEADER.pack(104, wire.INIT, 2, 0, 0, 0, 0, 0, 0)
    request += struct.pack("<IIIII44x", 7, 45, 131072, offered & 0xFFFFFFFF, offered >> 32)
    reply = bytearray(wire.INIT_OUT_BYTES)
    wire.OUT_HEADER.pack_into(reply, 0, len(reply), 0, 2)
    struct.pack_into(
        "<IIIIHHIIHHII", reply, 16, 7, 38, 131072, flags & 0xFFFFFFFF, 12, 9, max_write, 1, 256, 0, flags >> 32, 0
    )
    return request, memoryview(reply)


EXT = wire.FLAG_INIT_EXT


def test_init_takes_passthrough_only_from_the_supervisor(backings: Backings) -> None:
    one = session(backings)
    request, reply = init_pair(EXT | wire.FLAG_PASSTHROUGH | 1, wire.FLAG_PASSTHROUGH | 1)
    one.remember_init(request)
    assert one.init_replied(reply)
    assert wire.init_reply_flags(reply) == EXT | wire.FLAG_PASSTHROUGH | 1
    assert wire.u32(reply, wire.INIT_OUT_STACK_DEPTH_OFFSET) == 1
    off = Session(backings, wire.PAYLOAD_BYTES_MAX, "switched off")
    request, reply = init_pair(EXT | wire.FLAG_PASSTHROUGH | 1, wire.FLAG_PASSTHROUGH | 1)
    off.remember_init(request)
    assert off.init_replied(reply)
    assert wire.init_reply_flags(reply) == EXT | 1
    assert wire.u32(reply, wire.INIT_OUT_STACK_DEPTH_OFFSET) == 0


@pytest.mark.parametrize(
    ("flags", "offered", "why"),
    [(EXT, 1, "does not offer"), (EXT | wire.FLAG_WRITEBACK_CACHE, wire.FLAG_PASSTHROUGH | (1 << 16), "writeback")],
)
def test_passthrough_is_given_up_with_a_reason(backings: Backings, flags: int, offered: int, why: str) -> None:
    one = session(backings)
    request, reply = init_pair(flags, offered)
    one.remember_init(request)
    one.init_replied(reply)
    assert why in one.no_passthrough


def test_messages_are_kept_below_what_a_socket_carries(backings: Backings) -> None:
    one = Session(backings, 102 * 4096, "switched off")
    request, reply = init_pair(EXT | wire.FLAG_MAX_PAGES, wire.FLAG_MAX_PAGES)
    one.remember_init(request)
    one.init_replied(reply)
    assert wire.u32(reply, wire.INIT_OUT_MAX_WRITE_OFFSET) == 102 * 4096
    assert struct.unpack_from("<H", reply, wire.INIT_OUT_MAX_PAGES_OFFSET) == (102,)


def test_a_later_daemon_must_agree_to_what_the_kernel_was_told(backings: Backings) -> None:
    one = session(backings)
    request, reply = init_pair(EXT | 5, 7)
    one.remember_init(request)
    assert one.init_replied(reply)
    assert wire.init_request_flags(one.init_request()) == EXT | 5, "offered: what the first one took"
    assert not one.init_replied(init_pair(EXT | 5, 7)[1]), "kept from the kernel"
    with pytest.raises(IncompatibleError, match="flags"):
        one.init_replied(init_pair(EXT | 4, 7)[1])
    with pytest.raises(IncompatibleError, match="max_write"):
        one.init_replied(init_pair(EXT | 5, 7, max_write=4096)[1])
    with pytest.raises(IncompatibleError, match="refused"):
        one.init_replied(memoryview(bytearray(wire.error_reply(2))))


def open_pair(fh: int, fopen: int, node: int = 5, flags: int = os.O_RDWR) -> tuple[bytes, memoryview]:
    request = wire.IN_HEADER.pack(48, wire.OPEN, 8, node, 0, 0, 0, 0, 0) + wire.OPEN_IN.pack(flags, 0)
    return request, memoryview(bytearray(wire.OUT_HEADER.pack(32, 0, 8) + wire.OPEN_OUT.pack(fh, fopen, 99)))


def test_a_forged_backing_id_is_taken_out(backings: Backings) -> None:
    one = session(backings)
    request, reply = open_pair(3, wire.FOPEN_PASSTHROUGH | wire.FOPEN_DIRECT_IO)
    assert one.replied(request, reply) == 0
    assert wire.OPEN_OUT.unpack_from(reply, 16) == (3, wire.FOPEN_DIRECT_IO, 0)


def test_opens_of_one_inode_never_break_the_kernels_rules(backings: Backings, tmp_path: Path) -> None:
    one = session(backings)
    fd = os.open(tmp_path / "f", os.O_CREAT | os.O_RDWR)
    backing_id = backings.register(1, fd)
    backings.register(3, fd)
    request, reply = open_pair(1, wire.FOPEN_KEEP_CACHE)
    one.replied(request, reply)
    assert wire.OPEN_OUT.unpack_from(reply, 16) == (1, wire.FOPEN_PASSTHROUGH, backing_id)
    request, reply = open_pair(2, wire.FOPEN_KEEP_CACHE)
    one.replied(request, reply)
    assert wire.OPEN_OUT.unpack_from(reply, 16) == (2, wire.FOPEN_DIRECT_IO, 0), "refused by the kernel"
    release = wire.IN_HEADER.pack(64, wire.RELEASE, 10, 5, 0, 0, 0, 0, 0)
    for fh in (1, 2):
        one.replied(release + wire.RELEASE_IN.pack(fh, 0), memoryview(b""))
    assert one.handle_count == 0
    request, reply = open_pair(2, 0)
    one.replied(request, reply)
    assert wire.OPEN_OUT.unpack_from(reply, 16) == (2, 0, 0), "cached"
    request, reply = open_pair(3, wire.FOPEN_DIRECT_IO)
    one.replied(request, reply)
    assert wire.OPEN_OUT.unpack_from(reply, 16) == (3, wire.FOPEN_DIRECT_IO, 0), "registered beside a cached one"
    os.close(fd)


def test_an_open_with_another_file_behind_it_is_told(
    backings: Backings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The kernel refuses it with EIO, whatever the answer says."""
    one = session(backings)
    first, second = (os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in "ab")
    backing_id = backings.register(1, first)
    backings.register(2, second)
    request, reply = open_pair(1, 0)
    one.replied(request, reply)
    assert wire.OPEN_OUT.unpack_from(reply, 16) == (1, wire.FOPEN_PASSTHROUGH, backing_id)
    request, reply = open_pair(2, wire.FOPEN_KEEP_CACHE)
    one.replied(request, reply)
    assert wire.OPEN_OUT.unpack_from(reply, 16) == (2, wire.FOPEN_DIRECT_IO, 0)
    assert len(backings) == 1, "what is not used is given back"
    assert (one.broken, "does not offer again" in capfd.readouterr().err) == (1, True)
    release = wire.IN_HEADER.pack(64, wire.RELEASE, 10, 5, 0, 0, 0, 0, 0)
    for fh in (1, 2):
        one.replied(release + wire.RELEASE_IN.pack(fh, 0), memoryview(b""))
    other = backings.register(3, second)
    request, reply = open_pair(3, 0)
    one.replied(request, reply)
    assert wire.OPEN_OUT.unpack_from(reply, 16) == (3, wire.FOPEN_PASSTHROUGH, other)
    os.close(first)
    os.close(second)


def test_a_reply_to_open_that_is_cut_short_fails_the_open(backings: Backings) -> None:
    request, reply = open_pair(3, 0)
    assert session(backings).replied(request, reply[:20]) == errno.EIO


def create_pair(node: int, mode: int, size: int = 0) -> tuple[bytes, memoryview]:
    request = wire.IN_HEADER.pack(58, wire.CREATE, 8, 1, 0, 0, 0, 0, 0) + wire.CREATE_IN.pack(os.O_RDWR, 0o644, 0, 0)
    entry = bytearray(wire.ENTRY_OUT_BYTES)
    struct.pack_into("<Q", entry, 0, node)
    struct.pack_into("<QQ", entry, 40, node, size)  # fuse_attr: ino, size
    struct.pack_into("<I", entry, 100, mode)
    body = bytes(entry) + wire.OPEN_OUT.pack(3, 0, 0)
    return request + b"f\0", memoryview(bytearray(wire.OUT_HEADER.pack(16 + len(body), 0, 8) + body))


@pytest.mark.parametrize(
    ("node", "mode", "size"), [(0, 0o100644, 0), (1, 0o100644, 0), (5, 0o40755, 0), (5, 0o100644, -1)]
)
def test_a_created_file_that_the_kernel_would_not_take_leaves_no_handle(
    backings: Backings, node: int, mode: int, size: int
) -> None:
    """It fails the call and sends no RELEASE."""
    one = session(backings)
    assert one.replied(*create_pair(node, mode, size % (1 << 64))) == errno.EIO
    assert one.handle_count == 0
    assert one.replied(*create_pair(5, 0o100644)) == 0
    assert one.handle_count == 1


def test_garbage_from_a_daemon_harms_nobody(mount: Mount) -> None:
    mount.start("--exit-timeout", "0.3", daemon=(sys.executable, str(BAD_DAEMON)))
    wait_until(lambda: mount.phase() == "serving", "serves")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        os.stat(mount.point / "too-long")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        os.stat(mount.point / "bad-errno")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        os.stat(mount.point / "bad-body")
    with pytest.raises(FileNotFoundError):
        os.stat(mount.point / "after-garbage")
    assert int(str(mount.status()["refused"])) >= 8
    assert mount.phase() == "serving"
    assert mount.umount() == EXIT_NOT_DURABLE, "it does not end when told"
    assert "Traceback" not in mount.said()


# -- privileges --------------------------------------------------------------------------------------------


def test_root_is_nobody_to_become() -> None:
    assert find_user("65534") == (65534, 65534)
    assert find_user("1000:100") == (1000, 100)
    for name in ("root", "0", "1000:0", "no-such-user"):
        with pytest.raises(PrivilegeError):
            find_user(name)


PROBE = """
import os, sys, pwd
from cachexfs.supervisor.privileges import become, capabilities
become(65534, 65534)
assert os.getresuid() == (65534,) * 3 and os.getresgid() == (65534,) * 3, os.getresuid()
assert os.getgroups() in ([], [65534]), os.getgroups()
assert capabilities() == 1 << 21, hex(capabilities())
for path in ("/etc/shadow", "/root"):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path)
    except PermissionError:
        continue
    sys.exit(f"{path} can be read")
sys.stdout.flush()
os.execv("/bin/sh", ["sh", "-c", "grep CapPrm /proc/self/status; id -u"])
"""


def test_only_sys_admin_is_left_and_no_child_inherits_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=DAEMON.parents[2], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["CapPrm:", "0" * 16, "65534"]


@pytest.fixture
def for_others(mount: Mount) -> tuple[Mount, list[str]]:
    """A mount below directories of another user, and a daemon command that this user can run.

    The interpreter must be one that the other user can reach: the system's, with our packages.
    """
    python = f"/usr/bin/python3.{sys.version_info.minor}"
    if not os.access(python, os.X_OK):
        pytest.skip("no interpreter that another user can run")
    staging = mount.root.parent
    staging.chmod(0o755)
    mount.point, mount.root, mount.socket = staging / "mnt", staging / "own" / "root", staging / "own" / "status"
    for path in (mount.point, mount.root.parent, mount.root):
        path.mkdir()
        os.chown(path, NOBODY, NOBODY)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    paths = os.pathsep.join([str(DAEMON.parents[2]), *packages])
    return mount, ["/usr/bin/env", f"PYTHONPATH={paths}", python]


def test_the_daemon_runs_as_the_user_and_passthrough_works(for_others: tuple[Mount, list[str]]) -> None:
    mount, python = for_others
    mount.start("--user", str(NOBODY), "--allow-other", daemon=(*python, str(DAEMON)))
    wait_until(lambda: mount.phase() == "serving", "serves")
    (mount.point / "f").write_bytes(b"x" * 5000)
    assert (mount.point / "f").read_bytes() == b"x" * 5000
    assert (mount.root / "f").stat().st_uid == NOBODY
    spared = [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in (mount.daemon_pid(), os.getpid())]
    assert spared[0] == spared[1], "it may not have what lets it fill the node's memory"
    daemon = Path(f"/proc/{mount.daemon_pid()}/status").read_text()
    assert f"Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}" in daemon
    assert "CapPrm:\t0000000000000000" in daemon
    supervisor = Path(f"/proc/{mount.status()['supervisor_pid']}/status").read_text()
    assert f"CapPrm:\t{1 << 21:016x}" in supervisor
    assert f"CapBnd:\t{1 << 21:016x}" in supervisor
    mount.kill_daemon()
    assert (mount.point / "f").read_bytes() == b"x" * 5000
    assert mount.umount() == 0


WITHOUT_ROOT = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_without_root_everything_but_passthrough_works(for_others: tuple[Mount, list[str]]) -> None:
    mount, python = for_others
    (mount.root / "hello").write_bytes(b"x" * (3 << 20))
    os.chown(mount.root / "hello", NOBODY, NOBODY)
    command = [sys.executable, "-c", WITHOUT_ROOT, *python, "-m", "cachexfs.supervisor"]
    command += ["--mountpoint", str(mount.point), "--status-socket", str(mount.socket)]
    command += ["--backing-dir", str(mount.root), "--", *python, str(DAEMON)]
    with mount.log.open("ab") as log:
        mount.process = subprocess.Popen(
            command, env={**os.environ, "PLAIN_ROOT": str(mount.root)}, stdout=log, stderr=log, cwd="/"
        )
    wait_until(lambda: mount.phase() == "serving", "serves")
    status = mount.status()
    assert str(status["passthrough_reason"]).startswith("no CAP_SYS_ADMIN")
    limit_bytes = 2 * int(Path("/proc/sys/net/core/wmem_max").read_text())
    assert int(str(status["payload_bytes_max"])) <= min(limit_bytes, wire.PAYLOAD_BYTES_MAX)
    mount.kill_daemon()
    look = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOT, "/usr/bin/wc", "-c", str(mount.point / "hello")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert look.stdout.split()[0] == str(3 << 20)
    assert mount.ask("stop") == {"said": "stopping"}
    assert mount.wait() == 0
