"""Publishing in any order, with anything missing, killed at any step: no checkpoint ever looks whole and is not.

A checkpoint of one generation lies on the PFS; one of the next, with the same names and sizes, is held by several
nodes, of which some may be lost. After every single change of the PFS an independent look judges what is there.
"""

from __future__ import annotations

import errno
import json
import os
import random
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cachexfs.core import formats
from cachexfs.core.digest import FileDigest
from cachexfs.core.manifest import Member
from cachexfs.recovery.choice import Candidate, Record, choose, decode_record, encode_record
from cachexfs.recovery.publish import Publisher
from cachexfs.recovery.report import LEFT, Outcome
from cachexfs.recovery.target import Target

Tree = dict[str, bytes]


def safetensors(text: bytes) -> bytes:
    header = json.dumps({"t": {"dtype": "U8", "data_offsets": [0, len(text)]}}).encode()
    return struct.pack("<Q", len(header)) + header + text


def huggingface(mark: bytes) -> Tree:
    """Shards and their index, the same names and sizes whatever ``mark`` (one byte) is."""
    index = {"metadata": {"mark": mark.decode()}, "weight_map": {f"t{i}": f"model-{i}.safetensors" for i in range(3)}}
    shards = {f"run/model-{i}.safetensors": safetensors(mark * (50 + i)) for i in range(3)}
    return shards | {"run/model.safetensors.index.json": json.dumps(index).encode(), "run/notes.txt": mark * 10}


def deepspeed(mark: bytes) -> Tree:
    """A tag's directory and the file that points to it."""
    return {
        f"tag{mark.decode()}/mp_rank_00_model_states.pt": mark * 100,
        f"tag{mark.decode()}/zero_pp_rank_0_mp_rank_00_optim_states.pt": mark * 200,
        "latest": b"tag" + mark,
    }


