"""Hostile pickles: nothing in them runs, nothing in them exhausts memory or the stack."""

import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
from formats_support import CHECKPOINT, Call, Named, info, metadata, pickled
from hypothesis import given
from hypothesis import strategies as st

from cachexfs.core.formats import FormatError
from cachexfs.core.formats.dcp import needed_files
from cachexfs.core.formats.inert_pickle import Limits

SIZE = CHECKPOINT + "metadata"


def refused(data: bytes, match: str | None = None) -> None:
    with pytest.raises(FormatError, match=match):
        needed_files(data)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        ("os", "system", ("touch {}",)),
        ("posix", "system", ("touch {}",)),
        ("subprocess", "call", (["touch", "{}"],)),
        ("builtins", "eval", ("open('{}', 'w')",)),
        ("builtins", "exec", ("open('{}', 'w')",)),
        ("builtins", "open", ("{}", "w")),
        ("builtins", "__import__", ("os",)),
        ("pathlib", "Path.touch", ("{}",)),
        ("torch", "load", ("{}",)),
        ("torch.storage", "_load_from_bytes", (b"",)),
        ("torch", "Size.__class__", ("{}",)),
        ("megatron.core", "os.system", ("touch {}",)),
        ("operator", "attrgetter", ("system",)),
        ("functools", "partial", (1,)),
    ],
)
def test_foreign_functions_are_refused_and_never_run(
    tmp_path: Path, protocol: int, module: str, name: str, args: tuple[object, ...]
) -> None:
    canary = tmp_path / "ran"
    args = tuple(a.format(canary) if isinstance(a, str) else a for a in args)
    call = Call(module, name, *args)
    for data in (
        pickled(call, protocol),
        metadata([info("x", 0, 1)], protocol, planner_data={"k": call}),
        metadata([info(call, 0, 1)], protocol),
        metadata([call], protocol),
    ):
        refused(data, "which no checkpoint needs")
    assert not canary.exists()


def test_the_canary_would_have_run(tmp_path: Path) -> None:
    """The same kind of bytes does run under Python's own unpickler."""
    canary = tmp_path / "ran"
    pickle.loads(pickled(Call("builtins", "open", str(canary), "w"))).close()
    assert canary.exists()


def test_admitted_functions_are_not_called_either() -> None:
    """``getattr`` and ``_codecs.encode`` occur in real files; here their results stay inert."""
    chain = Call("builtins", "getattr", Call("builtins", "getattr", Call("pathlib", "Path", "/"), "unlink"), "x")
    assert needed_files(metadata([info("x", 0, 1)], planner_data=chain)) == {b"x": 1}
    refused(metadata([info(Call("_codecs", "encode", "name", "latin1"), 0, 1)]))
    refused(metadata([info(Call("pathlib", "PosixPath", "a", "b"), 0, 1)]))


def test_the_result_of_getattr_cannot_be_called() -> None:
    pushed = b"\x8c\x08builtins\x8c\x07getattr\x93\x8c\x05torch\x8c\x04Size\x93\x8c\x07__new__\x86R"
    refused(b"\x80\x04" + pushed + b")R.", "calls something that is not a class")


def test_admitted_classes_with_evil_arguments_stay_inert() -> None:
    for evil in (10**30, -1, "x" * 10_000, [[]] * 50, {"a": 1}):
        planner = Call("torch", "Size", evil)
        assert needed_files(metadata([info("x", 0, 1)], planner_data=planner)) == {b"x": 1}


def test_kept_classes_are_made_in_one_way_only() -> None:
    refused(metadata([Call(CHECKPOINT + "filesystem", "_StorageInfo", "x", 0, 1)]), "unknown way")
    refused(pickled(Call(SIZE, "Metadata", {}, None, {})), "unknown way")
    refused(metadata([Named(CHECKPOINT + "filesystem", "_StorageInfo", (None, {"relative_path": "x"}))]))


def test_a_dictionary_built_from_arguments_is_not_taken_for_an_empty_one() -> None:
    items = [("k", info("x", 0, 1))]
    refused(pickled(Named(SIZE, "Metadata", {"storage_data": Call("collections", "OrderedDict", items)})))
    empty = Named(SIZE, "Metadata", {"storage_data": Call("collections", "OrderedDict")})
    assert needed_files(pickled(empty)) == {}


def test_a_state_used_up_is_not_read_as_an_empty_dictionary() -> None:
    shared = {"fqn": "x"}
    state = {"a": Named(SIZE, "StorageMeta", shared), "storage_data": shared}
    refused(pickled(Named(SIZE, "Metadata", state)))


