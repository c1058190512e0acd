"""Calls of applications that got EIO or ENOSPC: which of them still say that something is wrong, and which are past.

Role: filled by the frontend, asked by ``status``. What an fsync or a close was to bring about may come about later: it
is over when the file is as it was to be, or is gone, or when the same call has worked since. Until then it is an error,
however long ago. Other calls are errors until they work again, for ten minutes at most: what goes on being wrong has an
error of its own. What is over is a note for ten minutes.
Concurrency: nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

SHOWN_S = 600.0
CALLS_MAX = 256
#: Calls by which an application hands over its data.
OF_DATA = ("fsync", "fsyncdir", "write", "flush", "release")

#: What a call asked: its name, the file id (of the directory, where it is about a name), the name.
Asked = tuple[str, int, bytes]


@dataclass(frozen=True, slots=True)
class Call:
    """One that failed. ``over``: why it is past, in words."""

    text: str
    when_s: float
    over: str = ""


class FailedCalls:
    """The last ones of this daemon, the newest of each."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._calls: dict[Asked, Call] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def failed(self, asked: Asked, text: str) -> None:
        """A call got EIO or ENOSPC."""
        self._calls.pop(asked, None)
        self._calls[asked] = Call(text, self._now_s())
        while len(self._calls) > CALLS_MAX:
            del self._calls[next(iter(self._calls))]

    def worked(self, asked: Asked) -> None:
        """A call has succeeded."""
        call = self._calls.get(asked)
        if call is not None and not call.over:
            self._calls[asked] = replace(call, over="it has worked since")

    def look(self, over: Callable[[str, int], str]) -> tuple[list[str], list[str]]:
        """(errors, notes) in words. ``over``: of a call of data and its file id, why it is past, "" if it is not."""
        errors, notes = list[str](), list[str]()
        for asked, failed in list(self._calls.items()):
            call, is_of_data = failed, asked[0] in OF_DATA
            if is_of_data and not call.over:
                call = self._calls[asked] = replace(call, over=over(asked[0], asked[1]))
            age_s = self._now_s() - call.when_s
            if age_s >= SHOWN_S and (call.over or not is_of_data):
                del self._calls[asked]
            elif call.over:
                notes.append(f"{call.text} ({age_s:.0f} s ago; {call.over})")
            else:
                errors.append(f"{call.text} ({age_s:.0f} s ago)")
        return errors, notes
