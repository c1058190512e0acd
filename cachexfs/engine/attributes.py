"""The extended attributes ``user.cachex.*``: how far each file and checkpoint has got.

Role: turns catalogue and completeness into the values of the user's contract. Values are computed when asked.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from cachexfs.core.boundary import Boundary
from cachexfs.core.records import ROOT_FID, Copy, Inode
from cachexfs.core.routes import DIRECT, PARTNER
from cachexfs.engine.completeness import Checkpoint, Completeness, Piece
from cachexfs.engine.files import Files
from cachexfs.engine.health import pfs_health
from cachexfs.engine.node import Node

PREFIX = b"user.cachex."
DIGEST = PREFIX + b"digest"
MISSING_SHOWN_MAX = 64
ETA_S_MIN = 0.001  # zero is only what is reached
COPY_SLOWER = 2.0  # by which a copy that is under way may still slow down
Eta = tuple[float, float]
NO_COPY = (
    "no live copy: every holder is lost and it is not on the PFS",
    "no live copy: its node was lost before it reached the PFS, and on the route 'direct' no partner had it",
)


def rfc3339(time_s: float) -> str:
    """UTC with microseconds."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Attributes:
    """Computes attribute values."""

    def __init__(self, node: Node, files: Files, completeness: Completeness) -> None:
        #: ("partner" or "pfs", bytes, route, seconds since publication) -> (median, 95% bound) seconds left, or None
        self.eta_s: Callable[[str, int, str, float], Eta | None] = lambda boundary, size, route, waited_s: None
        self.copy_left_s: Callable[[int], float | None] = lambda fid: None  # of a copy to the PFS that is under way
        self.node = node
        self.files = files
        self.completeness = completeness

    def stage(self, fid: int, inode: Inode) -> Boundary:
        """Boundary of one file as this node sees it, WRITING between a write and its publication."""
        vnode = self.files.known(fid)
        if inode.writing or (vnode is not None and vnode.dirty):
            return Boundary.WRITING
        return self.node.boundary(fid, inode)

    async def of(self, fid: int) -> dict[str, str]:
        """All attributes of a file or directory, without the prefix. Empty for what has none."""
        inode = self.node.catalogue.view.inode(fid)
        if inode is None:
            return {}
        if inode.kind == "d":
            return await self._directory(fid)
        if inode.kind == "f":
            return self._file(fid, inode)
        return {"stage": "pfs" if self.node.on_pfs(fid, inode) else "returned"}

    def _file(self, fid: int, inode: Inode) -> dict[str, str]:
        node = self.node
        generation = node.catalogue.view.generation(fid)
        stage = self.stage(fid, inode)
        on_pfs = node.on_pfs(fid, inode)
        route = self.route(fid, inode)
        waited_s = max(0.0, node.clock.now_s() - inode.t_returned_s) if inode.t_returned_s else 0.0
        found = {
            "stage": stage.label,
            "eta.pfs": self._eta("pfs", inode.size, waited_s, on_pfs, route, self.copy_left_s(fid)),
        }
        if node.replica_count:
            found["eta.partner"] = self._eta(
                "partner",
                inode.size,
                waited_s,
                stage >= Boundary.PARTNER,
                route,
                self.copy_left_s(fid) if route == DIRECT else None,
            )
        times = (
            ("returned", inode.t_returned_s, True),
            ("partner", inode.t_partner_s, node.is_protected(inode)),
            ("pfs", inode.t_pfs_s, on_pfs),
        )
        for name, time_s, holds in times:
            if time_s and holds and stage != Boundary.WRITING:
                found[f"t.{name}"] = rfc3339(time_s)
        held = generation.stage if generation is not None else ""
        holders = [f"{copy.node}:{self._tier(copy, held)}" for copy in node.live_copies(inode)]
        found["holders"] = ",".join(holders + ([self._pfs()] if on_pfs else []))
        found["origin"] = inode.origin or "pfs"
        found["route"] = route
        found["generation"] = str(inode.gen)
        found["pending"] = str(0 if on_pfs else inode.size)
        if generation is not None and generation.digest:
            found["digest"] = f"xxh3_128:{generation.digest.hex()}"
        error = inode.error or node.errors.get(f"conflict:{fid:x}", "")
        if stage == Boundary.LOST:
            error = error or NO_COPY[inode.route == DIRECT]
        if not error and not on_pfs and stage != Boundary.WRITING and (health := pfs_health(node)).away:
            error = health.words
        if error:
            found["error"] = error
        return found

    def _tier(self, copy: Copy, stage: str) -> str:
        """Where a copy lies. What this node has spilled is on its NVMe; of others' it does not know."""
        is_here = copy.node == self.node.name and copy.store == self.node.staging.store
        return "nvme" if is_here and self.node.staging.is_spilled(stage) else copy.tier

    def _pfs(self) -> str:
        """The PFS as a holder: a copy there counts, but nobody can read it while it does not answer."""
        pfs = self.node.pfs
        state = "offline" if pfs is None or self.node.options.offline else pfs.state
        return "pfs" if state == "ok" else f"pfs:{state}"

    def route(self, fid: int, inode: Inode) -> str:
        """The way that a file's newest bytes take, as far as this node can tell: another's come with their FLUSH."""
        vnode = self.files.known(fid)
        route = (vnode.route if vnode is not None else "") or inode.route
        if not route:  # it came from the PFS, or from before routes were recorded
            return PARTNER if self.node.replica_count and inode.origin else DIRECT
        return DIRECT if route == DIRECT else PARTNER

    def _eta(
        self, boundary: str, size: int, waited_s: float, reached: bool, route: str = PARTNER,
        copying_s: float | None = None, others: bool = False,
    ) -> str:  # fmt: skip
        """``copying_s``: what a copy that is under way takes at the pace so far: known better than what is usual.
        ``others``: it is one of several."""
        if reached:
            return "p50=0 p95=0"
        if (boundary == "pfs" or route == DIRECT) and pfs_health(self.node).away:
            return "unknown"
        found = self.eta_s(boundary, size, route, waited_s)
        if copying_s is not None:
            usual = (0.0, 0.0) if found is None else found
            found = (max(copying_s, usual[0] if others else 0.0), max(COPY_SLOWER * copying_s, usual[1]))
        if found is None:
            return "unknown"
        return " ".join(f"{name}={_seconds(max(s, ETA_S_MIN))}" for name, s in zip(("p50", "p95"), found, strict=True))

    async def _directory(self, fid: int) -> dict[str, str]:
        weakest, pending, error, last_s, copying_s = Boundary.PFS, 0, "", 0.0, list[float]()
        for _, child, inode in self.completeness.walk(fid):
            weakest = min(weakest, self.stage(child, inode) if inode.kind == "f" else self.node.boundary(child, inode))
            if not self.node.on_pfs(child, inode):
                pending, last_s = pending + inode.size, max(last_s, inode.t_returned_s)
                copying_s += filter(None, [self.copy_left_s(child)])
            error = error or inode.error
        waited_s = max(0.0, self.node.clock.now_s() - last_s) if last_s else 0.0
        left_s = max(copying_s, default=None)
        found = {
            "stage": weakest.label,
            "pending": str(pending),
            "eta.pfs": self._eta("pfs", pending, waited_s, weakest == Boundary.PFS, copying_s=left_s, others=True),
        }
        if self.node.replica_count:
            found["eta.partner"] = self._eta("partner", pending, waited_s, weakest >= Boundary.PARTNER)
        if not error and weakest not in (Boundary.PFS, Boundary.WRITING) and (health := pfs_health(self.node)).away:
            error = health.words
        if error:
            found["error"] = error
        checkpoint = await self.completeness.checkpoint(fid)
        if checkpoint is not None:
            self._checkpoint(checkpoint, found)
        else:
            risk = await self.at_risk_s(fid)
            if risk is not None:
                found["at_risk_s"] = f"{risk:.0f}"
            elif fid == ROOT_FID:
                found["at_risk_s"] = "unknown"
        return found

    def _checkpoint(self, checkpoint: Checkpoint, found: dict[str, str]) -> None:
        found["restartable"] = "no" if checkpoint.restartable is None else checkpoint.restartable.label
        times = {
            "returned": checkpoint.t_returned_s, "partner": checkpoint.t_partner_s, "pfs": checkpoint.t_pfs_s,
            "restartable": checkpoint.t_restartable_s,
        }  # fmt: skip
        found.update({f"t.{name}": rfc3339(time_s) for name, time_s in times.items() if time_s})
        if checkpoint.missing:
            shown = [_missing(piece) for piece in checkpoint.missing[:MISSING_SHOWN_MAX]]
            more = len(checkpoint.missing) - len(shown)
            found["missing"] = "; ".join(shown) + (f"; and {more} more" if more > 0 else "")

    async def at_risk_s(self, fid: int) -> float | None:
        """Seconds of training since the first write of the newest checkpoint that survives the loss of a node."""
        for candidate in await self.completeness.newest_first(fid):
            found = await self.completeness.checkpoint(candidate.fid)
            if found is not None and found.restartable is not None and found.restartable >= Boundary.PARTNER:
                return max(0.0, self.node.clock.now_s() - found.first_s) if found.first_s else None
        return None


def _missing(piece: Piece) -> str:
    why = f"{piece.node}: {piece.reason}" if piece.node else piece.reason
    return f"{piece.name.decode(errors='backslashreplace')} ({why})"


def _seconds(value_s: float) -> str:
    """Three digits, without an exponent: ``2510000``, ``12.3``."""
    rounded_s = float(f"{value_s:.3g}")
    return f"{rounded_s:.0f}" if rounded_s >= 1000 else f"{rounded_s:g}"