BOMBS = {
    "bytes of 2**62": b"\x8e" + (2**62).to_bytes(8, "little") + b"x.",
    "bytes of 2**31": b"B" + (2**31).to_bytes(4, "little") + b"x.",
    "bytearray of 2**40": b"\x96" + (2**40).to_bytes(8, "little") + b"x.",
    "text of 2**62": b"\x8d" + (2**62).to_bytes(8, "little") + b"x.",
    "text of 2**32": b"X\xff\xff\xff\xffx.",
    "integer of 2**31 bytes": b"\x8b\xff\xff\xff\x7f.",
    "negative length": b"\x8b\xff\xff\xff\xff.",
    "frame of 2**62": b"\x95" + (2**62).to_bytes(8, "little") + b"N.",
    "memo entry 2**32": b"Nr\xff\xff\xff\xff.",
    "unset memo entry": b"j\xff\xff\xff\x7f.",
    "deep marks": b"(" * 3_000_000 + b".",
    "many items": b"N" * 6_000_000 + b".",
    "one huge tuple": b"(" + b"N" * 6_000_000 + b"t.",
    "many dictionaries": b"}\x94" * 4_000_000 + b".",
    "many kept objects": b"\x8c\x26torch.distributed.checkpoint.filesystem\x8c\x0c_StorageInfo\x93\x94"
    + b"h\x00)\x81\x94" * 1_500_000
    + b".",
    "many texts": b"\x8c\x02ab\x94" * 2_000_000 + b".",
    "nested tuples as a key": b"}" + b")" + b"\x85" * 2_000_000 + b"Ns.",
    "nested lists": b"]" * 500_000 + b"a" * 499_999 + b".",
    "nested dictionaries": b"}" + b"K\x00}" * 400_000 + b"s" * 400_000 + b".",
    "billion laughs": b")" + b"\x94h\x00\x86" * 100_000 + b".",
    "doubling lists": b"]\x94" + b"(h\x00h\x00e" * 300_000 + b".",
    "doubling dictionaries": b"}\x94" + b"(h\x00h\x00u" * 300_000 + b".",
    "dictionary in itself": b"}\x94K\x00h\x00s.",
    "duplicates": b"N" + b"2" * 6_000_000 + b".",
    "huge name": b"c" + b"a" * 5_000_000 + b"\nb\n.",
    "text repeated by a call": b"\x8c\x08operator\x8c\x03mul\x93\x8c\x01aJ\xff\xff\xff\x7f\x86R.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_within_bounded_memory(name: str) -> None:
    data = b"\x80\x04" + BOMBS[name]
    limits = Limits(objects_free=10_000, stack_items_max=100_000)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            needed_files(data, limits)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * len(data) + (8 << 20)


def test_default_limits_stop_a_flood_of_dictionaries() -> None:
    refused(b"\x80\x04" + b"}\x940" * 1_600_000 + b".", "more objects than")
    refused(b"\x80\x04" + b"N" * 2_000_000 + b".", "unfinished items")
    refused(b"\x80\x04" + b"(" * 20_000 + b".", "nested")


def test_a_file_above_the_limit_is_not_looked_at() -> None:
    with pytest.raises(FormatError, match="the limit is 100"):
        needed_files(metadata([info("x", 0, 1)]), Limits(bytes_max=100))


@pytest.mark.parametrize("op", [o for o in range(256) if bytes([o]) in b"PiogI\x82\x83\x84\x97\x98LFSTUV"])
def test_opcodes_that_no_checkpoint_needs_are_refused(op: int) -> None:
    refused(b"\x80\x04N" + bytes([op]) + b"\x01\x00\x00\x00\n\n.", "opcode")


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\x80\x04", b"\x80\x01N.", b"\x80\x06N.", b"N.", b"(dp0\n.", b"PK\x03\x04"]
)
def test_what_is_no_pickle_is_refused(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize(
    "body",
    [b".", b"(.", b"(N.", b"NN.", b"t.", b"u.", b"b.", b"Nb.", b"NNb.", b"R.", b"NNR.", b"N)\x81.", b"Na.", b"NNa.",
     b"(NNu.", b"}(Nu.", b"}NNNs.", b"0.", b"1.", b"2.", b"\x94.", b"\x93.", b"NN\x93.", b"h", b"\x8c\x05ab",
     b"N(e.", b"\x86.", b"(0t.", b"\x8c\x01\xff.", b"M\x01", b"J\x01", b"j\x01", b"X\x01", b"cos\xff\nx\n.", b"G12"],
)  # fmt: skip
def test_broken_programs_are_refused(body: bytes) -> None:
    refused(b"\x80\x04" + body)


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    for start in (b"", b"\x80\x04", b"\x80\x02"):
        refused(start + data)


PIECES = [bytes([op]) for op in range(256)] + [
    b")\x81\x94}\x94(",
    b"\x86\x94\x85\x94R\x94",
    b"ub",
    b"\x8c\x0drelative_path",
    b"\x8c\x0cstorage_data",
    b"\x8c\x05torch\x8c\x04Size\x93\x94",
    b"\x8c\x26torch.distributed.checkpoint.filesystem\x8c\x0c_StorageInfo\x93\x94",
    b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93\x94",
    *(b"h" + bytes([i]) for i in range(8)),
    *(b"K" + bytes([i]) for i in range(3)),
]


@given(st.lists(st.sampled_from(PIECES), max_size=60))
def test_any_program(pieces: list[bytes]) -> None:
    try:
        needs = needed_files(b"\x80\x04" + b"".join(pieces) + b".")
    except FormatError:
        return
    assert isinstance(needs, dict)


def test_nothing_on_disk_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading opens no file, whatever paths the metadata mentions."""
    monkeypatch.chdir(tmp_path)
    opened: list[object] = []
    monkeypatch.setattr(os, "open", lambda *a, **k: opened.append(a))
    assert needed_files(metadata([info("x", 0, 1)], storage_meta=Call("pathlib", "PosixPath", "/", "etc"))) == {b"x": 1}
    assert opened == []
