"""The demo's story: save, watch the boundaries, lose a node and the PFS, restore, go on.

Role: drives cluster and ranks, fills a ``Report``, tells the ``Screen`` as it goes. Each step either holds or raises;
``run`` catches what a step raises and names the step. Concurrency: one thread, beside the watcher's. The caller takes
the cluster down.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr, xattrs
from cachexfs.demo.ranks import RankPool, SaveSpan, block_of
from cachexfs.demo.report import FileRow, Report, Restored, Saved, SourceRow
from cachexfs.demo.screen import Screen
from cachexfs.demo.watcher import BOUNDARIES, BoundaryWatcher, FileTimes, parse_time_s
from cachexfs.errors import CacheXError, NotDurableError

STEPS_BEFORE_SAVE = 3
STEPS_AFTER = 5
SEED = 11
OTHER_SEED = 12  # fresh ranks start from other weights: equality must come from the checkpoint
SETTLE_TIMEOUT_S = 150.0
NOTICE_TIMEOUT_S = 100.0
POLL_S = 0.05
CACHE = "survivors' caches"
CHECKPOINT = f"ckpt/step-{STEPS_BEFORE_SAVE}"


class DemoError(NotDurableError):
    """Something that the product promises did not hold."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for."""

    nodes: int
    ranks: int
    mib: float
    root: Path


