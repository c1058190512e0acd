"""Array type of the model.

Role: one name for "a numpy array of float64", so that signatures say what they carry. Pure; no state.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
GIB = float(2**30)
"""Bytes in one GiB."""


def blom(n: Floats | float) -> Floats:
    """Expected standard-normal score of the largest of ``n`` independent values (Blom 1958), 0 for n <= 1.

    a(n) = Phi^-1((n - 3/8) / (n + 1/4)); no unit.
    """
    from scipy.special import ndtri

    count = np.asarray(n, dtype=np.float64)
    safe = np.maximum(count, 1.0)
    return np.where(count <= 1.0, 0.0, ndtri((safe - 0.375) / (safe + 0.25)))


def mad_sd(values: Floats) -> float:
    """Robust standard deviation: 1.4826 times the median absolute deviation from the median; 0 if empty."""
    if values.size == 0:
        return 0.0
    return float(1.4826 * np.median(np.abs(values - np.median(values))))


def weighted_median(values: Floats, weights: Floats) -> float:
    """Where the cumulative weight, interpolated between the middles of the weights, reaches one half."""
    order = np.argsort(values)
    sorted_weights = weights[order]
    middles = np.cumsum(sorted_weights) - 0.5 * sorted_weights
    return float(np.interp(0.5 * weights.sum(), middles, values[order]))
