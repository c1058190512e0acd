"""What goes wrong in the drain: one error for each change that the PFS refuses, one for an outage of the PFS.

Role: decides how long a change rests, shows its error (``status``, log, the file's ``error``), parks what the PFS
refuses repeatedly. A PFS that does not answer is no error of the files that wait for it: those are counted, it is told
once when it begins and once when the last of them has got through. Used by ``drain``. Concurrency: one task per change.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import trio

from cachexfs.core import publication
from cachexfs.core.changes import errno_name
from cachexfs.core.records import Op, OpKind
from cachexfs.core.transaction import Tx
from cachexfs.engine.health import pfs_health
from cachexfs.engine.node import Node
from cachexfs.engine.owners import Owners
from cachexfs.errors import CacheXError, CatalogueUnavailableError, quoted

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MAX_S = 0.25, 15.0
PARK_AFTER = 4  # refusals, some seconds in all
_FULL = (errno.ENOSPC, errno.EDQUOT)  # parked at once: removals must not wait for what they make room for
_PASSING = (errno.EIO, errno.EBUSY, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESTALE)


@dataclass(slots=True)
class Attempts:
    """Of one change: how long it rests before the next attempt, how often it was refused; ``late``: a call of it was
    given up, and may land yet."""

    delay_s: float = 0.0
    refusals: int = 0
    late: bool = False

    def rest(self) -> None:
        """Another attempt has failed."""
        self.delay_s = min(max(self.delay_s * 2, RETRY_FIRST_S), RETRY_MAX_S)


@dataclass(slots=True)
class Progress:
    """Numbers for ``status``. ``errors``: of changes that were refused, ``refused``: their errnos; ``held_up``: those
    that the PFS has not answered, with their paths."""

    landed_ops: int = 0
    errors: dict[bytes, str] = field(default_factory=dict)
    refused: dict[bytes, int] = field(default_factory=dict)
    held_up: dict[bytes, bytes] = field(default_factory=dict)


class DrainErrors:
    """The errors of this node's changes."""

    def __init__(self, node: Node, owners: Owners, progress: Progress) -> None:
        self.node = node
        self.owners = owners
        self.progress = progress
        self._outage_s = 0.0  # when the first of ``held_up`` was not answered
        self._held_up_count = 0

    async def failed(self, key: bytes, op: Op, error: BaseException, attempts: Attempts) -> None:
        """An attempt has failed: the next one comes after ``attempts.delay_s``."""
        attempts.rest()
        attempts.late = attempts.late or isinstance(error, trio.TooSlowError)
        if isinstance(error, CatalogueUnavailableError):  # no error of this change; whoever asks the daemon hears of it
            log.debug("%r: %s: %s", op.path, op.kind, error)
        elif self._is_outage(error):
            self._hold_up(key, op, error)
        else:
            await self._show(key, op, error, attempts)
        now = self.node.catalogue.view.op(key)
        if now is not None and now.begun and not attempts.late:
            try:
                await self.owners.ended(key)
            except CacheXError as unavailable:
                log.debug("that a call has ended could not be recorded: %s", unavailable)

    def over(self, key: bytes) -> None:
        """A change has landed, or need not land, or waits for something else than its error."""
        self.progress.errors.pop(key, None)
        self.progress.refused.pop(key, None)
        if self.progress.held_up.pop(key, None) is not None and not self.progress.held_up:
            away_s = self.node.clock.now_s() - self._outage_s
            log.warning("the PFS answers again: it kept %d changes waiting, for %.0f s", self._held_up_count, away_s)

    # ---- an outage
    def _is_outage(self, error: BaseException) -> bool:
        """Whether it is the PFS that does not answer, rather than this change that it refuses."""
        if isinstance(error, trio.TooSlowError):
            return True
        return isinstance(error, OSError) and self.node.pfs is not None and self.node.pfs.state != "ok"

    def _hold_up(self, key: bytes, op: Op, error: BaseException) -> None:
        held_up = self.progress.held_up
        self.progress.errors.pop(key, None)
        self.progress.refused.pop(key, None)
        if not held_up:
            self._outage_s, self._held_up_count = self.node.clock.now_s(), 0
            log.error("%s; what is pending waits, and lands by itself (%r first)", pfs_health(self.node).words, op.path)
        log.debug("%r: %s: %s", op.path, op.kind, error or type(error).__name__)
        self._held_up_count += key not in held_up
        held_up[key] = op.path

    def outage(self, count: int) -> str:
        """That ``count`` changes wait because the PFS did not answer to some of them; empty when it did to all."""
        held_up = self.progress.held_up
        if not held_up:
            return ""
        first = quoted(next(iter(held_up.values())))
        changes = f"{count} changes wait ({first} first)" if count > 1 else f"the change of {first} waits"
        return f"{changes} because the PFS did not answer; they are tried again, and land by themselves"

    # ---- refusals
    def refusal(self) -> str:
        """That a PFS which answers takes no changes, with its most frequent reason; empty when it refuses none."""
        codes = Counter(self.progress.refused.values())
        if not codes:
            return ""
        code, count = codes.most_common(1)[0]
        return f"refuses {count} change{'' if count == 1 else 's'}: {errno_name(code)}"

    async def _show(self, key: bytes, op: Op, error: BaseException, attempts: Attempts) -> None:
        what = str(error)
        if isinstance(error, OSError) and error.errno:
            said, plain = error.strerror or "", os.strerror(error.errno)
            what = errno_name(error.errno) if said == plain else f"{said} [{errno.errorcode.get(error.errno)}]"
        text = f"drain: {op.kind}: {what}; next try in {attempts.delay_s:.2g} s"
        self.over(key)
        self.progress.errors[key] = text
        if isinstance(error, OSError) and error.errno:
            self.progress.refused[key] = error.errno
        log.warning("%r: %s", op.path, text)
        parked = self._parks(error, attempts)
        ctx = self.node.ctx()

        def note(tx: Tx) -> None:
            now = tx.read(key)
            if parked and isinstance(now, Op) and now.parked != parked:
                tx.put(key, msgspec.structs.replace(now, parked=parked))
            if op.kind == OpKind.PUT:
                publication.note_error(tx, ctx, op.fid, text)

        if not parked and op.kind != OpKind.PUT:
            return
        try:
            await self.node.catalogue.mutate(note)
        except CacheXError as unavailable:
            log.warning("the error could not be recorded: %s", unavailable)

    def _parks(self, error: BaseException, attempts: Attempts) -> str:
        """The name of an errno with which the PFS has refused an operation often enough; "" if it has not."""
        code = error.errno if isinstance(error, OSError) else None
        if code is None or code in _PASSING:
            attempts.refusals = 0
            return ""
        attempts.refusals += 1
        return errno.errorcode.get(code, str(code)) if attempts.refusals >= PARK_AFTER or code in _FULL else ""
