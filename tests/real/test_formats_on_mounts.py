"""Checkpoints as frameworks write them, through a real mount: restartable when whole, and never before.

The order of the files is that of the framework; each is also tried without one of its members. ``latest`` gives the
same answer on the mount and, once all is there, on the bare PFS directory.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import COMMIT, Template, until, until_stage, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr

MakeCluster = Callable[..., LocalCluster]
GENERATOR = Path(__file__).parents[1] / "core" / "formats_checkpoints.py"

#: Directory -> a member without which it is not whole.
WHOLE = {
    "fsdp": "__1_0.distcp", "per-rank": "__1_0.distcp", "per-rank ": "__0.metadata", "empty-shard": "__0_0.distcp",
    "plain": "__0_0.distcp", "many-files": "__0_3.distcp", "threads": "__0_1.distcp", "safetensors": "__0_0.distcp",
    "hf": "model-00002-of-00002.safetensors", "deepspeed/global_step10": "zero_pp_rank_2_mp_rank_00_optim_states.pt",
}  # fmt: skip


@pytest.fixture(scope="module")
def real_ones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by real torch, on one and on two ranks."""
    root = tmp_path_factory.mktemp("real")
    subprocess.run([sys.executable, GENERATOR, root], check=True, timeout=120, capture_output=True)
    return root


