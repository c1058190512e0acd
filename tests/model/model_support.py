"""Generated measurements with a known law, and the bundled real ones."""

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import cachexfs.model
from cachexfs.model.observe import Observations, observations

DATA = Path(cachexfs.model.__file__).parent / "data"
GIB = 2.0**30


def law(n: float, b: float, *, alone: float = 1.0 * GIB, together: float = 20.0 * GIB, latency: float = 0.0) -> float:
    """Seconds of ``n`` writers of ``b`` bytes: sum of what one alone takes and its share of the server."""
    return latency + b / alone + n * b / together


def generated(
    counts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    repeats: int = 6,
    size: float = GIB,
    noise: float = 0.05,
    seed: int = 1,
    system: str = "",
    **kind: float,
) -> Observations:
    rng = np.random.default_rng(seed)
    n = np.repeat(np.array(counts, dtype=float), repeats)
    times = np.array([law(x, size, **kind) for x in n]) * np.exp(noise * rng.standard_normal(n.size))
    return observations(n, size, times, typical_s=times * 0.9, system=system)


def bundled(name: str) -> list[dict[str, str]]:
    with gzip.open(DATA / name, "rt", newline="") as stream:
        return list(csv.DictReader(stream))
