"""What can be known to be wrong before a daemon is started: devices, directories, an old mount.

Role: called by ``cachexfs mount``: ``check_machine``, ``clear_mountpoint``, and the other two. Each raises
``UsageError`` or ``CannotTellError`` with what to do. No concurrency; what may hang runs in a child.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress

import msgspec

from cachexfs.cli import client, mounts
from cachexfs.cli.child import run_in_child
from cachexfs.cli.identity import acting_as
from cachexfs.cli.output import write_warning
from cachexfs.cli.pfs_check import PFS_TIMEOUT_S, Adoption, check_new, check_nvme
from cachexfs.cli.places import check_places, warning_of
from cachexfs.cli.protocol import Pong
from cachexfs.config import MountOptions
from cachexfs.core import sizes
from cachexfs.errors import CannotTellError, UsageError
from cachexfs.machine import memory_limit_bytes
from cachexfs.tmpfs import is_in_use

UMOUNT_TIMEOUT_S = 5.0
FUSE_DEVICE = "/dev/fuse"
LIBFUSE_WITH_DESCRIPTORS = (3, 3)  # takes /dev/fd/N for a mount point


def check_machine(options: MountOptions) -> None:
    """Raise ``UsageError`` when this machine or this user cannot mount."""
    try:
        os.close(os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise UsageError(
            f"{FUSE_DEVICE} is missing: run 'modprobe fuse' as root; in a container, pass the device in "
            "(docker run --device /dev/fuse --cap-add SYS_ADMIN)"
        ) from None
    except OSError as error:
        hint = ""
        if error.errno == errno.EACCES and os.geteuid() != 0:
            hint = (
                f"; root lets all users with 'chmod 666 {FUSE_DEVICE}', as udev does, or mounts for one (-o user=NAME)"
            )
        raise UsageError(
            f"cannot open {FUSE_DEVICE} ({error.strerror}): this user or container may not mount{hint}"
        ) from None
    if os.geteuid() == 0:
        return
    if shutil.which("fusermount3") is None:
        raise UsageError("fusermount3 is missing, which mounts for users who are not root: install the package fuse3")
    if options.allow_other and not _fuse_conf_allows_other():
        raise UsageError("allow_other needs the line 'user_allow_other' in /etc/fuse.conf, or root")


def check_memory(options: MountOptions) -> None:
    """Refuse to stage more than there is: the kernel would end processes when it is used. Raises ``UsageError``.

    What is staged already is adopted all the same, with a warning.
    """
    limit = memory_limit_bytes()
    if options.memory <= limit:
        return
    text = (
        f"memory={sizes.format_size(options.memory)} is more than this machine or its cgroup allows "
        f"({sizes.format_size(limit)})"
    )
    if not is_in_use(options):
        raise UsageError(f"{text}: give less, as a size or in percent (default: 25%)")
    write_warning(f"{text}: unmount, and mount with less")


def choose_supervisor(options: MountOptions) -> MountOptions:
    """The options with ``supervisor=auto`` decided: off where libfuse cannot be given an open device.

    Raises ``UsageError`` for ``supervisor=on`` there.
    """
    version = libfuse_version()
    if options.supervisor == "off" or version >= LIBFUSE_WITH_DESCRIPTORS:
        return options
    why = f"libfuse {'.'.join(map(str, version))} cannot be given an open device, 3.3 can"
    if options.supervisor == "on" or options.uid is not None:
        wish = "supervisor=on" if options.uid is None else "user="
        raise UsageError(f"{wish}: {why}: install a newer one, or leave it out (a dead daemon is a dead mount then)")
    return msgspec.structs.replace(options, supervisor="off", unsupervised_why=why)


def libfuse_version() -> tuple[int, int]:
    """(major, minor) of the machine's libfuse 3; the one that is needed where it cannot be asked."""
    try:
        number = int(ctypes.CDLL("libfuse3.so.3").fuse_version())
    except (OSError, AttributeError):
        return LIBFUSE_WITH_DESCRIPTORS
    return divmod(number, 100 if number >= 100 else 10)


def check_address(options: MountOptions) -> None:
    """Raise ``UsageError`` when the daemon could not listen on the node's address (nothing to do alone)."""
    if options.alone:
        return
    family = socket.AF_INET6 if ":" in options.listen_host else socket.AF_INET
    where = f"{options.listen_host or '*'}:{options.listen_port}"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.listen_host, options.listen_port))
            probe.listen(1)
        except OSError as error:
            hint = {
                errno.EADDRINUSE: "does a daemon of this job still run here? Give another job, or listen=ADDRESS:PORT",
                errno.EADDRNOTAVAIL: "it is no address of this machine: is 'node' right?",
            }.get(error.errno or 0, "give listen=ADDRESS:PORT")
            raise UsageError(f"cannot listen on {where} ({error.strerror}): {hint}") from None


def _fuse_conf_allows_other() -> bool:
    try:
        with open("/etc/fuse.conf", encoding="utf-8", errors="replace") as file:
            return any(line.strip() == "user_allow_other" for line in file)
    except OSError:
        return False


