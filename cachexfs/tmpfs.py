"""Where staging lies: a tmpfs of its own as root, else a directory under /dev/shm.

Role: base layer. ``cachexfs mount`` prepares it, because it must outlive the daemon and be there before the
supervisor starts; the daemon gives it back after a clean end.
"""

from __future__ import annotations

import errno
import os
import subprocess

from cachexfs import config, machine
from cachexfs.config import MountOptions
from cachexfs.errors import UsageError

HEADROOM_BYTES = 64 << 20
SOURCE = "cachexfs-staging"  # as the table of mounts shows it
PFS_TOKEN = "pfs-id"  # in the staging directory: which PFS directory it belongs to; there while it is in use


def staging_directory(options: MountOptions) -> str:
    """The staging directory of a mount."""
    if options.staging is not None:
        return options.staging
    if options.uid is not None:
        return f"{config.RUNTIME_DIR_ROOT}/staging/{config.mount_id(options.mountpoint, options.node)}"
    name = config.mount_id(options.mountpoint, options.node)
    if os.geteuid() == 0:
        return f"{options.runtime_dir or config.default_runtime_dir()}/staging/{name}"
    return f"/dev/shm/cachexfs-{os.geteuid()}-{name}"


def prepare(options: MountOptions) -> str:
    """Make the staging directory; as root, mount a tmpfs on it unless one is there already. Returns it.

    ``huge=within_size`` keeps 4 KiB files small and gives large ones huge pages. Its size is only where the kernel
    stops writers that it serves by itself; the daemon keeps to ``memory``. Where the kernel or the container does not
    allow the mount, the directory is used as it is. Raises ``OSError``.
    """
    directory = staging_directory(options)
    if options.uid is None:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    elif os.geteuid() == 0:
        _make_for(options, directory)
    if options.staging is not None or os.geteuid() != 0 or os.path.ismount(directory):
        return directory
    owner = "" if options.uid is None else f",uid={options.uid},gid={options.gid}"
    size = options.memory + max(options.memory // 16 + HEADROOM_BYTES, _growth_bytes(options.memory))
    for huge in (",huge=within_size", ""):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700{owner}{huge}", SOURCE, directory]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return directory
    if options.uid is not None and options.gid is not None:
        os.chown(directory, options.uid, options.gid, follow_symlinks=False)
    return directory


def _make_for(options: MountOptions, directory: str) -> None:
    """Root's directory for the staging of a user: nobody else can put another in its place."""
    if options.staging is None:
        os.makedirs(os.path.dirname(directory), mode=0o755, exist_ok=True)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        if os.path.ismount(directory) and os.stat(directory).st_uid != options.uid:
            raise OSError(
                errno.EEXIST, f"{directory} is the staging of another user's mount that did not end: umount it"
            )


def _growth_bytes(memory_bytes: int) -> int:
    """How far a file that the kernel writes without asking may pass ``memory``: half of what is left to this node."""
    try:
        return (machine.memory_limit_bytes() - memory_bytes) // 2
    except UsageError:
        return 0


def is_in_use(options: MountOptions) -> bool:
    """Whether staging belongs to a mount, alive or dead."""
    return os.path.exists(os.path.join(staging_directory(options), PFS_TOKEN))


def release(options: MountOptions) -> None:
    """Undo ``prepare``. A directory that the user gave, or that is not empty, stays."""
    if options.staging is not None:
        return
    directory = staging_directory(options)
    if os.path.ismount(directory):
        subprocess.run(["umount", "-l", directory], capture_output=True, check=False)  # a child may still be ending
    try:
        os.rmdir(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY, errno.ENOENT, errno.EACCES, errno.EPERM):
            raise
