"""Stage keys: what a staged file's name tells after its daemon is gone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachexfs.core.stages import make_stage, parse_stage


@given(st.integers(0, 2**62), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_key_tells_file_and_generation(fid: int, gen: int, nonce: int) -> None:
    stage = make_stage(fid, gen, nonce)
    assert parse_stage(stage) == (fid, gen)
    assert "/" not in stage
    assert len(stage) < 64


def test_attempts_at_one_generation_have_different_keys() -> None:
    assert make_stage(4096, 2, 1) != make_stage(4096, 2, 2)


@pytest.mark.parametrize("name", ["", "1.2", "1.2.3.4", "x.2.3", "1.y.3", "..", "lost+found", ".nfs00012"])
def test_a_foreign_name_is_no_key(name: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|values to unpack"):
        parse_stage(name)
