"""``cachexfs recover``: what a crash left on this node's NVMe and under hidden names, brought to the PFS.

Role: asks a child process (``python -m cachexfs.recovery``), which needs no daemon and may hang with the PFS; with
``--dead``, the daemon of this node.
"""

from __future__ import annotations

import os
from collections import Counter

import click
import msgspec

from cachexfs.cli import client, mounts, recovery_child, waiting
from cachexfs.cli.output import shown, table, write, write_error, write_json
from cachexfs.cli.progress import bar
from cachexfs.cli.protocol import Pong, Vouched
from cachexfs.cli.seconds import Seconds
from cachexfs.errors import EXIT_DONE, EXIT_NOT_DURABLE, CacheXError, CannotTellError, UsageError
from cachexfs.recovery.report import HeldStore, Listing, Mended, Request, Result
from cachexfs.registration import Entry

NVME_VARIABLE = "CACHEXFS_NVME"
PING_SILENCE_S = 5.0
#: etcd's restart and election.
DEAD_SILENCE_S = 60.0
_WORDS = {
    "published": "published", "there": "there already", "superseded": "superseded by newer ones",
    "withheld": "held back", "conflict": "in conflict", "damaged": "damaged", "failed": "failed",
}  # fmt: skip


@click.command("recover")
@click.argument("nvme_dir", required=False)
@click.option("--to", "pfs_dir", metavar="PFS_DIR", help="Bring what is held to this PFS directory.")
@click.option("--list", "list_only", is_flag=True, help="Show what is held; change nothing.")
@click.option("--verify", is_flag=True, help="With --list: read every replica and compare its digests.")
@click.option("--job", metavar="JOB", help="Only this job's data.")
@click.option("--elsewhere", is_flag=True, help="PFS_DIR is not the directory that the job had mounted.")
@click.option("--wait", "wait_s", type=Seconds(), default=0.0, metavar="SECONDS",
              help="Wait so long for what 'recover' on other nodes brings.")  # fmt: skip
@click.option(
    "--dead", multiple=True, metavar="NODE", help="Confirm that NODE is dead and stays so: its survivors go on."
)
@click.option("--journal", "staging_dir", metavar="STAGING_DIR",
              help="Mend the damaged catalogue of a single-node mount: only what is damaged is left out.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as a JSON object.")
