"""How far a large file's copy to the PFS has got, at which rate, and how long the rest takes."""

from __future__ import annotations

import os

import pytest
import trio
from test_found import Scene, scene

from cachexfs.control_progress import of_drain, of_files
from cachexfs.control_server import ControlServer, Facts
from cachexfs.core.boundary import Boundary
from cachexfs.engine import attributes
from cachexfs.engine.drain_progress import WINDOW_S, Throughput
from cachexfs.engine.drain_reasons import why_pending

MIB = 1 << 20
SIZE = 8 * MIB  # some 7 s in the simulation, 4 KiB after 4 KiB


def status(scene: Scene) -> dict[str, object]:
    return ControlServer(scene.life.parts, Facts("/mnt", "/pfs", "off", "builtin"))._mount_facts()


@scene()
async def test_a_copy_that_is_under_way_says_how_far_it_is_and_what_it_still_takes(scene: Scene) -> None:
    parts = scene.life.parts
    await scene.mkdir(b"d")
    await scene.write(b"d/large", b"x" * SIZE)
    await trio.sleep(5)
    ino = await scene.ino(b"d/large")
    inode = parts.node.catalogue.view.inode(ino)
    assert inode is not None
    progress = of_files(parts, [(b"d/large", ino, inode)], Boundary.PFS)
    done = progress["bytes_done"]
    assert 0 < done < SIZE
    assert (progress["files_done"], progress["bytes_total"]) == (0, SIZE)
    assert of_drain(parts)["bytes_left"] == SIZE - done
    facts = status(scene)
    assert (facts["own_copied_bytes"], facts["own_left_bytes"]) == (done, SIZE - done)
    assert facts["pending_bytes"] == SIZE
    assert facts["drain_bytes_s"] == progress["rate_bytes_s"] > 0
    key = next(key for key, op in parts.node.catalogue.view.ops_of(ino) if op.kind == "put")
    assert "MiB of 8.0 MiB are there" in why_pending(parts.drainer, key)
    etas = [dict(part.split("=") for part in (await parts.attributes.of(i))["eta.pfs"].split())
            for i in (ino, await scene.ino(b"d"))]  # fmt: skip
    began_s = trio.current_time()
    await scene.drained()
    took_s = trio.current_time() - began_s
    for told_s in (progress["left_s"], of_drain_s := facts["own_left_s"], *(float(eta["p50"]) for eta in etas)):
        assert told_s == pytest.approx(took_s, rel=0.3), of_drain_s
    assert (await parts.attributes.of(ino))["eta.pfs"] == "p50=0 p95=0"
    assert status(scene)["own_left_s"] is None


@scene()
async def test_while_the_pfs_does_not_answer_nothing_is_foretold(scene: Scene) -> None:
    parts = scene.life.parts
    parts.attributes.eta_s = lambda boundary, size, route, waited_s: (1.0, 2.0)
    await scene.write(b"large", b"x" * SIZE)
    await trio.sleep(5)
    assert (await parts.attributes.of(await scene.ino(b"large")))["eta.pfs"].startswith("p50=")
    scene.faults.away = True
    await trio.sleep(60)
    assert (await parts.attributes.of(await scene.ino(b"large")))["eta.pfs"] == "unknown"
    facts = status(scene)
    assert (facts["own_left_s"], facts["drain_bytes_s"]) == (None, 0)


def test_the_rate_is_of_the_last_seconds(autojump_clock: trio.testing.MockClock) -> None:
    async def main() -> None:
        moves = Throughput()
        assert moves.rate() == 0
        for _ in range(30):
            moves.moved(100)
            await trio.sleep(0.5)
        assert moves.rate() == pytest.approx(200, rel=0.15)
        await trio.sleep(WINDOW_S + 1)
        assert moves.rate() == 0
        moves.begin()
        await trio.sleep(4)
        moves.moved(400)
        assert moves.rate() == pytest.approx(100)

    trio.run(main, clock=autojump_clock)


def writes(scene: Scene) -> list[str]:
    """What is written on the PFS from now on, a step each."""
    seen: list[str] = []
    scene.before = lambda step: seen.append(step) if step == "write part" else None
    return seen


@scene(fsync="returned")
async def test_what_is_removed_while_it_is_copied_is_not_copied_any_further(scene: Scene) -> None:
    for name in (b"removed", b"stays"):
        await scene.write(name, b"x" * SIZE)
    await trio.sleep(2)
    await scene.unlink(b"removed")
    parts = scene.life.parts
    assert SIZE // 2 < of_drain(parts)["bytes_left"] < SIZE
    seen = writes(scene)
    await scene.drained()
    assert len(seen) * 4096 <= SIZE  # the rest of one of them
    assert (scene.on_pfs(b"removed"), scene.on_pfs(b"stays"), scene.left()) == (None, b"x" * SIZE, [])


@scene(fsync="returned")
async def test_what_is_written_anew_while_it_is_copied_is_copied_to_its_end(scene: Scene) -> None:
    """Who writes one file again and again would never get it to the PFS."""
    await scene.write(b"f", b"x" * SIZE)
    await trio.sleep(2)
    seen = writes(scene)
    handle = await scene.fs.open(await scene.ino(b"f"), os.O_WRONLY)
    await scene.fs.write(handle, 0, b"y")
    await scene.close(handle)
    await scene.drained()
    assert scene.on_pfs(b"f") == b"y" + b"x" * (SIZE - 1)
    assert len(seen) * 4096 > SIZE + SIZE // 2  # the rest of the first, and the second


def test_seconds_have_no_exponent() -> None:
    assert [attributes._seconds(value_s) for value_s in (2_514_000.0, 999.6, 12.345, 0.01)] == [
        "2510000", "1000", "12.3", "0.01",
    ]  # fmt: skip
