"""What a PFS child process does to files: prepare, land, discard; what its other calls (``pfs_names``, ``pfs_reads``)
share with that.

Role: plain functions from a request's arguments to a msgpack-able answer, called by ``pfs_worker``.
Concurrency: none here, but several children, of several nodes, work in the same directory, and an abandoned child
is always possible. It has had SIGKILL, so it does *at most the one system call that it hangs in*, possibly hours
later. Why that does no harm:

=============================  =====================================================================================
late system call               effect
=============================  =====================================================================================
create of a part, O_EXCL       an empty part with a name of its own (``<hidden>~<nonce>``), never used by others
write, fsync of a part         the part has been unlinked by the next attempt: bytes of a nameless inode
rename part -> hidden          the next attempt has unlinked the part first: ENOENT. (Unlinking a *fixed* name first
                               would not do: the late call might be that unlink, and hit the new attempt's file.)
rename hidden -> path          the retry has landed it, or it was discarded: ENOENT. Until the call has ended the
unlink of hidden or record     pool refuses to prepare this name anew (EBUSY): a late call would hit the new file.
unlink, rmdir, rename, mkdir,  may hit what is there by then. Nobody touches the path until the call has ended:
attributes of a path           the pool refuses with EBUSY (``PfsCalls.refuse``)
=============================  =====================================================================================
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from cachexfs.adapters import pfs_copy
from cachexfs.adapters.pfs_attrs import Attrs, StatRow, row_of, set_attrs_of, stat_row
from cachexfs.adapters.pfs_dir import (
    LOOKS,
    Memory,
    PfsDir,
    PfsIdentity,
    RootError,
    fsync_dir,
    names_in,
    plain_name,
    remove_quietly,
    write_all,
)
from cachexfs.core.reserved import BESIDE_PREFIX

RECORD_SUFFIX = b".rec"
#: The prepared file that ``land`` wants is not there or not whole: prepare it again. (ENOENT: the parent is missing.)
NOT_PREPARED = errno.ENODATA
RECORD_BYTES_MAX = 4 << 20

EXAMINE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FinalError(OSError):
    """What must not be asked again: the filesystem might say "ok" now."""


class Monitor(pfs_copy.Monitor, Protocol):
    """How an operation speaks to the pool while it runs."""

    def note(self, value: int) -> None:
        """Something that the pool must know should the answer be lost: the inode about to be renamed."""
        ...

    def page(self, rows: Sequence[tuple[bytes, object]]) -> None:
        """A part of a listing."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """What every operation is given. ``nonce`` is unique to the call."""

    path: bytes
    identity: PfsIdentity | None
    nonce: str
    monitor: Monitor
    memory: Memory

    def open(self, *, mutating: bool) -> PfsDir:
        """The PFS directory, checked."""
        return PfsDir(self.path, self.identity, self.memory, mutating=mutating)


P = ParamSpec("P")
R = TypeVar("R")


def certain(function: Callable[Concatenate[Context, P], R]) -> Callable[Concatenate[Context, P], R]:
    """Have an operation say "not there" only where the PFS is whole, and twice in a row."""

    def look(context: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        for again in reversed(range(LOOKS)):
            try:
                return function(context, *args, **kwargs)
            except (RootError, FinalError):
                raise
            except OSError as error:
                if error.errno not in (errno.ENOENT, NOT_PREPARED):
                    raise
                with context.open(mutating=False) as pfs:
                    pfs.make_sure()
                if not again:
                    raise
        raise AssertionError

    return look


def probe(context: Context, parts: bool) -> tuple[int, int, str, list[str]]:
    """Identity (made at the first time of all), and on demand the parts in ``.cachexfs/tmp``."""
    known = context.identity
    with context.open(mutating=True) as pfs:
        token = pfs.establish().token if known is None else known.token
        pfs.ensure_names()
        if not parts:  # else a restart with a server down would have to do without the others, too
            pfs.make_sure()
        names = [name for fd in pfs.tmp_all() for name in names_in(fd)] if parts else []
        return pfs.dev, pfs.ino, token, [os.fsdecode(name) for name in names if b"~" in name]


def prepare(
    context: Context,
    source: str,
    size: int,
    hidden: str,
    attrs: Attrs,
    record: bytes,
    digest: bytes,
    old: list[str],
    scan: bool,
) -> int:
    """See ``Pfs.prepare``. ``digest``: xxh3_128 to verify by reading back, or empty. ``old``: parts of earlier
    attempts to remove first; ``scan``: look for more of them. Returns the inode number."""
    name = plain_name(hidden)
    part = name + b"~" + context.nonce.encode()
    record_part = name + RECORD_SUFFIX + b"~" + context.nonce.encode()
    source_fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with context.open(mutating=True) as pfs:
            tmp = pfs.tmp(name)
            _remove_parts(tmp, name, old, scan)
            try:
                ino = _write_part(part, tmp, source_fd, size, attrs, context.monitor)
                if digest:
                    pfs_copy.check_digest(part, tmp, size, digest, context.monitor)
                _write_small(record_part, tmp, record)
                # The record first: bytes without a record could not be put anywhere.
                os.rename(record_part, name + RECORD_SUFFIX, src_dir_fd=tmp, dst_dir_fd=tmp)
                os.rename(part, name, src_dir_fd=tmp, dst_dir_fd=tmp)
                fsync_dir(tmp)
            except BaseException:
                for left in (part, record_part):
                    remove_quietly(left, tmp)
                raise
            return ino
    finally:
        os.close(source_fd)


def _remove_parts(tmp: int, name: bytes, old: list[str], scan: bool) -> None:
    names = {os.fsencode(entry) for entry in old}
    if scan:
        starts = (name + b"~", name + RECORD_SUFFIX + b"~")
        names |= {raw for raw in names_in(tmp) if raw.startswith(starts)}
    for raw in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(raw, dir_fd=tmp)


def _write_part(part: bytes, dir_fd: int, source_fd: int, size: int, attrs: Attrs, monitor: pfs_copy.Monitor) -> int:
    fd = os.open(part, os.O_WRONLY | _NEW, stat.S_IMODE(attrs.mode) & 0o777, dir_fd=dir_fd)
    try:
        pfs_copy.copy(source_fd, fd, size, monitor)
        set_attrs_of(fd, os.fstat(fd), attrs)
        os.fsync(fd)  # once: after an error the filesystem may say "ok" over lost data
        found = os.fstat(fd)
    finally:
        os.close(fd)
    if found.st_size != size:
        raise OSError(errno.EIO, f"the copy has {found.st_size} bytes, not {size}")
    return found.st_ino


def _write_small(name: bytes, dir_fd: int, data: bytes) -> None:
    fd = os.open(name, os.O_WRONLY | _NEW, 0o600, dir_fd=dir_fd)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


@certain
def land(context: Context, hidden: str, path: bytes, attrs: Attrs, size: int, ino: int) -> StatRow:
    """See ``Pfs.land``. ``size``, ``ino``: of the prepared file, -1 when unknown. When the answer of an earlier attempt
    was lost, the file is at the path already."""
    name = plain_name(hidden)
    with context.open(mutating=True) as pfs:
        tmp = pfs.tmp(name)
        parent, last = pfs.place(path)
        try:
            fd = pfs.keep(os.open(name, EXAMINE, dir_fd=tmp))
        except FileNotFoundError:
            fd = pfs.keep(_landed_before(parent, last, size, ino, hidden))
            row = row_of(os.fstat(fd))
        else:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or size not in (-1, found.st_size):
                raise OSError(NOT_PREPARED, f"the prepared file has {found.st_size} bytes, not {size}", hidden)
            set_attrs_of(fd, found, attrs)
            try:
                os.rename(name, last, src_dir_fd=tmp, dst_dir_fd=parent)
                row = row_of(os.fstat(fd))
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                fd = pfs.keep(_land_beside(context, name, tmp, parent, last, attrs))
                row = row_of(os.fstat(fd))
        try:
            sync_renamed(fd)
        except OSError as error:  # final for this file, which lies there already: another must take its place
            raise FinalError(NOT_PREPARED, f"fsync after the rename: {error.strerror}", hidden) from None
        fsync_dir(parent)
        remove_quietly(name + RECORD_SUFFIX, tmp)
        return row


def sync_renamed(fd: int) -> None:
    """fsync a file, given by any descriptor, that got its name just now; its attributes, too.

    Some filesystems do nothing at fsync of a directory, but below them a file's own fsync makes its rename durable.
    """
    try:
        real = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        return  # mode 0000 and not root: the fsync of the directory has to do
    try:
        os.fsync(real)
    finally:
        os.close(real)


def _landed_before(parent: int, last: bytes, size: int, ino: int, hidden: str) -> int:
    """A descriptor of the path, if it is the file that was prepared: the answer of an earlier attempt was lost."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(last, EXAMINE, dir_fd=parent)
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and (found.st_size, found.st_ino) == (size, ino):
            return fd
        os.close(fd)
    raise OSError(NOT_PREPARED, "the prepared file is not there", hidden)


