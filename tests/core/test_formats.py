"""HuggingFace, DeepSpeed, Megatron, Lightning, accelerate and single files; the registry."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from formats_support import DirFiles, MemoryFiles, info, metadata
from hypothesis import given
from hypothesis import strategies as st

from cachexfs.core.commitfiles import is_commit_name
from cachexfs.core.formats import (
    FORMATS,
    FormatError,
    Members,
    Missing,
    describe,
    describe_file,
    evaluate,
    listed,
    recognise,
)

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real files of torch and safetensors, written by a process of its own."""
    root = tmp_path_factory.mktemp("saved")
    script = [sys.executable, "-W", "ignore", str(HERE / "formats_checkpoints.py"), str(root), "single"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root


def safetensors(data_bytes: int) -> bytes:
    header = json.dumps({"__metadata__": {"f": "pt"}, "t": {"dtype": "U8", "data_offsets": [0, data_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"x" * data_bytes


def index(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"t{i}": shard for i, shard in enumerate(shards)}}).encode()


def wants(content: Mapping[bytes, bytes]) -> Members:
    found = describe(MemoryFiles(content))
    assert found is not None
    return found


def missing(content: Mapping[bytes, bytes]) -> list[bytes]:
    """Names that hold the checkpoint back; a general reason counts as the name ``b"!"``."""
    found = wants(content)
    names = [m.name for m in evaluate(found.needs, {name: len(data) for name, data in content.items()})]
    return names + ([b"!"] if found.incomplete_reason else [])


def test_what_each_commit_file_lists_where_one_is_something_else() -> None:
    others = {b"a.index.json": index("s"), b".metadata": b"mine", b"b.index.json": b"[]", b"c.index.json": b"{"}
    content = {**others, b"d.index.json": b'{"weight_map": {"t": 3}}', b"trainer_state.json": b"{}"}
    found = {commit: list(names) for commit, names in listed(MemoryFiles(content)).items()}
    assert found == {b"a.index.json": [b"s"], b".metadata": [], b"b.index.json": [], b"c.index.json": []}


def test_what_each_of_several_commit_files_lists() -> None:
    found = wants(
        {b"a.index.json": index("s"), b"b.index.json": index("t", "u"), b"trainer_state.json": b'{"global_step": 1}'}
    )
    assert {commit: sorted(names) for commit, names in found.listed.items()} == {
        b"a.index.json": [b"s"], b"b.index.json": [b"t", b"u"],
    }  # fmt: skip


# evaluate, recognise


def test_evaluate_says_what_is_missing_and_why() -> None:
    needs = {b"c": 5, b"a": 1, b"b": 10, b"d": 0, b"e": 3}
    assert evaluate(needs, {b"b": 4, b"a": 0, b"d": 0, b"e": 9}) == [
        Missing(b"a", "empty"),
        Missing(b"b", "4 bytes, at least 10 needed"),
        Missing(b"c", "absent"),
    ]
    assert evaluate({}, {}) == []


def test_recognise_knows_every_format() -> None:
    cases = {
        "deepspeed": [b"latest", b"global_step1"],
        "megatron": [b"metadata.json", b"common.pt"],
        "dcp": [b".metadata", b"__0_0.distcp"],
        "lightning": [b"meta.pt"],
        "hf-trainer": [b"trainer_state.json", b"x"],
        "huggingface": [b"model.safetensors.index.json"],
        "accelerate": [b"random_states_0.pkl"],
    }
    assert {known.name for known in FORMATS} == set(cases)
    for name, names in cases.items():
        assert [known.name for known, _ in recognise(names)] == [name]
    assert recognise([]) == []
    assert recognise([b"config.json", b"model.safetensors"]) == []


@pytest.mark.parametrize(
    "name", [b"common.pt", b"model.safetensors", b"__0_0.distcp", b"config.json", b"metadata.json"]
)
def test_the_first_file_of_a_checkpoint_is_not_a_checkpoint(name: bytes) -> None:
    assert recognise([name]) == []


def test_common_names_in_other_checkpoints_do_no_harm() -> None:
    content = {name.removeprefix(b"x/"): data for name, data in dcp_set(b"x").items()}
    assert missing({**content, b"metadata.json": b'{"mine": 1}'}) == []
    hf = {b"m.index.json": index("a.safetensors"), b"a.safetensors": safetensors(5)}
    assert missing({**hf, b"metadata.json": b"no JSON", b"meta.pt": b"x"}) == []


def test_commit_files_of_formats_are_commit_names() -> None:
    for names in ([b"latest"], [b"latest_checkpointed_iteration.txt"], [b"metadata.json"], [b".metadata"]):
        assert all(is_commit_name(commit) for _, commit in recognise(names))


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text() | st.just("weight_map"), c)
).map(lambda v: json.dumps(v).encode()))  # fmt: skip
def test_any_commit_file_is_read_or_refused(data: bytes) -> None:
    names = [b"latest", b".metadata", b"metadata.json", b"latest_checkpointed_iteration.txt", b"__0.metadata"]
    names += [b"x.index.json", b"trainer_state.json", b"meta.pt", b"random_states_0.pkl", b"mp_rank_00_model_states.pt"]
    describe_file(MemoryFiles({b"x.safetensors": data}), b"x.safetensors")
    describe_file(MemoryFiles({b"x.pt": data}), b"x.pt")
    files = MemoryFiles(dict.fromkeys([*names, b"x.safetensors", b"optimizer.pt"], data))
    for known in FORMATS:
        for commit in known.recognises(names):
            for given_files in (None, files):
                try:
                    found = known.members(commit, data, names, given_files)
                except FormatError:
                    continue
                assert commit not in found.needs
                assert all(size >= 0 for size in found.needs.values())


