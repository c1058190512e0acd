"""What a call on the PFS that hangs does late, a scene each; between nodes: ``test_found_nodes``."""

from __future__ import annotations

import trio
from test_found import Scene, scene
from test_found_nodes import _After


@scene(fsync="returned")
async def test_attributes_that_hang_while_their_directory_is_renamed_do_not_come_late_over_newer_ones(
    scene: Scene,
) -> None:
    """The call had opened the directory: what had been set since under its new name went."""
    await scene.mkdir(b"d")
    await scene.drained()
    scene.life.pfs._rng = _After(1)  # what hangs takes effect late
    scene.faults.away = True
    await scene.fs.setattr(await scene.ino(b"d"), None, mtime_ns=10**18)
    await trio.sleep(1)
    scene.faults.away = False
    await scene.rename(b"d", b"e")
    await trio.sleep(1)
    assert scene.store.find(b"e") is not None  # nothing orders the two
    await scene.fs.setattr(await scene.ino(b"e"), None, mtime_ns=2 * 10**18)
    await scene.drained()
    await trio.sleep(200)
    found = scene.store.find(b"e")
    assert found is not None
    assert found.attrs.mtime_ns == 2 * 10**18