class Scenario:
    """One run on a created, not yet mounted cluster."""

    def __init__(self, settings: Settings, cluster: LocalCluster, screen: Screen) -> None:
        self.settings = settings
        self.cluster = cluster
        self.screen = screen
        self.report = Report(settings.nodes, settings.ranks, settings.mib, str(settings.root))
        self.rank_log = settings.root / "ranks.log"
        self._step = ""

    def run(self) -> Report:
        """The whole story; ``report.failed`` tells whether and where it ended early."""
        begin = time.monotonic()
        try:
            self._run()
        except (CacheXError, OSError) as error:
            self.report.failed = self._step
            self.report.error = " ".join(str(error).split())
        self.report.seconds = time.monotonic() - begin
        return self.report

    def _run(self) -> None:
        with self._doing(f"mount {self.settings.nodes} nodes") as began:
            self.cluster.mount()
            self.report.mount_ms = _ms_since(began)
        with self._doing(f"start {self.settings.ranks} ranks"):
            ranks = self._pool(SEED)
        with ranks:
            with self._doing(f"train {STEPS_BEFORE_SAVE} steps"):
                ranks.train(STEPS_BEFORE_SAVE)
                digests = ranks.digests()
            self._save(ranks, digests)
            with self._doing(f"train {STEPS_AFTER} steps more, unbroken"):
                self.report.losses_unbroken = ranks.train(STEPS_AFTER)
        lost = self._lose_node()
        self._restore(lost, digests)

    @contextlib.contextmanager
    def _doing(self, step: str) -> Iterator[float]:
        self._step = step
        with self.screen.doing(step):
            yield time.monotonic()

    def _pool(self, seed: int) -> RankPool:
        return RankPool(self.settings.ranks, mib=self.settings.mib, seed=seed, log=self.rank_log)

    def _paths(self, indices: list[int]) -> list[str]:
        """The checkpoint's path for each rank, ranks dealt out over the nodes in blocks."""
        world = self.settings.ranks
        mounts = [self.cluster.nodes[indices[block_of(rank, world, len(indices))]].mountpoint for rank in range(world)]
        return [str(mount / CHECKPOINT) for mount in mounts]

    def _save(self, ranks: RankPool, digests: list[str]) -> None:
        directory = self.cluster.nodes[-1].mountpoint / CHECKPOINT
        with BoundaryWatcher(directory) as watcher:
            with self._doing("dcp.save into the mounts"):
                directory.parent.mkdir()
                spans = ranks.save(self._paths(list(range(self.settings.nodes))))
            with self._doing("wait for every boundary"):
                watcher.wait(SETTLE_TIMEOUT_S)
        with self._doing("read the attributes"):
            files = watcher.times()
            attributes = xattrs(directory)
            _check_claims(files, attributes, self.settings.ranks)
        on_pfs = self.cluster.pfs / CHECKPOINT
        with self._doing("plain dcp.load from the PFS directory, without CacheX FS"):
            equal = ranks.load_digests([str(on_pfs)] * self.settings.ranks) == digests
        self.report.saved = _saved(spans, files, attributes, on_pfs, equal)
        self.screen.saved(self.report.saved)
        if not equal:
            raise DemoError("what dcp.load reads from the PFS directory is not what was saved")

    def _lose_node(self) -> int:
        assert self.report.saved
        names = [node.name for node in self.cluster.nodes]
        origin = next(row.node for row in self.report.saved.files if row.name == ".metadata")
        with self._doing(f"kill -9 everything on {origin}, wipe its memory and NVMe, switch the PFS off"):
            lost = names.index(origin)
            self._killed = len(self.cluster.processes(lost))
            self.cluster.kill(lost)
            self.cluster.wipe(lost)
            self.cluster.pfs.rename(self.cluster.pfs.with_name("pfs.off"))
        return lost

    def _restore(self, lost: int, digests: list[str]) -> None:
        survivors = [node.index for node in self.cluster.nodes if node.index != lost]
        with self._doing("the survivors take new files and find the PFS unreachable"):
            self._find_unreachable(survivors)
        before = self._sources(survivors)
        with self._doing(f"start {self.settings.ranks} fresh ranks on the survivors"):
            ranks = self._pool(OTHER_SEED)
        with ranks:
            if ranks.digests() == digests:
                raise DemoError("the fresh ranks hold the saved state before the restore: nothing would be shown")
            with self._doing("dcp.load from the mounts that are left") as began:
                restored = ranks.resume(self._paths(survivors))
                restore_ms = _ms_since(began)
            with self._doing("ask the survivors where the bytes came from"):
                rows = self._source_rows(survivors[0], self.cluster.nodes[lost].name, before, self._sources(survivors))
                states = [self.cluster.status(index).pfs_state for index in survivors]
            self.report.restored = Restored(
                lost=self.cluster.nodes[lost].name,
                killed=self._killed,
                survivors=[self.cluster.nodes[index].name for index in survivors],
                pfs_states=states,
                restore_ms=restore_ms,
                files=rows,
                ranks_equal=sum(mine == saved for mine, saved in zip(restored, digests, strict=True)),
                ranks=self.settings.ranks,
            )
            self.screen.restored(self.report.restored)
            self._check_restored(self.report.restored)
            with self._doing(f"train {STEPS_AFTER} steps from the restored state"):
                self.report.losses_resumed = ranks.train(STEPS_AFTER)
        self.screen.losses(STEPS_BEFORE_SAVE, self.report.losses_unbroken, self.report.losses_resumed)
        if self.report.losses_resumed != self.report.losses_unbroken:
            raise DemoError("the resumed losses differ from the unbroken run's")

    def _find_unreachable(self, survivors: list[int]) -> None:
        """Give each survivor something to drain, and wait until it says that the PFS is not there."""
        for index in survivors:
            node = self.cluster.nodes[index]
            (node.mountpoint / f"after-the-loss-{node.name}").write_text(f"written on {node.name} without a PFS\n")
        deadline = time.monotonic() + NOTICE_TIMEOUT_S
        for index in survivors:
            while (state := self.cluster.status(index).pfs_state) == "ok":
                if time.monotonic() > deadline:
                    raise DemoError(f"{self.cluster.nodes[index].name} calls the PFS {state} though it is gone")
                time.sleep(POLL_S)

    def _check_restored(self, restored: Restored) -> None:
        self._step = "compare the restored state"
        if restored.ranks_equal != restored.ranks:
            raise DemoError(f"only {restored.ranks_equal} of {restored.ranks} ranks got their state back to the bit")
        own = {f"{name}:memory" for name in restored.survivors}
        unread = [row.name for row in restored.files if not row.sources and not own & set(row.copies)]
        if unread:
            raise DemoError(f"no survivor says where {', '.join(unread)} came from")
        gone = ("pfs", f"memory:{restored.lost}", f"nvme:{restored.lost}")
        if "ok" in restored.pfs_states:
            raise DemoError("a survivor calls the PFS ok though it is gone")
        wrong = [row.name for row in restored.files if any(source in row.sources for source in gone)]
        if wrong:
            raise DemoError(f"{', '.join(wrong)} came from what is said to be gone")

    def _sources(self, indices: list[int]) -> dict[tuple[str, str], int]:
        """Bytes read of the checkpoint by (file, source), summed over the nodes. A node's own copies get its name."""
        total: dict[tuple[str, str], int] = {}
        for index in indices:
            for file in self.cluster.sources(index):
                head, name = os.path.split(file.path)
                for source, count in file.sources.items():
                    shown = f"memory:{self.cluster.nodes[index].name}" if source == "local" else source
                    if head == CHECKPOINT:
                        total[name, shown] = total.get((name, shown), 0) + count
        return total

    def _source_rows(
        self, survivor: int, lost: str, before: dict[tuple[str, str], int], after: dict[tuple[str, str], int]
    ) -> list[SourceRow]:
        """What each file's bytes came from since ``before``. A file that was fetched only earlier came from a cache."""
        assert self.report.saved
        directory = self.cluster.nodes[survivor].mountpoint / CHECKPOINT
        rows = []
        for row in self.report.saved.files:
            own = {source: n for (name, source), n in sorted(after.items()) if name == row.name}
            read = {source: n - before.get((row.name, source), 0) for source, n in own.items()}
            fetched = {source: n for source, n in read.items() if n > 0}
            earlier = sum(n for (name, _), n in before.items() if name == row.name)
            copies = (xattr(directory / row.name, "holders") or "").split(",")
            # without the PFS, which is away, and the killed node, whose lease may not have ended yet
            copies = [copy for copy in copies if ":" in copy and not copy.startswith(("pfs:", f"{lost}:"))]
            rows.append(SourceRow(row.name, row.node, copies, fetched or ({CACHE: earlier} if earlier else {})))
        return rows


