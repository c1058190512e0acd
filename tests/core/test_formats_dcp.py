"""DCP: what real checkpoints name is what lies on disk; what hostile ones name is refused."""

import os
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest
from formats_support import CHECKPOINT, Call, DirFiles, Named, info, metadata, pickled
from hypothesis import given
from hypothesis import strategies as st

from cachexfs.core.formats import FormatError, Members, combine, describe, evaluate, prefixed, recognise
from cachexfs.core.formats.dcp import Dcp, needed_files

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real checkpoints, written by torch in a process of its own."""
    root = tmp_path_factory.mktemp("saved")
    script = [sys.executable, "-W", "ignore", str(HERE / "formats_checkpoints.py"), str(root)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root


def sizes(root: Path) -> dict[bytes, int]:
    files = DirFiles(root)
    return {name: files.size(name) or 0 for name in files.names()}


NATIVE = ["plain", "path-object", "many-files", "threads", "fsdp", "per-rank", "safetensors", "empty-shard", "nothing"]


@pytest.mark.parametrize("name", NATIVE)
def test_real_checkpoint_is_whole_and_sizes_are_exact(saved: Path, name: str) -> None:
    found = describe(DirFiles(saved / name))
    assert found is not None
    assert found.incomplete_reason is None
    present = sizes(saved / name)
    assert evaluate(found.needs, present) == []
    data = {n: size for n, size in found.needs.items() if not n.endswith(b".metadata")}
    assert data == {n: present[n] for n in data}
    unnamed = {n for n in present if n.endswith(b".distcp")} - set(data)
    assert all(present[n] == 0 for n in unnamed)
    assert bool(data) == (name != "nothing")


@pytest.mark.parametrize("name", [n for n in NATIVE if n != "nothing"])
def test_one_byte_less_or_a_file_less_is_incomplete(saved: Path, name: str) -> None:
    found = describe(DirFiles(saved / name))
    assert found is not None
    present = sizes(saved / name)
    for member, size in found.needs.items():
        assert [m.name for m in evaluate(found.needs, {**present, member: size - 1})] == [member]
        assert [m.name for m in evaluate(found.needs, {n: s for n, s in present.items() if n != member})] == [member]


def test_number_of_files_as_saved(saved: Path) -> None:
    assert len(needed_files((saved / "many-files/.metadata").read_bytes())) > 20
    assert len(needed_files((saved / "threads/.metadata").read_bytes())) == 3
    assert len(needed_files((saved / "fsdp/.metadata").read_bytes())) == 2


def test_safetensors_shard_is_longer_than_its_metadata_says(saved: Path) -> None:
    directory = saved / "safetensors"
    data = (directory / ".metadata").read_bytes()
    whole = (directory / "__0_0.distcp").stat().st_size
    without = Dcp().members(b".metadata", data, [b".metadata"])
    assert not without.exact
    assert without.needs[b"__0_0.distcp"] < whole
    with_files = Dcp().members(b".metadata", data, [b".metadata"], DirFiles(directory))
    assert with_files.exact
    assert with_files.needs == {b"__0_0.distcp": whole}


def test_per_rank_metadata_without_a_global_one(saved: Path) -> None:
    names = os.listdir(os.fsencode(saved / "per-rank"))
    assert recognise(names)[0][1] == b"__0.metadata"
    assert [commit for _, commit in recognise(names)] == [b"__0.metadata", b"__1.metadata"]
    found = describe(DirFiles(saved / "per-rank"))
    assert found is not None
    assert found.note == "per-rank metadata, 2 of ?"
    assert set(found.needs) == {b"__0_0.distcp", b"__1_0.distcp", b"__1.metadata"}


def test_a_gap_in_per_rank_metadata_is_missing() -> None:
    names = [b"__0.metadata", b"__3.metadata"]
    data = {b"__0.metadata": metadata([info("__0_0.distcp", 0, 9)]), b"__3.metadata": metadata([])}
    found = combine([Dcp().members(name, data[name], names) for name in names])
    assert [m.name for m in evaluate(found.needs, dict.fromkeys(names, 9))] == [
        b"__0_0.distcp",
        b"__1.metadata",
        b"__2.metadata",
    ]


def test_global_metadata_wins_over_left_over_rank_metadata() -> None:
    assert Dcp().recognises([b"__0.metadata", b".metadata", b"__0_0.distcp"]) == [b".metadata"]
    assert Dcp().recognises([b".metadata.tmp", b"__0.metadata.tmp", b"__x.metadata", b"__01.metadata"]) == []


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_strange_names_in_every_protocol(saved: Path, protocol: int) -> None:
    needs = needed_files((saved / f"names.{protocol}").read_bytes())
    assert needs == {
        b"a\nb": 100_000 + 2**40,
        b"sub/dir/x.distcp": 15,
        b"caf\xe9": 25,
        b"dot/x": 35,
        b"z": 9,
    }


def test_without_memo_shortcuts_the_answer_is_the_same(saved: Path) -> None:
    """The fast runs of opcodes and the plain ones agree: an optimized pickle has none of the runs."""
    for name in ("plain", "fsdp", "many-files", "path-object"):
        data = (saved / name / ".metadata").read_bytes()
        optimized = pickletools.optimize(data)
        assert optimized != data
        assert needed_files(optimized) == needed_files(data)


def test_real_metadata_cut_anywhere_is_refused(saved: Path) -> None:
    data = (saved / "plain/.metadata").read_bytes()
    for size in [*range(0, len(data), 97), len(data) - 1]:
        with pytest.raises(FormatError):
            needed_files(data[:size])


@given(st.data())
def test_damaged_metadata_is_read_or_refused(saved: Path, data: st.DataObject) -> None:
    original = (saved / "plain/.metadata").read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        needs = needed_files(bytes(damaged))
    except FormatError:
        return
    assert all(isinstance(size, int) and size >= 0 for size in needs.values())


NO_TORCH = """
import sys
from cachexfs.core import formats
from cachexfs.core.formats.dcp import needed_files
needs = needed_files(open(sys.argv[1], "rb").read())
loaded = [m for m in ("torch", "numpy", "safetensors", "pyfuse3", "trio") if m in sys.modules]
print(len(needs), loaded)
"""


def test_reads_without_torch(saved: Path) -> None:
    script = [sys.executable, "-c", NO_TORCH, str(saved / "fsdp/.metadata")]
    assert subprocess.run(script, capture_output=True, text=True, check=True).stdout.strip() == "2 []"


@given(st.lists(st.tuples(st.sampled_from(["a", "b/c", "d\n"]), st.integers(0, 2**62 - 1), st.integers(0, 2**62))))
def test_minimum_size_is_the_largest_end(items: list[tuple[str, int, int]]) -> None:
    expected: dict[bytes, int] = {}
    for name, offset, length in items:
        expected[name.encode()] = max(expected.get(name.encode(), 0), offset + length)
    assert needed_files(metadata(info(*item) for item in items)) == expected


def test_more_items_than_one_batch_of_the_pickler() -> None:
    needs = needed_files(metadata(info(f"f{i % 7}", i, 1) for i in range(2500)))
    assert needs == {b"f%d" % (i % 7): i + 1 for i in range(2493, 2500)}


def test_megatron_metadata_holds_the_plans_of_the_save(saved: Path) -> None:
    assert needed_files((saved / "megatron.metadata").read_bytes()) == {b"__0_0.distcp": 9}


def test_megatron_metadata_class() -> None:
    state = {"storage_data": {"k": info("x", 1, 2)}, "mcore_data": {"w": {"shape": Call("torch", "Size", (3,))}}}
    module = "megatron.core.dist_checkpointing.strategies.torch"
    assert needed_files(pickled(Named(module, "MCoreMetadata", state))) == {b"x": 3}


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        "",
        ".",
        "a/.",
        "a/",
        "nul\0",
        "x" * 256,
        "y/" * 3000 + "y",
        "\ud800",
        3,
        None,
    ],
)
def test_names_that_leave_the_directory_are_refused(path: object) -> None:
    with pytest.raises(FormatError):
        needed_files(metadata([info("good", 0, 1), info(path, 0, 1)]))


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 2), (0, -1), (2**63, 0), (2**62, 2**62), ("0", 1), (0, None), (True, 1), (0.5, 1)]
)
def test_impossible_extents_are_refused(offset: object, length: object) -> None:
    with pytest.raises(FormatError):
        needed_files(metadata([info("x", offset, length)]))


@pytest.mark.parametrize(
    "top",
    [
        None,
        {"storage_data": {}},
        Named(CHECKPOINT + "metadata", "Metadata", {"state_dict_metadata": {}}),
        Named(CHECKPOINT + "metadata", "Metadata", {"storage_data": None}),
        Named(CHECKPOINT + "metadata", "Metadata", {"storage_data": [info("x", 0, 1)]}),
        Named(CHECKPOINT + "metadata", "Metadata", {"storage_data": {"k": "x"}}),
        Named(
            CHECKPOINT + "metadata",
            "Metadata",
            {"storage_data": {"k": Named(CHECKPOINT + "filesystem", "_StorageInfo")}},
        ),
        Named(CHECKPOINT + "metadata", "Metadata", (None, {"storage_data": {}})),
        Named(CHECKPOINT + "metadata", "Metadata"),
        Named(CHECKPOINT + "metadata", "StorageMeta", {"storage_data": {}}),
    ],
)
def test_other_pickles_are_not_taken_for_metadata(top: object) -> None:
    with pytest.raises(FormatError):
        needed_files(pickled(top))


def test_a_message_says_which_class_is_unknown() -> None:
    planner = Named("my_company.planner", "Plan", {})
    with pytest.raises(FormatError, match=r"'my_company\.planner' 'Plan'"):
        needed_files(metadata([], planner_data=planner))


def test_two_sets_in_one_checkpoint_are_combined() -> None:
    model = Members(b".metadata", {b"__0_0.distcp": 10}, exact=True)
    optimizer = Members(b".metadata", {b"__0_0.distcp": 20}, exact=True, note="n", incomplete_reason="r")
    both = combine([prefixed(b"pytorch_model_fsdp_0", model), prefixed(b"optimizer_0", optimizer)])
    assert both.commit == b"pytorch_model_fsdp_0/.metadata"
    assert both.needs == {
        b"pytorch_model_fsdp_0/__0_0.distcp": 10,
        b"optimizer_0/__0_0.distcp": 20,
        b"optimizer_0/.metadata": 1,
    }
    assert (both.exact, both.note, both.incomplete_reason) == (True, "n", "r")
    with pytest.raises(FormatError):
        combine([])
