"""What ``cachexfs recover`` does, without a daemon: list, or bring to the PFS.

Role: called in a process of its own (``__main__``). Concurrency: see ``publish``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cachexfs.adapters.journal_file import count_pending, mend
from cachexfs.adapters.replica_copy import Committed
from cachexfs.config import safe_name
from cachexfs.errors import CannotTellError, CorruptError, UsageError
from cachexfs.recovery import held
from cachexfs.recovery.choice import Candidate, choose, decode_record, of_manifest
from cachexfs.recovery.held import Store
from cachexfs.recovery.publish import Publisher
from cachexfs.recovery.report import (
    HeldFile,
    HeldStore,
    Line,
    Listing,
    Mended,
    Outcome,
    Pending,
    Request,
    Result,
    SafeFile,
)
from cachexfs.recovery.target import Target

RETRY_S = 2.0
TELL_S = 0.5
VERIFY_WORKERS = 4


class Progress:
    """Counts, and says so at most every ``TELL_S``; only when something has happened, so that silence means a hang."""

    def __init__(self, say: Callable[[Line], None]) -> None:
        self._say = say
        self._said_s = 0.0
        self.bytes_done = self.bytes_total = self.files_done = self.files_total = 0
        self.note = ""

    def tell(self, count: int) -> None:
        """``count`` bytes were read or written."""
        self.bytes_done += count
        now_s = time.monotonic()
        if now_s - self._said_s >= TELL_S:
            self._said_s = now_s
            self._say(Line(
                bytes_done=min(self.bytes_done, self.bytes_total), bytes_total=self.bytes_total,
                files_done=self.files_done, files_total=self.files_total, note=self.note,
            ))  # fmt: skip

    def landed(self, candidate: Candidate) -> None:
        """A file is under its name."""
        self.files_done += 1
        self.tell(0)


def run(request: Request, say: Callable[[Line], None]) -> Line:
    """Answer a request. Raises ``CacheXError``, ``OSError``."""
    if request.journal is not None:
        kept, skipped = mend(Path(request.journal))
        return Line(done=True, mended=Mended(kept, skipped))
    if request.pending is not None:
        changes, size = count_pending(Path(request.pending))
        return Line(done=True, pending=Pending(changes, size))
    progress = Progress(say)
    stores = held.find(request.nvme, request.job and safe_name(request.job)) if request.nvme is not None else []
    if request.nvme is not None and request.is_named and not stores:
        held.check_is_nvme(request.nvme)
    if request.list_only or request.to is None:
        return Line(done=True, listing=_list(request, stores, progress))
    with held.locked(stores):
        return Line(done=True, result=_bring(request, request.to, stores, progress))


# ---- looking
def _list(request: Request, stores: list[Store], progress: Progress) -> Listing:
    progress.bytes_total = sum(c.manifest.size for store in stores for c in store.replicas) if request.verify else 0
    found = tuple(_list_store(store, request.verify, progress) for store in stores)
    records: list[SafeFile] = []
    if request.to is not None:
        target = Target(request.to, progress.tell)
        if target.token() is not None:
            records = [
                SafeFile(os.fsdecode(c.path), c.record.size, c.record.gen, c.record.job, c.hidden)
                for c in _records(target, request, stores)
                if c.ready
            ]
    return Listing(found, tuple(records))


def _list_store(store: Store, verify: bool, progress: Progress) -> HeldStore:
    replicas = sorted(store.replicas, key=lambda c: c.manifest.path)
    with ThreadPoolExecutor(VERIFY_WORKERS) as pool:
        reasons = list(pool.map(lambda c: _check(c, progress) if verify else "", replicas))
    files = [
        HeldFile(
            os.fsdecode(c.manifest.path), c.manifest.size, c.manifest.gen, c.manifest.origin, c.manifest.published,
            not reason if verify else None, reason,
        )
        for c, reason in zip(replicas, reasons, strict=True)
    ]  # fmt: skip
    damaged = tuple(HeldFile("", 0, 0, "", False, False, reason) for reason in store.damaged.values())
    return HeldStore(store.job, store.node, str(store.directory), held.in_use(store), tuple(files), damaged)


def _check(committed: Committed, progress: Progress) -> str:
    try:
        held.verify(committed, progress.tell)
    except CorruptError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    progress.files_done += 1
    return ""


def _records(target: Target, request: Request, stores: list[Store]) -> list[Candidate]:
    """What is safe on the PFS under hidden names and belongs to the jobs in question; not ``ready``: a record alone."""
    jobs = {request.job and safe_name(request.job)} if request.job else {store.job for store in stores}
    found = []
    for hidden, data, there, size in target.records():
        try:
            record = decode_record(data)
        except CorruptError:
            continue
        mine = not jobs or not record.job or safe_name(record.job) in jobs
        if mine and (not there or size == record.size):
            found.append(Candidate(record, hidden, ready=there))
    return found


# ---- bringing
def _bring(request: Request, to: str, stores: list[Store], progress: Progress) -> Result:
    target = Target(to, progress.tell)
    stores, strangers = _fitting(target, request, stores)
    deadline_s = time.monotonic() + request.wait_s
    published: dict[str, Outcome] = {}
    while True:
        replicas = [of_manifest(c.manifest, s.job, c.path) for s in stores for c in s.replicas]
        records = _records(target, request, stores)
        chosen = choose([*replicas, *(c for c in records if c.ready)])
        chosen.spent = [c for c in records if not c.ready]
        progress.files_total = len(chosen.wanted)
        progress.bytes_total = sum(c.record.size for c in chosen.wanted.values())
        progress.bytes_done = progress.files_done = 0
        outcomes = Publisher(target, chosen, progress.landed, progress.tell).run()
        # A later round finds there what an earlier one has published.
        outcomes = [published.get(o.path, o) if o.outcome == "there" else o for o in outcomes]
        published |= {o.path: o for o in outcomes if o.outcome == "published"}
        waits = any(o.outcome == "withheld" for o in outcomes)
        if not waits or time.monotonic() >= deadline_s:
            break
        progress.note = "waits for other nodes"
        time.sleep(min(RETRY_S, max(0.0, deadline_s - time.monotonic())))
        progress.tell(0)
    outcomes += strangers
    outcomes += [
        Outcome(f"(replica {stage})", "damaged", job=s.job, reason=reason)
        for s in stores
        for stage, reason in s.damaged.items()
    ]
    return Result(tuple(sorted(outcomes, key=lambda o: o.path)))


def _fitting(target: Target, request: Request, stores: list[Store]) -> tuple[list[Store], list[Outcome]]:
    """Stores whose node had mounted this very directory; with ``elsewhere`` all of them. The rest is reported."""
    token = target.token()
    if token is None:
        if not request.elsewhere:
            raise CannotTellError(
                f"'{request.to}' has no .cachexfs, so no mount has used it: is the PFS mounted? For another directory "
                "than the job's, add --elsewhere"
            )
        token = target.establish()
    if request.elsewhere:
        return stores, []
    fit = [store for store in stores if store.token == token]
    others = [store for store in stores if store.token != token]
    if others and not fit:
        raise UsageError(
            f"'{request.to}' is not the directory that job {others[0].job} had mounted: name that one, or add "
            "--elsewhere"
        )
    why = "its job had mounted another PFS directory: name that one, or add --elsewhere"
    return fit, [Outcome(f"(job {s.job}, node {s.node})", "withheld", job=s.job, reason=why) for s in others]
