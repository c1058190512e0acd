"""``cachexfs restart`` and ``cachexfs upgrade``: another daemon under a mount that goes on.

Role: asks the mount's supervisor to swap the daemon, and waits until the next one answers. Applications see a pause.
"""

from __future__ import annotations

import os
import sys
import time

import click

from cachexfs.cli import client, mounts
from cachexfs.cli.output import write_json
from cachexfs.cli.protocol import Pong
from cachexfs.cli.seconds import Seconds
from cachexfs.errors import EXIT_DONE, CannotTellError, TimedOutError, UsageError
from cachexfs.supervisor import status as supervisor

POLL_S = 0.05
TIMEOUT_S = 180.0
NAMES = ("python", "python3")  # of an interpreter: a distribution has only the second


@click.command("restart")
@click.argument("mountpoint")
@click.option("--timeout", "timeout_s", type=Seconds(), default=TIMEOUT_S, show_default=True,
              metavar="SECONDS", help="How long the next daemon may take (exit 124).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the new daemon as a JSON object.")
def command(mountpoint: str, timeout_s: float, as_json: bool) -> int:
    """Replace the daemon of a mount by another of the same program; applications see a pause."""
    return _swap(mountpoint, "", timeout_s, as_json)


@click.command("upgrade")
@click.argument("mountpoint")
@click.argument("prefix", required=False)
@click.option("--timeout", "timeout_s", type=Seconds(), default=TIMEOUT_S, show_default=True,
              metavar="SECONDS", help="How long the next daemon may take (exit 124).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the new daemon as a JSON object.")
def upgrade(mountpoint: str, prefix: str | None, timeout_s: float, as_json: bool) -> int:
    """Replace the daemon of a mount by one of the installation in PREFIX (default: that of this command).

    If the new one cannot start or serve, the old program goes on.
    """
    return _swap(mountpoint, _interpreter(prefix), timeout_s, as_json)


def _interpreter(prefix: str | None) -> str:
    if prefix is None:
        return sys.executable
    path = os.path.abspath(prefix)
    if not os.path.exists(path):
        raise UsageError(f"'{path}' does not exist: give a virtual environment or an interpreter with CacheX FS")
    places = [os.path.join(path, "bin", name) for name in NAMES] if os.path.isdir(path) else [path]
    found = next((place for place in places if os.access(place, os.X_OK)), None)
    if found is None:
        raise UsageError(
            f"there is no Python that can be run at {' or '.join(places)}: give a virtual environment or an "
            "interpreter with CacheX FS"
        )
    return found


def _swap(mountpoint: str, interpreter: str, timeout_s: float, as_json: bool) -> int:
    found = mounts.find(mountpoint)
    if found is None or found.relative:
        raise UsageError(f"'{mountpoint}' is not the mount point of a CacheX FS mount: see 'cachexfs status'")
    if found.entry is None:
        raise client.dead(found.mount.mountpoint, None)
    socket = client.supervisor_socket(found.entry)
    deadline_s = time.monotonic() + timeout_s
    while True:
        before = _ask(socket, "status", found.mount.mountpoint)
        said = str(_ask(socket, f"restart {interpreter}".strip(), found.mount.mountpoint).get("said"))
        if not said.startswith("not now"):
            break
        if before["phase"] not in ("starting", "backoff", "retiring") or time.monotonic() > deadline_s:
            raise CannotTellError(f"the supervisor of {mountpoint} does not restart its daemon ({said})")
        time.sleep(POLL_S)
    while True:
        now = _ask(socket, "status", found.mount.mountpoint)
        if now["swaps_refused"] != before["swaps_refused"]:
            raise CannotTellError(f"{now['last_failure']}; the old program serves {mountpoint}")
        if now["phase"] == "failed":
            raise CannotTellError(f"no daemon can serve {mountpoint}: {client.reason_of(found.entry, now)}")
        if now["phase"] == "serving" and now["life"] != before["life"]:
            break
        if time.monotonic() > deadline_s:
            raise TimedOutError(f"the next daemon of {mountpoint} has not served for {timeout_s:g} s: {now['phase']}")
        time.sleep(POLL_S)
    entry = mounts.entry_of(found.mount, mounts.registry()) or found.entry
    client.ask(entry, {"op": "ping"}, Pong)
    if as_json:
        write_json({"mountpoint": found.mount.mountpoint, "pid": now["daemon_pid"], "interpreter": now["interpreter"]})
    return EXIT_DONE


def _ask(socket: str, command: str, mountpoint: str) -> dict[str, object]:
    try:
        return supervisor.ask(socket, command)
    except (ConnectionRefusedError, FileNotFoundError):
        raise UsageError(
            f"{mountpoint} has no supervisor (supervisor=off, or it is dead): umount it and mount it again"
        ) from None
    except OSError as error:
        raise CannotTellError(f"the supervisor of {mountpoint} does not answer: {error.strerror or error}") from None
