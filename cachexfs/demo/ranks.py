"""Ranks: one process each, forked from a server that has torch loaded, driven over pipes.

Role: runs ``training.Trainer`` methods on all ranks at once. Concurrency: calls block their caller until every rank
has answered or the deadline is over; one thread uses a pool. Called by the demo's scenario and by tests. torch is
loaded in the fork server only, so that 32 ranks cost one import.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from cachexfs.demo.cluster import PORT_FIRST, PORT_LAST
from cachexfs.errors import CacheXError, NotDurableError

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

T = TypeVar("T")

CALL_TIMEOUT_S = 240.0
END_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class SaveSpan:
    """When ``dcp.save`` was entered and left by one rank, seconds since the epoch."""

    begin_s: float
    end_s: float


class RankError(NotDurableError):
    """A rank failed, died or did not answer in time; the message is its own."""


class _Answer(Generic[T]):
    """What one rank says: a value, or the text of its exception."""

    def __init__(self, value: T | None, error: str) -> None:
        self.value = value
        self.error = error


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now, and that the kernel gives to no client until we do."""
    while True:
        port = random.randrange(PORT_FIRST, PORT_LAST)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def block_of(rank: int, world: int, places: int) -> int:
    """The place of a rank when ``world`` ranks are dealt out over ``places`` in contiguous blocks."""
    return rank * places // world


class RankPool:
    """``world`` ranks of one training job. Use as a context manager: leaving it ends the processes."""

    def __init__(self, world: int, *, mib: float, seed: int, log: Path) -> None:
        self.world = world
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "cachexfs.demo.training"])
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        port = free_port()
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main, args=(theirs, rank, world, port, mib, seed, str(log)), daemon=True
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._gather("start")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid or 0 for process in self._processes]

    def train(self, steps: int) -> list[float]:
        """Losses of ``steps`` further steps; the ranks agree on them, or ``RankError``."""
        losses: list[list[float]] = self._call("train", [(steps,)] * self.world)
        if any(other != losses[0] for other in losses):
            raise RankError("the ranks do not agree on the loss")
        return losses[0]

    def save(self, paths: Sequence[str]) -> list[SaveSpan]:
        """``dcp.save`` on every rank, rank r to ``paths[r]``."""
        return self._call("save", [(path,) for path in paths])

    def digests(self) -> list[str]:
        """Every rank's digest of what it holds."""
        return self._call("digest", [()] * self.world)

    def load_digests(self, paths: Sequence[str]) -> list[str]:
        """Every rank's digest of what ``dcp.load`` gives from ``paths[r]``, beside the model."""
        return self._call("load_digest", [(path,) for path in paths])

    def resume(self, paths: Sequence[str]) -> list[str]:
        """Every rank goes on from the checkpoint at ``paths[r]``; the digests of its state afterwards."""
        return self._call("resume", [(path,) for path in paths])

    def close(self) -> None:
        """End all ranks: at once, as a scheduler does with a job that has lost a node."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(END_TIMEOUT_S)
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()

    def _call(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[T]:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((method, arguments[rank]))
            except OSError as error:
                raise RankError(f"rank {rank} has ended before {method}: {error}") from None
        return self._gather(method)

    def _gather(self, method: str) -> list[T]:
        """One answer per rank. All answers that come are read, so that a failed call does not answer the next."""
        answers: dict[int, _Answer[T]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                pipe = cast("Connection", ready)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    answers[rank] = _Answer(None, "its process has ended")
        failed = [f"rank {rank}: {answers[rank].error}" for rank in sorted(answers) if answers[rank].error]
        failed += [f"rank {rank}: no answer within {CALL_TIMEOUT_S:.0f} s" for rank in sorted(waiting.values())]
        if failed:
            raise RankError(f"{method}: {failed[0]}" + (f" (and {len(failed) - 1} more)" if failed[1:] else ""))
        return [cast("T", answers[rank].value) for rank in range(self.world)]


def _rank_main(pipe: Connection, rank: int, world: int, port: int, mib: float, seed: int, log: str) -> None:
    """Body of a rank's process. Leaves without destructors: gloo's threads may abort an ordinary exit."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        _serve(pipe, rank, world, port, mib, seed)
    os._exit(0)


def _serve(pipe: Connection, rank: int, world: int, port: int, mib: float, seed: int) -> None:
    try:
        from cachexfs.demo.training import RankSetup, Trainer

        trainer = Trainer(RankSetup(rank, world, port, mib, seed))
    except Exception as error:  # the parent shows it; this process has nobody else to tell
        pipe.send(_Answer(None, _told(error)))
        return
    pipe.send(_Answer(None, ""))
    while True:
        method, arguments = pipe.recv()
        try:
            answer = _Answer(getattr(trainer, method)(*arguments), "")
        except Exception as error:
            answer = _Answer(None, _told(error))
        pipe.send(answer)


def _told(error: Exception) -> str:
    """One line for the parent; the traceback goes to the log."""
    traceback.print_exception(error)
    lines = [line for line in str(error).splitlines() if line.strip()]
    if isinstance(error, CacheXError):
        return lines[0] if lines else type(error).__name__
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
