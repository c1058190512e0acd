"""The boundaries of a generation and the one table by which it moves between them.

Role: pure. Live code, replay after a restart and the simulation all apply events through ``step``;
nothing else decides what a boundary is. The table is also what docs/architecture.md shows.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class Boundary(IntEnum):
    """How far one generation of a file has got. The order is the order of strength."""

    LOST = 0
    WRITING = 1
    RETURNED = 2
    PARTNER = 3
    PFS = 4

    @property
    def label(self) -> str:
        """The value that ``user.cachex.stage`` shows."""
        return self.name.lower()


class Event(Enum):
    """What can happen to a generation."""

    PUBLISHED = "published"
    REPLICATED = "replicated"
    DRAINED = "drained"
    PARTNER_COPY_GONE = "partner copy gone"
    PFS_COPY_GONE = "pfs copy gone"
    ALL_COPIES_GONE = "all copies gone"
    RECOVERED = "recovered"


_B, _E = Boundary, Event

#: (boundary, event) -> boundary. A pair that is not here must not happen: ``step`` raises.
TRANSITIONS: dict[tuple[Boundary, Event], Boundary] = {
    (_B.WRITING, _E.PUBLISHED): _B.RETURNED,
    (_B.WRITING, _E.ALL_COPIES_GONE): _B.LOST,
    (_B.RETURNED, _E.REPLICATED): _B.PARTNER,
    (_B.RETURNED, _E.DRAINED): _B.PFS,
    (_B.RETURNED, _E.ALL_COPIES_GONE): _B.LOST,
    (_B.PARTNER, _E.REPLICATED): _B.PARTNER,
    (_B.PARTNER, _E.DRAINED): _B.PFS,
    (_B.PARTNER, _E.PARTNER_COPY_GONE): _B.RETURNED,
    (_B.PARTNER, _E.ALL_COPIES_GONE): _B.LOST,
    (_B.PFS, _E.REPLICATED): _B.PFS,
    (_B.PFS, _E.DRAINED): _B.PFS,
    (_B.PFS, _E.PARTNER_COPY_GONE): _B.PFS,
    (_B.PFS, _E.PFS_COPY_GONE): _B.RETURNED,
    (_B.PFS, _E.ALL_COPIES_GONE): _B.LOST,
    (_B.LOST, _E.RECOVERED): _B.RETURNED,
}


def step(state: Boundary, event: Event) -> Boundary:
    """The boundary after ``event``. Raises ``ValueError`` for a pair that the table does not have."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"{event.value!r} cannot happen at {state.label!r}") from None


def boundary_of(*, published: bool, on_pfs: bool, fast_copies: int, replicas: int) -> Boundary:
    """The boundary that the evidence carries.

    ``fast_copies`` counts whole copies on live nodes (memory or NVMe), ``replicas`` the partner copies that
    the mount asks for (0: this node alone). The result is reached from WRITING through ``step`` only, so
    evidence and table cannot disagree.
    """
    state = Boundary.WRITING
    if not published:
        return state
    state = step(state, Event.PUBLISHED)
    if fast_copies > replicas >= 1:
        state = step(state, Event.REPLICATED)
    if on_pfs:
        return step(state, Event.DRAINED)
    if fast_copies == 0:
        return step(state, Event.ALL_COPIES_GONE)
    return state