def command(
    nvme_dir: str | None, pfs_dir: str | None, list_only: bool, verify: bool, job: str | None, elsewhere: bool,
    wait_s: float, dead: tuple[str, ...], staging_dir: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Show what NVME_DIR holds after a crash, or bring it to the PFS.

    Needs no daemon. Run it on every node of the job that has ended, then once more where something was held back; or on
    all nodes at once with --wait. Nothing on the PFS is replaced but what the data was based on.
    """
    if dead:
        if nvme_dir or pfs_dir or list_only:
            raise UsageError("--dead speaks to the running daemon: give it alone")
        return _vouch(dead, as_json)
    if staging_dir is not None:
        if nvme_dir or pfs_dir or list_only:
            raise UsageError("--journal mends the catalogue in a staging directory: give it alone")
        return _mend(staging_dir, as_json)
    nvme = nvme_dir or os.environ.get(NVME_VARIABLE)
    if nvme is None and pfs_dir is None:
        raise UsageError("nothing to look at: give the job's NVME_DIR, --to PFS_DIR, or both")
    if pfs_dir is not None and not list_only:
        _refuse_live(pfs_dir, job)
    request = Request(
        nvme and os.path.abspath(nvme), pfs_dir and os.path.abspath(pfs_dir), list_only, verify, job, elsewhere, wait_s,
        is_named=nvme_dir is not None,
    )  # fmt: skip
    with bar("recovering", not as_json) as draw:
        answer = recovery_child.ask(request, draw)
    if answer.result is not None:
        return _show_result(answer.result, _staged_for(pfs_dir, job), as_json)
    return _show_listing(answer.listing or Listing(), as_json)


def _refuse_live(pfs_dir: str, job: str | None) -> None:
    for entry in mounts.registry():
        same = os.path.realpath(entry.pfs) == os.path.realpath(pfs_dir) and job in (None, entry.job)
        if same and _lives(entry):
            raise UsageError(
                f"job {entry.job} is alive: {entry.mountpoint} drains to {pfs_dir} by itself; 'cachexfs umount' waits "
                "for it (another job's data: --job)"
            )


def _staged_for(pfs_dir: str | None, job: str | None) -> list[waiting.Left]:
    """What mounts of a node alone, without a daemon, have in memory for PFS_DIR: ``recover`` does not reach it.

    Of several nodes, what was worth it has a replica, which it does reach.
    """
    found = []
    for waits in waiting.find():
        owner = waits.owner
        same = (
            owner.nvme_directory is None
            and pfs_dir is not None
            and os.path.realpath(owner.pfs) == os.path.realpath(pfs_dir)
        )
        if same and job in (None, owner.job) and (left := waiting.look(waits)).is_data:
            found.append(left)
    return found


def _lives(entry: Entry) -> bool:
    """Whether a daemon answers; one that is there and does not answer may still be draining."""
    try:
        client.ask(entry, {"op": "ping"}, Pong, silence_s=PING_SILENCE_S)
    except client.DeadDaemonError:
        return False
    except CacheXError:
        return True
    return True


# ---- showing
def _show_result(result: Result, staged: list[waiting.Left], as_json: bool) -> int:
    left = result.left
    if as_json:
        waits = [found.as_json() for found in staged]
        write_json({"files": msgspec.to_builtins(result.outcomes), "left": len(left), "staged": waits})
    else:
        counts: Counter[str] = Counter(outcome.outcome for outcome in result.outcomes)
        done = counts["published"]
        size = sum(outcome.size for outcome in result.outcomes if outcome.outcome == "published")
        if left:
            rows = [[o.path, _WORDS[o.outcome], f"{o.size:,}", o.origin, o.reason] for o in left]
            write("\n".join(table(["file", "outcome", "bytes", "written on", "why"], rows)))
        if not done and not left:
            write(f"nothing to do: of what is on NVMe or under hidden names {counts['there']} files are on the PFS")
        else:
            write(", ".join(f"{counts[kind]} {word}" for kind, word in _WORDS.items() if counts[kind])
                  + (f"; {size:,} bytes published" if done else ""))  # fmt: skip
    said = [f"{len(left)} files are not on the PFS; docs/recovery.md says what to do about each reason"] if left else []
    said += [
        f"{found.amount} staged in this node's memory for {found.waits.owner.mountpoint} is not on the PFS, and no "
        f"daemon serves it: {found.sentence}"
        for found in staged
    ]
    if said:
        write_error("; ".join(said))
    return EXIT_NOT_DURABLE if left or staged else EXIT_DONE


def _show_listing(listing: Listing, as_json: bool) -> int:
    bad = [f for store in listing.stores for f in (*store.files, *store.damaged) if f.whole is False]
    if as_json:
        write_json({"stores": msgspec.to_builtins(listing.stores), "records": msgspec.to_builtins(listing.records)})
    else:
        lines = [line for store in listing.stores for line in _store_lines(store)]
        if listing.records:
            lines += [f"on the PFS under hidden names: {len(listing.records)} files"]
            rows = [[f.path, f"{f.size:,}", str(f.generation), f.job] for f in listing.records]
            lines += table(["file", "bytes", "generation", "job"], rows, "  ")
        write("\n".join(lines or ["nothing is held"]))
    if bad:
        write_error(f"{len(bad)} replicas are damaged: {bad[0].reason}")
    return EXIT_NOT_DURABLE if bad else EXIT_DONE


def _store_lines(store: HeldStore) -> list[str]:
    size = sum(file.size for file in store.files)
    use = ", in use by a daemon" if store.in_use else ""
    first = f"job {store.job}, node {store.node}: {len(store.files)} files, {size:,} bytes{use} ({store.directory})"
    rows = [
        [f.path or "(removed)", f"{f.size:,}", str(f.generation), f.origin, "published" if f.published else "fsynced",
         {True: "whole", False: f.reason, None: ""}[f.whole]]
        for f in store.files
    ]  # fmt: skip
    lines = [shown(first)]
    if rows:
        lines += table(["file", "bytes", "generation", "written on", "state", ""], rows, "  ")
    return lines + [shown(f"  damaged: {f.reason}") for f in store.damaged]


# ---- a damaged journal
def _mend(staging_dir: str, as_json: bool) -> int:
    request = Request(None, None, journal=os.path.abspath(staging_dir))
    mended = recovery_child.ask(request).mended or Mended(0, 0)
    if as_json:
        write_json({"kept": mended.kept, "skipped": mended.skipped})
    else:
        what = f"{mended.skipped} damaged places left out" if mended.skipped else "nothing in it was damaged"
        write(f"{mended.kept} records kept, {what}; the old file is beside it. Mount again with the same options")
    return EXIT_NOT_DURABLE if mended.skipped else EXIT_DONE


# ---- a dead node
def _vouch(nodes: tuple[str, ...], as_json: bool) -> int:
    entries = [entry for entry in mounts.registry() if _lives(entry)]
    if not entries:
        raise CannotTellError("no daemon runs on this node: --dead is for a survivor")
    jobs = {entry.job for entry in entries}
    if len(jobs) > 1:
        raise UsageError(f"daemons of several jobs run here ({', '.join(sorted(jobs))}): set CACHEXFS_RUNTIME_DIR")
    request = {"op": "dead", "nodes": list(nodes)}
    answer = client.ask(entries[0], request, Vouched, silence_s=DEAD_SILENCE_S)
    if as_json:
        write_json({"done": answer.changed, "reason": answer.reason})
    else:
        write(answer.reason)
    return EXIT_DONE
