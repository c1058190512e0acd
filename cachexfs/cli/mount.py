"""``cachexfs mount``: check everything that can be checked, start the daemon, wait until the mount answers.

Role: the only command that starts a daemon. Anything wrong is one line before the daemon is started, where possible.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial

import click
import msgspec

from cachexfs import staged, tmpfs
from cachexfs.cli import mounts, waiting
from cachexfs.cli.catalogue_check import without_majority
from cachexfs.cli.earlier import check_left, end_earlier
from cachexfs.cli.identity import acting_as, default_runtime_dir_for, environment_for, give_directory, user_of
from cachexfs.cli.mount_checks import (
    check_address,
    check_directories,
    check_machine,
    check_memory,
    choose_supervisor,
    clear_mountpoint,
    detach,
)
from cachexfs.cli.mount_help import EPILOG
from cachexfs.cli.options import load_options
from cachexfs.cli.output import write_json, write_warning
from cachexfs.cli.pfs_check import Adoption, check_no_mount
from cachexfs.cli.seconds import Seconds
from cachexfs.config import MountOptions, mount_id
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_DONE, CacheXError, CannotTellError, UsageError
from cachexfs.machine import take_precedence
from cachexfs.mountpoint import protect, unprotect
from cachexfs.supervisor.mount import changeable_by_others

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S, STOP_TIMEOUT_S_MIN = 5.0, 0.5
#: Of the time limit, what is kept to find out why the mount does not answer, and to end it: a share, at most so much.
END_S, END_SHARE = 4.0, 0.25
REQUEST_TIMEOUT_S_MIN = 90.0  # a daemon that leaves a request unanswered for twice this long counts as hung


class Ready(msgspec.Struct, frozen=True):
    """The line that the daemon writes once its mount answers, or cannot."""

    ok: bool
    error: str = ""
    exit: int = 4


@click.command("mount", epilog=EPILOG)
@click.argument("pfs_dir")
@click.argument("mountpoint")
@click.option("-o", "words", multiple=True, metavar="OPT[=VALUE],...", help="Mount options; may be repeated.")
@click.option("--config", "config_file", metavar="FILE", help="TOML file with the same keys.")
@click.option("--foreground", is_flag=True, help="Stay attached to the daemon; it logs to stderr.")
@click.option("--check", is_flag=True, help="Check the options and the directories, mount nothing.")
@click.option("--sloppy", is_flag=True, help="Ignore unknown -o options, as mount -s does.")
@click.option("--timeout", "timeout_s", type=Seconds(), default=READY_TIMEOUT_S, show_default=True, metavar="SECONDS",
              help="How long the mount may take until it answers.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the mount as a JSON object.")
def command(
    pfs_dir: str,
    mountpoint: str,
    words: tuple[str, ...],
    config_file: str | None,
    foreground: bool,
    check: bool,
    sloppy: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Mount PFS_DIR at MOUNTPOINT on this node.

    Returns once the mount answers. A mount point whose daemon is dead is replaced: with the same options nothing that
    was staged is lost.
    """
    options = load_options(pfs_dir, mountpoint, words, config_file, sloppy=sloppy)
    kernel_mounts, _ = mounts.read_mountinfo()
    options = msgspec.structs.replace(options, mountpoint=mounts.resolve(options.mountpoint, kernel_mounts))
    if options.log_file is None and not foreground:
        name = mount_id(options.mountpoint, options.node) + ".log"
        options = msgspec.structs.replace(options, log_file=os.path.join(options.runtime_dir, name))
    check_machine(options)
    check_no_mount(options.pfs)
    check_memory(options)
    options = choose_supervisor(options)
    user = user_of(options)
    if user is not None and not check:
        _give(options, user)
    if not check:
        _begin_anew(options)
    check_left(options)
    adoption = Adoption(options, change=not check)
    clear_mountpoint(options.mountpoint, options.runtime_dir, not check, user, adoption.check)
    if not check:
        with acting_as(user):
            end_earlier(options)
    with acting_as(user):
        warnings = check_directories(options, adoption, change=not check)
        others = mounts.registry(options.runtime_dir)
    if not check:
        check_address(options)
    for entry in others:
        if entry.pfs == options.pfs and entry.job != options.job and mounts.is_alive(entry.pid):
            write_warning(
                f"{options.pfs} is mounted at {entry.mountpoint} too, by another job: the two mounts do not "
                "see each other's changes"
            )
    if check:
        for warning in warnings:
            write_warning(warning)
        return EXIT_DONE
    return _start(options, foreground, timeout_s, as_json, warnings)


