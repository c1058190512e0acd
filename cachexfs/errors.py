"""The errors of CacheX FS.

Role: the one place where a kind of failure gets its class. The core and the engine raise these; the
FUSE adaptor turns ``FsError`` into its errno, the command line turns ``CacheXError`` into one line on
stderr and ``exit_code``. A message says what happened and what to do about it.
"""

from __future__ import annotations

import errno as _errno
import os

EXIT_DONE = 0
EXIT_NO = 1
EXIT_USAGE = 2
EXIT_NOT_DURABLE = 3
EXIT_CANNOT_TELL = 4
EXIT_TIMEOUT = 124


class CacheXError(Exception):
    """Base of all errors that a user may see. ``exit_code`` is what a command ends with."""

    exit_code: int = EXIT_CANNOT_TELL


class UsageError(CacheXError):
    """Wrong option, wrong value, wrong combination: the user can correct the call."""

    exit_code = EXIT_USAGE


class NotDurableError(CacheXError):
    """Data is not durable, lost or unprotected where the command was to ensure the contrary."""

    exit_code = EXIT_NOT_DURABLE


class CannotTellError(CacheXError):
    """No daemon, no readable PFS, no catalogue: the answer is unknown, not negative."""

    exit_code = EXIT_CANNOT_TELL


class TimedOutError(CacheXError):
    """A deadline given by the user has passed."""

    exit_code = EXIT_TIMEOUT


class CorruptError(CacheXError):
    """Bytes on disk or on the wire are not what their digest, length or format says."""

    exit_code = EXIT_NOT_DURABLE


class PeerError(CacheXError):
    """The peer broke the protocol or failed to authenticate (its fault, not ours)."""


class CatalogueUnavailableError(CacheXError):
    """The catalogue has no majority or does not answer: nothing can be published now."""


class FsError(CacheXError):
    """A failure with an errno, for the application's system call.

    Parameters: ``code`` an errno value, ``why`` a sentence for logs and the ``error`` attribute.
    ``fid``: the file that it is about, where only who raises it knows.
    """

    def __init__(self, code: int, why: str = "", fid: int = 0) -> None:
        super().__init__(why or os.strerror(code))
        self.errno = code
        self.fid = fid


class LateError(FsError):
    """An fsync whose boundary did not come in time. It may come later."""


def enoent(why: str = "") -> FsError:
    """ENOENT as an ``FsError``."""
    return FsError(_errno.ENOENT, why)


def quoted(path: bytes | str | None) -> str:
    """A path as messages show it: in quotes, with control characters and bytes that are not UTF-8 escaped."""
    if path is None:
        return "a file without a name"
    text = path if isinstance(path, str) else path.decode("utf-8", "surrogateescape")
    return "'" + "".join(c if c.isprintable() else _escaped(c) for c in text) + "'"


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte, as os.fsdecode has it
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape", "surrogatepass").decode()
