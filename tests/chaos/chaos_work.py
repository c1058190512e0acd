"""What applications do under chaos, each in a process of its own: savers of checkpoints, and random operations.

Role: ``saver`` saves checkpoints in every way that frameworks do, reads them back, and tells a ledger what it did;
``twin`` compares random operations with a plain directory. Both go on until told to end (a line on stdin or its end),
or until the first wrong byte or errno. Exit codes: 0; 1 with the failure on stderr; 5 the mount is gone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import select
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "posix"), str(HERE.parent / "core")]

from chaos_data import Save, digest  # noqa: E402
from twin import Twin  # noqa: E402

GONE = (errno.ENOTCONN, errno.ECONNABORTED)
EXIT_GONE = 5
KEEP = 3


def told_to_end() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


class Saver:
    """One writer: directories below ``root`` that are its own; every change is announced in the ledger first."""

    def __init__(self, root: Path, ledger: Path, seed: str, bytes_max: int) -> None:
        self.root, self.bytes_max, self.seed = root, bytes_max, seed
        self.chance = random.Random(seed)
        self.ledger = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.done: dict[str, Save] = {}
        self.count = 0
        self.slowest_s = 0.0

    def tell(self, *words: str) -> None:
        os.write(self.ledger, ("\t".join(words) + "\n").encode())

    def run(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        while not told_to_end():
            self.count += 1
            began = time.monotonic()
            self.save()
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.look_back()
            while len(fresh := [d for d in self.done if "step" in d]) > KEEP:
                self.forget(fresh[0])
        for directory in list(self.done):
            self.check(directory)
        print(self.count, round(self.slowest_s, 1))

    def save(self) -> None:
        chance = self.chance
        style = chance.choice(("dcp", "dcp", "hf"))
        kind = chance.choice((f"step-{self.count}", f"step-{self.count}", f"over-{style}"))
        save = Save.random(f"{self.seed}.{self.count}", style, chance, self.bytes_max)
        directory = self.root / kind
        self.tell("begin", kind, save.line())
        if chance.random() < 0.2 and "step" in kind:  # written aside, then renamed whole
            aside = directory.with_name(f"tmp-{self.count}")
            self.write_all(save, aside)
            os.rename(aside, directory)
        else:
            self.write_all(save, directory)
        self.done[kind] = save
        self.tell("end", kind, save.line())

    def write_all(self, save: Save, directory: Path) -> None:
        chance = self.chance
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
        sync = chance.random() < 0.6
        names = list(save.sizes)
        chance.shuffle(names)
        for name in names:
            how = chance.choice(self.HOWS)
            how(self, directory / name, save.shard(name), sync)
        if chance.random() < 0.2:  # as Trainer and others do: attributes before the commit
            os.chmod(directory / names[0], 0o600)
        temporary = directory / (save.commit_name + ".tmp")
        self.plain(temporary, save.commit(), sync)
        with contextlib.suppress(FileNotFoundError):
            if chance.random() < 0.5:
                os.unlink(directory / save.commit_name)
        os.rename(temporary, directory / save.commit_name)
        for name in set(os.listdir(directory)) - set(names) - {save.commit_name}:
            os.unlink(directory / name)  # of a save with more shards

    # ---- ways to write a file
    def plain(self, path: Path, data: bytes, sync: bool) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._pour(fd, data, sync)

    def _pour(self, fd: int, data: bytes, sync: bool) -> None:
        try:
            view, piece = memoryview(data), self.chance.choice((4096, 100_000, 1 << 20, 4 << 20))
            while view:
                view = view[os.write(fd, view[:piece]) :]
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def renamed(self, path: Path, data: bytes, sync: bool) -> None:
        aside = path.with_name(path.name + ".part")
        self.plain(aside, data, sync)
        os.rename(aside, path)

    def replaced(self, path: Path, data: bytes, sync: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._pour(fd, data, sync)

    def appended(self, path: Path, data: bytes, sync: bool) -> None:
        """In two goes, the second with O_APPEND; the length before it must be seen."""
        half = len(data) // 2
        self.plain(path, data[:half], False)
        if (size := os.stat(path).st_size) != half:
            raise AssertionError(f"{path}: {size} bytes after the close of {half}")
        self._pour(os.open(path, os.O_WRONLY | os.O_APPEND), data[half:], sync)

    def mapped(self, path: Path, data: bytes, sync: bool) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.ftruncate(fd, len(data))
            with mmap.mmap(fd, len(data)) as map_:
                map_[:] = data
                map_.flush()
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def patched(self, path: Path, data: bytes, sync: bool) -> None:
        """Holes and a placeholder first (zip files, safetensors writers), then r+b over it, read by another."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        cut = len(data) // 3
        try:
            self._all_at(fd, bytes(min(cut, 64)), 0)
            self._all_at(fd, data[cut:], cut)
        finally:
            os.close(fd)
        with open(path, "r+b") as file:
            file.write(data[:cut])
            file.flush()
            if path.read_bytes() != data:
                raise AssertionError(f"{path}: other bytes before the close of a patch")
            if sync:
                os.fsync(file.fileno())

    def copied(self, path: Path, data: bytes, sync: bool) -> None:
        aside = path.with_name(path.name + ".src")
        self.plain(aside, data, False)
        with open(aside, "rb") as one, open(path, "wb") as two:
            done = 0
            while done < len(data):
                if self.chance.random() < 0.5:
                    done += os.copy_file_range(one.fileno(), two.fileno(), len(data) - done, done, done)
                else:
                    os.lseek(two.fileno(), done, os.SEEK_SET)
                    done += os.sendfile(two.fileno(), one.fileno(), done, len(data) - done)
            if sync:
                os.fsync(two.fileno())
        os.unlink(aside)

    @staticmethod
    def _all_at(fd: int, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(fd, view, offset)
            view, offset = view[done:], offset + done

    HOWS: tuple[Callable[[Saver, Path, bytes, bool], None], ...] = (
        plain, plain, plain, renamed, replaced, appended, mapped, patched, copied,
    )  # fmt: skip

    # ---- reading back
    def look_back(self) -> None:
        directory = self.chance.choice(list(self.done))
        self.check(directory)

    def check(self, directory: str) -> None:
        save = self.done[directory]
        wanted = save.files()
        if (found := sorted(os.listdir(self.root / directory))) != sorted(wanted):
            raise AssertionError(f"{directory}: {found}, not {sorted(wanted)}")
        for name, data in wanted.items():
            got = (self.root / directory / name).read_bytes()
            if got != data:
                raise AssertionError(f"{directory}/{name} of {save.name}: {describe(got, data)}")

    def forget(self, directory: str) -> None:
        self.tell("gone", directory)
        del self.done[directory]
        shutil.rmtree(self.root / directory)


def describe(got: bytes, wanted: bytes) -> str:
    where = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    zero = bytes(16) == got[where : where + 16]
    what = "zeroes" if zero else digest(got)[:8]
    return f"{len(got)} bytes of {len(wanted)}, first difference at {where}: {what}"


def twins(ours: Path, plain: Path, seed: str) -> None:
    """Random operations on fresh pairs of directories, one seed after the other."""
    turn, steps = 0, 0
    while not told_to_end():
        turn += 1
        sides = ours / f"{seed}-{turn}", plain / f"{seed}-{turn}"
        for side in sides:
            side.mkdir(parents=True)
        twin = Twin(
            sides, hash((int(seed), turn)), frozenset({"fsync", "mtime"})
        )  # an unpublished mtime may move by a tick when the daemon dies
        ended = False
        for _ in range(8):
            twin.steps(50)
            steps += 50
            if ended := told_to_end():
                break
        twin.finish()
        if turn > 2 and not ended:
            for side in ours, plain:
                shutil.rmtree(side / f"{seed}-{turn - 2}")
    print(steps)


def main(what: str, *arguments: str) -> int:
    try:
        if what == "saver":
            root, ledger, seed, bytes_max = arguments
            Saver(Path(root), Path(ledger), seed, int(bytes_max)).run()
        else:
            ours, plain, seed = arguments
            twins(Path(ours), Path(plain), seed)
    except OSError as error:
        if error.errno in GONE:
            return EXIT_GONE
        traceback.print_exc()
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
