"""One call's view of the PFS directory: is it the right one, and safe ways to the names in it.

Role: used by the operations inside a PFS child process (``pfs_ops``). Imports little, so that a child
starts fast. Concurrency: none, a child does one call at a time; a ``PfsDir`` lives for one call.

*The right one*: an unmounted mount point is an ordinary empty directory of the local disk, and takes writes in
silence. So ``PFS_DIR/.cachexfs/id`` holds a random token, made by the first mount that finds no ``.cachexfs`` at all.
The token is the identity. Device and inode numbers alone would not do: a remount changes the device, and a new
directory may get the old one's inode.

A child that has read the token once then only looks whether the id file is still the same file.

*Is it whole?* Where a server of it is down, some shared filesystems answer ENOENT for the names that it holds, and
leave them out of listings. So ``.cachexfs/names`` holds files that never change, spread over the servers as all names
are. An answer that rests on a name's absence counts only when all of them are listed (``make_sure``), before and after.

*Safe ways*: directories are opened one component at a time with ``O_NOFOLLOW``, everything else goes by the
descriptor of its directory. A symlink planted on the PFS leads nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType

from cachexfs.core import witnesses
from cachexfs.core.reserved import BESIDE_PREFIX, STATE_DIR, WHY

TMP_DIR = b"tmp"
HELD_DIR = b"held"
ID_NAME = b"id"
TOKEN_CHARS = 32
LOOKS = 2  # that must agree on a name's absence
#: Prepared files are spread over so many directories, by name: a directory's lock, in every client and server, is held
#: during each create and rename in it.
TMP_SHARDS = 16
#: How long an id file may be short: another node has created it and not yet written it.
TOKEN_WAIT_S = 2.0
NAME_BYTES_MAX = 255

_WALK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Filesystems that cannot fsync a directory say so with one of these; they promise nothing to wait for.
_NO_DIR_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class PfsIdentity:
    """Which directory this is: device and inode numbers as first seen, and the token in ``.cachexfs/id``."""

    dev: int
    ino: int
    token: str


#: What the id file with a token looked like when it was read: token -> device, inode, ctime.
Memory = dict[str, tuple[int, int, int]]


class RootError(OSError):
    """The PFS directory itself is not there, not reachable or not the one that was mounted."""


def stale(why: str) -> RootError:
    """ESTALE: what lies at PFS_DIR now is not what was mounted."""
    return RootError(errno.ESTALE, f"PFS_DIR is not the directory that was mounted: {why}")


HELD_PREFIX = STATE_DIR + b"/" + HELD_DIR + b"/"
TMP_PREFIX = STATE_DIR + b"/" + TMP_DIR + b"/"


def split(path: bytes) -> list[bytes]:
    """The components of a path relative to the PFS directory. Raises OSError (EINVAL) for any other kind of path."""
    if not path:
        return []
    parts = path.split(b"/")
    for part in parts:
        if part in (b"", b".", b"..") or b"\0" in part:
            raise OSError(errno.EINVAL, "not a plain relative path", os.fsdecode(path))
        if len(part) > NAME_BYTES_MAX:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), os.fsdecode(path))
    if parts[0] == STATE_DIR or parts[-1].startswith(BESIDE_PREFIX):
        raise OSError(errno.EPERM, WHY, os.fsdecode(path))
    return parts


def plain_name(name: str) -> bytes:
    """A hidden name as bytes. Raises OSError (EINVAL) unless it is one component without ``~``."""
    raw = os.fsencode(name)
    if not raw or raw.startswith(b".") or b"/" in raw or b"\0" in raw or b"~" in raw or len(raw) > NAME_BYTES_MAX - 40:
        raise OSError(errno.EINVAL, "not a hidden name", name)
    return raw


def fsync_dir(fd: int) -> None:
    """fsync a directory given by any descriptor of it, an ``O_PATH`` one too."""
    real = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    try:
        os.fsync(real)
    except OSError as error:
        if error.errno not in _NO_DIR_FSYNC:
            raise
    finally:
        os.close(real)


def remove_quietly(name: bytes, dir_fd: int) -> None:
    """unlink without complaint: on some filesystems ``rm`` itself fails with ENOSPC."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=dir_fd)


