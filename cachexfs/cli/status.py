"""``cachexfs status``: each mount of this node, or one path: boundaries, times, what is pending, what is wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass

import click
import msgspec

from cachexfs.cli import client, mounts, waiting
from cachexfs.cli.output import shown, table, write, write_error, write_json
from cachexfs.cli.protocol import Checkpoint, FileState, Refreshed, Status
from cachexfs.cli.seconds import Seconds
from cachexfs.core.sizes import format_duration, format_rate, format_size
from cachexfs.errors import (
    EXIT_CANNOT_TELL,
    EXIT_DONE,
    EXIT_NO,
    EXIT_NOT_DURABLE,
    CacheXError,
    CannotTellError,
    UsageError,
)
from cachexfs.registration import Entry

CLEAR_SCREEN = "\x1b[H\x1b[2J"
LIST_MAX = 20


@dataclass(frozen=True, slots=True)
class Report:
    """What one mount said: its status, or why there is none; ``left``: it has ended, and what it left in staging."""

    mountpoint: str
    status: Status | None
    raw: dict[str, object]
    error: str = ""
    left: waiting.Left | None = None

    @property
    def exit_code(self) -> int:
        """3 on any error, lost protection or data without a mount, 4 without an answer, else 0."""
        if self.left is not None:
            return EXIT_NOT_DURABLE if self.left.is_data else EXIT_DONE
        if self.status is None:
            return EXIT_CANNOT_TELL
        return EXIT_NOT_DURABLE if problems(self.status) else EXIT_DONE


def problems(status: Status) -> list[str]:
    """What makes ``status`` end with 3: errors, lost protection, a PFS that does not answer."""
    found: list[str] = []
    if status.failed:
        found.append(f"the daemon has failed: {status.failed}")
    if len(status.nodes) > 1 and not status.protected:
        found.append("no live partner: what is only here would be lost with this node")
    if status.pfs_state in ("unreachable", "hung"):
        waits = f"; {status.held_up} changes wait and land by themselves" if status.held_up else ""
        found.append(f"the PFS is {_pfs_state(status)}{waits}")
    if status.pfs_refuses:
        found.append(f"the PFS directory {status.pfs} {status.pfs_refuses}; what is refused waits, and is tried again")
    for error in status.errors:
        where = " ".join(filter(None, [error.path, f"({error.node})" if error.node else ""]))
        found.append(f"{where}: {error.error}")
    known = [error.path for error in status.errors]
    for point in status.checkpoints:  # its error is that of one of its files
        prefix = point.path + "/" if point.path else ""
        if point.error and not any(path.startswith(prefix) for path in known):
            found.append(f"{point.path or '.'}: {point.error}")
    if status.file is not None and status.file.error and status.file.path not in known:
        found.append(f"{status.file.path}: {status.file.error}")
    return found


@click.command("status")
@click.argument("path", required=False)
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--interval", "interval_s", type=Seconds(0.1), default=1.0, show_default=True,
              metavar="SECONDS", help="How often with --watch.")  # fmt: skip
@click.option(
    "--refresh", is_flag=True, help="Take in what was changed on the PFS behind the mount, at and below PATH."
)
@click.option("--forget", is_flag=True, help="With --refresh: forget names that are gone there.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object (with --watch, one a line).")
def command(path: str | None, watch: bool, interval_s: float, refresh: bool, forget: bool, as_json: bool) -> int:
    """Show a PATH inside a mount, or every mount of this node.

    Exit 3 on any error or lost protection, 4 if a daemon does not answer. With --refresh: 1 if names are missing.
    """
    if refresh or forget:
        if not refresh or path is None or watch:
            raise UsageError("--refresh needs a PATH inside a mount and goes without --watch; --forget needs --refresh")
        return _refresh(path, forget=forget, as_json=as_json)
    while True:
        try:
            reports = collect(path)
        except CannotTellError as error:  # a watch goes on over a restart
            if not watch:
                raise
            reports = [Report("", None, {}, str(error))]
        if as_json:
            _print_json(path, reports)
        else:
            if watch and sys.stdout.isatty():
                sys.stdout.write(CLEAR_SCREEN)
            _print_words(path, reports)
        if not watch:
            break
        try:
            time.sleep(interval_s)
        except KeyboardInterrupt:
            break
    if EXIT_NOT_DURABLE in [report.exit_code for report in reports]:
        return EXIT_NOT_DURABLE
    return max(report.exit_code for report in reports)


def _refresh(path: str, *, forget: bool, as_json: bool) -> int:
    entry, relative = client.locate(path)
    line = client.ask_raw(entry, {"op": "refresh", "path": relative, "forget": forget})
    found = client.decode(entry, line, Refreshed)
    code = EXIT_NO if found.missing else EXIT_DONE
    if as_json:
        write_json({**msgspec.to_builtins(found), "exit": code})
        return code
    words = [
        ("new", found.new), ("changed", found.changed), ("missing on the PFS", found.missing),
        ("forgotten", found.forgotten), ("left alone, changes are pending", found.busy),
    ]  # fmt: skip
    for word, paths in words:
        for name in paths[:LIST_MAX]:
            write(f"{word}: {shown(name) or '.'}")
        if len(paths) > LIST_MAX:
            write(f"{word}: ... and {len(paths) - LIST_MAX} more (--json lists all)")
    if found.missing:
        write(
            "of these, what a node still holds is copied there again, the rest is lost until a refresh finds it there "
            "(a server that is down looks the same); if they are gone for good: --refresh --forget"
        )
    return code


def collect(path: str | None) -> list[Report]:
    """What every mount of this node says, or that of ``path``. Raises ``CannotTellError`` when there is none."""
    if path is not None:
        return [_of_path(path)]
    entries = mounts.registry()
    reports: list[Report] = []
    left = {waits.owner.mountpoint: waits for waits in waiting.find()}
    of_others: list[str] = []
    for mount in mounts.read_mountinfo()[0]:
        waits = left.pop(mount.mountpoint, None)
        entry_found = mounts.entry_of(mount, entries)
        if entry_found is None and mounts.draining(mount.mountpoint, entries):
            continue  # its supervisor has died: below
        if entry_found is None and waits is None and os.environ.get("CACHEXFS_RUNTIME_DIR"):
            continue  # one of several nodes on this machine: the mounts of the others are not its own
        if entry_found is None and os.geteuid() not in (0, mount.owner):
            of_others.append(mount.mountpoint)
            continue
        try:
            if entry_found is None:
                raise client.dead(mount.mountpoint, None)
            reports.append(_ask(entry_found, None))
        except CacheXError as error:
            reports.append(_no_answer(mount.mountpoint, error, waits))
    for entry in entries:  # what umount(8) has taken away, while its daemon still drains
        if not entry.device and mounts.is_alive(entry.pid):
            try:
                reports.append(_ask(entry, None))
            except client.EndedError:
                continue  # it has drained everything, and gives back what it had
            except CacheXError as error:
                reports.append(Report(entry.mountpoint, None, {}, str(error)))
    reports += [_left(waits) for waits in left.values()]
    if not reports and of_others:
        raise CannotTellError(f"the mount at {of_others[0]} is another user's: ask as that user, or as root")
    if not reports:
        raise CannotTellError("no CacheX FS mount on this node: 'cachexfs mount PFS_DIR MOUNTPOINT' makes one")
    return reports


def _of_path(path: str) -> Report:
    """The root of a mount shows all of it."""
    found = mounts.find(path)
    mountpoint = found.mount.mountpoint if found is not None else mounts.resolve(path, [])
    entry, relative = (found.entry, found.relative) if found is not None else (None, "")
    if entry is None:  # drained after umount(8), or just ending
        ours = [e for e in mounts.registry() if e.mountpoint == mountpoint and mounts.is_alive(e.pid)]
        entry = ours[0] if ours else None
    waits = waiting.find_at(mountpoint) if entry is None or not mounts.is_alive(entry.pid) else None
    if found is None and entry is None and waits is not None:
        return _left(waits)
    try:
        if entry is None:
            entry, relative = client.locate(path)
        return _ask(entry, relative or None)
    except client.DeadDaemonError as error:
        if waits is None:
            raise
        raise CannotTellError(_no_answer(mountpoint, error, waits).error) from None


def _no_answer(mountpoint: str, error: CacheXError, waits: waiting.Waiting | None) -> Report:
    """A mount whose daemon does not answer; where that is dead, with what it has left."""
    if waits is None or not isinstance(error, client.DeadDaemonError):
        return Report(mountpoint, None, {}, str(error))
    left = waiting.look(waits)
    held = f"{left.amount} staged in {waits.directory} is not on {waits.owner.pfs}"
    return Report(mountpoint, None, {}, f"the daemon of {mountpoint} is dead; {held}: {left.sentence}")


def _left(waits: waiting.Waiting) -> Report:
    left = waiting.look(waits)
    return Report(waits.owner.mountpoint, None, left.as_json(), left=left)


def _ask(entry: Entry, relative: str | None) -> Report:
    line = client.ask_raw(entry, {"op": "status", "path": relative})
    raw = json.loads(line)
    raw.pop("done", None)
    return Report(entry.mountpoint, client.decode(entry, line, Status), raw)


def _print_json(path: str | None, reports: list[Report]) -> None:
    answers = [
        {**report.raw, "exit": report.exit_code}
        if report.status is not None or report.left is not None
        else {"mountpoint": report.mountpoint, "error": report.error, "exit": report.exit_code}
        for report in reports
    ]
    write_json(answers[0] if path is not None else {"mounts": answers})


def _print_words(path: str | None, reports: list[Report]) -> None:
    for number, report in enumerate(reports):
        lines = [""] if number else []
        if report.left is not None:
            write("\n".join(lines + _left_lines(report.left)))
            continue
        if report.status is None:
            write_error(report.error)
            continue
        if path is None or not report.status.file:
            lines += _mount_lines(report.status)
        if report.status.file is not None:
            lines += _file_lines(report.status.file)
        lines += _checkpoint_lines(report.status.checkpoints)
        wrong = problems(report.status)
        lines += [_red("error: " + shown(text)) for text in wrong[:LIST_MAX]]
        if len(wrong) > LIST_MAX:
            lines.append(_red(f"... and {len(wrong) - LIST_MAX} more errors (--json lists all)"))
        lines += [f"note: {shown(text)}" for text in report.status.notes[-LIST_MAX:]]
        write("\n".join(lines))


def _red(text: str) -> str:
    return f"\x1b[31m{text}\x1b[0m" if sys.stdout.isatty() else text


def _pfs_state(status: Status) -> str:
    """``ok``, or ``hung for 42 s: no answer to land a/b``."""
    since = f" for {format_duration(status.pfs_away_s)}" if status.pfs_away_s else ""
    refuses = f", {status.pfs_refuses}" if status.pfs_refuses else ""
    return f"{status.pfs_state}{since}{refuses}" + (f": {status.pfs_error}" if status.pfs_error else "")


def _left_lines(left: waiting.Left) -> list[str]:
    owner = left.waits.owner
    lines = [
        f"{shown(owner.mountpoint)} on {shown(owner.pfs)}  node {owner.node}, job {owner.job}: not mounted",
        f"  staged    {format_size(left.staged_bytes)} in {shown(left.waits.directory)}; {left.amount} not on the PFS",
    ]
    if left.is_data:
        waits = f"staged data waits for the PFS directory {owner.pfs}, and nothing copies it now"
        lines.append(_red("error: " + shown(waits)))
    elif left.has_landed:
        lines.append("  another node of the job has brought all of it to the PFS since; a mount begins anew")
    else:
        lines.append("  the memory is given back by a mount that goes on, and its umount")
    return lines + [f"  {shown(when)}:  {shown(command)}" for when, command in left.ways_on]


def _pending(status: Status) -> str:
    """``10.0 GiB in 3 changes (4.2 GiB copied, about 1 m 58 s left)``; of several nodes, of which this one says how
    far it is with its own share."""
    if not status.pending_ops:
        return "nothing"
    all_of_it = f"{format_size(status.pending_bytes)} in {status.pending_ops} changes"
    share = status.own_copied_bytes + status.own_left_bytes
    if not share:
        return all_of_it
    whose = f" of {format_size(share)} on this node" if len(status.nodes) > 1 else ""
    left = f", about {format_duration(status.own_left_s)} left" if status.own_left_s is not None else ""
    return f"{all_of_it} ({format_size(status.own_copied_bytes)}{whose} copied{left})"


def _nodes(status: Status) -> str:
    gone = [node.name for node in status.nodes if not node.live]
    if status.cut_off:
        return f"{len(status.nodes)}; no word from the others: which of them live is not known"
    lost = f" (lost: {', '.join(gone)})" if gone else ""
    return f"{len(status.nodes) - len(gone)} of {len(status.nodes)} live{lost}; partner {status.partner or 'none'}"


def _mount_lines(status: Status) -> list[str]:
    lines = [
        f"{shown(status.mountpoint)} on {shown(status.pfs)}  node {status.node}, job {status.job}, "
        f"up {format_duration(status.uptime_s)}, pid {status.pid}"
    ]
    if len(status.nodes) > 1:
        lines.append(f"  nodes     {_nodes(status)}")
    now = f", now {status.route_now}: {status.route_why}" if status.route_why else ""
    lines += [
        f"  memory    {format_size(status.staging_used)} of {format_size(status.staging_limit)}; "
        f"NVMe {format_size(status.nvme_used)}",
        f"  PFS       {_pfs_state(status)}; pending {_pending(status)}; drain {format_rate(status.drain_bytes_s)}, "
        f"replication {format_rate(status.replicate_bytes_s)}",
        f"  settings  fsync {status.fsync}, route {status.route}{now}, catalogue {status.catalogue}, "
        f"kernel {status.kernel}{f' ({status.kernel_reason})' if status.kernel_reason else ''}, "
        f"supervisor {status.supervisor}{f' ({status.daemons} daemons so far)' if status.daemons > 1 else ''}",
    ]
    return lines


def _checkpoint_lines(checkpoints: tuple[Checkpoint, ...]) -> list[str]:
    if not checkpoints:
        return []
    headers = (
        "CHECKPOINT",
        "FORMAT",
        "RESTARTABLE",
        "STAGE",
        "FILES",
        "SIZE",
        "PENDING",
        "RETURNED",
        "PARTNER",
        "PFS",
        "HOLDERS",
    )
    rows = [
        (
            point.path or ".",
            point.format or "-",
            point.restartable,
            point.stage or "-",
            str(point.files),
            format_size(point.bytes),
            format_size(point.pending) if point.pending else "-",
            _clock(point.t_returned),
            _clock(point.t_partner),
            _clock(point.t_pfs),
            ",".join(point.holders) or ("pfs" if point.stage == "pfs" else "-"),
        )
        for point in checkpoints
    ]
    lines = table(headers, rows)
    for point in checkpoints:
        lines += [
            f"  {shown(point.path)} misses {shown(member.name)}{f' on {member.node}' if member.node else ''}: "
            f"{shown(member.reason)}"
            for member in point.missing[:LIST_MAX]
        ]
    return lines


def _file_lines(file: FileState) -> list[str]:
    rows = [
        ("stage", file.stage),
        ("size", f"{file.size} bytes ({format_size(file.size)})"),
        ("generation", str(file.generation)),
        ("origin", file.origin),
        ("holders", ", ".join(file.holders)),
        ("route", file.route or ""),
        ("digest", file.digest or ""),
        ("pending", format_size(file.pending) if file.pending else ""),
        ("returned", file.t_returned or ""),
        ("partner", file.t_partner or ""),
        ("pfs", file.t_pfs or ""),
    ]
    return [shown(file.path), *(f"  {name:<11} {shown(value)}" for name, value in rows if value)]


def _clock(moment: str | None) -> str:
    """HH:MM:SS.mmm of an RFC 3339 time (UTC); of another day than today, YYYY-MM-DD HH:MM:SS."""
    if not moment:
        return "-"
    day, _, clock = moment.partition("T")
    if day == time.strftime("%Y-%m-%d", time.gmtime()):
        return clock[:12].rstrip("Z")
    return f"{day} {clock[:8]}"
