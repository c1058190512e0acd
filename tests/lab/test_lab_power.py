"""The power of the shared filesystem's servers fails after ``pfs`` was claimed: what was claimed is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lab_base import Lab
from lab_gluster import Gluster
from lab_support import until_drained
from real_support import Template, until, write_file

from cachexfs.demo.cluster import LocalCluster
from cachexfs.demo.control import xattr

ROUNDS = 2


@pytest.mark.parametrize("filesystem", ["xfs", "small"])
def test_what_is_claimed_survives_a_power_cut(
    filesystem: str,
    lab: Lab,
    request: pytest.FixtureRequest,
    make_cluster: Callable[..., LocalCluster],
    templates: tuple[Template, Template],
) -> None:
    if filesystem == "small":
        shared: Gluster = request.getfixturevalue("small")
        root, cut = shared.mounts[0], lambda: shared.power_cut(0)
    else:
        root = lab.xfs("power", 300)
        cut = lambda: lab.power_cut(root)  # noqa: E731
    pfs = root / "pfs"
    cluster = make_cluster(1, {"fsync": "returned", "keep_fast": "100"}, pfs=[pfs])
    mount = cluster.nodes[0].mountpoint
    written: dict[str, bytes] = {}

    def save(number: int) -> None:
        template = templates[number % 2]
        template.save([mount], f"run/step-{number}")
        for name, data in template.files.items():
            written[f"run/step-{number}/{name}"] = data
        write_file(mount / "run/scratch", data)
        (mount / "run/scratch").rename(mount / f"run/small-{number}")
        written[f"run/small-{number}"] = data

    for number in range(ROUNDS):
        save(2 * number)
        until("all is claimed", lambda: _claimed(mount, written) == list(written))
        if number:  # the first time nothing follows that might take the last changes to the disk
            save(2 * number + 1)
        claimed = _claimed(mount, written)
        cluster.kill(0)  # its node has failed, too: staging is not looked at
        cut()
        lost = [name for name in claimed if _bytes(pfs / name) != written[name]]
        assert not lost, f"{len(lost)} of {len(claimed)}: {lost}"
        cluster.remount(0)
        until_drained(cluster, mount)
    for name, data in written.items():
        assert (pfs / name).read_bytes() == data, name


def _claimed(mount: Path, written: dict[str, bytes]) -> list[str]:
    return [name for name in list(written) if xattr(mount / name, "t.pfs")]


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
