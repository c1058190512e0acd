"""The files of a lone node's catalogue: its lock, snapshots of its journal, and mending a damaged one.

Role: what ``catalogue_builtin`` and ``cachexfs recover --journal`` share. Blocking calls; no concurrency of its own.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cachexfs.core import journal
from cachexfs.core.journal import End, Mutation, Rows
from cachexfs.core.order import lands_at, lists_members
from cachexfs.core.records import ROOT_FID, Dirent, Op, OpKind, dirent_key, generation_key, inode_key, times_key
from cachexfs.core.records import encode as encode_record
from cachexfs.core.replica import Change, Entry, Replica
from cachexfs.errors import CannotTellError, CorruptError, UsageError

JOURNAL_NAME = "catalogue.journal"
LOCK_NAME = "catalogue.lock"
MENDED_NAME = "catalogue.mended"
ROWS_PER_FRAME = 1000


def mend(directory: Path) -> tuple[int, int]:
    """Replace a damaged journal by what of it is whole; returns (records kept, places where bytes were skipped).

    The damaged file stays as ``catalogue.journal.damaged``. The next start sets aside staged files without a name
    instead of removing them. Raises ``UsageError`` while a daemon uses the directory, ``CannotTellError``.
    """
    path = directory / JOURNAL_NAME
    if not path.is_file():
        raise UsageError(f"there is no {JOURNAL_NAME} in {directory}: the mount's error message names the directory")
    lock_fd = lock(directory / LOCK_NAME)
    try:
        data = path.read_bytes()
        if "newer" in journal.scan(data[: journal.HEADER_BYTES]).damage:
            raise UsageError(f"{path} is of a newer CacheX FS, not damaged: use that version")
        view, kept, skipped = Replica(), 0, 0
        for _, payload in journal.whole_frames(data):
            kept, skipped = kept + (payload is not None), skipped + (payload is None)
            _apply_leniently(view, payload)
        _mend_names(view)
        if skipped:
            _mend_order(view)
            _mend_commits(view)
        fresh = path.with_suffix(".new")
        os.close(write_snapshot(fresh, list(view.items()), view.revision, fsync=True))
        os.replace(path, path.with_suffix(".journal.damaged"))
        os.replace(fresh, path)
        (directory / MENDED_NAME).touch()
        sync_directory(directory)
    except OSError as error:
        raise CannotTellError(f"cannot mend {path}: {error.strerror}") from error
    finally:
        os.close(lock_fd)
    return kept, skipped


def count_pending(directory: Path) -> tuple[int, int]:
    """(changes of the PFS that wait, bytes of the files among them) in the staging of a mount without a daemon.

    Changes nothing. Raises ``CorruptError`` where the journal is not whole to its end, or was not and has been mended:
    what it has lost may be a change. Raises ``OSError`` where there is none (several nodes).
    """
    data = (directory / JOURNAL_NAME).read_bytes()
    found = journal.scan(data)
    if found.damage or found.good_length < max(len(data), journal.HEADER_BYTES) or (directory / MENDED_NAME).exists():
        raise CorruptError(f"{directory / JOURNAL_NAME} is not whole: what waits is not known")
    view = Replica()
    for payload in found.payloads:
        _apply_leniently(view, payload)
    waiting = [op for _, op, _ in view.ops()]
    return len(waiting), sum(op.size for op in waiting if op.kind == OpKind.PUT and not op.cancelled)


def _mend_names(view: Replica) -> None:
    """What has lost its name gets that back from a pending change, else it is forgotten: its bytes become orphans."""
    for fid, inode in view.inodes():
        if fid == ROOT_FID or view.names_of(fid):
            continue
        ops = view.ops_of(fid)
        name = next((found for _, op in reversed(ops) if (found := _free_name(view, op))), None)
        if name is not None:
            changes = [Change(dirent_key(*name), encode_record(Dirent(fid, inode.kind)), view.revision, view.revision)]
        else:
            changes = _without(view, fid)
        view.apply(view.revision, changes)
    _mend_paths(view)


def _mend_paths(view: Replica) -> None:
    """A name below a directory that nothing leads to is no name: its file is forgotten if it has no other."""
    for fid, _ in list(view.inodes()):
        names = view.names_of(fid)
        nowhere = [(parent, name) for parent, name in names if view.path(parent) is None]
        changes = [Change(dirent_key(*name), None, 0, view.revision) for name in nowhere]
        if nowhere and len(nowhere) == len(names):
            changes += _without(view, fid)
        view.apply(view.revision, changes)


def _mend_order(view: Replica) -> None:
    """A pending change whose creation is lost, and that was noted again later, gets its place back.

    A lone node's keys sort in the order of issue; directories' attributes have no order.
    """
    rows = sorted((row for row in view.ops() if row[1].kind != OpKind.DIRATTR), key=lambda row: row[0])
    places, first = list[tuple[int, bytes, Op]](), view.revision
    for key, op, created in reversed(rows):
        first = min(first, created)
        places.append((first, key, op))
    if [created for _, _, created in rows] == [created for created, _, _ in reversed(places)]:
        return
    view.apply(view.revision, [Change(key, None, 0, view.revision) for key, _, _ in rows])
    again = [Change(key, encode_record(op), created, view.revision) for created, key, op in reversed(places)]
    view.apply(view.revision, again)


def _without(view: Replica, fid: int) -> list[Change]:
    keys = [inode_key(fid), generation_key(fid), times_key(fid), *(key for key, _ in view.ops_of(fid))]
    return [Change(key, None, 0, view.revision) for key in keys]


def _mend_commits(view: Replica) -> None:
    """What was to land before a commit file may be what is missing: it is kept hidden, and seen once it is whole."""
    lands = (OpKind.PUT, OpKind.RENAME, OpKind.LINK)
    for key, op, created in list(view.ops()):
        if op.commit and op.kind in lands and lists_members(lands_at(op).rpartition(b"/")[2]):
            held = encode_record(msgspec.structs.replace(op, cancelled=True))
            view.apply(view.revision, [Change(key, held, created, view.revision)])


def _free_name(view: Replica, op: Op) -> tuple[int, bytes] | None:
    """(parent, name) of the path that a pending change speaks of, if nothing has it."""
    *directories, name = (op.path2 or op.path).split(b"/")
    parent = ROOT_FID
    for directory in directories:
        entry = view.lookup(parent, directory)
        if entry is None or entry.kind != "d":
            return None
        parent = entry.fid
    is_free = name and op.kind in (OpKind.PUT, OpKind.RENAME, OpKind.MKDIR) and view.lookup(parent, name) is None
    return (parent, name) if is_free else None


def _apply_leniently(view: Replica, payload: bytes | None) -> None:
    """Take over one record whatever is missing before it."""
    try:
        item = journal.decode(payload) if payload is not None else None
    except ValueError:
        return
    if isinstance(item, Rows):
        view.apply(view.revision, [Change(*row) for row in item.rows])
    elif isinstance(item, Mutation) and item.revision > view.revision:
        view.apply(item.revision, changes_of(view, item.revision, item.changes))
    elif isinstance(item, End) and item.revision > view.revision:
        view.apply(item.revision, [])


def changes_of(view: Replica, revision: int, changes: list[tuple[bytes, bytes | None]]) -> list[Change]:
    made = []
    for key, value in changes:
        entry = view.entry(key)
        made.append(Change(key, value, entry.created if entry else revision, revision))
    return made


def write_snapshot(path: Path, entries: Sequence[tuple[bytes, Entry]], revision: int, fsync: bool) -> int:
    """Write a snapshot to a new file; returns its descriptor, open for appending. Runs in a worker thread."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        write(fd, journal.header())
        for start in range(0, len(entries), ROWS_PER_FRAME):
            part = entries[start : start + ROWS_PER_FRAME]
            rows = [(key, entry.encoded, entry.created, entry.modified) for key, entry in part]
            write(fd, journal.encode(Rows(rows)))
        write(fd, journal.encode(End(revision, len(entries))))
        if fsync:
            os.fdatasync(fd)
    except BaseException:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


def write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock(path: Path) -> int:
    """Take the directory's lock; raises ``UsageError`` naming the process that has it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CannotTellError(f"cannot open {path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise UsageError(
            f"another daemon (process {owner}) uses {path.parent}: unmount it first, or give this mount its own staging"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