def _begin_anew(options: MountOptions) -> None:
    """What the last mount of this place has left goes, if other nodes of its job have brought it to the PFS since.

    The catalogue went with them: nobody could go on with it. Raises ``UsageError``, ``CannotTellError``.
    """
    directory = tmpfs.staging_directory(options)
    owner = staged.read(directory)
    if any(mount.mountpoint == options.mountpoint for mount in mounts.read_mountinfo()[0]):
        return
    if owner is not None and waiting.has_landed(waits := waiting.Waiting(directory, owner)):
        waiting.give_back(waits)
    nvme = options.nvme_directory
    if nvme is not None and os.path.isdir(nvme) and waiting.is_marked(nvme, options.pfs):
        waiting.give_back_nvme(nvme)


def _give(options: MountOptions, user: tuple[int, int]) -> None:
    """What only root can make for the user for whom it mounts. Raises ``UsageError``."""
    if where := changeable_by_others(options.mountpoint):
        raise UsageError(
            f"user=: others than root can change {where}, on the way to the mount point {options.mountpoint}, and "
            "could lead root's mount elsewhere: use a directory of root's, or mount as that user"
        )
    default = default_runtime_dir_for(user)
    instead = f"with user=, leave CACHEXFS_RUNTIME_DIR and runtime_dir= out (it is {default} then), or give another"
    give_directory(options.runtime_dir, user, "runtime directory", instead)
    if options.nvme is not None and not os.path.isdir(options.nvme):
        raise UsageError(f"nvme={options.nvme} does not exist: mkdir -p {options.nvme}")
    if options.nvme_directory is not None and options.nvme is not None and os.stat(options.nvme).st_uid != user[0]:
        instead = "give another nvme=DIR or job=NAME; what is in it may be what another mount has left"
        give_directory(os.path.dirname(options.nvme_directory), user, "job's NVMe directory", instead)
    with acting_as(user):
        if not os.access(sys.executable, os.X_OK, effective_ids=True):
            raise UsageError(f"user=: that user cannot run {sys.executable}: install CacheX FS where all can read it")


def _start(options: MountOptions, foreground: bool, timeout_s: float, as_json: bool, warnings: list[str]) -> int:
    """``warnings``: for who has a mount now; an error needs no other line beside it."""
    try:
        text = msgspec.json.encode(options)
    except UnicodeEncodeError:
        raise UsageError("paths given to mount must be UTF-8") from None
    reader, writer = os.pipe()
    user = user_of(options)
    log_fd = None
    if options.log_file is not None:
        try:
            with acting_as(user):
                log_fd = _open_own(options.log_file, os.O_APPEND)
        except OSError as error:
            raise UsageError(f"cannot write the log '{options.log_file}': {error.strerror}") from None
    answer_path = None
    fresh = not tmpfs.is_in_use(options)
    try:
        staging = tmpfs.prepare(options)
    except OSError as error:
        raise UsageError(f"staging directory: {error}; choose another with -o staging=DIR") from None
    command = [sys.executable, "-P", "-m", "cachexfs.daemon"]
    if options.supervisor == "off":
        command += ["--ready-fd", str(writer)]
    else:
        with acting_as(user):
            command, answer_path = _supervised(options, text, staging, writer)
    if user is None:  # else root's directory refuses the user's writes
        protect(options.mountpoint)
    daemon = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log_fd,
        stderr=log_fd,
        pass_fds=[writer],
        env=None if user is None else environment_for(user),
        cwd="/",
        start_new_session=not foreground,
        preexec_fn=partial(take_precedence, options.nice),
    )
    os.close(writer)
    if log_fd is not None:
        os.close(log_fd)
    deadline_s = time.monotonic() + timeout_s
    try:
        _await_ready(daemon, text, reader, timeout_s, options, answer_path)
        with acting_as(user):
            known = mounts.registry(options.runtime_dir)
        entry = next((e for e in known if e.mountpoint == options.mountpoint), None)
        for warning in warnings:
            write_warning(warning)
        if as_json:
            write_json(
                {
                    "mountpoint": options.mountpoint,
                    "pfs": options.pfs,
                    "node": options.node,
                    "job": options.job,
                    "pid": entry.pid if entry else daemon.pid,
                    "socket": entry.socket if entry else "",
                    "log": options.log_file or "",
                }
            )
    except BaseException:
        _stop(daemon, options.mountpoint, deadline_s)
        unprotect(options.mountpoint)
        if fresh and not tmpfs.is_in_use(options):
            tmpfs.release(options)
        raise
    finally:
        os.close(reader)
    if foreground:
        return _attend(daemon)
    daemon.returncode = 0  # it outlives us: keeps Popen from warning that it still runs
    return EXIT_DONE


