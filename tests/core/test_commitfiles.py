"""Names that commit, point or mark."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachexfs.core.commitfiles import (
    is_commit_name,
    is_pointer_name,
    is_unfinished_marker,
    pointer_target,
    step_of,
    unfinished_target,
)

COMMITS = [
    b".metadata",
    b"__0.metadata",
    b"__1023.metadata",
    b"model.safetensors.index.json",
    b"diffusion_pytorch_model.bin.index.json",
    b"latest",
    b"latest_checkpointed_iteration.txt",
    b"commit_success.txt",
    b"x.commit_success",
    b"trainer_state.json",
    b"metadata.json",
    b"meta.pt",
    b"_CHECKPOINT_METADATA",
    b"integrity.json",
]
DATA = [
    b"",
    b"__0_0.distcp",
    b".metadata.tmp",
    b"__0.metadata.tmp",
    b"x__0.metadata",
    b"__a.metadata",
    b"__.metadata",
    b"model.safetensors",
    b"index.json",
    b"latest_universal",
    b"Latest",
    b"my_metadata.json",
    b"common.pt",
    b"__0.metadata\n",
    b"\xff\xfe",
]


@pytest.mark.parametrize("name", COMMITS)
def test_commit_names(name: bytes) -> None:
    assert is_commit_name(name)


@pytest.mark.parametrize("name", DATA)
def test_other_names(name: bytes) -> None:
    assert not is_commit_name(name)
    assert not is_pointer_name(name)


def test_pointers_are_commit_files() -> None:
    assert [name for name in COMMITS if is_pointer_name(name)] == [b"latest", b"latest_checkpointed_iteration.txt"]


TRACKER = b"latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(
    ("name", "data", "target"),
    [
        (b"latest", b"global_step10", b"global_step10"),
        (b"latest", b" global_step10\n", b"global_step10"),
        (b"latest", b"epoch 1/step\xff2", b"epoch 1/step\xff2"),
        (b"latest", b"..a", b"..a"),
        (TRACKER, b"100", b"iter_0000100"),
        (TRACKER, b"0\n", b"iter_0000000"),
        (TRACKER, b"123456789", b"iter_123456789"),
        (TRACKER, b"release", b"release"),
    ],
)
def test_targets(name: bytes, data: bytes, target: bytes) -> None:
    assert pointer_target(name, data) == target


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (b"latest", b""),
        (b"latest", b" \n"),
        (b"latest", b"/etc"),
        (b"latest", b".."),
        (b"latest", b"a/../../b"),
        (b"latest", b"./a"),
        (b"latest", b"a//b"),
        (b"latest", b"a/"),
        (b"latest", b"a\0b"),
        (b"latest", b"a\nb"),
        (b"latest", b"x" * 256),
        (b"latest", b"x/" * 3000),
        (TRACKER, b""),
        (TRACKER, b"-1"),
        (TRACKER, b"1_0"),
        (TRACKER, "٣".encode()),
        (TRACKER, b"global_step10"),
        (TRACKER, b"../release"),
        (TRACKER, b"9" * 30),
        (b"other", b"global_step10"),
    ],
)
def test_what_names_nothing(name: bytes, data: bytes) -> None:
    assert pointer_target(name, data) is None


@given(st.sampled_from([b"latest", TRACKER]), st.binary(max_size=60) | st.text("./a1 \n").map(str.encode))
def test_a_target_never_leaves_the_directory(name: bytes, data: bytes) -> None:
    target = pointer_target(name, data)
    if target is not None:
        assert target
        assert not target.startswith(b"/")
        assert not {b"", b".", b".."} & set(target.split(b"/"))


def test_unfinished_marker() -> None:
    assert is_unfinished_marker(b"step=100-unfinished")
    assert unfinished_target(b"step=100-unfinished") == b"step=100"
    assert not is_unfinished_marker(b"-unfinished")
    assert not is_unfinished_marker(b"step=100-unfinished.txt")
    assert not is_unfinished_marker(b"unfinished")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-100", 100),
        ("checkpoint-00500", 500),
        ("iter_0000100", 100),
        ("global_step10", 10),
        ("epoch=3-step=1200.ckpt", 1200),
        ("run2/step-7", 7),
        ("7", 7),
        ("latest", None),
        ("", None),
        ("step-٣", None),
        ("9" * 300, None),
    ],
)
def test_step_is_the_last_integer(name: str, step: int | None) -> None:
    assert step_of(name) == step
