"""Whether a mount can use PFS_DIR, asked before a daemon is started.

Role: called by ``cachexfs mount``. A mount that begins needs a directory that takes writes. One that adopts what a dead
mount left must not depend on the PFS, whatever state it is in; but where PFS_DIR is certainly another directory than
the staged data is for, nothing of it would ever land, and the mount is refused. What may hang runs in a child. No
concurrency.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cachexfs import mountinfo, staged, tmpfs
from cachexfs.cli import mounts, waiting
from cachexfs.cli.child import run_in_child
from cachexfs.cli.output import write_warning
from cachexfs.config import PFS_ID, MountOptions
from cachexfs.errors import CannotTellError, UsageError

PFS_TIMEOUT_S = 10.0
LINKS_TIMEOUT_S = 3.0
STATE_DIR = ".cachexfs"
TOKEN_CHARS = 32
TOKEN_BYTES_MAX = 64
PROBE_BYTES = 4096
MOUNTED = "mount"  # of ``pfs_type``: whatever filesystem, if it is mounted there


@dataclass(frozen=True, slots=True)
class Look:
    """What lies at PFS_DIR. ``error``: an errno, 0 when it could be examined; ``token``: of ``.cachexfs/id``, "" where
    there is none; ``token_error``: why that could not be read, an errno; ``is_known``: it is the path of ``before``;
    ``mountpoint``, ``kind``: of the filesystem that it lies on, "" where that is not known."""

    error: int = 0
    is_directory: bool = False
    is_usable: bool = False
    is_read_only: bool = False
    token: str = ""
    token_error: int = 0
    is_known: bool = False
    mountpoint: str = ""
    kind: str = ""


def check_no_mount(pfs: str) -> None:
    """Refuse a CacheX FS mount as the PFS of another: what is durable there is only on its way. Raises ``UsageError``.

    The kernel tells; nothing in that mount is touched. A PFS that does not answer, which symbolic links are asked of,
    is taken for none.
    """
    with suppress(TimeoutError, OSError):
        run_in_child(partial(_refuse_mount, pfs), LINKS_TIMEOUT_S)


def _refuse_mount(pfs: str) -> None:
    if (found := mounts.find(pfs)) is not None:
        raise UsageError(
            f"the PFS directory '{pfs}' lies in the CacheX FS mount {found.mount.mountpoint}: give the directory that "
            f"that one has mounted, {os.path.normpath(os.path.join(found.mount.source, found.relative))}"
        )


def check_new(pfs: str, kind: str = "any") -> str:
    """PFS_DIR for a mount without anything staged; ``kind`` as the option ``pfs_type``. Returns a warning, or "".

    Raises ``UsageError``, ``CannotTellError``.
    """
    try:
        look = run_in_child(partial(_look, pfs, pfs), PFS_TIMEOUT_S)
    except TimeoutError:
        raise CannotTellError(
            f"the PFS directory '{pfs}' has not answered for {PFS_TIMEOUT_S:g} s: wait, or mount with -o offline"
        ) from None
    if look.error == errno.ENOENT:
        raise UsageError(f"the PFS directory '{pfs}' does not exist: create it, or check that the PFS is mounted")
    if look.error:
        raise CannotTellError(f"cannot read the PFS directory '{pfs}': {os.strerror(look.error)}")
    if not look.is_directory:
        raise UsageError(f"the PFS directory '{pfs}' is not a directory")
    if look.is_read_only:
        raise UsageError(f"the PFS directory '{pfs}' is read-only: have its filesystem mounted for writing")
    if not look.is_usable:
        raise UsageError(f"no permission to write into the PFS directory '{pfs}'")
    if not _is_of_type(look, kind):
        wanted = "a filesystem of its own is mounted there" if kind == MOUNTED else f"{kind} is mounted there"
        raise CannotTellError(
            f"the PFS directory '{pfs}' lies on {_place(look)}, and pfs_type={kind} says that {wanted}: mount the PFS"
        )
    if kind == "any" and not look.token and not look.token_error and look.mountpoint == "/":
        return (
            f"the PFS directory '{pfs}' is new, and lies on {_place(look)}: if the PFS is to be mounted there, it is "
            "not (-o pfs_type=lustre, nfs, ... or mount refuses that)"
        )
    return ""


def _is_of_type(look: Look, kind: str) -> bool:
    """Whether PFS_DIR lies on such a filesystem. An automounter's bare place is not mounted."""
    if kind == "any":
        return True
    if kind == MOUNTED:
        return look.mountpoint != "/" and look.kind != "autofs"
    return look.kind.startswith(kind)


def _place(look: Look) -> str:
    if look.mountpoint == "/":
        return f"the root filesystem ({look.kind})"
    return f"{look.mountpoint} ({look.kind})" if look.mountpoint else "a filesystem that is not known"


def check_nvme(options: MountOptions) -> None:
    """Refuse PFS_DIR when this job's NVMe directory has replicas for another one. Raises ``UsageError``."""
    if options.nvme_directory is None:
        return
    try:
        with open(os.path.join(options.nvme_directory, PFS_ID), encoding="ascii", errors="replace") as file:
            token = file.read(TOKEN_BYTES_MAX).strip()
        look = run_in_child(partial(_look, options.pfs, options.pfs), PFS_TIMEOUT_S)
    except (OSError, TimeoutError):
        return
    if token and not look.error and look.is_directory and not look.token_error and look.token != token:
        raise UsageError(
            f"{options.nvme_directory} holds replicas of job {options.job} for another PFS directory than "
            f"'{options.pfs}' (its .cachexfs/id is {token}): mount that one, or bring them there with 'cachexfs "
            f"recover {options.nvme_directory} --to DIR' and remove them, or give this mount another job name "
            "(-o job=NAME)"
        )