class PfsDir:
    """The PFS directory, opened for one call.

    Parameters: ``path`` PFS_DIR; ``identity`` what it must be, None only for ``establish``; ``mutating`` demands the
    token, while a call that only reads is content with the same device and inode; ``memory`` lives as long as the
    process. Raises ``RootError``.
    """

    def __init__(self, path: bytes, identity: PfsIdentity | None, memory: Memory, *, mutating: bool) -> None:
        self._fds: list[int] = []
        self._state_fd: int | None = None
        self._memory = memory
        self._identity = identity
        try:
            self.root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise stale(f"{os.fsdecode(path)}: {error.strerror}") from None
            raise RootError(error.errno, f"PFS_DIR cannot be opened: {error.strerror}") from None
        self._fds.append(self.root)
        try:
            self._check(identity, mutating)
        except BaseException:
            self.close()
            raise

    def _check(self, identity: PfsIdentity | None, mutating: bool) -> None:
        try:
            found = os.fstat(self.root)
        except OSError as error:
            raise RootError(error.errno, f"PFS_DIR cannot be examined: {error.strerror}") from None
        self.dev, self.ino = found.st_dev, found.st_ino
        if identity is None or (not mutating and (self.dev, self.ino) == (identity.dev, identity.ino)):
            return
        seen = self._id_file()
        if seen is not None and self._memory.get(identity.token) == seen:
            return
        token = self._token()
        if token is None:
            raise stale("it has no .cachexfs/id (is it unmounted?)")
        if token != identity.token:
            raise stale(f".cachexfs/id is {token}, was {identity.token}")
        if seen is not None:
            self._memory[token] = seen

    def _id_file(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(ID_NAME, dir_fd=self._state(), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise RootError(error.errno, f".cachexfs/id cannot be examined: {error.strerror}") from None
        return found.st_dev, found.st_ino, found.st_ctime_ns

    def __enter__(self) -> PfsDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor that this call opened."""
        while self._fds:
            os.close(self._fds.pop())

    def keep(self, fd: int) -> int:
        """Have ``fd`` closed with the call."""
        self._fds.append(fd)
        return fd

    def _state(self) -> int:
        if self._state_fd is None:
            self._state_fd = self.keep(os.open(STATE_DIR, _WALK, dir_fd=self.root))
        return self._state_fd

    def _token(self) -> str | None:
        """The token, or None where there is no id file. Waits while it is short."""
        end_s = time.monotonic() + TOKEN_WAIT_S
        while True:
            try:
                fd = os.open(ID_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._state())
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise RootError(error.errno, f".cachexfs/id cannot be read: {error.strerror}") from None
            try:
                text = os.read(fd, TOKEN_CHARS + 1).decode("ascii", "replace").strip()
            except OSError as error:
                raise RootError(error.errno, f".cachexfs/id cannot be read: {error.strerror}") from None
            finally:
                os.close(fd)
            if len(text) == TOKEN_CHARS:
                return text
            if time.monotonic() > end_s:
                raise RootError(errno.EIO, ".cachexfs/id is damaged: see docs/pfs.md")
            time.sleep(0.05)

    def establish(self) -> PfsIdentity:
        """Read the identity; make it where there is no ``.cachexfs`` yet. Several nodes may do so at once."""
        end_s = time.monotonic() + TOKEN_WAIT_S
        while True:
            try:
                self._state()
            except FileNotFoundError:
                self._make_state()
            token = self._token()
            if token is not None:
                return PfsIdentity(self.dev, self.ino, token)
            if time.monotonic() > end_s:
                raise RootError(errno.EIO, "there is .cachexfs, and no .cachexfs/id in it: see docs/pfs.md")
            time.sleep(0.05)

    def ensure_names(self) -> None:
        """Make ``.cachexfs/names`` where it is missing."""
        try:
            self.keep(os.open(witnesses.DIRECTORY, _WALK, dir_fd=self._state()))
        except FileNotFoundError:
            self._put(witnesses.DIRECTORY, self._state(), _fill_names)

    def _make_state(self) -> None:
        """The whole of ``.cachexfs`` at once: a crash leaves no half of it."""

        def fill(state: int) -> None:
            for name in (TMP_DIR, HELD_DIR):
                _mkdir(name, state)
            self._put(witnesses.DIRECTORY, state, _fill_names)
            _write_new(ID_NAME, state, secrets.token_hex(TOKEN_CHARS // 2).encode() + b"\n")

        self._put(STATE_DIR, self.root, fill)

    def _put(self, name: bytes, parent: int, fill: Callable[[int], None]) -> None:
        """Make a directory, unless it is there: aside, filled and synced, then renamed."""
        aside = BESIDE_PREFIX + secrets.token_hex(8).encode()
        os.mkdir(aside, 0o700, dir_fd=parent)
        try:
            fd = self.keep(os.open(aside, _WALK, dir_fd=parent))
            fill(fd)
            fsync_dir(fd)
            os.rename(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                shutil.rmtree(aside, dir_fd=parent)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise  # else another node was first
        fsync_dir(parent)

    def make_sure(self) -> None:
        """Raise ``RootError`` (EIO) unless the PFS shows all the names that are always there.

        Of a directory without a known identity nothing is known.
        """
        if self._identity is None:
            return
        try:
            seen = names_in(self.keep(os.open(witnesses.DIRECTORY, _WALK, dir_fd=self._state())))
        except OSError as error:
            raise RootError(errno.EIO, f".cachexfs/names cannot be listed: {error.strerror}") from None
        if said := witnesses.complaint(seen):
            raise RootError(errno.EIO, said)

    def remove(self, names: Iterable[bytes], dir_fd: int) -> None:
        """unlink; a name that is not there is no error, if the PFS is whole. Raises OSError."""
        left = list(names)
        for _ in range(LOOKS):
            left = [name for name in left if not _unlinked(name, dir_fd)]
            if not left:
                return
            self.make_sure()

    def held(self) -> int:
        """Descriptor of ``.cachexfs/held``."""
        return self._inner(self._state(), HELD_DIR)

    def tmp(self, name: bytes) -> int:
        """Descriptor of the directory below ``.cachexfs/tmp`` where files of this name are prepared."""
        return self._inner(self._inner(self._state(), TMP_DIR), b"%x" % (zlib.crc32(name) % TMP_SHARDS))

    def tmp_all(self) -> list[int]:
        """Descriptors of all those directories that exist."""
        tmp = self._inner(self._state(), TMP_DIR)
        return [self._inner(tmp, name) for name in sorted(names_in(tmp))]

    def _inner(self, fd: int, name: bytes) -> int:
        """Descriptor of a directory of ours, made (again) where it is missing."""
        try:
            return self.keep(os.open(name, _WALK, dir_fd=fd))
        except FileNotFoundError:
            _mkdir(name, fd)
            fsync_dir(fd)
            return self.keep(os.open(name, _WALK, dir_fd=fd))

    def directory(self, path: bytes) -> int:
        """Descriptor (``O_PATH``) of a directory. Raises OSError: ENOENT, ENOTDIR (a symlink, too)."""
        return self._walk(split(path), path)

    def place(self, path: bytes) -> tuple[int, bytes]:
        """``parent`` of a path, or of a held file, ``.cachexfs/held/<name>``."""
        if path.startswith(HELD_PREFIX):
            return self.held(), plain_name(os.fsdecode(path.removeprefix(HELD_PREFIX)))
        return self.parent(path)

    def to_read(self, path: bytes) -> tuple[int, bytes]:
        """``place``, also of a file that is ready, ``.cachexfs/tmp/<name>``: nothing but ``land`` changes that."""
        if path.startswith(TMP_PREFIX):
            name = plain_name(os.fsdecode(path.removeprefix(TMP_PREFIX)))
            return self.tmp(name), name
        return self.place(path)

    def parent(self, path: bytes) -> tuple[int, bytes]:
        """Descriptor of the directory that holds ``path``, and the last name. EINVAL for the root."""
        parts = split(path)
        if not parts:
            raise OSError(errno.EINVAL, "the PFS directory itself cannot be changed so")
        return self._walk(parts[:-1], path), parts[-1]

    def _walk(self, parts: list[bytes], path: bytes) -> int:
        fd = self.root
        for part in parts:
            try:
                fd = self.keep(os.open(part, _WALK, dir_fd=fd))
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror} (at {part!r})", os.fsdecode(path)) from None
        return fd


def names_in(fd: int) -> list[bytes]:
    """The names in a directory given by any descriptor of it."""
    return [os.fsencode(name) for name in os.listdir(f"/proc/self/fd/{fd}")]


def _unlinked(name: bytes, dir_fd: int) -> bool:
    try:
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return False
    return True


def _fill_names(fd: int) -> None:
    space = os.fstatvfs(fd)
    total = witnesses.WITNESSES_MAX
    if space.f_files:  # else the filesystem does not count them
        total = min(total, max(1, space.f_favail // witnesses.INODES_PER_WITNESS))
    for name in witnesses.witnesses(total):
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd))


def _mkdir(name: bytes, dir_fd: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=dir_fd)


def _write_new(name: bytes, dir_fd: int, data: bytes) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """write(2) until all is written: a short write comes before ENOSPC."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        if written == 0:
            raise OSError(errno.EIO, "write wrote nothing")
        view = view[written:]


def kind_of(mode: int) -> str:
    """The letter of ``Dirent.kind`` for an ``st_mode``."""
    letters = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l", stat.S_IFIFO: "p", stat.S_IFSOCK: "s"}
    letters |= {stat.S_IFCHR: "c", stat.S_IFBLK: "b"}
    return letters[stat.S_IFMT(mode)]
