"""Which directories are checkpoints, by names alone: one rule for the mount and for a bare directory."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cachexfs.core.formats import commit_names, may_be_checkpoint, outline


def listing_of(paths: Iterable[str]) -> outline.Listing:
    tree: dict[bytes, tuple[dict[bytes, None], dict[bytes, None]]] = {b"": ({}, {})}
    for path in paths:
        *directories, last = path.encode().split(b"/")
        here = b""
        for name in directories:
            tree[here][1][name] = None
            here = here + b"/" + name if here else name
            tree.setdefault(here, ({}, {}))
        if last:
            tree[here][0][last] = None
    return lambda path: (list(tree[path][0]), list(tree[path][1])) if path in tree else ([], [])


def found(*paths: str, name: str = "run") -> list[str]:
    return sorted(p.decode() for p in outline.checkpoints(name.encode(), listing_of(paths), commit_names))


def test_a_directory_with_a_commit_file_is_one_and_nothing_below_it_counts() -> None:
    assert found("step-1/.metadata", "step-1/sub-2/.metadata", "a/b/step-2/.metadata") == ["a/b/step-2", "step-1"]


def test_shards_without_their_commit_file_are_a_checkpoint_that_is_not_saved_yet() -> None:
    assert found("step-1/__0_0.distcp", "step-2/notes.txt") == ["step-1"]
    assert outline.awaited([b"__0_0.distcp", b"__1_0.distcp"]) == b".metadata"
    assert outline.awaited([b"__0_0.distcp", b"__1.metadata"]) is None


def test_a_pointer_alone_makes_no_checkpoint_of_its_directory() -> None:
    assert found("latest_checkpointed_iteration.txt", "iter_0000010/.metadata") == ["iter_0000010"]
    assert found("latest", "global_step5/mp_rank_00_model_states.pt") == ["global_step5"]


def test_several_sets_below_a_step_are_one_checkpoint() -> None:
    sets = ("global_step_10/model/.metadata", "global_step_10/optimizer/.metadata", "global_step_10/extra.txt")
    assert found(*sets) == ["global_step_10"]
    assert outline.parts(b"global_step_10", listing_of(sets), b"global_step_10", commit_names) == [
        b"model/.metadata", b"optimizer/.metadata",
    ]  # fmt: skip
    assert found("checkpoint_3/pytorch_model_fsdp_0/.metadata", "checkpoint_3/optimizer_0/__0_0.distcp") == [
        "checkpoint_3"
    ]
    assert found("epoch=1-step=20/weights/.metadata", "epoch=1-step=20/context/io.json") == ["epoch=1-step=20"]


@pytest.mark.parametrize("run", ["run", "run7", "2026-01-02"])
def test_a_run_with_a_number_in_its_name_is_no_checkpoint_of_its_steps(run: str) -> None:
    assert found("step-1/.metadata", "step-2/.metadata", name=run) == ["step-1", "step-2"]
    assert found("a/step-1/.metadata", "last/.metadata", name=run) in (["a/step-1", "last"], ["a/step-1", "last"])
    assert found("step-1/.metadata", "last/.metadata", name=run) == ["last", "step-1"]


@pytest.mark.parametrize("names", [("best", "last"), ("model_best", "model-last"), ("ckpt",), ("Final",)])
def test_a_run_with_a_number_in_its_name_is_no_checkpoint_of_its_best_and_its_last(names: tuple[str, ...]) -> None:
    """``latest run-2`` once said ``run-2``, which nothing can load."""
    assert found(*(f"{name}/.metadata" for name in names), name="run-2") == sorted(names)


def test_a_run_without_a_step_groups_nothing() -> None:
    assert found("model/.metadata", "optimizer/.metadata", name="run") == ["model", "optimizer"]


def test_a_member_is_covered_by_the_nearest_commit_file() -> None:
    commits = {b".metadata", b"a/.metadata", b"b/__0.metadata", b"b/__1.metadata"}
    assert outline.covering(b"x/__0_0.distcp", commits) == b".metadata"
    assert outline.covering(b"a/__0_0.distcp", commits) == b"a/.metadata"
    assert outline.covering(b"b/__1_3.distcp", commits) == b"b/__1.metadata"
    assert outline.covering(b"a/.metadata", commits) is None
    assert outline.covering(b"c/__0_0.distcp", {b"a/.metadata"}) is None


@pytest.mark.parametrize("name", [b"train.log", b"config.yaml", b"a/events.out.tfevents.17", b"README.md", b"run.JSON"])
def test_logs_and_settings_are_no_checkpoints(name: bytes) -> None:
    assert not may_be_checkpoint(name)


@pytest.mark.parametrize("name", [b"model.pt", b"a/data", b"x.npz", b"\xff\n", b"weights.bin"])
def test_anything_else_may_be_one(name: bytes) -> None:
    assert may_be_checkpoint(name)