class Adoption:
    """PFS_DIR for a mount that adopts what another one left in staging. Asked once, however often it is checked."""

    def __init__(self, options: MountOptions, *, change: bool) -> None:
        self._options = options
        self._change = change
        self._is_checked = False

    def check(self) -> None:
        """Refuse another directory than the staged data is for; warn when nothing can land there now.

        Raises ``UsageError``. A PFS that cannot be asked does not prevent the adoption; ``offline`` does not ask it.
        """
        if self._is_checked or self._options.offline or not tmpfs.is_in_use(self._options):
            return
        self._is_checked = True
        pfs, directory = self._options.pfs, tmpfs.staging_directory(self._options)
        owner = staged.read(directory)
        try:
            look = run_in_child(partial(_look, pfs, owner.pfs if owner else pfs), PFS_TIMEOUT_S)
        except TimeoutError:
            look = Look(errno.ETIMEDOUT, is_known=True)
        except OSError as error:
            look = Look(error.errno or errno.EIO, is_known=True)
        if self._is_other(look, _token_in(directory), owner):
            was = f"'{owner.pfs}'" if owner else f"the PFS directory whose .cachexfs/id is {_token_in(directory)}"
            again = staged.quoted(staged.mount_command(owner)) if owner else "mount that one again"
            raise UsageError(
                f"'{pfs}' is not the PFS directory of the last mount here: {directory} has staged data for {was}. Go "
                f"on with that ({again}) and 'cachexfs umount {self._options.mountpoint}' before another directory is "
                "mounted here, or use another mount point"
            )
        if said := self._says(look, _token_in(directory)):
            write_warning(f"the PFS directory '{pfs}' {said}; {self._waits(directory, owner)}")

    def _is_other(self, look: Look, token: str, owner: staged.Owner | None) -> bool:
        """Whether PFS_DIR is certainly not what the staged data is for.

        A directory without an identity may be the bare mount point of a PFS that is not mounted; under another name
        than that of the last mount it is taken for another directory.
        """
        if look.error in (errno.ENOENT, errno.ENOTDIR):
            return owner is not None and not look.is_known
        if look.error or (look.is_directory and look.token_error):
            return False
        if not look.is_directory:
            return True
        return look.token != token if look.token else owner is not None and not look.is_known

    def _says(self, look: Look, token: str) -> str:
        """What keeps the staged data from landing, for a warning; "" when nothing is known to."""
        if look.error == errno.ETIMEDOUT:
            return f"has not answered for {PFS_TIMEOUT_S:g} s"
        if look.error == errno.ENOENT:
            return "does not exist now (is the PFS mounted?)"
        if look.error or look.token_error:
            return f"cannot be read ({os.strerror(look.error or look.token_error)})"
        if not look.token:
            return f"has no .cachexfs/id now, where {token} is expected (is the PFS mounted? docs/pfs.md)"
        if look.is_read_only:
            return "is read-only"
        if not look.is_usable:
            return "gives this user no permission to write"
        return self._refusal() if self._change else ""

    def _refusal(self) -> str:
        """With which error the PFS refuses a small file: a quota, or a disk that is full, shows no other way."""
        try:
            run_in_child(partial(_write_and_remove, self._options.pfs), PFS_TIMEOUT_S)
        except TimeoutError:
            return f"has not taken a small file for {PFS_TIMEOUT_S:g} s"
        except OSError as error:
            return f"takes no writes ({error.strerror})"
        return ""

    def _waits(self, directory: str, owner: staged.Owner | None) -> str:
        found = waiting.Waiting(directory, owner or staged.Owner(self._options.pfs, self._options.mountpoint, "", ""))
        amount = waiting.look(found).amount
        return f"{amount} staged in {directory} waits for it" + (
            "" if amount == "nothing" else ", and lands by itself then"
        )


def _token_in(directory: str) -> str:
    try:
        with open(os.path.join(directory, tmpfs.PFS_TOKEN), encoding="ascii", errors="replace") as file:
            return file.read(TOKEN_BYTES_MAX).strip()
    except OSError:
        return ""


# ---- in the child
def _look(pfs: str, before: str) -> Look:
    """Never raises: what is wrong is part of the answer."""
    is_known = os.path.realpath(pfs) == os.path.realpath(before)
    try:
        # By the effective identity: root may be acting as the user for whom it mounts.
        is_directory = stat.S_ISDIR(os.stat(pfs).st_mode)
        is_usable = os.access(pfs, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
        is_read_only = bool(os.statvfs(pfs).f_flag & os.ST_RDONLY)
    except OSError as error:
        return Look(error.errno or errno.EIO, is_known=is_known)
    token, token_error = "", 0
    try:
        with open(os.path.join(pfs, STATE_DIR, "id"), encoding="ascii", errors="replace") as file:
            token = file.read(TOKEN_BYTES_MAX).strip()
        token_error = 0 if len(token) == TOKEN_CHARS else errno.EIO  # damaged, or being written by another node
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        token_error = error.errno or errno.EIO
    place = mountinfo.place_of(os.path.realpath(pfs))
    mountpoint, kind = (place.mountpoint, place.kind) if place is not None else ("", "")
    return Look(0, is_directory, is_usable, is_read_only, token, token_error, is_known, mountpoint, kind)


def _write_and_remove(pfs: str) -> None:
    """Raises ``OSError``. The name is that of an unfinished copy, which nobody misses if this process dies."""
    directory = os.path.join(pfs, STATE_DIR, "tmp", "0")
    os.makedirs(directory, 0o700, exist_ok=True)
    path = os.path.join(directory, f"mount~{secrets.token_hex(8)}")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, bytes(PROBE_BYTES))
        os.fsync(fd)
    finally:
        os.close(fd)
        os.unlink(path)
