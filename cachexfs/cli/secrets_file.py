"""The file with a job's shared secret, or a site's key: that nobody else can read it.

Role: called by ``cachexfs.cli.options`` and ``cachexfs job-secret``. No concurrency.
"""

from __future__ import annotations

import os
import stat

from cachexfs.errors import UsageError

SECRET_BYTES_MIN = 16


def check_secret_file(path: str) -> None:
    """Raise ``UsageError`` unless the file exists, only its owner and group may read it, and it is long enough."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise UsageError(f"cannot read the secret '{path}': {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"the secret '{path}' is not a regular file")
    if status.st_mode & 0o007:
        raise UsageError(
            f"everybody can read the secret '{path}': chmod 600 it, and make a new one if others use this machine"
        )
    if not os.access(path, os.R_OK):
        raise UsageError(f"cannot read the secret '{path}': it belongs to somebody else")
    if status.st_size < SECRET_BYTES_MIN:
        raise UsageError(f"the secret '{path}' has {status.st_size} bytes, at least {SECRET_BYTES_MIN} are needed")
