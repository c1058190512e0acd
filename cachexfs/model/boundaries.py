"""Boundaries: when a checkpoint is returned, on the partner, on the PFS, restartable.

Role: composes the delays of the parts into delays from capture. Pure; docs/model.md section 5.

    returned  = snapshot
    partner   = returned + copy                     direct route: not reached
    pfs       = returned + write                    direct;  partner + drain  on the partner route
    restartable at L = L + manifest

Every part is the slowest shard's. Parts that overlap (streaming while the application still writes) take
``overlap``: the sum becomes max(returned + tail, copy), the tail being what is sent after the last write.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cachexfs.errors import UsageError
from cachexfs.model.arrays import Floats
from cachexfs.model.delays import Delay

DRAWS = 4000


@dataclass(frozen=True)
class Parts:
    """Delays [s] of the parts, each of the slowest shard; ``overlap`` in [0, 1] share of the copy hidden."""

    snapshot: Delay
    copy: Delay
    write: Delay
    drain: Delay
    manifest: Delay
    overlap: float = 0.0


@dataclass(frozen=True)
class Boundaries:
    """Delays from capture; ``partner`` and ``restartable_partner`` are None on the direct route."""

    returned: Delay
    partner: Delay | None
    pfs: Delay
    restartable_partner: Delay | None
    restartable_pfs: Delay

    def named(self) -> list[tuple[str, Delay]]:
        """(name, delay) of those that exist on this route, in order."""
        pairs = (
            ("returned", self.returned),
            ("partner", self.partner),
            ("restartable at partner", self.restartable_partner),
            ("pfs", self.pfs),
            ("restartable at pfs", self.restartable_pfs),
        )
        return [(name, delay) for name, delay in pairs if delay is not None]


def compose(parts: Parts, route: str, draws: int = DRAWS) -> Boundaries:
    """Boundaries of ``route`` (partner or direct) by ``draws`` draws from a fixed seed.

    A part that never completes makes every later boundary unreached with that probability.
    """
    if route not in ("partner", "direct") or not 0.0 <= parts.overlap <= 1.0:
        raise UsageError("route is partner or direct, overlap lies in [0, 1]")
    rng = np.random.default_rng(7)
    returned = parts.snapshot.draw(rng, draws)
    manifest = parts.manifest.draw(rng, draws)
    if route == "direct":
        pfs = returned + parts.write.draw(rng, draws)
        return Boundaries(_delay(returned), None, _delay(pfs), None, _delay(pfs + manifest))
    copy = parts.copy.draw(rng, draws)
    with np.errstate(invalid="ignore"):
        hidden = np.where(np.isfinite(copy), copy * (1.0 - parts.overlap), np.inf)
    partner = np.maximum(returned + hidden, copy)
    pfs = partner + parts.drain.draw(rng, draws)
    return Boundaries(
        _delay(returned), _delay(partner), _delay(pfs), _delay(partner + manifest), _delay(pfs + manifest)
    )


def _delay(times_s: Floats) -> Delay:
    reached = times_s[np.isfinite(times_s)]
    if reached.size == 0:
        raise UsageError("a boundary is never reached: one of its parts always fails")
    return Delay.of(reached, 1.0 - reached.size / times_s.size)