def _supervised(options: MountOptions, text: bytes, staging: str, ready_fd: int) -> tuple[list[str], str]:
    """The supervisor's command, and the file in which the first daemon says how its start went.

    Each daemon of the mount reads the same options again, so they lie in a file.
    """
    base = os.path.join(options.runtime_dir, mount_id(options.mountpoint, options.node))
    answer = base + ".answer"
    with suppress(FileNotFoundError):
        os.unlink(answer)
    try:
        with open(_open_own(base + ".options", os.O_TRUNC), "wb") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write '{base}.options': {error.strerror}") from None
    # Root runs it in the user's HOME: without -s its Python would run what lies in the user's ~/.local.
    command = [
        sys.executable, "-P", *(["-s"] if options.uid is not None else []), "-m", "cachexfs.supervisor",
        "--mountpoint", options.mountpoint,
        "--fsname", options.pfs.replace(",", "_"), "--passthrough", options.passthrough, "--backing-dir", staging,
        "--request-timeout", str(max(REQUEST_TIMEOUT_S_MIN, options.full_timeout_s, options.fsync_timeout_s) * 2),
        "--status-socket", base + ".supervisor", "--ready-fd", str(ready_fd), "--standby",
        *(["--allow-other"] if options.allow_other else []),
        *(["--user", f"{options.uid}:{options.gid}"] if options.uid is not None else []),
        *(["--release", staging] if options.uid is not None and options.staging is None else []),
        "--module", "daemon", "--", "--options", base + ".options", "--answer", answer,
    ]  # fmt: skip
    return command, answer


def _open_own(path: str, flags: int) -> int:
    """A file for writing, made when it is missing. ``OSError``, also for a pipe: root would wait for its reader."""
    flags |= os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    fd = os.open(path, flags, 0o600)
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is a pipe")
    os.set_blocking(fd, True)
    return fd


def _await_ready(
    daemon: subprocess.Popen[bytes],
    text: bytes,
    reader: int,
    timeout_s: float,
    options: MountOptions,
    answer_path: str | None,
) -> None:
    assert daemon.stdin is not None
    with suppress(BrokenPipeError):  # it died: the end of the other pipe says so
        daemon.stdin.write(text)
        daemon.stdin.flush()
    with suppress(BrokenPipeError):
        daemon.stdin.close()
    began_s = time.monotonic()
    deadline_s = began_s + timeout_s - min(END_S, timeout_s * END_SHARE)
    data = b""
    log = f"; its log is {options.log_file}" if options.log_file else ""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([reader], [], [], max(deadline_s - time.monotonic(), 0))
        if not ready:
            why = without_majority(options)
            waits_s = time.monotonic() - began_s
            again = "" if why else ": mount again with a longer --timeout, or see the log"
            raise CannotTellError(f"the mount has not answered for {waits_s:.0f} s{': ' + why if why else again}{log}")
        part = os.read(reader, 1 << 16)
        if not part:
            break
        data += part
    if answer_path is not None:
        try:
            with acting_as(user_of(options)):
                data = mounts.read_small(answer_path)
        except OSError:
            data = b""
    try:
        answer = msgspec.json.decode(data, type=Ready)
    except ValueError:
        with acting_as(user_of(options)):
            said = _last_line(options.log_file)
        raise CannotTellError(f"the daemon ended before it mounted{': ' + said if said else ''}{log}") from None
    if not answer.ok:
        why = without_majority(options) if answer.exit == EXIT_CANNOT_TELL and deadline_s > time.monotonic() else ""
        error = CacheXError(why or answer.error)
        error.exit_code = answer.exit
        raise error


def _last_line(path: str | None) -> str:
    if path is None:
        return ""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - 4096, 0))
            lines = [line.strip() for line in file.read(8192).decode(errors="replace").splitlines()]
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line), "")


def _stop(daemon: subprocess.Popen[bytes], mountpoint: str, deadline_s: float) -> None:
    """End a daemon that did not become a mount, and what it may have mounted."""
    for number, wait_s in ((signal.SIGTERM, deadline_s - time.monotonic()), (signal.SIGKILL, STOP_TIMEOUT_S_MIN)):
        if daemon.poll() is None:
            daemon.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(min(max(wait_s, STOP_TIMEOUT_S_MIN), STOP_TIMEOUT_S))
    if any(mount.mountpoint == mountpoint for mount in mounts.read_mountinfo()[0]):
        with suppress(CannotTellError):
            detach(mountpoint)


def _attend(daemon: subprocess.Popen[bytes]) -> int:
    """Stay until the daemon ends; SIGTERM and SIGHUP are passed on, Ctrl-C reaches it by itself."""

    def pass_on(number: int, _: object) -> None:
        daemon.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGHUP, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = daemon.wait()
    return code if code >= 0 else 128 - code