class Files:
    """An independent look at a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = [p for p in root.rglob("*") if p.is_file() and ".cachexfs" not in p.parts]
        self._sizes = {os.fsencode(p.relative_to(root)): p.stat().st_size for p in paths}

    def names(self) -> Collection[bytes]:
        return self._sizes

    def size(self, name: bytes) -> int | None:
        return self._sizes.get(name)

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        return (self.root / os.fsdecode(name)).read_bytes()[offset : offset + length]


def claimed(root: Path, generations: Mapping[str, Tree]) -> str | None:
    """Which generation the directory claims to be whole of; None for no claim. Fails for a mixture."""
    files = Files(root)
    found = formats.describe(files)
    if found is None or found.incomplete_reason:
        return None
    sizes = {name: files.size(name) or 0 for name in files.names()}
    if formats.evaluate(found.needs, sizes):
        return None
    needed = [found.commit, *found.needs]
    present = {name: files.read(name, 0, 1 << 20) for name in needed}
    whole = [
        mark for mark, tree in generations.items()
        if all(_of(tree, name, root) == data for name, data in present.items())
    ]  # fmt: skip
    assert whole, f"claims to be whole and is a mixture: {sorted(present)}"
    return whole[0]


def _of(tree: Tree, name: bytes, root: Path) -> bytes | None:
    relative = os.fsdecode(name)
    return tree.get(relative) or tree.get(f"{root.name}/{relative}")


class Killed(BaseException):
    """The process ends here."""


class Watched(Target):
    """A target that judges the directory after each change, and may be killed after some."""

    def __init__(self, root: Path, judge: Callable[[], object], steps: int = 1 << 30) -> None:
        super().__init__(str(root), lambda count: None)
        self._judge = judge
        self._steps = steps
        self.token() or self.establish()

    def _step(self) -> None:
        self._judge()
        self._steps -= 1
        if self._steps < 0:
            raise Killed

    def prepare(self, candidate: Candidate) -> None:
        super().prepare(candidate)
        self._step()

    def land(self, candidate: Candidate) -> None:
        super().land(candidate)
        self._step()

    def hide(self, path: bytes) -> str:
        name = super().hide(path)
        self._step()
        return name

    def forget_held(self, name: str) -> None:
        super().forget_held(name)
        self._step()


def write(root: Path, tree: Tree) -> None:
    for name, data in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def candidates(pfs: Path, nvme: Path, tree: Tree) -> list[Candidate]:
    """The tree as replicas on NVMe, based on what the PFS has now."""
    write(nvme, tree)
    found = []
    for number, (name, data) in enumerate(sorted(tree.items())):
        digest = FileDigest()
        digest.update(data)
        base = None
        if (pfs / name).exists():
            status = (pfs / name).stat()
            base = (status.st_ino, status.st_size, status.st_mtime_ns)
        members: tuple[Member, ...] = ()
        if name.endswith(".index.json"):
            members = tuple(_member(other, 1, tree) for other in tree if other.endswith(".safetensors"))
        elif name == "latest":
            members = tuple(_member(other, 0, tree) for other in tree if other != name)
        result = digest.result()
        record = Record(
            path=name.encode(), fid=4096 * (number + 1), gen=2, size=len(data), mode=0o644, uid=os.getuid(),
            gid=os.getgid(), mtime_ns=10**18, base=base, digest=result.file, tree=result.tree, job="j",
            revision=number + 1, members=members,
        )  # fmt: skip
        found.append(Candidate(record, f"{record.fid:x}.2.0-{len(data):x}", str(nvme / name)))
    return found


def _member(name: str, cut: int, tree: Tree) -> Member:
    """A member, its name relative to its directory (``cut`` 1) or to the root (0)."""
    digest = FileDigest()
    digest.update(tree[name])
    return Member(name.split("/", cut)[-1].encode(), len(tree[name]), digest.result().file)


def publish(target: Target, held: list[Candidate]) -> list[Outcome]:
    """One run of a node that holds these."""
    records = [Candidate(decode_record(data), hidden, ready=there) for hidden, data, there, _ in target.records()]
    chosen = choose([*held, *(c for c in records if c.ready)])
    chosen.spent = [c for c in records if not c.ready]
    return Publisher(target, chosen, lambda candidate: None, lambda count: None).run()


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("layout", [huggingface, deepspeed])
def test_any_order_any_loss_any_kill(tmp_path: Path, layout: Callable[[bytes], Tree], seed: int) -> None:
    chance = random.Random(seed)
    pfs, nvme = tmp_path / "pfs", tmp_path / "nvme"
    pfs.mkdir()
    generations = {"A": layout(b"A"), "B": layout(b"B")}
    overwrites = chance.random() < 0.7
    if overwrites:
        write(pfs, generations["A"])
    root = pfs / "run" if layout is huggingface else pfs

    def judge() -> str | None:
        return claimed(root, generations)

    held = candidates(pfs, nvme, generations["B"])
    lost = chance.random() < 0.4
    if lost:
        gone = chance.choice([c for c in held if c.path.endswith((b".safetensors", b".pt"))])
        held.remove(gone)
    nodes: list[list[Candidate]] = [[], [], []]
    for candidate in held:
        nodes[chance.randrange(3)].append(candidate)
    for _ in range(chance.randrange(4)):
        try:
            publish(Watched(pfs, judge, steps=chance.randrange(8)), chance.choice(nodes))
        except Killed:
            pass
    outcomes = [o for node in [*nodes, *nodes] for o in publish(Watched(pfs, judge), node)]
    last = {outcome.path: outcome.outcome for outcome in outcomes}
    if not lost:
        assert judge() == "B"
        assert set(last.values()) == {"there"} or "withheld" not in last.values()
        assert all((pfs / name).read_bytes() == data for name, data in generations["B"].items())
        assert [p for p in (pfs / ".cachexfs/tmp").rglob("*") if p.is_file()] == []
        assert {o.outcome for node in nodes for o in publish(Watched(pfs, judge), node)} <= {"there"}
    else:
        assert judge() == ("A" if overwrites else None)
        assert "withheld" in last.values()


@pytest.mark.parametrize("of", ["A", "B"])
@pytest.mark.parametrize("where", ["pfs", "nvme"])
def test_files_of_two_saves_are_told_apart_whose_digests_the_commit_file_did_not_know(
    tmp_path: Path, where: str, of: str
) -> None:
    """As just after their closes: any of the right length were taken for them."""
    pfs, nvme = tmp_path / "pfs", tmp_path / "nvme"
    pfs.mkdir()
    generations = {"A": huggingface(b"A"), "B": huggingface(b"B")}
    write(pfs, generations[of] if where == "pfs" else {})
    (pfs / "run/model.safetensors.index.json").unlink(missing_ok=True)
    time_ns = {"A": 10**18, "B": 2 * 10**18}
    for path in pfs.rglob("*.safetensors"):
        os.utime(path, ns=(0, time_ns[of]))
    held = candidates(pfs, nvme, generations["B"])
    commit = next(c for c in held if c.path.endswith(b".index.json"))
    members = tuple(Member(m.name, m.size, b"", time_ns["B"]) for m in commit.record.members or ())
    commit = replace(commit, record=msgspec.structs.replace(commit.record, members=members))
    others = [c for c in candidates(pfs, nvme, generations[of]) if c.path.endswith(b".safetensors")]
    others = [replace(c, record=msgspec.structs.replace(c.record, mtime_ns=time_ns[of])) for c in others]
    write(nvme, {"run/model.safetensors.index.json": generations["B"]["run/model.safetensors.index.json"]})
    publish(Watched(pfs, lambda: claimed(pfs / "run", generations)), [commit, *(others if where == "nvme" else ())])
    assert claimed(pfs / "run", generations) == ("B" if of == "B" else None)


@pytest.mark.parametrize("step", ["hide", "land"])
def test_a_refusal_amid_a_checkpoint_is_reported_for_every_file_that_is_left(tmp_path: Path, step: str) -> None:
    pfs, nvme = tmp_path / "pfs", tmp_path / "nvme"
    pfs.mkdir()
    generations = {"A": huggingface(b"A"), "B": huggingface(b"B")}
    write(pfs, generations["A"])
    held = candidates(pfs, nvme, generations["B"])

    class Refusing(Watched):
        def land(self, candidate: Candidate) -> None:
            if step == "land" and candidate.path.endswith(b"model-1.safetensors"):
                raise OSError(errno.EACCES, "refused")
            super().land(candidate)

        def hide(self, path: bytes) -> str:
            if step == "hide":
                raise OSError(errno.EACCES, "refused")
            return super().hide(path)

    outcomes = {o.path: o for o in publish(Refusing(pfs, lambda: claimed(pfs / "run", generations)), held)}
    assert set(outcomes) == set(generations["B"])
    assert "failed" in {o.outcome for o in outcomes.values()}
    assert outcomes["run/model.safetensors.index.json"].outcome in LEFT
    last = publish(Watched(pfs, lambda: claimed(pfs / "run", generations)), held)
    assert {o.outcome for o in last} <= {"published", "there"}
    assert claimed(pfs / "run", generations) == "B"


def test_what_an_fsync_had_made_safe_is_there_though_the_next_one_was_cut_off(tmp_path: Path) -> None:
    """The record under a hidden name is exchanged before the bytes: these were called damaged."""
    pfs, nvme = tmp_path / "pfs", tmp_path / "nvme"
    pfs.mkdir()
    target = Watched(pfs, lambda: None)
    (one,), (two,) = candidates(pfs, nvme, {"f": b"one"}), candidates(pfs, nvme, {"f": b"two"})
    write(nvme, {"f": b"one"})
    target.prepare(one)
    record = msgspec.structs.replace(two.record, before=(b"?" * 16, one.record.tree))
    [path] = (pfs / ".cachexfs").rglob(f"{one.hidden}.rec")
    path.write_bytes(encode_record(record, 1 << 20))
    assert [outcome.outcome for outcome in publish(target, [])] == ["published"]
    assert (pfs / "f").read_bytes() == b"one"


def test_the_record_of_what_landed_just_before_the_end_goes(tmp_path: Path) -> None:
    """It stayed for good. One whose file is nowhere stays: another node may be making it."""
    pfs, nvme = tmp_path / "pfs", tmp_path / "nvme"
    pfs.mkdir()
    target = Watched(pfs, lambda: None)
    landed, other = candidates(pfs, nvme, {"f": b"landed", "g": b"other"})
    target.prepare(landed)
    target.prepare(other)
    [file] = (pfs / ".cachexfs").rglob(landed.hidden)
    file.rename(pfs / "f")
    [file] = (pfs / ".cachexfs").rglob(other.hidden)
    file.unlink()
    assert [outcome.outcome for outcome in publish(target, [landed])] == ["there"]
    assert [path.name for path in (pfs / ".cachexfs/tmp").rglob("*.rec")] == [f"{other.hidden}.rec"]


def test_what_lies_elsewhere_is_not_touched(tmp_path: Path) -> None:
    """Paths out of the directory, symlinks in it, a directory where a file should be."""
    pfs, nvme, outside = tmp_path / "pfs", tmp_path / "nvme", tmp_path / "outside"
    for path in (pfs, outside, pfs / "dir"):
        path.mkdir()
    (pfs / "link").symlink_to(outside)
    target = Watched(pfs, lambda: None)
    tree = {"link/f": b"1", "dir": b"2", "good": b"3"}
    held = candidates(pfs, nvme, tree)
    assert {o.path: o.outcome for o in publish(target, held)} == {
        "link/f": "failed", "dir": "conflict", "good": "published",
    }  # fmt: skip
    assert list(outside.iterdir()) == []
    for path in (b"../out", b".cachexfs/id", b"a/./b", b"/etc/x"):
        bad = Candidate(decode_record(_record(path)), "2000.1.0-1", str(nvme / "good"))
        assert [o.outcome for o in publish(target, [bad])] == ["damaged"]
    assert not (tmp_path / "out").exists()


def _record(path: bytes) -> bytes:
    import msgspec

    fields = {"path": path, "fid": 8192, "gen": 1, "size": 1, "mode": 0o644, "mtime_ns": 1}
    return msgspec.msgpack.encode(fields)
