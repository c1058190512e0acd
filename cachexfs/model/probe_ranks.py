"""Probe with the ranks of a job: ``srun cachexfs probe DIR``.

Role: every rank runs this; rank 0 leads. They speak through small files in a directory of the probed filesystem,
because that is the one thing that all of them surely share. The start of a run is a moment on the wall clock
(NTP holds nodes within milliseconds); a rank that learns of it too late says so, and rank 0 repeats the run with
more notice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass

from cachexfs.errors import CannotTellError, UsageError
from cachexfs.model.writer import Outcome, new_block, write_durably

NOTICE_S = 1.0
NOTICE_S_MAX = 60.0
POLL_S = 0.02
JOIN_S = 120.0


@dataclass(frozen=True)
class Ranks:
    """This process's ``rank`` of ``count``, and a ``job`` name that all ranks agree on."""

    rank: int
    count: int
    job: str


def ranks_of(environment: Mapping[str, str]) -> Ranks | None:
    """Slurm's ranks, or None outside a step or in a step of one."""
    count, rank = environment.get("SLURM_STEP_NUM_TASKS"), environment.get("SLURM_PROCID")
    count = count or environment.get("SLURM_NTASKS")
    if count is None or rank is None or not (count.isdigit() and rank.isdigit()):
        return None
    if "SLURM_STEP_ID" not in environment or int(count) < 2:
        return None
    job = f"{environment.get('SLURM_JOB_ID', '0')}-{environment['SLURM_STEP_ID']}"
    return Ranks(int(rank), int(count), re.sub(r"[^0-9A-Za-z.-]", "_", job))


def _put(path: str, value: object) -> None:
    with open(path + ".tmp", "w", encoding="ascii") as stream:
        json.dump(value, stream)
    os.rename(path + ".tmp", path)


def _get(path: str) -> dict[str, float | int | str | bool] | None:
    try:
        with open(path, encoding="ascii") as stream:
            value = json.load(stream)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class Leader:
    """Rank 0's side; offers ``Writers``. Use as a context manager: leaving it ends the other ranks."""

    def __init__(self, directory: str, ranks: Ranks) -> None:
        self._ranks = ranks
        self._place = os.path.join(directory, f".cachexfs-ranks-{ranks.job}")
        self._next = 0
        self._notice_s = NOTICE_S
        try:
            shutil.rmtree(self._place, ignore_errors=True)
            os.mkdir(self._place, 0o700)
        except OSError as error:
            raise UsageError(f"cannot write in {directory}: {error.strerror}") from error
        self._await_ranks()

    def _await_ranks(self) -> None:
        deadline = time.monotonic() + JOIN_S
        while sum(n.startswith("here-") for n in os.listdir(self._place)) < self._ranks.count - 1:
            if time.monotonic() > deadline:
                self.close()
                raise CannotTellError(f"not all of {self._ranks.count} ranks see {self._place}")
            time.sleep(POLL_S)

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, directory: str, count: int, size: int, shared: bool, seconds_max: float) -> list[Outcome] | None:
        """One run with ``count`` ranks, spread evenly over the job; see ``Writers``."""
        while True:
            outcomes = self._run(directory, count, size, shared, seconds_max)
            if outcomes is None or not any(o.late for o in outcomes):
                return outcomes
            self._notice_s *= 2.0
            if self._notice_s > NOTICE_S_MAX:
                return None

    def _run(self, directory: str, count: int, size: int, shared: bool, seconds_max: float) -> list[Outcome] | None:
        number, self._next = self._next, self._next + 1
        chosen = [i * self._ranks.count // count for i in range(count)]
        start = time.time() + self._notice_s
        order = {"directory": directory, "size": size, "shared": shared, "start": start}
        _put(os.path.join(self._place, f"run-{number}"), {**order, "ranks": {str(r): i for i, r in enumerate(chosen)}})
        outcomes = []
        block = new_block(size)
        if 0 in chosen:
            outcomes.append(_write(order, chosen.index(0), block))
        missing = {r for r in chosen if r != 0}
        deadline = time.monotonic() + self._notice_s + seconds_max
        while missing:
            for name in os.listdir(self._place):
                if name.startswith(f"done-{number}-") and not name.endswith(".tmp"):
                    rank = int(name.rsplit("-", 1)[1])
                    answer = _get(os.path.join(self._place, name)) if rank in missing else None
                    if answer is not None:
                        missing.discard(rank)
                        outcomes.append(Outcome(float(answer["seconds"]), int(answer["error"]), bool(answer["late"])))
            if missing and time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
        return outcomes

    def close(self) -> None:
        """Tell the ranks to end, give them a moment, remove the directory."""
        with contextlib.suppress(OSError):
            _put(os.path.join(self._place, f"run-{self._next}"), {"end": True})
        deadline = time.monotonic() + 5.0
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                names = os.listdir(self._place)
                if sum(n.startswith("gone-") for n in names) >= sum(n.startswith("here-") for n in names):
                    break
                time.sleep(POLL_S)
        shutil.rmtree(self._place, ignore_errors=True)


def _write(order: Mapping[str, object], index: int, block: bytearray) -> Outcome:
    size = int(str(order["size"]))
    shared = bool(order["shared"])
    name = "shared" if shared else f"w{index:05d}"
    path = os.path.join(str(order["directory"]), name)
    return write_durably(path, index * size if shared else 0, size, float(str(order["start"])), time.time, block)


def follow(directory: str, ranks: Ranks, idle_s: float = 600.0) -> None:
    """What every rank but 0 does: obey the leader until it says end. CannotTellError if it falls silent."""
    place = os.path.join(directory, f".cachexfs-ranks-{ranks.job}")
    deadline = time.monotonic() + JOIN_S
    while True:
        with contextlib.suppress(OSError):
            _put(os.path.join(place, f"here-{ranks.rank}"), {})
            break
        if time.monotonic() > deadline:
            raise CannotTellError(f"rank 0 did not create {place}")
        time.sleep(POLL_S)
    number, block = 0, bytearray()
    heard = time.monotonic()
    while time.monotonic() - heard < idle_s:
        order = _get(os.path.join(place, f"run-{number}"))
        if order is None:
            if not os.path.isdir(place):
                if number > 0:
                    return
            elif number == 0 and not os.path.exists(os.path.join(place, f"here-{ranks.rank}")):
                with contextlib.suppress(OSError):  # we spoke to the remains of an earlier step
                    _put(os.path.join(place, f"here-{ranks.rank}"), {})
            time.sleep(POLL_S)
            continue
        heard = time.monotonic()
        if order.get("end"):
            with contextlib.suppress(OSError):
                _put(os.path.join(place, f"gone-{ranks.rank}"), {})
            return
        index = order["ranks"].get(str(ranks.rank)) if isinstance(order["ranks"], dict) else None
        if index is not None:
            block = block or new_block(int(order["size"]))
            outcome = _write(order, int(index), block)
            answer = {"seconds": outcome.seconds, "error": outcome.error, "late": outcome.late}
            with contextlib.suppress(OSError):
                _put(os.path.join(place, f"done-{number}-{ranks.rank}"), answer)
        number += 1
    raise CannotTellError("rank 0 fell silent: the probe has ended")
