"""A lone mount whose catalogue is damaged, lost, or of another version: one clear error, and no byte is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from real_support import until

from cachexfs.demo.cluster import LocalCluster

MakeCluster = Callable[..., LocalCluster]


def dead_with_unwritten_data(make_cluster: MakeCluster) -> tuple[LocalCluster, Path, dict[str, bytes]]:
    """A cluster that was killed with data that is nowhere but in its staging, its journal, what was written."""
    cluster = make_cluster(1, {"fsync": "returned"})
    mount = cluster.nodes[0].mountpoint
    os.listdir(mount)
    cluster.pfs.rename(cluster.pfs.with_name("pfs.off"))
    written = {f"file-{number}": os.urandom(5000 + number) for number in range(20)}
    for name, data in written.items():
        (mount / name).write_bytes(data)
    cluster.kill(0)
    cluster.detach(0)
    cluster.pfs.with_name("pfs.off").rename(cluster.pfs)
    (journal,) = cluster.nodes[0].staging.rglob("catalogue.journal")
    return cluster, journal, written


def test_a_damaged_journal_is_refused_and_mended_without_losing_a_byte(make_cluster: MakeCluster) -> None:
    cluster, journal, written = dead_with_unwritten_data(make_cluster)
    data = bytearray(journal.read_bytes())
    data[data.index(b"file-7") + 2] ^= 0xFF  # its creation: its name is still in the pending drain
    lost = [at for at in range(len(data) - 6) if data[at : at + 6] == b"file-3"]
    for at in lost:
        data[at + 2] ^= 0xFF
    journal.write_bytes(data)
    refused = cluster.run(0, *cluster.mount_arguments(0))
    assert refused.code == 3
    assert refused.err.count("\n") == 1
    assert f"recover --journal {journal.parent}" in refused.err
    assert journal.read_bytes() == data
    mended = cluster.run(0, "recover", "--journal", str(journal.parent))
    assert (mended.code, f"{1 + len(lost)} damaged places left out" in mended.out) == (3, True), mended
    cluster.mount()
    mount = cluster.nodes[0].mountpoint
    kept = {path.name: path.read_bytes() for path in mount.iterdir()}
    orphans = [path.read_bytes() for path in (journal.parent / "orphans").iterdir()]
    assert kept == {name: data for name, data in written.items() if name != "file-3"}
    assert orphans == [written["file-3"]]
    status = cluster.run(0, "status", str(mount))
    assert status.code == 3
    assert "1 staged files have lost their names" in status.out
    until("drained", lambda: cluster.status(0).pending_ops == 0)
    ended = cluster.run(0, "umount", str(mount), "--timeout", "20")
    assert ended.code == 3
    assert "orphans" in ended.err
    assert [path.read_bytes() for path in (journal.parent / "orphans").iterdir()] == [written["file-3"]]
    for path in (journal.parent / "orphans").iterdir():
        path.unlink()
    cluster.mount()
    assert cluster.run(0, "status").code == 0
    cluster.umount()


def test_a_lost_journal_costs_names_and_no_content(make_cluster: MakeCluster) -> None:
    cluster, journal, written = dead_with_unwritten_data(make_cluster)
    journal.unlink()
    cluster.mount()
    orphans = sorted(path.read_bytes() for path in (journal.parent / "orphans").iterdir())
    assert orphans == sorted(written.values())
    assert cluster.run(0, "status").code == 3


def test_a_journal_cut_in_its_last_record_needs_nobody(make_cluster: MakeCluster) -> None:
    cluster, journal, written = dead_with_unwritten_data(make_cluster)
    os.truncate(journal, journal.stat().st_size - 3)
    cluster.mount()
    mount = cluster.nodes[0].mountpoint
    assert {path.name: path.read_bytes() for path in mount.iterdir()} == written
