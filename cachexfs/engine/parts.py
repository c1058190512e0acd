"""The engine's parts of one mount, and how they know each other.

Role: built once per daemon by the layer above, which then loads, runs and ends them. Whatever one part tells another
is connected here, and nowhere else. No concurrency: nothing here waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cachexfs.engine.attributes import Attributes
from cachexfs.engine.claims import Claims
from cachexfs.engine.completeness import Completeness
from cachexfs.engine.content import Reader
from cachexfs.engine.denied import Denied
from cachexfs.engine.drain import Drainer
from cachexfs.engine.drain_left import copy_left_s
from cachexfs.engine.files import Files
from cachexfs.engine.hold import Keeper
from cachexfs.engine.interfaces import FormatReader
from cachexfs.engine.last_whole import LastWhole
from cachexfs.engine.losses import Losses
from cachexfs.engine.mended import Mended
from cachexfs.engine.node import Node
from cachexfs.engine.outrun import Outrun
from cachexfs.engine.pfs_import import Importer
from cachexfs.engine.reclaim import Reclaim
from cachexfs.engine.recover import Takeover
from cachexfs.engine.replicate import Replicator
from cachexfs.engine.source import Source


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one mount."""

    node: Node
    files: Files
    reader: Reader
    replicator: Replicator
    drainer: Drainer
    keeper: Keeper
    importer: Importer
    completeness: Completeness
    attributes: Attributes
    claims: Claims
    losses: Losses
    takeover: Takeover
    denied: Denied
    reclaim: Reclaim
    mended: Mended


def assemble(node: Node, formats: FormatReader | None = None) -> Parts:
    """The parts of ``node``, connected and listening to its catalogue.

    ``formats`` reads large commit files elsewhere; None: they are read in this process.
    """
    source = Source(node)
    files = Files(node, source)
    replicator, drainer = Replicator(node, files, source), Drainer(node, files, source)
    keeper = Keeper(node, files, source.copies)
    completeness = Completeness(node, files, source, formats)
    attributes = Attributes(node, files, completeness)
    attributes.copy_left_s = partial(copy_left_s, drainer)
    last_whole = LastWhole(node, drainer.waits)
    node.keeps = last_whole.keeps
    claims, losses, takeover = (
        Claims(node, completeness, drainer, last_whole),
        Losses(node, completeness),
        Takeover(node, files),
    )
    denied, reclaim = Denied(node, source), Reclaim(node)
    source.keeper, source.replicator = keeper, replicator
    keeper.fills = source.fills
    keeper.on_pressure = claims.pressed
    node.members = completeness.commit_files.members_of
    drainer.on_landed = keeper.landed
    files.publishing.on_released = drainer.released
    files.on_orphan_closed = keeper.check
    node.requests.is_held = files.is_held
    for part in (keeper, replicator, drainer, last_whole, claims, losses, takeover, denied, reclaim, Outrun(node)):
        node.catalogue.listen(part.notice)
    return Parts(
        node, files, source, replicator, drainer, keeper, Importer(node, source), completeness,
        attributes, claims, losses, takeover, denied, reclaim,
        Mended(node, source, drainer),
    )  # fmt: skip


def load(parts: Parts) -> None:
    """Let them see what the catalogue holds of earlier daemons, once these have been adopted."""
    parts.drainer.load()
    parts.claims.load()
    parts.losses.load()
    parts.denied.load()
    parts.reclaim.load()
