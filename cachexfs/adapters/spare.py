"""Spare memory: what removed staged files leave for the next ones.

Role: a first touch of memory costs more than the copy into it: pages are cleared, huge ones are looked for, and a
virtual machine may have given the free ones back to its host (measured here: 0.4 GB/s for 10). So a removed file
becomes a spare, and a growing file gets memory that a spare gives up just before: the kernel hands out first what
was freed last. So does the page cache of a first read. A spare is only ever shortened, never written: an old reader
could see a short file, not foreign bytes.

Concurrency: none; called by ``Staging`` in the daemon's thread. A system call or two for each 2 MiB.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

OPEN_SUFFIX = ".open"
OPEN_FILES_MAX = 8  # asked at every creation
PIECE_BYTES = 2 << 20  # a huge page: what memory is worth keeping in, and is given up in
#: Half a huge page, which the kernel splits for it: freed whole, it would wait on a list of its own for the next huge
#: page, and who takes small pages, as the page cache does, would touch new memory (``bench_mount.py --only read``).
SMALL_PIECE_BYTES = PIECE_BYTES // 2


class Spare:
    """Files of a directory beside the staged ones, as memory that is kept. ``bytes``: how much.

    ``open_bytes``: beyond that, in removed files that somebody has open, of which it is the kernel's to give back.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[tuple[Path, int]] = []
        self._open: list[tuple[Path, int]] = []
        self._number = 0
        self.bytes = self.open_bytes = 0

    def open(self) -> None:
        """Make the directory, or take over what an earlier daemon left in it. Raises ``OSError``."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in self._directory.iterdir():
            if not path.stem.isdecimal() or path.suffix not in ("", OPEN_SUFFIX):
                continue  # not ours
            self._number = max(self._number, int(path.stem) + 1)
            (self._wait_for if path.suffix else self._add)(path, path.stat().st_size)

    def _add(self, path: Path, size: int) -> None:
        self._files.append((path, size))
        self.bytes += size

    def _wait_for(self, path: Path, size: int) -> None:
        self._open.append((path, size))
        self.open_bytes += size

    def take(self, path: Path, room_bytes: int) -> bool:
        """Keep the memory of a staged file that is not needed any more, up to ``room_bytes``; else False.

        Not that of a small or sparse one. One that somebody has open counts once nobody has (``look``).
        """
        try:
            found = path.stat()
            if found.st_size < PIECE_BYTES or found.st_blocks * 512 < found.st_size:
                return False
            kept = self._directory / f"{self._number}{OPEN_SUFFIX}"
            path.rename(kept)
        except OSError:
            return False
        self._number += 1
        self._wait_for(kept, found.st_size)
        self.look(room_bytes)
        if len(self._open) > OPEN_FILES_MAX:
            self.forget_open()
        return True

    def look(self, room_bytes: int) -> None:
        """Count what nobody has open any more: on that the kernel grants a lease for writing."""
        waiting, self._open, self.open_bytes = self._open, [], 0
        for path, size in waiting:
            try:
                kept_bytes = _cut_unless_open(path, room_bytes)
            except BlockingIOError:
                self._wait_for(path, size)
                continue
            except OSError:
                kept_bytes = 0
            if kept_bytes:
                self._add(path.rename(path.with_suffix("")), kept_bytes)
                room_bytes -= kept_bytes
            else:
                path.unlink(missing_ok=True)

    def forget_open(self) -> None:
        """Memory is wanted: let go of what others have open; the kernel frees it once they close it."""
        while self._open:
            path, size = self._open.pop()
            path.unlink(missing_ok=True)
            self.open_bytes -= size

    def begin(self) -> tuple[int, int]:
        """(descriptor, number) of a new spare file, to be filled; it counts once ``end`` was called."""
        number, self._number = self._number, self._number + 1
        return os.open(self._directory / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), number

    def end(self, number: int, length: int) -> None:
        """The first ``length`` bytes of a new spare file have been touched."""
        path, size = self._directory / str(number), length // PIECE_BYTES * PIECE_BYTES
        if size:
            os.truncate(path, size)
            self._add(path, size)
        else:
            path.unlink(missing_ok=True)

    def give(self, length: int, piece_bytes: int = PIECE_BYTES) -> int:
        """Give up memory, at least ``length`` bytes if there are so many, in pieces; returns how many bytes."""
        given = 0
        while given < length and self._files:
            path, size = self._files.pop()
            keep = max(0, size - (length - given)) // piece_bytes * piece_bytes
            if keep:
                os.truncate(path, keep)
                self._files.append((path, keep))
            else:
                path.unlink()
            given += size - keep
        self.bytes -= given
        return given


def _cut_unless_open(path: Path, room_bytes: int) -> int:
    """Cut a file to whole pieces within the room; its size then. Raises ``BlockingIOError``: somebody has it open."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        size = max(0, min(os.fstat(fd).st_size, room_bytes)) // PIECE_BYTES * PIECE_BYTES
        os.ftruncate(fd, size)
    finally:
        os.close(fd)
    return size
