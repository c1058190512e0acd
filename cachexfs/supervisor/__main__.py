"""``python -m cachexfs.supervisor``: command line of the supervisor.

Role: parses, mounts, gives up root when told to, then serves. Started by ``cachexfs mount``, one per mount.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from . import child, mount, passthrough, privileges, wire
from .lifecycle import EXIT_CANNOT_TELL, EXIT_DONE, EXIT_USAGE, Limits
from .plan import Plan, log
from .run import Supervisor

#: Saves two wake-ups of a sleeping process per request. Measure with ``bench/bench_supervisor.py``.
_SPIN_US = 100.0
#: A mount that lives shorter does not pay for a second process.
_STANDBY_AFTER_S = 5.0


def _parser() -> argparse.ArgumentParser:
    defaults = Limits()
    parser = argparse.ArgumentParser(prog="cachexfs.supervisor", description=__doc__)
    parser.add_argument("--mountpoint", required=True)
    parser.add_argument("--fsname", default="cachexfs", help="what mount(8) shows as the source")
    parser.add_argument("--allow-other", action="store_true", help="let other users in")
    parser.add_argument("--mount-with", choices=("auto", "mount", "fusermount"), default="auto")
    parser.add_argument("--passthrough", choices=("auto", "on", "off"), default="auto")
    parser.add_argument(
        "--backing-dir", action="append", default=[], help="files on this directory's filesystem may back files"
    )
    parser.add_argument("--status-socket", metavar="PATH")
    parser.add_argument("--ready-fd", type=int, help="gets one line: ready, or failed: REASON")
    parser.add_argument("--user", help="become this user, keeping only CAP_SYS_ADMIN; the daemon gets none")
    parser.add_argument("--release", metavar="DIR", help="after an end in order, unmount this too: the staging tmpfs")
    parser.add_argument(
        "--standby", action="store_true", help="start the next daemon ahead: shorter pauses, one more process"
    )
    parser.add_argument("--standby-after", type=float, default=_STANDBY_AFTER_S, metavar="S", help="then: when")
    parser.add_argument("--max-restarts", type=int, default=defaults.restarts_max, help="failures in a row")
    parser.add_argument(
        "--max-suspicions",
        type=int,
        default=defaults.suspicions_max,
        help="deaths without an answer before the oldest request gets EIO",
    )
    parser.add_argument(
        "--max-payload",
        type=_kib,
        default=wire.PAYLOAD_BYTES_MAX // 1024,
        metavar="KIB",
        help="largest read or write request; a message needs that much contiguous kernel memory",
    )
    parser.add_argument(
        "--spin-us", type=float, default=_SPIN_US, help="poll this long after a READ or WRITE before sleeping"
    )
    for name, value, text in (
        ("start", defaults.start_s, "until a daemon is ready"),
        ("stop", defaults.stop_s, "for the daemon to finish after SIGTERM"),
        ("grace", defaults.grace_s, "for open requests before a restart"),
        ("exit", defaults.exit_s, "for a daemon to exit when told"),
        ("unmount", defaults.unmount_s, "while the mount is busy, before it is detached"),
        ("request", defaults.request_s, "without an answer to a request before the daemon counts as hung"),
        ("pulse", defaults.pulse_s, "without a sign of the daemon's loop, while requests wait, before it does"),
    ):
        parser.add_argument(f"--{name}-timeout", type=float, default=value, metavar="S", help=text)
    parser.add_argument(
        "--module", metavar="NAME", help="the daemon is this module beside us, run by our Python; -- then its arguments"
    )  # not its whole name: who kills what is called like the daemon shall not find it here
    parser.add_argument("daemon", nargs=argparse.REMAINDER, help="-- then the daemon's command")
    return parser


def _kib(text: str) -> int:
    value = int(text)
    if not 4 <= value <= wire.PAYLOAD_BYTES_MAX // 1024 or value % 4:
        raise argparse.ArgumentTypeError("a multiple of 4 between 4 and 1024")
    return value


def _spare_from_oom() -> None:
    """Without the supervisor the mount is dead, so the kernel should kill others first (needs privilege).

    Not where the daemon is another user's: it inherits the right to the same, and could fill the node's memory.
    """
    try:
        with open("/proc/self/oom_score_adj", "wb") as score:
            score.write(b"-1000")
    except OSError:
        pass  # no CAP_SYS_RESOURCE: an ordinary process then


def _limits(args: argparse.Namespace) -> Limits:
    return Limits(
        restarts_max=max(0, int(args.max_restarts)),
        suspicions_max=max(0, int(args.max_suspicions)),
        start_s=float(args.start_timeout),
        stop_s=float(args.stop_timeout),
        grace_s=float(args.grace_timeout),
        exit_s=float(args.exit_timeout),
        unmount_s=float(args.unmount_timeout),
        request_s=float(args.request_timeout),
        pulse_s=float(args.pulse_timeout),
    )


def _backing_devices(paths: Sequence[str]) -> frozenset[int]:
    return frozenset(os.stat(path).st_dev for path in paths)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, mount, serve; the exit code."""
    args = _parser().parse_args(arguments)
    argv = tuple(args.daemon[1:] if args.daemon[:1] == ["--"] else args.daemon)
    if args.module:
        argv = (sys.executable, "-P", "-m", f"{__package__.rpartition('.')[0]}.{args.module}", *argv)
    if not argv:
        log("no daemon command after --")
        return EXIT_USAGE
    try:
        user = privileges.find_user(args.user) if args.user else None
        place = mount.Place.find(args.mountpoint, only_roots=user is not None)
        release = mount.Place.find(args.release, only_roots=user is not None) if args.release else None
        devices = _backing_devices(args.backing_dir)
        reason = passthrough.probe(args.passthrough)
        if not reason and not devices:
            reason = "no --backing-dir was given"
        if args.passthrough == "on" and reason:
            log(f"passthrough=on: {reason}")
            return EXIT_CANNOT_TELL
        uid, gid = user or (os.getuid(), os.getgid())
        # A signal between mounting and the loop must not leave a dead mount behind.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        fd = mount.mount(place, args.fsname, is_shared=args.allow_other, uid=uid, gid=gid, how=args.mount_with)
    except (mount.MountError, privileges.PrivilegeError, OSError) as error:
        log(str(error))
        return EXIT_CANNOT_TELL
    supervisor = None
    try:
        if user is not None:
            privileges.become(*user)
        else:
            _spare_from_oom()
        plan = Plan(
            place=place,
            device_fd=fd,
            argv=argv,
            limits=_limits(args),
            payload_bytes_max=min(child.payload_bytes_max(), args.max_payload * 1024),
            no_passthrough=reason,
            backing_devices=devices,
            status_path=args.status_socket,
            ready_fd=args.ready_fd,
            standby_after_s=max(0.0, args.standby_after) if args.standby else None,
            spin_s=max(0.0, args.spin_us * 1e-6) if len(os.sched_getaffinity(0)) > 1 else 0.0,
        )
        supervisor = Supervisor(plan, os.environ)
        code = supervisor.run()
    except BaseException as error:
        if supervisor is None or not supervisor.has_served:  # else a dead mount is better than one that looks empty
            mount.unmount(place, is_lazy=True)
        if supervisor is None and isinstance(error, (OSError, privileges.PrivilegeError)):
            log(str(error))
            return EXIT_CANNOT_TELL
        raise
    if release is not None and code == EXIT_DONE:
        mount.unmount(release, is_lazy=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