def in_order(directory: Path) -> list[Path]:
    """Files as frameworks write them: shards of all ranks, commit files of each rank, then of the whole."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sorted(files, key=lambda p: (p.name.endswith((".metadata", ".index.json")), p.name == COMMIT, p.name))


@pytest.mark.parametrize("name", WHOLE)
def test_a_real_checkpoint_is_restartable_when_whole_and_not_without_a_member(
    alone: LocalCluster, mount: Path, real_ones: Path, name: str
) -> None:
    source, target = real_ones / name.strip(), mount / "step-7"
    target.mkdir()
    for path in in_order(source):
        assert xattr(target, "restartable") in (None, "no") or path.stat().st_size == 0 or name.startswith("deepspeed")
        (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        write_file(target / path.relative_to(source), path.read_bytes(), sync=False)
    until("restartable", lambda: xattr(target, "restartable") == "pfs")
    assert xattr(target, "missing") is None
    on_mount = alone.run(0, "latest", str(mount))
    assert (on_mount.code, on_mount.out) == (0, f"{target}\n"), on_mount.err
    bare = alone.run(0, "latest", str(alone.pfs / mount.name))
    assert (bare.code, bare.out) == (0, f"{alone.pfs / mount.name / 'step-7'}\n"), bare.err
    (target / WHOLE[name]).unlink()
    assert xattr(target, "restartable") == "no"
    assert WHOLE[name] in (xattr(target, "missing") or "")
    until("removed", lambda: alone.status(0).pending_ops == 0)
    for directory in (mount, alone.pfs / mount.name):
        ended = alone.run(0, "latest", str(directory))
        # Without its index, which left the PFS with the shard, the rest of "hf" may be a set that needs none.
        assert (ended.code, ended.out) in ((1, ""), (4 if name == "hf" else 1, "")), (directory, ended)


def test_ranks_that_write_their_own_metadata_one_after_the_other_are_whole(mount: Path, real_ones: Path) -> None:
    """Without collectives rank 1's shard is written after rank 0's commit file."""
    source, target = real_ones / "per-rank", mount / "step-1"
    target.mkdir()
    for rank in (0, 1):
        for name in (f"__{rank}_0.distcp", f"__{rank}.metadata"):
            write_file(target / name, (source / name).read_bytes(), sync=False)
    until("restartable", lambda: xattr(target, "restartable") == "pfs")
    write_file(target / "__0_0.distcp", (source / "__0_0.distcp").read_bytes(), sync=False)
    assert xattr(target, "restartable") == "no"
    assert "newer than __0.metadata" in (xattr(target, "missing") or "")


def test_several_sets_are_one_checkpoint_and_each_counts(
    alone: LocalCluster, mount: Path, templates: tuple[Template, Template]
) -> None:
    step = mount / "global_step_20"
    for part in ("model", "optimizer"):
        (step / part).mkdir(parents=True)
        for name in templates[0].shards():
            write_file(step / part / name, templates[0].files[name], sync=False)
        assert xattr(step, "restartable") in (None, "no")
        templates[0].commit(step / part, sync=False)
    until("restartable", lambda: xattr(step, "restartable") == "pfs")
    assert alone.run(0, "latest", str(mount)).out == f"{step}\n"
    assert alone.run(0, "latest", str(alone.pfs / mount.name)).out == f"{alone.pfs / mount.name / step.name}\n"
    write_file(step / "optimizer" / templates[0].shards()[0], b"")
    assert xattr(step, "restartable") == "no"
    assert "optimizer/" in (xattr(step, "missing") or "")
    assert alone.run(0, "latest", str(mount)).code == 1


def test_without_steps_the_last_saved_is_the_newest_on_the_mount_and_on_the_pfs(
    alone: LocalCluster, mount: Path, templates: tuple[Template, Template]
) -> None:
    for name in ("last", "best", "last"):
        templates[0].save([mount], name, sync=False)
    until_stage(mount, "pfs")
    assert alone.run(0, "latest", str(mount)).out == f"{mount / 'last'}\n"
    assert alone.run(0, "latest", str(alone.pfs / mount.name)).out == f"{alone.pfs / mount.name / 'last'}\n"


def test_latest_reads_no_commit_file_that_is_older_than_its_answer(
    make_cluster: MakeCluster, templates: tuple[Template, Template]
) -> None:
    """Of five hundred checkpoints it once read all, each time."""
    cluster = make_cluster(1, mounted=False)
    for step in (8, 9, 10, 11):
        templates[0].save([cluster.pfs], f"runs/step-{step}", sync=False)
    (cluster.pfs / "runs" / "step-11" / templates[0].shards()[0]).unlink()
    cluster.mount()
    runs = cluster.nodes[0].mountpoint / "runs"
    assert cluster.run(0, "latest", str(runs)).out == f"{runs}/step-10\n"
    assert xattr(runs, "at_risk_s") is not None
    read = {found.path for found in cluster.sources(0) if found.path.endswith(COMMIT)}
    assert read == {f"runs/step-{step}/{COMMIT}" for step in (10, 11)}
    assert cluster.run(0, "latest", str(runs), "--below", "9").out == f"{runs}/step-8\n"


def test_digests_that_are_told_after_the_commit_file_make_no_shard_newer(
    alone: LocalCluster, mount: Path, templates: tuple[Template, Template]
) -> None:
    """``sync_files=False`` with shards above a megabyte: a passed file's digests come when its last writer has gone."""
    step = mount / "step-6"
    step.mkdir()
    writers = []
    for name in templates[0].shards():
        writers.append(os.open(step / name, os.O_WRONLY | os.O_CREAT))
        os.write(writers[-1], templates[0].files[name] + bytes(2 << 20))
        os.close(os.dup(writers[-1]))  # FLUSH publishes
    templates[0].commit(step, sync=False)
    for fd in writers:
        os.close(fd)
    until("restartable", lambda: xattr(step, "restartable") == "pfs")
    assert alone.run(0, "latest", str(mount)).out == f"{step}\n"


def test_a_copy_counts_in_whatever_order_its_files_came(
    alone: LocalCluster, mount: Path, templates: tuple[Template, Template]
) -> None:
    """``cp -r`` goes by the order of the listing. What replaces a file that was there may be of another save."""
    step = mount / "step-5"
    step.mkdir()
    first, *others = templates[0].shards()
    for name in (first, COMMIT, *others):
        assert xattr(step, "restartable") in (None, "no")
        write_file(step / name, templates[0].files[name], sync=False)
    until("restartable", lambda: xattr(step, "restartable") == "pfs")
    assert alone.run(0, "latest", str(mount)).out == f"{step}\n"
    assert templates[0].same_as(alone.pfs / mount.name / step.name) == []
    for replace in (lambda path: None, Path.unlink):
        replace(step / others[0])
        write_file(step / others[0], templates[1].files[others[0]], sync=False)
        assert xattr(step, "restartable") == "no"
        assert "newer" in (xattr(step, "missing") or "")
        write_file(step / COMMIT, templates[0].files[COMMIT], sync=False)
        until("restartable again", lambda: xattr(step, "restartable") == "pfs")


