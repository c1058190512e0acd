"""The transition table of the boundaries, and the evidence that carries each."""

import itertools

import pytest

from cachexfs.core.boundary import TRANSITIONS, Boundary, Event, boundary_of, step

EVIDENCE = list(itertools.product([False, True], [False, True], range(4), range(3)))


def meaning(published: bool, on_pfs: bool, fast_copies: int, replicas: int) -> Boundary:
    """The promises, said without the table."""
    if not published:
        return Boundary.WRITING
    if on_pfs:
        return Boundary.PFS
    if replicas and fast_copies >= replicas + 1:
        return Boundary.PARTNER
    return Boundary.RETURNED if fast_copies else Boundary.LOST


@pytest.mark.parametrize(("published", "on_pfs", "fast_copies", "replicas"), EVIDENCE)
def test_a_boundary_is_claimed_only_with_its_evidence(
    published: bool, on_pfs: bool, fast_copies: int, replicas: int
) -> None:
    found = boundary_of(published=published, on_pfs=on_pfs, fast_copies=fast_copies, replicas=replicas)
    assert found == meaning(published, on_pfs, fast_copies, replicas)


@pytest.mark.parametrize(("published", "on_pfs", "fast_copies", "replicas"), EVIDENCE)
def test_more_evidence_never_lowers_a_boundary(published: bool, on_pfs: bool, fast_copies: int, replicas: int) -> None:
    less = boundary_of(published=published, on_pfs=on_pfs, fast_copies=fast_copies, replicas=replicas)
    assert boundary_of(published=published, on_pfs=on_pfs, fast_copies=fast_copies + 1, replicas=replicas) >= less
    assert boundary_of(published=published, on_pfs=True, fast_copies=fast_copies, replicas=replicas) >= less


def test_alone_no_partner_is_ever_claimed() -> None:
    for copies in range(5):
        assert boundary_of(published=True, on_pfs=False, fast_copies=copies, replicas=0) != Boundary.PARTNER


@pytest.mark.parametrize("state", Boundary)
@pytest.mark.parametrize("event", Event)
def test_what_the_table_does_not_have_is_refused(state: Boundary, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert step(state, event) == TRANSITIONS[state, event]
    else:
        with pytest.raises(ValueError, match=event.value):
            step(state, event)


def test_only_destroyed_evidence_lowers_a_boundary() -> None:
    falling = {Event.PARTNER_COPY_GONE, Event.PFS_COPY_GONE, Event.ALL_COPIES_GONE}
    for (state, event), after in TRANSITIONS.items():
        if event in falling:
            assert after <= state
        else:
            assert after >= state


def test_a_lost_partner_copy_does_not_lower_what_is_on_the_pfs() -> None:
    assert step(Boundary.PFS, Event.PARTNER_COPY_GONE) == Boundary.PFS


def test_labels_are_those_of_the_attribute() -> None:
    assert [b.label for b in Boundary] == ["lost", "writing", "returned", "partner", "pfs"]
