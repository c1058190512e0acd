"""Names that tools trip over: newlines, control characters, bytes that are not UTF-8, 255 bytes, deep paths.

Through the mount, to the PFS and back, to a partner, through every command in words and in JSON.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from real_support import Template, until, until_stage, write_file

from cachexfs.demo.cluster import LocalCluster

MakeCluster = Callable[..., LocalCluster]

NAMES = [
    b"new\nline",
    b"\xff\xfe not utf-8",
    b"x" * 255,
    b"\xe2\x98\x83" * 85,  # 255 bytes of UTF-8
    b"\x1b[31mred\x07",
    b"quote' \" \\ $(id) `id`; *",
    b" ",
    b"-rf",
    b"tab\t\r",
    b"caf\xc3\xa9",
    b"%s%n{0}",
]


def tree(directory: bytes) -> dict[bytes, bytes]:
    """Contents by path below a directory."""
    found = {}
    for where, _, files in os.walk(directory):
        for name in files:
            path = os.path.join(where, name)
            if b".cachexfs" not in path:
                with open(path, "rb") as file:
                    found[os.path.relpath(path, directory)] = file.read()
    return found


def fill(mount: Path) -> dict[bytes, bytes]:
    """A file of each name in a directory of each name; returns what was written, by path."""
    root, wanted = os.fsencode(mount), {}
    for number, name in enumerate(NAMES):
        directory = os.path.join(root, name)
        os.mkdir(directory)
        for inner in (name, NAMES[(number + 1) % len(NAMES)]):
            path, data = os.path.join(directory, inner), b"%d " % number + inner
            with open(path, "wb") as file:
                file.write(data)
            wanted[os.path.relpath(path, root)] = data
        moved = os.path.join(directory, b"m" + name[1:])
        os.rename(os.path.join(directory, name), moved)
        wanted[os.path.relpath(moved, root)] = wanted.pop(os.path.join(name, name))
    return wanted


def test_they_go_through_the_mount_the_drain_a_restart_and_umount(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1, {"fsync": "returned"})
    mount, pfs = cluster.nodes[0].mountpoint, os.fsencode(cluster.pfs)
    wanted = fill(mount)
    assert tree(os.fsencode(mount)) == wanted
    cluster.kill(0)
    cluster.detach(0)
    cluster.mount()
    assert tree(os.fsencode(mount)) == wanted
    until("all on the PFS", lambda: cluster.status(0).pending_ops == 0)
    assert tree(pfs) == wanted
    for name in NAMES[::2]:
        shutil.rmtree(os.path.join(os.fsencode(mount), name))
    left = {path: data for path, data in wanted.items() if path.split(b"/")[0] not in NAMES[::2]}
    cluster.umount()
    assert tree(pfs) == left
    cluster.mount()
    assert tree(os.fsencode(mount)) == left


def checkpoint_in(mount: Path, name: bytes, template: Template) -> Path:
    directory = Path(os.fsdecode(os.path.join(os.fsencode(mount), b"step-1 " + name[:240])))
    directory.mkdir()
    for shard in template.shards():
        write_file(directory / shard, template.files[shard], sync=False)
    template.commit(directory, sync=False)
    return directory


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_every_command_shows_them_and_prints_one_object_or_clean_lines(
    alone: LocalCluster, mount: Path, templates: tuple[Template, Template], name: bytes
) -> None:
    directory = checkpoint_in(mount, name, templates[0])
    until_stage(directory, "pfs")
    relative = os.path.relpath(directory, alone.nodes[0].mountpoint)
    asked = {
        "status": ["status", str(directory)], "explain": ["explain", str(directory)],
        "wait": ["wait", str(directory), "--at", "pfs", "--timeout", "100"], "latest": ["latest", str(mount)],
        "drill": ["drill", str(directory)],
    }  # fmt: skip
    for what, arguments in asked.items():
        plain, as_json = run_bytes(alone, *arguments), run_bytes(alone, *arguments, "--json")
        assert (plain.code, as_json.code) == ((3, 3) if what == "drill" else (0, 0)), (what, plain, as_json)
        answer = json.loads(as_json.out)
        assert as_json.out.count(b"\n") == 1
        if what == "latest":
            assert plain.out == os.fsencode(directory) + b"\n"  # for "$(cachexfs latest)": the bytes themselves
            assert answer["path"] == str(directory)
        else:
            shown = [line for line in plain.out.splitlines() if b"\x1b" in line or b"\x07" in line]
            assert shown == [], what
            assert plain.err.count(b"\n") <= 1
        if what in ("explain", "drill"):
            assert answer["path"] == relative
        if what == "status":
            assert [point["path"] for point in answer["checkpoints"]] == [relative]
    (directory / templates[0].shards()[0]).unlink()
    for arguments in (["status"], ["explain", str(directory)], ["latest", str(mount)]):
        ended = run_bytes(alone, *arguments)
        assert b"\x1b" not in ended.out + ended.err
        assert b"b'" not in ended.out + ended.err
    shutil.rmtree(directory)


class Said:
    """Exit code and both outputs, as bytes."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out, err

    def __repr__(self) -> str:
        return f"{self.code} {self.out!r} {self.err!r}"


def run_bytes(cluster: LocalCluster, *arguments: str) -> Said:
    import subprocess
    import sys

    ended = subprocess.run(
        [sys.executable, "-m", "cachexfs", *arguments], env=cluster.environment(0) | {"LC_ALL": "C.UTF-8"},
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    return Said(ended.returncode, ended.out if hasattr(ended, "out") else ended.stdout, ended.stderr)


def test_they_reach_the_partner_survive_its_peer_and_come_back_by_recover(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, {"fsync": "partner"})
    mount = cluster.nodes[0].mountpoint
    cluster.pfs.chmod(0o755)
    away = cluster.pfs.with_name("pfs.off")
    os.listdir(mount)
    cluster.pfs.rename(away)
    wanted = fill(mount)
    until("all at the partner", lambda: os.getxattr(mount, "user.cachex.stage") == b"partner")
    for index in (0, 1):
        cluster.kill(index)
        cluster.detach(index)
    cluster.wipe(0)
    away.rename(cluster.pfs)
    listed = cluster.run(1, "recover", str(cluster.nodes[1].nvme), "--list", "--json")
    assert listed.code == 0, listed.err
    files = [file for store in json.loads(listed.out)["stores"] for file in store["files"]]
    assert {os.fsencode(file["path"]) for file in files if file["size"]} == set(wanted)
    plain = run_bytes(cluster, "recover", str(cluster.nodes[1].nvme), "--list")
    assert b"\x1b" not in plain.out
    done = cluster.run(1, "recover", str(cluster.nodes[1].nvme), "--to", str(cluster.pfs), "--json")
    assert done.code == 0, done.out + done.err
    assert tree(os.fsencode(cluster.pfs)) == wanted
