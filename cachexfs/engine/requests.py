"""Requests that change the catalogue, so that one which is repeated is applied once and answered as the first time.

Role: behind a supervisor a request outlives the daemon that had it. Each changing request has an id of its own
(``ctx.pid``, see ``supervisor.replay``), and the transaction that applies it puts id and result into this node's
``Applied`` record. A daemon that is given the request again finds it there, whatever other nodes have done to the
name since. Only what may be repeated is kept: an id leaves the record with the first change after its answer.

An answer counts as given when its handler has returned: pyfuse3 writes the reply before any other task runs, and the
supervisor takes the replies that a dead daemon had written. What fails is not recorded: it has changed nothing, and
is decided anew.

Concurrency: trio thread. A daemon's first transaction (its registration) fences those of its predecessor off, so that
the record is final before the first repeated request arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from cachexfs.core.records import AnyRecord, Applied, Inode, applied_key
from cachexfs.core.replica import Replica
from cachexfs.core.transaction import Tx

#: A transaction's function that returns the id of the file which it makes or links, 0 when it makes none.
Change = Callable[[Tx], int]


class Requests:
    """The unanswered requests of one mount on node ``node``."""

    def __init__(self, node: str) -> None:
        self._key = applied_key(node)
        self._mount = ""
        self._open: set[int] = set()
        self._repeated: frozenset[int] = frozenset()
        #: Whether applications have a file open here.
        self.is_held: Callable[[int], bool] = lambda fid: False

    def resume(self, mount: str, unanswered: Iterable[int]) -> None:
        """This mount is the one called ``mount``; these requests of it were given to an earlier daemon."""
        self._mount = mount
        self._repeated = frozenset(unanswered)
        self._open |= self._repeated

    @contextmanager
    def answering(self, request: int | None) -> Iterator[None]:
        """While a handler works on a request. None: a request that nobody will repeat."""
        if request is None:
            yield
            return
        self._open.add(request)
        try:
            yield
        except Exception:
            self._open.discard(request)  # an error is an answer; a cancelled handler gives none
            raise
        self._open.discard(request)

    def is_repeated(self, request: int | None) -> bool:
        """Whether an earlier daemon was asked the same, and may have done it."""
        return request in self._repeated

    def result(self, view: Replica, request: int | None) -> int | None:
        """What a request that was applied before has made (a file id, or 0); None when it was not."""
        if request is None or request not in self._repeated or request not in self._open:
            return None
        entry = view.entry(self._key)
        return self._results(entry.record if entry is not None else None).get(request)

    def once(self, request: int | None, change: Change) -> Change:
        """``change`` with its result recorded; it does nothing and returns that result when it was applied before."""
        if request is None:
            return change

        def work(tx: Tx) -> int:
            done = self._results(tx.read(self._key))
            if request in done:
                return done[request]
            result = change(tx)
            kept = [(other, made) for other, made in done.items() if other in self._open]
            gone = ((int(key[2:], 16), tx.view.inode(int(key[2:], 16))) for key in tx.removed(b"i/"))
            held = tuple((fid, inode) for fid, inode in gone if inode is not None and self.is_held(fid))
            tx.put(self._key, Applied(self._mount, (*kept, (request, result)), held))
            return result

        return work

    def gone(self, view: Replica) -> tuple[tuple[int, Inode], ...]:
        """Files that the last applied request took the last name from while they were open, as they were then.

        Its daemon may have died before it could note that where the next one finds it.
        """
        entry = view.entry(self._key)
        record = entry.record if entry is not None else None
        return record.gone if isinstance(record, Applied) and record.mount == self._mount else ()

    def _results(self, record: AnyRecord | None) -> dict[int, int]:
        return dict(record.results) if isinstance(record, Applied) and record.mount == self._mount else {}
