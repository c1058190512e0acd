"""Calls that got EIO: ``status`` ends with 3 as long as they matter, and tells them as a note afterwards."""

from __future__ import annotations

import errno

import pytest
import trio
from pyfuse3 import FUSEError
from test_found import Scene, scene

from cachexfs.control_errors import errors_and_notes
from cachexfs.core.records import ROOT_FID
from cachexfs.engine.failed_calls import SHOWN_S
from cachexfs.frontend.fuse import Operations


def operations(scene: Scene) -> Operations:
    return Operations(scene.fs, timeout_s=1.0, hide_xattrs=False)


async def fails(call: object) -> None:
    with pytest.raises(FUSEError) as raised:
        await call  # type: ignore[misc]
    assert raised.value.errno == errno.EIO


def told(scene: Scene) -> tuple[list[str], list[str]]:
    """Errors of calls, and notes."""
    errors, notes = errors_and_notes(scene.life.parts)
    return [error["error"] for error in errors if "sync" in error["error"]], notes


@scene()
async def test_a_failed_fsync_is_an_error_until_its_file_is_durable_and_a_note_then(scene: Scene) -> None:
    made = operations(scene)
    made._handles[1] = await scene.create(b"a", b"x" * 5000)
    scene.faults.away = True
    await fails(made.fsync(1, False))
    await made.release(1)
    errors, notes = told(scene)
    assert "'a' not at 'pfs'" in errors[0]
    assert notes == []
    await trio.sleep(2 * SHOWN_S)
    assert len(told(scene)[0]) == 1  # what is not durable does not become right by itself
    scene.faults.away = False
    await scene.drained()
    await made.getattr(ROOT_FID, None)
    assert told(scene) == ([], [])  # long ago
    scene.faults.away = True
    made._handles[2] = await scene.create(b"b", b"y")
    await fails(made.fsync(2, False))
    scene.faults.away = False
    await made.release(2)
    await scene.drained()
    errors, notes = told(scene)
    assert errors == []
    assert "it has got to 'pfs' since" in notes[0]


@scene()
async def test_a_failed_fsync_is_past_once_it_works_or_its_file_is_removed(scene: Scene) -> None:
    made = operations(scene)
    for number, name in enumerate((b"a", b"b")):
        made._handles[number] = await scene.create(name, b"x" * 5000)
        scene.faults.away = True
        await fails(made.fsync(number, False))
        scene.faults.away = False
    assert len(told(scene)[0]) == 2
    await made.fsync(0, False)
    await scene.fs.unlink(ROOT_FID, b"b")
    errors, notes = told(scene)
    assert errors == []
    assert ["worked since" in note or "removed since" in note for note in notes] == [True, True]


@scene()
async def test_a_failed_fsync_of_a_directory_is_past_once_its_names_are_there(scene: Scene) -> None:
    made = operations(scene)
    await scene.mkdir(b"d")
    scene.faults.away = True
    listing = await made.opendir(await scene.ino(b""), None)
    await fails(made.fsyncdir(listing, False))
    assert len(told(scene)[0]) == 1
    scene.faults.away = False
    await scene.drained()
    assert told(scene)[0] == []
