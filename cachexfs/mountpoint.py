"""The bare directory under a mount: it refuses writes while it is a mount point.

Role: base layer. If the mount dies or somebody detaches it, an application must get an error, not a checkpoint on the
local disk. ``cachexfs mount`` protects the directory, ``cachexfs umount`` takes the protection off again.
"""

from __future__ import annotations

import array
import fcntl
import os

FS_IOC_GETFLAGS, FS_IOC_SETFLAGS = 0x80086601, 0x40086602  # linux/fs.h
FS_IMMUTABLE_FL = 0x10


def protect(directory: str) -> bool:
    """Make an unmounted directory immutable; False where this user or filesystem cannot."""
    return _set_immutable(directory, on=True)


def unprotect(directory: str) -> bool:
    """Undo ``protect``; False when there was nothing to undo or it cannot be undone."""
    return _set_immutable(directory, on=False)


def _set_immutable(directory: str, *, on: bool) -> bool:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        flags = array.array("l", [0])
        fcntl.ioctl(fd, FS_IOC_GETFLAGS, flags, True)
        wanted = flags[0] | FS_IMMUTABLE_FL if on else flags[0] & ~FS_IMMUTABLE_FL
        if wanted == flags[0]:
            return False
        fcntl.ioctl(fd, FS_IOC_SETFLAGS, array.array("l", [wanted]))
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)