def copy_as_rsync(source: Path, target: Path, name: str) -> None:
    """A hidden name first, times kept, renamed over what is there."""
    hidden = target / f".{name}.ABCDEF"
    shutil.copy2(source / name, hidden)
    hidden.rename(target / name)


def test_a_copy_over_an_older_one_counts_when_it_is_done_and_has_kept_mtimes(
    alone: LocalCluster, mount: Path, tmp_path: Path, templates: tuple[Template, Template]
) -> None:
    """rsync goes by names, and ``.metadata`` comes before ``__0_0.distcp``."""
    step = mount / "step-5"
    step.mkdir()
    for round_, template in enumerate(templates):
        source = tmp_path / str(round_)
        template.save([source.parent], source.name, sync=False)
        names = sorted(os.listdir(source))
        assert names[0] == COMMIT
        for name in names:
            os.utime(source / name, (1e9, 1e9 + (name == COMMIT)))
        for name in names:
            copy_as_rsync(source, step, name)
            assert name == names[-1] or xattr(step, "restartable") == "no" or (round_ and name == COMMIT), name
        until("restartable", lambda: xattr(step, "restartable") == "pfs")
        assert alone.run(0, "latest", str(mount)).out == f"{step}\n"
        assert template.same_as(alone.pfs / mount.name / step.name) == []


def test_shards_without_a_commit_file_are_waited_for_and_never_offered(
    alone: LocalCluster, mount: Path, templates: tuple[Template, Template]
) -> None:
    step = mount / "step-3"
    step.mkdir()
    for name in templates[0].shards():
        write_file(step / name, templates[0].files[name], sync=False)
    until_stage(step, "pfs")
    waited = alone.run(0, "wait", str(step), "--at", "pfs", "--timeout", "0.5")
    assert waited.code == 124
    assert ".metadata: absent: not saved yet" in waited.err
    for directory in (mount, alone.pfs / mount.name):
        ended = alone.run(0, "latest", str(directory))
        assert (ended.code, ended.out) == (1, ""), ended
    explained = alone.run(0, "explain", str(step))
    assert ".metadata" in explained.out
    assert "wait for the writer" in explained.out
    templates[0].commit(step, sync=False)
    assert alone.run(0, "wait", str(step), "--at", "pfs", "--timeout", "100").code == 0


def test_a_checkpoint_that_is_marked_as_unfinished_does_not_count(
    alone: LocalCluster, mount: Path, templates: tuple[Template, Template]
) -> None:
    (mount / "step-4-unfinished").touch()
    templates[0].save([mount], "step-4", sync=False)
    assert xattr(mount / "step-4", "restartable") == "no"
    assert "step-4-unfinished (marks it as unfinished)" in (xattr(mount / "step-4", "missing") or "")
    assert alone.run(0, "latest", str(mount)).code == 1
    (mount / "step-4-unfinished").unlink()
    until("restartable", lambda: xattr(mount / "step-4", "restartable") == "pfs")
    assert alone.run(0, "latest", str(mount)).out == f"{mount / 'step-4'}\n"


@pytest.mark.parametrize("name", ["train.log", "config.yaml"])
def test_logs_beside_no_checkpoint_leave_no_doubt_and_unknown_files_do(
    alone: LocalCluster, mount: Path, name: str
) -> None:
    (mount / name).write_text("not a checkpoint")
    until_stage(mount / name, "pfs")
    for directory in (mount, alone.pfs / mount.name):
        assert alone.run(0, "latest", str(directory)).code == 1
    (mount / "weights.npz").write_bytes(b"of an unknown kind")
    until_stage(mount / "weights.npz", "pfs")
    for directory in (mount, alone.pfs / mount.name):
        ended = alone.run(0, "latest", str(directory))
        assert ended.code == 4
        assert "weights.npz" in ended.err


