"""``cachexfs latest``: the newest checkpoint that can be restarted from, on a mount or on a bare directory."""

from __future__ import annotations

import glob
import json
import os

import click

from cachexfs import staged
from cachexfs.cli import client, mounts
from cachexfs.cli.child import run_in_child
from cachexfs.cli.output import write, write_error, write_json, write_warning
from cachexfs.cli.protocol import Latest
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_DONE, EXIT_NO, CannotTellError

BARE_TIMEOUT_S = 120.0
STATE_DIR = ".cachexfs"  # in every PFS directory that a mount has used


@click.command("latest")
@click.argument("directory", metavar="DIR")
@click.option("--at", "boundary", type=click.Choice(["partner", "pfs"]), help="Restartable at this boundary or better.")
@click.option("--below", type=int, metavar="STEP", help="Only steps smaller than this one.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as a JSON object.")
def command(directory: str, boundary: str | None, below: int | None, as_json: bool) -> int:
    """Print the absolute path of the newest checkpoint in DIR that can be restarted from.

    The step is the last integer in a checkpoint's name. DIR is inside a mount, or any directory, such as the PFS.
    Exit 1 only if there certainly is none; 4 if that cannot be told.
    """
    found = mounts.find(directory)
    if found is None:
        answer = _bare(os.path.abspath(directory), below)
    elif found.entry is None:
        raise client.dead(found.mount.mountpoint, None)
    else:
        request = {"op": "latest", "dir": found.relative, "at": boundary, "below": below}
        answer = client.ask(found.entry, request, Latest)
        if answer.path is not None:
            path = os.path.join(found.mount.mountpoint, answer.path)
            answer = Latest(path, answer.certain, answer.reason)
    if as_json:
        write_json({"path": answer.path, "certain": answer.certain, "reason": answer.reason})
    if answer.path is None:
        write_error(answer.reason or f"no checkpoint in '{directory}' can be restarted from")
        return EXIT_NO if answer.certain else EXIT_CANNOT_TELL
    if not as_json:
        write(answer.path)
        if answer.reason:
            write_warning(f"newer ones cannot be judged: {answer.reason}")
    return EXIT_DONE


def _bare(directory: str, below: int | None) -> Latest:
    for entry in mounts.registry():
        if not entry.pid and staged.read(entry.staging) is None:
            continue  # what it had left is gone
        if entry.mountpoint == directory or directory.startswith(entry.mountpoint.rstrip("/") + "/"):
            raise CannotTellError(f"{entry.mountpoint} was a mount and is not mounted now: mount it again first")

    mountpoint = _was_mounted(directory)

    def read() -> Latest:
        from cachexfs.cli.bare import newest

        if mountpoint and not os.path.exists(os.path.join(mountpoint, STATE_DIR, "id")):  # the PFS itself, by now
            return Latest(None, False, f"{mountpoint} was a mount, and is not mounted now: mount it first")
        return newest(directory, below)

    try:
        return run_in_child(read, BARE_TIMEOUT_S)
    except TimeoutError:
        raise CannotTellError(
            f"'{directory}' has not been read within {BARE_TIMEOUT_S:g} s: does the PFS hang?"
        ) from None


def _was_mounted(directory: str) -> str:
    """The mount point of an earlier mount that a directory lies in; "" for none.

    An empty mount point is no evidence that there is no checkpoint, and one with files has them on a local disk. The
    options of a mount outlive it.
    """
    for place in mounts.runtime_dirs():
        for path in glob.glob(os.path.join(glob.escape(place), "*.options")):
            try:
                mountpoint = str(json.loads(mounts.read_small(path))["mountpoint"])
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if mounts.is_below(directory, mountpoint):
                return mountpoint
    return ""
