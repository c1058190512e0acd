"""A lone node whose catalogue comes back damaged: its end is gone, bytes of its middle, or it is of another version.

Role: a scenario. Applications work and all suffers as in ``Run``; then the daemon dies in the middle of it, what the
catalogue had is written as the real journal, and that is damaged. The real one opens it: it forgets what was torn off,
or refuses the file as it is, and is mended. The next daemon goes on with what is left. What it has forgotten nobody
asks for; but no byte that was published is dropped, and nothing on the PFS claims to be whole and is not.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from pathlib import Path

import crc32c
import trio
from sim_check import Violation
from sim_one import Run
from sim_store import Ino

from cachexfs.adapters.catalogue_builtin import BuiltinCatalogue
from cachexfs.adapters.journal_file import JOURNAL_NAME, MENDED_NAME, mend, write_snapshot
from cachexfs.core import journal
from cachexfs.core.journal import HEADER_BYTES, MAGIC, VERSION, Mutation
from cachexfs.core.records import Generation
from cachexfs.core.replica import Change, Replica
from cachexfs.core.stages import parse_stage
from cachexfs.engine.drain_reasons import why_pending
from cachexfs.errors import CorruptError, UsageError

REST_S = 1500.0
BYTES_CUT_MAX = 2000


class Journal(Run):
    """As ``Run``, to the day on which the journal is damaged."""

    events = ("kill", "faults", "away", "away", "calm", "cut")

    def __init__(self, seed: int, directory: str, *, trace: bool = False) -> None:
        super().__init__(seed, directory, trace=trace)
        self._directory = Path(directory)
        self.counts: Counter[str] = Counter()

    async def main(self) -> None:
        rng = self.random
        async with trio.open_nursery() as self._nursery:
            clients = [self.worker(self, b"c%d" % number) for number in range(rng.choice([1, 2]))]
            await self._born()
            for client in clients:
                await client.start()
            with trio.move_on_after(rng.choice([0.3, 2, 30]) * rng.random()):
                async with trio.open_nursery() as working:
                    working.start_soon(self._suffer)
                    for client in clients:
                        working.start_soon(client.work, 40)
            self.calm()
            if self._life is not None and not self._life.dead:
                self._life.kill()
            self.kernel.died(supervised=False)
            await trio.testing.wait_all_tasks_blocked()
            published = self._published()
            self._damage()
            self.checkers.commit_last("the damage")
            self.checkers.kept.excused = self.mended = True
            self.checkers._reached.clear()
            await self._born()
            await self._go_on()
            self._nothing_dropped(published)
            self._nursery.cancel_scope.cancel()

    async def _go_on(self) -> None:
        """All that can land does, and what is said of it is true."""
        life = await self.life()
        with trio.move_on_after(REST_S) as scope:
            while not life.parts.drainer.is_idle() or life.pfs.busy():  # noqa: ASYNC110
                await trio.sleep(1)
        if scope.cancelled_caught:
            left = [
                (op.kind, op.path, why_pending(life.parts.drainer, k)) for k, op in life.parts.drainer.in_progress()
            ]
            raise Violation(f"liveness: not on the PFS after {REST_S:.0f} s: {left[:5]}")
        await trio.sleep(60)
        await self.checkers.claims(life)
        self.checkers.memory(life)

    # ---- the damage
    def _damage(self) -> None:
        """Write the journal, damage it, have it opened, and go on with what it has then."""
        directory = self._directory / "journal"
        directory.mkdir()
        path = directory / JOURNAL_NAME
        self._write(path)
        whole = path.read_bytes()
        how = ("tail", "middle", "zeros", "middle", "version", "tail", "middle")[self.seed % 7]
        self.trace(f"DAMAGE {how}")
        self.counts[how] += 1
        path.write_bytes(getattr(self, f"_damaged_{how}")(whole))
        damaged = path.read_bytes()
        try:
            catalogue = BuiltinCatalogue(directory)
        except CorruptError as error:
            if path.read_bytes() != damaged:
                raise Violation(f"journal: it was refused ({error}), and has changed") from error
            catalogue = self._mended(directory, how, whole)
        else:
            if how in ("middle", "version"):
                raise Violation(f"journal: {how} was damaged, and nobody has noticed")
        view = catalogue.view
        if how in ("zeros", "version") and view.revision != len(self.log.revisions):
            raise Violation(f"journal: {how}: revision {view.revision} of {len(self.log.revisions)}")
        if view.revision < len(self.log.revisions) and not (directory / MENDED_NAME).exists():
            rest = len(whole) - len(damaged)
            if journal.scan(damaged).good_length != len(damaged):  # else it ends with a record, and looks whole
                raise Violation(f"journal: {rest} bytes are gone, and nobody is told")
        self._take(view)
        catalogue.close()

    def _mended(self, directory: Path, how: str, whole: bytes) -> BuiltinCatalogue:
        path = directory / JOURNAL_NAME
        if how == "version":
            damaged = path.read_bytes()
            try:
                mend(directory)
            except UsageError:
                if path.read_bytes() != damaged:
                    raise Violation("journal: a newer version's was not mended, and has changed") from None
            else:
                raise Violation("journal: a newer version's was mended")
            path.write_bytes(whole)
            return BuiltinCatalogue(directory)
        kept, skipped = mend(directory)
        self.counts["records that were skipped"] += skipped
        self.trace(f"MENDED {kept} records, {skipped} places")
        return BuiltinCatalogue(directory)

    def _write(self, path: Path) -> None:
        revisions, start = self.log.revisions, 0
        if self.random.random() < 0.5:  # it begins with a snapshot
            start, view = self.random.randrange(len(revisions) + 1), Replica()
            for revision in range(start):
                view.apply(revision + 1, revisions[revision])
            os.close(write_snapshot(path, list(view.items()), view.revision, fsync=False))
        else:
            path.write_bytes(journal.header())
        with path.open("ab") as out:
            for revision in range(start, len(revisions)):
                changes = [(change.key, change.value) for change in revisions[revision]]
                out.write(journal.encode(Mutation(revision + 1, changes)))

    def _damaged_tail(self, data: bytes) -> bytes:
        return data[: max(HEADER_BYTES, len(data) - self.random.randrange(1, BYTES_CUT_MAX))]

    def _damaged_zeros(self, data: bytes) -> bytes:
        return data + bytes(self.random.choice([1, 12, 5000]))

    def _damaged_middle(self, data: bytes) -> bytes:
        at = self.random.randrange(HEADER_BYTES, len(data) - 1)
        garbled = bytes(byte ^ 0x55 for byte in data[at : at + self.random.choice([1, 40, 900])])
        return data[:at] + garbled + data[at + len(garbled) :]

    def _damaged_version(self, data: bytes) -> bytes:
        head = struct.pack("<8sI", MAGIC, VERSION + 1)
        return head + struct.pack("<I", crc32c.crc32c(head)) + data[HEADER_BYTES:]

    def _take(self, view: Replica) -> None:
        """What the journal has left is what the catalogue knows."""
        rows = [Change(key, entry.encoded, entry.created, entry.modified) for key, entry in view.items()]
        last = max(view.revision, 1)
        self.log.revisions = [[] for _ in range(last - 1)] + [rows]
        self.log.state = Replica()
        for revision, changes in enumerate(self.log.revisions):
            self.log.state.apply(revision + 1, changes)

    # ---- what there was
    def _published(self) -> dict[bytes, bytes]:
        """Bytes that were published and lie in staging alone -> path."""
        assert self._life is not None
        staging, state = self._life.staging, self.log.state
        gens: dict[int, int] = {}  # file -> the newest that is staged, which the user has begun to put in its place
        for fid, gen in map(parse_stage, staging.stages()):
            gens[fid] = max(gen, gens.get(fid, 0))
        found = {}
        for key, entry in state.items():
            content = entry.record
            if not isinstance(content, Generation) or gens.get(int(key[2:], 16), 0) > content.gen:
                continue
            if content.size and content.tree and staging.has(content.stage):
                data = Path(staging.path(content.stage)).read_bytes()[: content.size]
                if len(data) == content.size:
                    found[data] = state.path(int(key[2:], 16)) or b"?"
        self.counts["contents in staging"] += len(found)
        return found

    def _nothing_dropped(self, published: dict[bytes, bytes]) -> None:
        there = [path.read_bytes() for path in self._directory.rglob("*") if path.is_file()]
        inos: list[Ino] = [*self.store.walk().values(), *self.store.tmp.entries.values()]
        there += [ino.data for ino in [*inos, *self.store.held.entries.values()]]
        self.counts["set aside"] += len(self._life.staging.orphans()) if self._life is not None else 0
        for data, path in published.items():
            if not any(found[: len(data)] == data for found in there):
                raise Violation(f"dropped: {path!r}, {len(data)} bytes, was published before the journal was damaged")
