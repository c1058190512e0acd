"""The client of a daemon's control socket.

Role: every command but ``mount`` asks through it. One request on one connection: a JSON object on a line goes out,
JSON objects on lines come back, the last with ``"done": true``. Every wait has a deadline; a daemon that does not
answer is ``CannotTellError`` (exit 4), never a hang.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import msgspec

from cachexfs.cli import mounts
from cachexfs.cli.protocol import Line, Progress
from cachexfs.errors import (
    EXIT_CANNOT_TELL,
    EXIT_NO,
    EXIT_NOT_DURABLE,
    EXIT_TIMEOUT,
    EXIT_USAGE,
    CacheXError,
    CannotTellError,
    NotDurableError,
    TimedOutError,
    UsageError,
)
from cachexfs.registration import Entry
from cachexfs.supervisor import status as supervisor

ANSWER_TIMEOUT_S = 10.0
RESTART_TIMEOUT_S = 10.0  # for a supervisor to start the next daemon
RETRY_S = 0.05
LINE_BYTES_MAX = 64 << 20
REQUEST_BYTES_MAX = 64 << 10

QUESTIONS = frozenset({"ping", "status", "explain", "latest", "sources", "wait"})  # they change nothing
ASKED_AGAIN_MAX = 5  # a daemon that each question kills is not asked for ever

T = TypeVar("T")


class EndedError(CannotTellError):
    """The daemon is gone, or went while it was asked."""


class NoError(CacheXError):
    """The answer is no."""

    exit_code = EXIT_NO


_BY_EXIT: Mapping[int, type[CacheXError]] = {
    EXIT_NO: NoError,
    EXIT_USAGE: UsageError,
    EXIT_NOT_DURABLE: NotDurableError,
    EXIT_CANNOT_TELL: CannotTellError,
    EXIT_TIMEOUT: TimedOutError,
}


def _silent(entry: Entry, what: str, kind: type[CannotTellError] = CannotTellError) -> CannotTellError:
    log = f"; its log is {entry.log}" if entry.log else ""
    return kind(f"the daemon of {entry.mountpoint} (pid {entry.pid}) {what}{log}")


def _ended(entry: Entry) -> CannotTellError:
    return _silent(entry, "ended before it answered", EndedError)


def _lines(connection: socket.socket, entry: Entry, silence_s: float) -> Iterator[bytes]:
    """Lines from the daemon; each may take ``silence_s``."""
    buffer = bytearray()
    deadline_s = time.monotonic() + silence_s
    while True:
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        try:
            data = connection.recv(1 << 16)
        except TimeoutError:
            raise _silent(entry, f"has not answered for {round(silence_s, 1):g} s") from None
        except OSError:
            raise _ended(entry) from None
        if not data:
            raise _ended(entry)
        buffer += data
        while (end := buffer.find(b"\n")) >= 0:
            yield bytes(buffer[:end])
            del buffer[: end + 1]
            deadline_s = time.monotonic() + silence_s
        if len(buffer) > LINE_BYTES_MAX:
            raise _silent(entry, "sends nonsense")


def _no_progress(_: Progress) -> None:
    return None


def ask_raw(
    entry: Entry,
    request: Mapping[str, object],
    on_progress: Callable[[Progress], None] = _no_progress,
    silence_s: float = ANSWER_TIMEOUT_S,
) -> bytes:
    """Send one request and return the last line; ``on_progress`` gets each report of progress.

    ``silence_s`` bounds the wait for each line. A question is asked again of the daemon that a supervisor starts after
    the one that was asked. Raises the ``CacheXError`` that the daemon's ``exit`` stands for, ``EndedError`` when it is
    gone, ``CannotTellError`` when it does not answer.
    """
    timeout_s = request.get("timeout_s")
    deadline_s = time.monotonic() + timeout_s if isinstance(timeout_s, int | float) else None
    for _ in range(ASKED_AGAIN_MAX if request["op"] in QUESTIONS else 0):
        try:
            return _ask_once(entry, request, on_progress, silence_s)
        except EndedError:
            if not is_supervised(entry):
                raise
        if deadline_s is not None:
            request = {**request, "timeout_s": max(deadline_s - time.monotonic(), 0.0)}
    return _ask_once(entry, request, on_progress, silence_s)


def _ask_once(
    entry: Entry, request: Mapping[str, object], on_progress: Callable[[Progress], None], silence_s: float
) -> bytes:
    line = json.dumps(request).encode() + b"\n"
    if len(line) > REQUEST_BYTES_MAX:
        raise UsageError("the path is too long")
    with _connect(entry, silence_s) as connection:
        try:
            connection.sendall(line)
        except (BrokenPipeError, ConnectionResetError):
            raise _ended(entry) from None
        except OSError as error:
            raise _silent(entry, f"does not answer ({error.strerror or 'timed out'})") from None
        for text in _lines(connection, entry, silence_s):
            try:
                answer = _convert(text, Line)
            except ValueError:
                raise _silent(entry, "sends nonsense") from None
            if not answer.done:
                on_progress(answer.progress or Progress())
                continue
            # "status" has an "error" too, further below; "exit" beside it marks a failed request.
            if answer.error is not None and answer.exit is not None:
                raise _BY_EXIT.get(answer.exit, CannotTellError)(answer.error)
            return text
    raise _ended(entry)


def _connect(entry: Entry, silence_s: float) -> socket.socket:
    """A connection to the daemon; while a supervisor starts the next one, wait for that."""
    deadline_s = time.monotonic() + min(RESTART_TIMEOUT_S, silence_s)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(silence_s)
        try:
            connection.connect(entry.socket)
        except (ConnectionRefusedError, FileNotFoundError):
            connection.close()
            no_more = _said(entry).get("phase") in ("failed", "ended")
            if time.monotonic() > deadline_s or not is_supervised(entry) or no_more:
                raise dead(entry.mountpoint, entry) from None
            time.sleep(RETRY_S)
        except OSError as error:
            connection.close()
            raise _silent(entry, f"does not answer ({error.strerror or 'timed out'})") from None
        else:
            return connection


def supervisor_socket(entry: Entry) -> str:
    """Where the supervisor of a mount listens, if it has one: beside its daemon."""
    return entry.socket.removesuffix(".sock") + ".supervisor"


def is_supervised(entry: Entry) -> bool:
    """Whether a supervisor of the mount is alive."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(supervisor_socket(entry))
        except OSError:
            return False
        return True