def test_latest_sends_who_saves_single_files_to_explain(alone: LocalCluster, mount: Path) -> None:
    (mount / "model.safetensors").write_bytes(b"cut")
    until_stage(mount / "model.safetensors", "pfs")
    for directory in (mount, alone.pfs / mount.name):
        ended = alone.run(0, "latest", str(directory))
        assert (ended.code, "cachexfs explain model.safetensors" in ended.err) == (4, True)
    assert "3 bytes, at least 10 needed" in alone.run(0, "explain", str(mount / "model.safetensors")).out


def large_commit_file(files: dict[str, int], items: int) -> bytes:
    """A ``.metadata`` of several MB that names ``files`` with these sizes, by torch's own classes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    storage = {}
    for name, size in files.items():
        each = size // items
        for item in range(items):
            length = each if item < items - 1 else size - each * item
            storage[MetadataIndex(f"layers.{item}.{name}")] = _StorageInfo(name, each * item, length)
    return pickle.dumps(Metadata({}, storage_data=storage))


def test_a_large_commit_file_is_read_beside_the_daemon_which_goes_on(alone: LocalCluster, mount: Path) -> None:
    step = mount / "step-5"
    step.mkdir()
    files = {f"__{rank}_0.distcp": 40_000 for rank in range(4)}
    for name in files:
        write_file(step / name, b"PK\3\4" + bytes(39_996), sync=False)
    commit = large_commit_file(files, 10_000)
    assert len(commit) > 2 << 20
    Template({COMMIT: commit}).commit(step, sync=False)
    assert alone.run(0, "latest", str(mount)).out == f"{step}\n"
    assert xattr(step, "restartable") is not None
    os.truncate(step / "__2_0.distcp", 39_999)
    ended = alone.run(0, "latest", str(mount))
    assert ended.code == 1, ended
    assert "__2_0.distcp" in ended.err


def test_a_hostile_commit_file_harms_nobody_and_says_so(alone: LocalCluster, mount: Path) -> None:
    step = mount / "step-6"
    step.mkdir()
    write_file(step / "__0_0.distcp", b"PK\3\4" + bytes(100), sync=False)
    for hostile in (
        b"\x80\x04" + b"N0" * 1_000_000,
        b"cos\nsystem\n(S'touch /tmp/cachexfs-bomb'\ntR.",
        b"\x80\x04" * 9,
    ):
        Template({COMMIT: hostile}).commit(step, sync=False)
        ended = alone.run(0, "latest", str(mount))
        assert (ended.code, ended.out) == (4, ""), ended
        assert "cannot be read" in ended.err
        explained = alone.run(0, "explain", str(step))
        assert "save the checkpoint again" in explained.out
    assert not Path("/tmp/cachexfs-bomb").exists()
    assert alone.status(0).failed is None
    shutil.rmtree(step)


def test_a_copy_over_an_older_one_whose_commit_file_came_first_says_how_to_make_it_count(
    alone: LocalCluster, mount: Path, templates: tuple[Template, Template]
) -> None:
    """``cp -r`` without mtimes, in the order of names: ``.metadata`` first."""
    step = mount / "step-8"
    step.mkdir()
    for template in reversed(templates):
        for name in sorted(template.files):
            write_file(step / name, template.files[name], sync=False)
    assert xattr(step, "restartable") == "no"
    explained = alone.run(0, "explain", str(step)).out
    fix = "cp .metadata .metadata.tmp && mv .metadata.tmp .metadata"
    assert fix in explained
    subprocess.run(["sh", "-c", fix], cwd=step, check=True)
    until("restartable", lambda: xattr(step, "restartable") == "pfs")
    assert alone.run(0, "latest", str(alone.pfs / mount.name)).code == 0


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_single_file_that_is_cut_is_explained(alone: LocalCluster, mount: Path, real_ones: Path, name: str) -> None:
    data = (real_ones / "hf-torch" / name).read_bytes()
    write_file(mount / name, data, sync=False)
    assert "not at 'restartable'" not in alone.run(0, "explain", str(mount / name)).out
    write_file(mount / name, data[:-40], sync=False)
    assert "not at 'restartable'" in alone.run(0, "explain", str(mount / name)).out
