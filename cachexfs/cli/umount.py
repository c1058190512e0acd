"""``cachexfs umount``: drain through the daemon, then wait until the mount and the daemon are gone."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import click

from cachexfs.cli import client, mounts
from cachexfs.cli.mount_checks import detach
from cachexfs.cli.output import shown, write_error, write_json
from cachexfs.cli.progress import bar
from cachexfs.cli.protocol import Unmounted
from cachexfs.config import mount_id
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_DONE, EXIT_NOT_DURABLE, CannotTellError, UsageError
from cachexfs.mountpoint import unprotect
from cachexfs.registration import Entry

GONE_TIMEOUT_S = 30.0
POLL_S = 0.05
#: The daemon reports progress while it drains; this much silence means that it hangs.
SILENCE_S = 60.0
LIST_MAX = 20


@click.command("umount")
@click.argument("mountpoint")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), metavar="SECONDS", help="How long to drain.")
@click.option("--abandon", is_flag=True, help="Do not drain; also takes away a mount whose daemon is dead.")
@click.option("--json", "as_json", is_flag=True, help="Print what is left as a JSON object.")
def command(mountpoint: str, timeout_s: float | None, abandon: bool, as_json: bool) -> int:
    """Bring everything to the PFS, serve the other nodes until they are done, then unmount.

    What is left when time runs out (exit 3, with the list) stays recoverable: mount again with the same options, or
    'cachexfs recover'.
    """
    found = mounts.find(mountpoint)
    if found is None:
        raise UsageError(f"'{mountpoint}' is not a CacheX FS mount on this node: see 'cachexfs status'")
    if found.relative:
        raise UsageError(f"'{mountpoint}' lies inside a mount: give the mount point, {found.mount.mountpoint}")
    entry = found.entry
    try:
        if entry is None:
            raise client.dead(found.mount.mountpoint, None)
        request = {"op": "umount", "timeout_s": timeout_s, "abandon": abandon}
        with bar("draining", not as_json) as draw:
            answer = client.ask(entry, request, Unmounted, draw, SILENCE_S)
    except client.DeadDaemonError as error:
        if not abandon:
            raise CannotTellError(f"{error}; or give --abandon to take the dead mount away") from None
        _take_away(found.mount, entry)
        write_error(f"the daemon of {found.mount.mountpoint} was dead: cannot tell what had not reached the PFS; "
                    "mount again with the same options to bring it there")  # fmt: skip
        return EXIT_CANNOT_TELL
    _await_gone(found.mount, entry)
    unprotect(found.mount.mountpoint)
    left = [{"path": item.path, "reason": item.reason} for item in answer.left]
    if as_json:
        write_json({"mountpoint": found.mount.mountpoint, "left": left})
    if not left:
        return EXIT_DONE
    names = [f"{shown(item.path)} ({shown(item.reason)})" for item in answer.left]
    more = f", and {len(names) - LIST_MAX} more" if len(names) > LIST_MAX else ""
    write_error(
        f"unmounted, and {len(left)} {'change is' if len(left) == 1 else 'changes are'} not on the PFS; what is left "
        f"stays recoverable (mount again with the same options): {', '.join(names[:LIST_MAX])}{more}"
    )
    return EXIT_NOT_DURABLE


def _take_away(mount: mounts.KernelMount, entry: Entry | None) -> None:
    detach(mount.mountpoint)
    unprotect(mount.mountpoint)
    if entry is None:
        return
    stem = os.path.join(os.path.dirname(entry.socket), mount_id(entry.mountpoint, entry.node))
    for name in (stem + ".json", stem + ".sock"):
        with suppress(OSError):
            os.unlink(name)


def _await_gone(mount: mounts.KernelMount, entry: Entry) -> None:
    for _ in range(round(GONE_TIMEOUT_S / POLL_S)):  # looks, not time: on a machine that stood still nobody is late
        # The kernel gives the device's number to the next mount, of anybody.
        same = ((other.device, other.mountpoint) for other in mounts.read_mountinfo()[0])
        is_mounted = (mount.device, mount.mountpoint) in same
        if not is_mounted and not mounts.is_alive(entry.pid):
            return
        time.sleep(POLL_S)
    raise CannotTellError(
        f"{mount.mountpoint} is drained, and the daemon (pid {entry.pid}) has not ended for {GONE_TIMEOUT_S:g} s: "
        f"see who uses it with 'fuser -vm {mount.mountpoint}'"
    )