# HuggingFace


def test_index_names_shards_and_headers_tell_sizes() -> None:
    whole = {b"model.safetensors.index.json": index("a.safetensors", "b.safetensors", "a.safetensors")}
    whole |= {b"a.safetensors": safetensors(1000), b"b.safetensors": safetensors(0)}
    found = wants(whole)
    assert found.exact
    assert found.needs == {name: len(data) for name, data in whole.items() if name.endswith(b"ors")}
    assert missing(whole) == []
    for cut in (0, 4, 30, 500):
        assert missing({**whole, b"a.safetensors": whole[b"a.safetensors"][:cut]}) == [b"a.safetensors"]
    assert missing({n: d for n, d in whole.items() if n != b"b.safetensors"}) == [b"b.safetensors"]


def test_a_shard_that_is_still_all_holes_is_not_whole() -> None:
    """safetensors sets the final size first and writes the bytes later."""
    content = {b"m.index.json": index("a.safetensors"), b"a.safetensors": bytes(1000)}
    assert missing(content) == [b"!"]


def test_index_without_files_is_a_lower_bound() -> None:
    found = FORMATS[5].members(b"m.index.json", index("a.bin"), [b"m.index.json"])
    assert (FORMATS[5].name, found.needs, found.exact) == ("huggingface", {b"a.bin": 1}, False)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b'{"weight_map": {"a": "../x"}}',
     b'{"weight_map": {"a": "/x"}}', b'{"weight_map": {"a": ["x"]}}', b"[" * 100_000, b"\xff\xfe", b"1" * 5000],
)  # fmt: skip
def test_unreadable_index(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^m\.index\.json: "):
        describe(MemoryFiles({b"m.index.json": data}))


@pytest.mark.parametrize(
    "header",
    [b"{}x", b"[]", b'{"t": 1}', b'{"t": {"data_offsets": [0]}}', b'{"t": {"data_offsets": [5, 1]}}',
     b'{"t": {"data_offsets": [0, 1e3]}}', b'{"t": {"data_offsets": [0, 99999999999999999999999]}}'],
)  # fmt: skip
def test_damaged_safetensors_header(header: bytes) -> None:
    content = {b"m.index.json": index("a.safetensors"), b"a.safetensors": struct.pack("<Q", len(header)) + header}
    assert missing(content) == [b"!"]


STATE = json.dumps({"global_step": 5}).encode()
TRAINER = dict.fromkeys([b"config.json", b"optimizer.pt", b"scheduler.pt", b"training_args.bin"], b"x")
TRAINER |= {b"trainer_state.json": STATE, b"model.safetensors": safetensors(9)}


def test_trainer_with_one_process() -> None:
    assert missing({**TRAINER, b"rng_state.pth": b"x"}) == []
    for gone in (b"optimizer.pt", b"scheduler.pt", b"rng_state.pth"):
        content = {**TRAINER, b"rng_state.pth": b"x"}
        del content[gone]
        assert missing(content) == [gone]


def test_trainer_needs_the_rng_state_of_every_rank() -> None:
    assert missing({**TRAINER, b"rng_state_0.pth": b"x"}) == [b"rng_state_1.pth"]
    assert missing({**TRAINER, b"rng_state_0.pth": b"x", b"rng_state_3.pth": b"x"}) == [
        b"rng_state_1.pth",
        b"rng_state_2.pth",
    ]
    assert "2 of ?" in wants({**TRAINER, b"rng_state_0.pth": b"x", b"rng_state_1.pth": b"x"}).note


def test_trainer_model_only_and_no_weights() -> None:
    only = {b"trainer_state.json": STATE, b"model.safetensors": safetensors(9)}
    assert missing(only) == []
    assert "model only" in wants(only).note
    assert missing({b"trainer_state.json": STATE, b"config.json": b"{}"}) == [b"!"]
    with pytest.raises(FormatError, match="global_step"):
        describe(MemoryFiles({b"trainer_state.json": b"{}"}))


def test_trainer_with_an_index_needs_its_shards() -> None:
    content = {**TRAINER, b"rng_state.pth": b"x", b"model.safetensors.index.json": index("m-1.safetensors")}
    del content[b"model.safetensors"]
    assert missing(content) == [b"m-1.safetensors"]


def dcp_set(directory: bytes) -> dict[bytes, bytes]:
    return {directory + b"/.metadata": metadata([info("__0_0.distcp", 0, 5), info("__0_0.distcp", 5, 5)]),
            directory + b"/__0_0.distcp": bytes(10)}  # fmt: skip


def test_trainer_with_fsdp_needs_both_sets() -> None:
    content = {b"trainer_state.json": STATE, b"scheduler.pt": b"x", b"rng_state_0.pth": b"x", b"rng_state_1.pth": b"x"}
    content |= dcp_set(b"pytorch_model_fsdp_0")
    assert missing(content) == [b"optimizer_0/.metadata"]
    content |= dcp_set(b"optimizer_0")
    assert missing(content) == []
    content[b"optimizer_0/__0_0.distcp"] = bytes(9)
    assert missing(content) == [b"optimizer_0/__0_0.distcp"]


def test_accelerate() -> None:
    content = {b"random_states_0.pkl": b"x", b"random_states_2.pkl": b"x", b"model.safetensors": safetensors(3)}
    assert missing(content) == [b"random_states_1.pkl"]
    sets = {b"random_states_0.pkl": b"x", **dcp_set(b"pytorch_model_fsdp_0"), **dcp_set(b"optimizer_0")}
    assert missing(sets) == []
    del sets[b"optimizer_0/.metadata"]
    assert missing(sets) == [b"optimizer_0/.metadata"]
    assert missing({b"random_states_0.pkl": b"x", b"y": b""}) == [b"!"]


# DeepSpeed


def test_deepspeed_real_files_say_how_many_ranks(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved / "deepspeed", root)
    files = DirFiles(root)
    found = describe(files)
    assert found is not None
    assert len(found.needs) == 4
    assert found.incomplete_reason is None
    (root / "global_step10" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    last = b"global_step10/zero_pp_rank_2_mp_rank_00_optim_states.pt"
    found = describe(files)
    assert found is not None
    assert [m.name for m in evaluate(found.needs, dict.fromkeys(files.names(), 10**9))] == [last]
    for rank in range(2):
        (root / "global_step10" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    found = describe(files)
    assert found is not None
    assert "ZeRO is on" in (found.incomplete_reason or "")


def test_deepspeed_step_directory_alone(saved: Path) -> None:
    found = describe(DirFiles(saved / "deepspeed" / "global_step10"))
    assert found is not None
    assert found.commit == b"mp_rank_00_model_states.pt"
    assert sorted(found.needs) == [b"zero_pp_rank_%d_mp_rank_00_optim_states.pt" % r for r in range(3)]


def step(*names: str) -> dict[bytes, bytes]:
    return {b"latest": b"s1", **{b"s1/" + name.encode(): b"x" for name in names}}


def test_deepspeed_sets_are_filled_up_to_the_largest_rank() -> None:
    names = ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"]
    assert missing(step(*names)) == []
    assert missing(step(*names, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")) == [
        b"s1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        b"s1/bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt",
        b"s1/bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt",
    ]
    assert missing(step(names[1])) == [b"s1/mp_rank_00_model_states.pt"]
    pipeline = ["layer_03-model_00-model_states.pt", "layer_01-model_01-model_states.pt"]
    assert missing(step(names[0], *pipeline)) == [
        b"s1/layer_01-model_00-model_states.pt",
        b"s1/layer_03-model_01-model_states.pt",
    ]


def test_deepspeed_stage_3() -> None:
    names = [f"zero_pp_rank_{r}_mp_rank_00_{k}_states.pt" for r in range(3) for k in ("model", "optim")]
    assert missing(step(*names)) == []
    assert missing(step(*names[1:])) == [b"s1/zero_pp_rank_0_mp_rank_00_model_states.pt"]


def test_deepspeed_latest_may_be_ahead_or_broken() -> None:
    assert missing({b"latest": b"s2", b"s1/mp_rank_00_model_states.pt": b"x"}) == [b"s2/mp_rank_00_model_states.pt"]
    for data in (b"", b"../x", b"/x"):
        with pytest.raises(FormatError, match=r"^latest: "):
            describe(MemoryFiles({b"latest": data, b"s1/.metadata": b""}))
    assert missing({b"latest": b"step-9", **dcp_set(b"step-9"), **dcp_set(b"step-8")}) == []
    assert missing({b"latest": b"step-9", b"step-9/.metadata": metadata([info("a", 0, 1)])}) == [b"step-9/a"]
    with pytest.raises(FormatError, match="beyond any job"):
        describe(MemoryFiles(step("zero_pp_rank_999999_mp_rank_999_optim_states.pt")))


# Megatron


ITER = b"iter_0000100/"
BESIDE = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}).encode()


def megatron() -> dict[bytes, bytes]:
    content = {b"latest_checkpointed_iteration.txt": b"100", ITER + b"common.pt": b"x", ITER + b"metadata.json": BESIDE}
    content |= dcp_set(ITER[:-1])
    return content


def test_megatron_needs_shards_and_what_stands_beside_them() -> None:
    content = megatron()
    assert missing(content) == []
    for name in content:
        if name.startswith(ITER):
            assert missing({n: d for n, d in content.items() if n != name}) == [name]


def test_megatron_other_iterations_do_not_count() -> None:
    assert missing({**megatron(), b"iter_0000050/.metadata": b"broken"}) == []


def test_megatron_iteration_directory_alone() -> None:
    content = {name[len(ITER) :]: data for name, data in megatron().items() if name.startswith(ITER)}
    assert missing(content) == []
    del content[b"common.pt"]
    assert missing(content) == [b"common.pt"]
    with pytest.raises(FormatError, match="not JSON"):
        describe(MemoryFiles({b"metadata.json": b"", b"common.pt": b"x"}))


def test_megatron_tracker_ahead_of_its_iteration() -> None:
    assert missing({b"latest_checkpointed_iteration.txt": b"100"}) == [b"!"]
    with pytest.raises(FormatError):
        describe(MemoryFiles({b"latest_checkpointed_iteration.txt": b"soon"}))


def test_megatron_older_layout() -> None:
    names = [b"mp_rank_00_000/model_optim_rng.pt", b"mp_rank_01_001/model_optim_rng.pt"]
    content = {b"latest_checkpointed_iteration.txt": b"100", **{ITER + name: b"x" for name in names}}
    assert missing(content) == [
        ITER + b"mp_rank_00_001/model_optim_rng.pt",
        ITER + b"mp_rank_01_000/model_optim_rng.pt",
    ]


# Lightning, single files, real archives


def test_lightning_needs_the_shards_too() -> None:
    assert missing({b"meta.pt": b"x"}) == [b".metadata"]


@pytest.mark.parametrize("name", ["optimizer.pt", "old.pt", "model.safetensors"])
def test_real_single_files(saved: Path, name: str) -> None:
    data = (saved / "hf-torch" / name).read_bytes()

    def whole(content: bytes) -> bool:
        found = describe_file(MemoryFiles({name.encode(): content}), name.encode())
        assert dict(found.needs) == {}
        return found.incomplete_reason is None

    assert whole(data)
    assert not whole(b"")
    assert not whole(bytes(len(data)))
    if name != "old.pt":  # torch's old format has no end mark
        assert not any(whole(data[:cut]) for cut in (100, len(data) // 2, len(data) - 1))


def test_a_cut_torch_file_is_named_in_the_reason(saved: Path) -> None:
    data = (saved / "hf-torch" / "optimizer.pt").read_bytes()
    content = {**TRAINER, b"rng_state.pth": b"x", b"optimizer.pt": data[:-5]}
    assert wants(content).incomplete_reason == "optimizer.pt: cut: the end of its zip archive is not there"


def test_real_huggingface_checkpoint(saved: Path) -> None:
    files = DirFiles(saved / "hf")
    found = describe(files)
    assert found is not None
    assert found.exact
    assert len(found.needs) == 2
    assert dict(found.needs) == {name: files.size(name) for name in found.needs}


def test_a_single_file_that_is_not_there() -> None:
    assert describe_file(MemoryFiles({}), b"a.pt").incomplete_reason == "absent"


def test_unrecognised_directory() -> None:
    assert describe(MemoryFiles({})) is None
    assert describe(MemoryFiles({b"a.txt": b"", b"b/c.txt": b""})) is None


def test_a_huge_commit_file_is_not_read() -> None:
    class Huge(MemoryFiles):
        def size(self, name: bytes) -> int | None:
            return 1 << 40

        def read(self, name: bytes, offset: int, length: int) -> bytes:
            raise AssertionError(f"{length} bytes were asked for")

    with pytest.raises(FormatError, match="the limit is"):
        describe(Huge({b".metadata": b""}))
