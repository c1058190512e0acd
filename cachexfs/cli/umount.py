"""``cachexfs umount``: drain through the daemon, then wait until the mount and the daemon are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import click

from cachexfs import staged
from cachexfs.cli import client, mounts, waiting
from cachexfs.cli.mount_checks import detach
from cachexfs.cli.output import shown, write_error, write_json, write_warning
from cachexfs.cli.progress import bar, lines, pace
from cachexfs.cli.protocol import Left, Progress, Unmounted
from cachexfs.cli.seconds import Seconds
from cachexfs.config import mount_id
from cachexfs.core.sizes import format_size
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_DONE, EXIT_NOT_DURABLE, CannotTellError, TimedOutError, UsageError
from cachexfs.mountpoint import unprotect
from cachexfs.registration import Entry

GONE_TIMEOUT_S = 30.0
POLL_S = 0.05
SAY_AFTER_S = 1.0
#: Of the command's time limit, what is kept for the unmount after the drain: a share of it, at most so much.
END_S, END_SHARE = 2.0, 0.25
DETACH_S = 0.5  # before the limit, a mount that is busy is detached
#: The daemon reports progress while it drains; this much silence means that it hangs.
SILENCE_S = 60.0
SILENCE_S_MIN = 5.0  # with whatever limit: a busy machine's daemon takes its time to answer
REASONS_MAX, NAMES_MAX = 3, 5


@click.command("umount")
@click.argument("mountpoint")
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(),
    metavar="SECONDS",
    help="How long the command may take, the drain included.",
)
@click.option("--abandon", is_flag=True, help="Do not drain; also takes away a mount whose daemon is dead.")
@click.option("--json", "as_json", is_flag=True, help="Print what is left as a JSON object.")
def command(mountpoint: str, timeout_s: float | None, abandon: bool, as_json: bool) -> int:
    """Bring everything to the PFS, serve the other nodes until they are done, then unmount.

    What is left when time runs out (exit 3, with the list) stays recoverable: mount again with the same options, or
    'cachexfs recover'.
    """
    found = mounts.find(mountpoint)
    if found is None and _give_back(mountpoint, as_json):
        return EXIT_DONE
    if found is None:
        raise UsageError(f"'{mountpoint}' is not a CacheX FS mount on this node: see 'cachexfs status'")
    if found.relative:
        raise UsageError(f"'{mountpoint}' lies inside a mount: give the mount point, {found.mount.mountpoint}")
    entry, limit = found.entry, Limit(timeout_s)
    with lines(not as_json) as say:
        try:
            if entry is None:
                raise client.dead(found.mount.mountpoint, None)
            answer = _drain(entry, limit, abandon, as_json, say)
        except client.DeadDaemonError as error:
            if not abandon:
                raise CannotTellError(f"{error}; or give --abandon to take the dead mount away") from None
            _take_away(found.mount, entry)
            write_error(f"the daemon of {found.mount.mountpoint} was dead: cannot tell what had not reached the PFS; "
                        "mount again with the same options to bring it there")  # fmt: skip
            return EXIT_CANNOT_TELL
        still = _await_gone(found.mount, entry, limit, say)
    unprotect(found.mount.mountpoint)
    left = [{"path": item.path, "reason": item.reason} for item in answer.left]
    if as_json:
        write_json({"mountpoint": found.mount.mountpoint, "left": left, "notes": list(answer.notes)})
    for note in answer.notes:
        write_warning(note)
    if not left:
        said = f"everything is on the PFS, and {still}"
        if still and timeout_s is None:
            raise CannotTellError(said)
        if still and _is_mounted(found.mount):
            raise TimedOutError(said)
        if still:  # what a next mount of this place waits for
            write_warning(said)
        return EXIT_DONE
    changes = f"{len(left)} {'change is' if len(left) == 1 else 'changes are'} not on the PFS"
    write_error(
        f"unmounted, and {changes}: {what_is_left(answer.left)}{f'; {still}' if still else ''}. {_stays(entry)}: mount "
        "again with the same options ('cachexfs status' says with which)"
    )
    return EXIT_NOT_DURABLE


def _stays(entry: Entry) -> str:
    """Where what is left lies, and how safe that is."""
    owner = staged.read(entry.staging) if entry.staging else None
    if owner is not None and owner.nvme_directory is None:
        return f"What is left is in this node's memory only ({entry.staging}), and a reboot loses it"
    return "What is left stays recoverable"


def what_is_left(left: Sequence[Left]) -> str:
    """``put: the PFS is full: a, b and 7 more; rename: ...``: each reason once, the most frequent first."""
    groups: dict[str, list[str]] = {}
    for item in left:
        groups.setdefault(item.reason, []).append(shown(item.path))
    said = []
    for reason, paths in sorted(groups.items(), key=lambda group: -len(group[1]))[:REASONS_MAX]:
        names = ", ".join(path for path in paths[:NAMES_MAX] if path)
        more = f" and {len(paths) - NAMES_MAX} more" if len(paths) > NAMES_MAX else ""
        said.append(shown(reason) + (f": {names}{more}" if names else ""))
    others = len(groups) - len(said)
    return "; ".join(said) + (f"; and {others} other reasons (--json lists all)" if others else "")


def _give_back(mountpoint: str, as_json: bool) -> bool:
    """Where nothing is mounted, and what the last mount has left is on the PFS by now: remove that. Else False."""
    waits = waiting.find_at(mountpoint)
    if waits is None or waits.owner.mountpoint != mounts.resolve(mountpoint, []) or not waiting.has_landed(waits):
        return False
    waiting.give_back(waits)
    if as_json:
        write_json({"mountpoint": waits.owner.mountpoint, "left": [], "notes": []})
    return True


class Limit:
    """The time that the whole command has: most of it to drain, the rest to unmount and to see the daemon end."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.timeout_s = timeout_s
        self.drain_s = None if timeout_s is None else timeout_s - min(END_S, timeout_s * END_SHARE)

    @property
    def left_s(self) -> float | None:
        """What is left of it; None without a limit."""
        return None if self._end_s is None else max(self._end_s - time.monotonic(), 0.0)