def _convert(line: bytes, kind: type[T]) -> T:
    # Not msgspec's own JSON: that refuses the lone surrogates which stand for bytes of a name that is not UTF-8.
    return msgspec.convert(json.loads(line), kind)


def decode(entry: Entry, line: bytes, kind: type[T]) -> T:
    """The typed answer of a last line."""
    try:
        return _convert(line, kind)
    except ValueError as error:
        raise _silent(entry, f"gave an answer that is not understood ({error})") from None


def ask(
    entry: Entry,
    request: Mapping[str, object],
    kind: type[T],
    on_progress: Callable[[Progress], None] = _no_progress,
    silence_s: float = ANSWER_TIMEOUT_S,
) -> T:
    """``ask_raw``, decoded as ``kind``."""
    return decode(entry, ask_raw(entry, request, on_progress, silence_s), kind)


class DeadDaemonError(EndedError):
    """A mount is there and its daemon is not."""


def dead(mountpoint: str, entry: Entry | None) -> DeadDaemonError:
    """The error for a mount whose daemon is gone (``entry``: what it had registered) or not registered at all."""
    if entry is None:
        return DeadDaemonError(
            f"no daemon of {mountpoint} is registered in {' or '.join(mounts.runtime_dirs())}: is it another user's, "
            "or of another CACHEXFS_RUNTIME_DIR? If it is dead, 'cachexfs mount' with the same options starts it again"
        )
    log = f" (its log is {entry.log})" if entry.log else ""
    if why := _given_up(entry):
        return DeadDaemonError(
            f"no daemon can serve {mountpoint}{log}, every request gets EIO: {why}; remove the cause, then 'cachexfs "
            f"restart {mountpoint}'"
        )
    return DeadDaemonError(
        f"the daemon of {mountpoint} is dead{log}: 'cachexfs mount' with the same options starts it again, "
        "with all that is staged"
    )


def _given_up(entry: Entry) -> str:
    """Why the supervisor of a mount has given up starting daemons; the empty string when it has not."""
    said = _said(entry)
    return reason_of(entry, said) if said.get("phase") == "failed" else ""


def _said(entry: Entry) -> Mapping[str, object]:
    """What the supervisor of a mount says of it; nothing when it does not answer."""
    try:
        return supervisor.ask(supervisor_socket(entry), "status", timeout_s=1.0)
    except (OSError, ValueError):
        return {}


def reason_of(entry: Entry, said: Mapping[str, object]) -> str:
    """Why the last daemon failed, ``said`` by the supervisor, in the daemon's own words where it had some."""
    try:
        answer = msgspec.json.decode(mounts.read_small(entry.socket.removesuffix(".sock") + ".answer"))
        words = "" if answer["ok"] else str(answer["error"])
    except (OSError, ValueError, KeyError, TypeError):
        words = ""
    return f"{said.get('last_failure')}{': ' if words else ''}{words}"


def locate(path: str) -> tuple[Entry, str]:
    """(daemon, path relative to its mount) of a path inside a mount. Raises ``CannotTellError`` otherwise."""
    found = mounts.find(path)
    if found is None:
        raise CannotTellError(f"'{path}' is not inside a CacheX FS mount on this node: see 'cachexfs status'")
    if found.entry is None:
        raise dead(found.mount.mountpoint, None)
    return found.entry, found.relative