def _check_claims(files: list[FileTimes], attributes: dict[str, str], ranks: int) -> None:
    """The attributes must tell one story: all files there, boundaries in order, the checkpoint not before its files."""
    if len(files) != ranks + 1:
        raise DemoError(f"{len(files)} files in the checkpoint, {ranks + 1} expected")
    for file in files:
        times = [file.reached_s.get(boundary) for boundary in BOUNDARIES]
        if None in times:
            raise DemoError(f"{file.name} does not say when it reached each boundary: {file.reached_s}")
    for boundary in BOUNDARIES:
        claimed = attributes.get(f"t.{boundary}")
        if claimed is None or parse_time_s(claimed) < max(file.reached_s[boundary] for file in files):
            raise DemoError(f"t.{boundary} of the checkpoint is {claimed}, before its last file")


def _saved(
    spans: list[SaveSpan], files: list[FileTimes], attributes: dict[str, str], on_pfs: Path, equal: bool
) -> Saved:
    begin_s = min(span.begin_s for span in spans)

    def after_ms(time_s: float | None) -> float | None:
        return None if time_s is None else (time_s - begin_s) * 1e3

    rows = [
        FileRow(file.name, file.origin, file.bytes, *(after_ms(file.reached_s.get(b)) for b in BOUNDARIES))
        for file in files
    ]
    return Saved(
        directory=CHECKPOINT,
        save_ms=(max(span.end_s for span in spans) - begin_s) * 1e3,
        files=rows,
        restartable_ms={b: (parse_time_s(attributes[f"t.{b}"]) - begin_s) * 1e3 for b in BOUNDARIES},
        attributes=attributes,
        pfs_listing=[(path.name, path.stat().st_size) for path in sorted(on_pfs.iterdir())],
        pfs_load_equal=equal,
    )


def _ms_since(begin_s: float) -> float:
    return (time.monotonic() - begin_s) * 1e3