def _drain(entry: Entry, limit: Limit, abandon: bool, as_json: bool, say: Callable[[str], None]) -> Unmounted:
    """Ask the daemon to drain and to end. Raises ``TimedOutError``: it still drains, mounted."""

    def on_progress(report: Progress) -> None:
        draw(report)
        say(_pending(entry, report))
        if limit.left_s == 0.0:
            raise late

    late = TimedOutError(
        f"{entry.mountpoint} is mounted still: its daemon (pid {entry.pid}) has not stopped draining within "
        f"{limit.timeout_s or 0:g} s"
    )
    request = {"op": "umount", "timeout_s": limit.drain_s, "abandon": abandon}
    silence_s = SILENCE_S if limit.left_s is None else max(min(SILENCE_S, limit.left_s), SILENCE_S_MIN)
    with bar("draining", not as_json) as draw:
        return client.ask(entry, request, Unmounted, on_progress, silence_s)


def _pending(entry: Entry, report: Progress) -> str:
    """What an unmount waits for, for a log."""
    begin = f"unmounting {entry.mountpoint}:"
    if not report.ops_left:
        return f"{begin} all of this node is on the PFS; it serves the other nodes until they are done"
    first = next((f", '{name}' first" for name in report.files if name), "")
    changes = f"{report.ops_left} change{'' if report.ops_left == 1 else 's'}"
    if not report.bytes_left:
        return f"{begin} {changes} of names still to be made on {entry.pfs}{first}"
    return (
        f"{begin} {format_size(report.bytes_left)} in {changes} still to be copied to {entry.pfs}{pace(report)}{first}"
    )


def _take_away(mount: mounts.KernelMount, entry: Entry | None) -> None:
    detach(mount.mountpoint)
    unprotect(mount.mountpoint)
    if entry is None:
        return
    stem = os.path.join(os.path.dirname(entry.socket), mount_id(entry.mountpoint, entry.node))
    for name in (stem + ".json", stem + ".sock"):
        with suppress(OSError):
            os.unlink(name)


def _await_gone(mount: mounts.KernelMount, entry: Entry, limit: Limit, say: Callable[[str], None]) -> str:
    """Wait until the mount and the daemon are gone; what is still there at the end, in words, "" for nothing.

    Near the end of a ``limit`` a mount that processes still use is taken from its name, as its daemon would do later.
    """
    began_s = time.monotonic()
    for _ in range(round(GONE_TIMEOUT_S / POLL_S)):  # looks, not time: on a machine that stood still nobody is late
        is_mounted = _is_mounted(mount)
        if not is_mounted and not mounts.is_alive(entry.pid):
            return ""
        if time.monotonic() - began_s > SAY_AFTER_S:
            say(f"unmounting {entry.mountpoint}: drained; waits for the daemon (pid {entry.pid}) to end")
        left_s = limit.left_s
        if left_s is not None and left_s < DETACH_S and is_mounted:
            with suppress(CannotTellError):
                detach(mount.mountpoint)
        if left_s == 0.0:
            break
        time.sleep(POLL_S)
    if _is_mounted(mount):
        who = f"see who uses it with 'fuser -vm {mount.mountpoint}'"
        return f"{mount.mountpoint} is mounted still, by the daemon (pid {entry.pid}): {who}"
    return f"the daemon (pid {entry.pid}) has not ended yet: it does so by itself"


def _is_mounted(mount: mounts.KernelMount) -> bool:
    # The kernel gives the device's number to the next mount, of anybody.
    return (mount.device, mount.mountpoint) in ((m.device, m.mountpoint) for m in mounts.read_mountinfo()[0])
