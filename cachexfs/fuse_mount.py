"""The mount as the kernel has it: made, found in its table, tuned, and asked how it serves files.

Role: daemon layer, without state. Nothing here touches a path inside the mount: the daemon would wait for itself.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pyfuse3
import trio

from cachexfs import mountinfo
from cachexfs.config import MountOptions
from cachexfs.errors import CannotTellError
from cachexfs.frontend.fuse import Operations
from cachexfs.supervisor.client import Supervisor
from cachexfs.supervisor.status import ask as ask_supervisor

log = logging.getLogger(__name__)

READ_AHEAD_KIB = 1024
READ_AHEAD_DELAY_S = 1.0
MODE_POLL_S = 0.1


def mount(options: MountOptions, supervisor: Supervisor | None, operations: Operations) -> None:
    """Mount, or take the supervisor's mount over. Raises ``CannotTellError``."""
    fuse_options = set(pyfuse3.default_options) | {f"fsname={_fsname(options.pfs)}", "subtype=cachexfs"}
    fuse_options.discard("nonempty")
    if options.allow_other:
        fuse_options.add("allow_other")
    fuse_options.add("default_permissions")
    try:
        pyfuse3.init(operations, supervisor.fuse_path if supervisor is not None else options.mountpoint, fuse_options)
    except RuntimeError as error:
        raise CannotTellError(
            f"FUSE did not mount {options.mountpoint}: {error}; see {options.log_file or 'the messages above'}"
        ) from error


def _fsname(pfs: str) -> str:
    return pfs.replace("\\", "_").replace(",", "_")


def device(mountpoint: str) -> str:
    """major:minor of a mount, read from the kernel's table; "" when nothing is mounted there."""
    found = [mount.device for mount in mountinfo.read() if mount.mountpoint == mountpoint]
    return found[-1] if found else ""


async def read_ahead(mountpoint: str) -> None:
    """Let the kernel read ahead in requests as large as FUSE has them (as root; else it stays at 128 KiB).

    The kernel sets its own value when it gets the answer to INIT, which nothing here can see.
    """
    await trio.sleep(READ_AHEAD_DELAY_S)
    try:
        Path(f"/sys/class/bdi/{device(mountpoint)}/read_ahead_kb").write_text(str(READ_AHEAD_KIB))
    except OSError as error:
        log.debug("read-ahead stays as it is: %s", error)


def mode(options: MountOptions, supervisor: Supervisor | None) -> tuple[str, str]:
    """(``passthrough`` or ``handler``: who serves staged files; why not the kernel), as far as known at the start."""
    if supervisor is None:
        why = options.unsupervised_why or "nobody holds the privilege that passthrough needs"
        return "handler", f"supervisor=off: {why}"
    if supervisor.passthrough:
        return "passthrough", ""
    return "handler", "passthrough=off" if options.passthrough == "off" else "the supervisor has not said why yet"


async def settled_mode(supervisor: Supervisor, status_socket: str) -> tuple[str, str] | None:
    """``mode`` once the supervisor has the kernel's answer to INIT; None when it does not say.

    From then on ``supervisor.passthrough`` is what the kernel granted.
    """
    while True:
        await trio.sleep(MODE_POLL_S)
        try:
            said = await trio.to_thread.run_sync(ask_supervisor, status_socket, "status", abandon_on_cancel=True)
        except (OSError, ValueError) as error:
            log.debug("the supervisor does not say how the mount works: %s", error)
            return None
        if said.get("phase") == "serving":
            break
    why = str(said.get("passthrough_reason") or "")
    supervisor.passthrough = supervisor.passthrough and not why
    return ("handler", why) if why else ("passthrough", "")