def _land_beside(context: Context, source: bytes, tmp: int, parent: int, last: bytes, attrs: Attrs) -> int:
    """The path is on another filesystem (or quota tree) than ``.cachexfs``: copy to a temporary beside it.

    Returns a descriptor of the file that landed.
    """
    beside = BESIDE_PREFIX + context.nonce.encode()
    source_fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=tmp)
    try:
        _write_part(beside, parent, source_fd, os.fstat(source_fd).st_size, attrs, context.monitor)
        os.rename(beside, last, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        remove_quietly(beside, parent)
        raise
    finally:
        os.close(source_fd)
    remove_quietly(source, tmp)
    return os.open(last, EXAMINE, dir_fd=parent)


def discard(context: Context, hidden: str) -> None:
    """Remove a prepared file, its record and all parts of it: what a takeover does first."""
    name = plain_name(hidden)
    with context.open(mutating=True) as pfs:
        tmp = pfs.tmp(name)
        _remove_parts(tmp, name, [], True)
        pfs.remove([name, name + RECORD_SUFFIX], tmp)
        fsync_dir(tmp)


def prepared(context: Context) -> None:
    """Pages of (hidden name, stat with the record's bytes as ``target``) for every record in ``.cachexfs/tmp``.

    A record without its file (landed, or never finished) has kind ``-``.
    """
    with context.open(mutating=True) as pfs:
        pfs.make_sure()
        for tmp in pfs.tmp_all():
            names = set(names_in(tmp))
            for raw in sorted(names):
                if raw.endswith(RECORD_SUFFIX):
                    with contextlib.suppress(FileNotFoundError):
                        _prepared_one(context, tmp, raw, raw.removesuffix(RECORD_SUFFIX), names)
        pfs.make_sure()


def _prepared_one(context: Context, tmp: int, record_name: bytes, hidden: bytes, names: set[bytes]) -> None:
    record = _read_small(record_name, tmp)
    row: StatRow = ("-", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, b"")
    if hidden in names:
        with contextlib.suppress(FileNotFoundError):
            row = stat_row(hidden, tmp)
    context.monitor.page([(hidden, (*row[:-1], record))])


def _read_small(name: bytes, dir_fd: int) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(RECORD_BYTES_MAX)
    finally:
        os.close(fd)


OPERATIONS: dict[str, Callable[..., object]] = {
    "probe": probe,
    "prepare": prepare,
    "land": land,
    "discard": discard,
    "prepared": prepared,
}