def clear_mountpoint(
    mountpoint: str, runtime_dir: str, change: bool, user: tuple[int, int] | None = None,
    may_adopt: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Make sure that the mount point is an empty directory; take a dead mount of ours away (not without ``change``).

    The directory is not touched before it is known that no live daemon of ours answers for it, and ``may_adopt`` has
    raised nothing: a dead mount refuses writes, which the directory below it might take. Raises ``UsageError``, or
    ``CannotTellError`` when a daemon neither answers nor is dead.
    """
    mount = next((m for m in mounts.read_mountinfo()[0] if m.mountpoint == mountpoint), None)
    if mount is not None and not change:
        write_warning(f"something is mounted at {mountpoint} already: if it answers, a mount is refused")
        return
    if mount is not None:
        with acting_as(user):
            entry = mounts.entry_of(mount, mounts.registry(runtime_dir))
        if entry is not None:
            with suppress(client.EndedError):
                client.ask(entry, {"op": "ping"}, Pong)
                raise UsageError(
                    f"{mountpoint} is mounted already (pid {entry.pid}): 'cachexfs umount {mountpoint}' first"
                )
        elif not _answers_enotconn(mountpoint, user):
            raise UsageError(f"{mountpoint} is mounted already, by a daemon that is not in {runtime_dir}")
        with acting_as(user):
            may_adopt()
        detach(mountpoint)
    try:
        names = os.listdir(mountpoint)
    except FileNotFoundError:
        raise UsageError(f"the mount point '{mountpoint}' does not exist: mkdir -p {mountpoint}") from None
    except NotADirectoryError:
        raise UsageError(f"the mount point '{mountpoint}' is not a directory") from None
    except OSError as error:
        raise UsageError(f"cannot use the mount point '{mountpoint}': {error.strerror}") from None
    if names:
        raise UsageError(
            f"the mount point '{mountpoint}' is not empty: it would hide '{names[0]}'; use another directory"
        )


def _answers_enotconn(mountpoint: str, user: tuple[int, int] | None) -> bool:
    def probe() -> bool:
        with acting_as(user):  # a mount of theirs does not answer root
            os.statvfs(mountpoint)
        return False

    try:
        return run_in_child(probe, PFS_TIMEOUT_S)
    except TimeoutError:
        raise CannotTellError(
            f"the mount at {mountpoint} does not answer and no daemon of it is known: 'umount -l {mountpoint}'"
        ) from None
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)


def detach(mountpoint: str) -> None:
    """Take a mount away lazily, without waiting for its daemon. Raises ``CannotTellError``."""
    commands = [["fusermount3", "-u", "-z", mountpoint], ["umount", "-l", mountpoint]]
    if os.geteuid() == 0:
        commands.reverse()
    said = ""
    for arguments in commands:
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=UMOUNT_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
            continue
        if done.returncode == 0:
            return
        said = done.stderr
    raise CannotTellError(f"cannot take the dead mount {mountpoint} away: {said}")


def check_directories(options: MountOptions, adoption: Adoption, change: bool) -> list[str]:
    """The PFS directory (in a child: it may hang), NVMe, staging and runtime directories. Raises ``UsageError``.

    Returns warnings for who mounts.
    """
    check_places(options)
    warnings = [warning_of(options), _without_partner(options)] if not is_in_use(options) else []
    if not options.offline and not is_in_use(options):
        warnings.append(check_new(options.pfs, options.pfs_type))
        check_nvme(options)
    adoption.check()
    for key, path in (("nvme", options.nvme), ("staging", options.staging)):
        if path is None or (key == "nvme" and options.uid is not None and _is_given(options)):
            continue
        if change:
            with suppress(OSError):
                os.mkdir(path, 0o700)
        _check_local(key, path, missing_is_well=not change and os.path.isdir(os.path.dirname(path)))
    if change:
        make_runtime_dir(options.runtime_dir)
    return [warning for warning in warnings if warning]


def _without_partner(options: MountOptions) -> str:
    """What was given for a partner, to a mount that has none; "" for nothing."""
    given = [word for word in options.words if word == "fsync=partner" or word.startswith("replicas=")]
    if not given or not options.alone:
        return ""
    return f"{', '.join(given)} without nodes=: this node is alone and has no partner" + (
        ", so fsync waits for the PFS" if options.fsync == "partner" else ""
    )


def _is_given(options: MountOptions) -> bool:
    """Whether this job's part of the NVMe directory is there, in root's directory."""
    directory = options.nvme_directory
    return directory is not None and os.path.isdir(os.path.dirname(directory))


def _check_local(key: str, path: str, missing_is_well: bool) -> None:
    if missing_is_well and not os.path.exists(path):
        return
    if not os.path.exists(path):
        raise UsageError(f"{key}={path} does not exist, nor the directory that it would be in: mkdir -p {path}")
    if not os.path.isdir(path):
        raise UsageError(f"{key}={path} is not a directory")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise UsageError(f"no permission to write into {key}={path}")


def make_runtime_dir(path: str) -> None:
    """Create the runtime directory, or make sure that nobody else can have prepared it. Raises ``UsageError``."""
    try:
        os.makedirs(path, 0o755 if os.geteuid() == 0 else 0o700, exist_ok=True)
        status = os.stat(path)
    except OSError as error:
        raise UsageError(f"cannot make the runtime directory '{path}': {error.strerror}") from None
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o002:
        raise UsageError(f"the runtime directory '{path}' is not ours alone: set CACHEXFS_RUNTIME_DIR to another")
