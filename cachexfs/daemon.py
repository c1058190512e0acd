"""The daemon: one per mount; puts engine, adaptors and front end together and takes them apart.

Role: the only module that knows all of them. Started by ``cachexfs mount`` with its options as JSON on standard input;
says on ``--ready-fd`` when the mount answers, or why it does not.

Concurrency: two nested nurseries. The outer one holds what must outlive the mount (catalogue, peers, PFS children,
replication, drain): after the unmount it goes on until nothing is pending or the time is over. FUSE runs in between.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from cachexfs import ended, fuse_mount, ours, staged, succession, tmpfs
from cachexfs.adapters.awake import AwakeClock
from cachexfs.adapters.catalogue_builtin import BuiltinCatalogue
from cachexfs.adapters.catalogue_etcd import EtcdCatalogue
from cachexfs.adapters.clock import ReferenceClock
from cachexfs.adapters.etcd_server import EtcdServer
from cachexfs.adapters.file_digest import digest_file
from cachexfs.adapters.format_child import FormatChild
from cachexfs.adapters.journal_file import MENDED_NAME
from cachexfs.adapters.pfs_pool import PfsPool
from cachexfs.adapters.replica_copy import write_synced
from cachexfs.adapters.replica_store import ReplicaStore
from cachexfs.adapters.staging import Staging
from cachexfs.catalogues import start_catalogue
from cachexfs.config import PFS_ID, MountOptions
from cachexfs.control_answers import Facts
from cachexfs.control_server import ControlServer
from cachexfs.core import namespace
from cachexfs.core import records as rec
from cachexfs.core.changes import NewAttrs
from cachexfs.core.job import agree
from cachexfs.core.records import FID_STEP, ROOT_FID, Job, Life
from cachexfs.core.routes import PARTNER
from cachexfs.core.transaction import Tx
from cachexfs.engine import recover
from cachexfs.engine.interfaces import Catalogue
from cachexfs.engine.node import Node
from cachexfs.engine.parts import Parts, assemble, load
from cachexfs.engine.reserve import Reserve
from cachexfs.engine.retention import Retention
from cachexfs.errors import EXIT_CANNOT_TELL, CacheXError, CannotTellError, CatalogueUnavailableError
from cachexfs.forecast import Forecast
from cachexfs.glue import HeldReplicas
from cachexfs.last import leave_token, others_of
from cachexfs.mountpoint import unprotect
from cachexfs.peering import keep_clock, start_peers
from cachexfs.registration import Registration
from cachexfs.serving import Serving
from cachexfs.supervisor.client import Supervisor
from cachexfs.supervisor.messages import EXIT_TRY_AGAIN
from cachexfs.survive import go_on_without

log = logging.getLogger("cachexfs.daemon")

PFS_PROBE_S = 20.0
FIRST_LOOK_S = 3.0
DEPART_S = 5.0


class Daemon:
    """One mount's life."""

    def __init__(self, options: MountOptions, answer: Answer) -> None:
        self.options = options
        self._answer = answer
        self.clock = ReferenceClock()
        self.supervisor = Supervisor.from_environ()
        follows = succession.is_one(self.supervisor)
        directory = tmpfs.staging_directory(options) if follows else tmpfs.prepare(options)
        self.staging = Staging(directory, options.memory, options.spill_directory)
        self.etcd: EtcdServer | None = None
        self._needed_by: list[str] = []  # nodes that were still there when this one left
        self._made_anew: list[str] = []  # on NVMe
        self._has_answered = False
        self._is_new = False  # the catalogue, when this daemon came
        self._registration = Registration(options)
        self.serving = Serving(options, self.supervisor, self._registration, self.clock.now_s, self._answers)

    # ---- start
    async def run(self) -> int:
        """Mount, serve, unmount; returns the exit code."""
        succession.check(self.staging.directory, self.options, self.supervisor)
        self.staging.open()
        ended.forget(self.staging.directory)
        if self.options.nvme_directory is not None:
            ended.forget(Path(self.options.nvme_directory))
        fresh = not self.staging.stages() and not (self.staging.directory / tmpfs.PFS_TOKEN).exists()
        try:
            return await self._run()
        except BaseException:
            if fresh and not self._has_answered:
                self._undo_start()
            raise

    def _answers(self) -> None:
        self._has_answered = True
        self._answer.tell({"ok": True})

    def _has_member(self, server: EtcdServer) -> None:
        self.etcd = server

    def _undo_start(self) -> None:
        """A mount that never answered leaves nothing behind: neither an etcd member of its own nor a tmpfs."""
        if self.etcd is not None and self.etcd.pid is not None:
            os.kill(self.etcd.pid, signal.SIGTERM)
        for path in self._made_anew:  # it may be of the wrong PFS directory
            os.unlink(path)
        ours.remove_staging(self.staging.directory)
        tmpfs.release(self.options)
        self.staging.close()

    async def _run(self) -> int:
        async with trio.open_nursery() as services:
            if self.supervisor is not None:
                services.start_soon(self.serving.follow, self.supervisor)
            follows = succession.is_one(self.supervisor)
            catalogue = await start_catalogue(
                self.options, self.staging.directory, services, self._has_member, follows=follows
            )
            node = Node(self.options, self.options.node, catalogue, self.staging, self.clock, digest_file)
            await self._start_pfs(services, node)
            store = await self._start_replicas(node)
            self._is_new = catalogue.view.inode(ROOT_FID) is None
            if self._is_new and follows:
                raise succession.catalogue_is_gone(self.options)
            await self._register(node, catalogue)
            parts = self._build(node, catalogue)
            if store is not None:
                await start_peers(services, node, self.staging, store, self.clock)
            handles = self.supervisor.state.handles if self.supervisor is not None else ()
            # A file that readers have open as it was and a writer as it is has two numbers: the writer's goes on.
            open_ones = sorted(handles, key=lambda handle: handle.flags & os.O_ACCMODE != os.O_RDONLY)
            open_files = {h.node // FID_STEP * FID_STEP: h.node for h in open_ones if not h.is_dir}
            set_aside = self._set_aside()
            await recover.adopt(node, parts.keeper, parts.files, open_files, set_aside)
            if has_forgotten := self._mended.exists():
                parts.drainer.pause()
            load(parts)
            if has_forgotten:
                services.start_soon(parts.mended.run, partial(self._mended.unlink, missing_ok=True))
            self._say_whose_staging(is_confirmed=False)
            for task in self._tasks(node, parts):
                services.start_soon(task)
            succession.leave_token(self.staging.directory, self.supervisor)
            await self.serving.serve(services, parts, self._control(parts))
            await self._depart(node, catalogue)
            services.cancel_scope.cancel()
        await self._end(catalogue)
        return self.serving.exit_code

    def _tasks(self, node: Node, parts: Parts) -> list[Callable[[], Awaitable[None]]]:
        """What goes on for as long as the daemon lives, also after the unmount."""
        return [
            parts.reader.fills.run, parts.replicator.run, parts.drainer.run, parts.claims.run, parts.keeper.run,
            parts.takeover.run, parts.denied.run, parts.reclaim.run, parts.completeness.commit_files.run,
            parts.files.passing.watch, parts.files.follow_maps, parts.files.unpublished.run,
            parts.files.publishing.late_digests.run, self._forecast.run, self._retention.run, Reserve(node).run,
            partial(recover.verify, node), partial(self._look_at_pfs, parts), partial(keep_clock, node, self.clock),
        ]  # fmt: skip

    def _control(self, parts: Parts) -> ControlServer:
        options = self.options
        facts = Facts(
            options.mountpoint, options.pfs, supervisor="off" if self.supervisor is None else "on",
            daemons=1 if self.supervisor is None else self.supervisor.state.life,
            catalogue="builtin" if options.alone else "etcd",
        )  # fmt: skip
        control = ControlServer(parts, facts)
        members = [member.name for member in options.catalogue_nodes]
        control.others = None if options.alone else others_of(parts.node, self.etcd, members)
        control.vouch = None if options.alone else lambda dead: self._vouch(parts.node, dead)
        return control

    async def _start_pfs(self, services: trio.Nursery, node: Node) -> None:
        if self.options.offline:
            return
        token = self._pfs_token
        pool = PfsPool(
            self.options.pfs, token=token.read_text() if token.exists() else None,
            drain_workers=self.options.drain_workers, verify=self.options.verify,
            bandwidth_bytes_s=self.options.drain_bandwidth or 0,
        )  # fmt: skip
        await services.start(pool.serve)
        node.pfs = pool
        if token.exists():  # a restart goes on without the PFS, as the mount would have without it
            return
        try:
            with trio.fail_after(PFS_PROBE_S):
                known = (await pool.probe()).token
                token.write_text(known)
                if self.options.nvme_directory is not None:  # so that ``recover`` knows the directory again
                    os.makedirs(self.options.nvme_directory, mode=0o700, exist_ok=True)
                    path = os.path.join(self.options.nvme_directory, PFS_ID)
                    self._made_anew = [] if os.path.exists(path) else [path]
                    write_synced(path, known.encode())
                if self.options.alone and (left := await pool.prepared(PFS_PROBE_S)):
                    node.errors["left behind"] = (
                        f"{len(left)} files that a lost daemon had fsynced lie in {self.options.pfs}/.cachexfs/tmp: "
                        f"unmount, and 'cachexfs recover --to {self.options.pfs}' gives them their names"
                    )
        except (OSError, trio.TooSlowError) as error:
            why = error.strerror if isinstance(error, OSError) else "no answer"
            raise CannotTellError(
                f"the PFS directory {self.options.pfs} does not answer: {why}; mount it, or use -o offline"
            ) from error

    async def _look_at_pfs(self, parts: Parts) -> None:
        """Find out soon how the PFS is, and take over the root's names while it is there."""
        if parts.node.pfs is None:
            return
        try:
            await parts.node.pfs.stat(b"", FIRST_LOOK_S)
            self._say_whose_staging(is_confirmed=True)
            await parts.importer.ensure(ROOT_FID)
        except (CacheXError, OSError, trio.TooSlowError) as error:
            log.warning("the PFS directory %s: %s", self.options.pfs, error or "no answer")

    def _say_whose_staging(self, *, is_confirmed: bool) -> None:
        """For ``status`` and the next mount. ``is_confirmed``: PFS_DIR has the identity that the staging is for."""
        try:
            staged.leave(self.staging.directory, self.options, is_confirmed=is_confirmed)
        except OSError as error:  # it is full: that is no reason not to drain it
            log.warning("%s cannot be written: %s", staged.NAME, error)

    async def _start_replicas(self, node: Node) -> ReplicaStore | None:
        if self.options.nvme_directory is None:
            return None
        directory = self._replicas
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            store = await ReplicaStore.open(str(directory))
        except OSError as error:
            if not succession.is_one(self.supervisor):
                raise
            node.errors["nvme"] = (
                f"NVMe takes no writes ({error}): this node holds no new replicas for others; what it has is read"
            )
            log.error("%s", node.errors["nvme"])
            try:
                store = ReplicaStore.inspect_blocking(str(directory))
            except OSError:
                return None  # others do not reach this node then, its own applications do
        node.replicas = HeldReplicas(store)
        return store

    @property
    def _replicas(self) -> Path:
        return Path(self.options.nvme_directory or "") / "replicas"

    async def _register(self, node: Node, catalogue: Catalogue) -> None:
        """Say who and where this node is; the first one makes the root and names the reference clock."""
        options = self.options
        own = next((n for n in options.nodes if n.name == options.node), None)
        index = [n.name for n in options.nodes].index(options.node) if own is not None else 0
        record = rec.Node(
            options.node, own.host if own else "", own.port if own else 0, index, self.staging.store,
            node.replicas.store if node.replicas is not None else "", options.domains.get(options.node, options.node),
        )  # fmt: skip
        ctx, pfs_id = node.ctx(), self._pfs_token.read_text() if self._pfs_token.exists() else ""
        attrs = NewAttrs(0o755, os.geteuid(), os.getegid())
        if node.pfs is not None and catalogue.view.inode(ROOT_FID) is None:
            found = await node.pfs.stat(b"", PFS_PROBE_S)
            attrs = NewAttrs(found.mode, found.uid, found.gid)

        def register(tx: Tx) -> None:
            job = tx.read(rec.JOB_KEY)
            known = job if isinstance(job, Job) else None
            agreed = agree(known, options.job, options.node, node.replica_count, options.pfs, pfs_id)
            if agreed != job:
                tx.put(rec.JOB_KEY, agreed)
            tx.put(rec.node_key(options.node), record)
            namespace.join_root(tx, ctx, attrs, imported=node.pfs is None)

        await catalogue.mutate(register)
        if options.alone:
            await catalogue.mutate(lambda tx: tx.put(rec.life_key(options.node), Life(options.node, "")))

    @property
    def _pfs_token(self) -> Path:
        """The identity of the PFS directory, once it is known."""
        return self.staging.directory / tmpfs.PFS_TOKEN

    def _set_aside(self) -> Callable[[str], None] | None:
        """How staged files without a name are kept, where the catalogue is new or was mended; else None."""
        return self.staging.set_aside if self._is_new or self._mended.exists() else None

    @property
    def _mended(self) -> Path:
        """Is there until the PFS has said what it has of what the catalogue may have forgotten."""
        return self.staging.directory / MENDED_NAME

    def _orphans(self) -> str:
        count = len(self.staging.orphans())
        if not count:
            return ""
        return (
            f"{count} staged files have lost their names with the catalogue: their whole contents, named by file and "
            f"generation, are in {self.staging.directory}/orphans; copy what you need, then remove that directory"
        )

    def _build(self, node: Node, catalogue: Catalogue) -> Parts:
        """The engine, and what only this layer has for it."""
        parts = assemble(node, FormatChild())
        node.orphans = self._orphans
        self._forecast = Forecast(node, parts.completeness, self._registration.records)
        self._retention = Retention(node, parts.keeper, parts.completeness)
        for part in (self._forecast, self._retention):
            catalogue.listen(part.notice)
        attributes, router = parts.attributes, parts.replicator.router
        attributes.eta_s, node.choose_route = self._forecast.eta_s, self._forecast.choose
        node.route_why = lambda: self._forecast.why
        router.partner_s = lambda size: self._forecast.eta_s(PARTNER, size)
        router.on_late, router.on_synced = self._forecast.note_late, self._forecast.note_synced
        return parts

    async def _vouch(self, node: Node, dead: list[str]) -> tuple[bool, str]:
        """Somebody confirms that these nodes will not come back."""
        return await go_on_without(node, self.etcd, [member.name for member in self.options.catalogue_nodes], dead)

    # ---- end
    async def _depart(self, node: Node, catalogue: Catalogue) -> None:
        """Leave the catalogue at once, and keep its member until the others have left too."""
        if self.serving.retired or not isinstance(catalogue, EtcdCatalogue):
            return
        if self.etcd is not None:  # the last of the others may drop its member from now on
            self.etcd.is_leaving = True
        with trio.move_on_after(DEPART_S):
            if self.serving.is_published:
                await leave_token(node, self.staging.directory, is_done=self.serving.exit_code == 0)
            try:
                await catalogue.leave()
            except CacheXError as error:
                log.warning("left without a word to the catalogue: %s", error)
            while catalogue.view.lives and self.serving.exit_code == 0:  # noqa: ASYNC110
                await trio.sleep(0.05)
        self._needed_by = sorted(catalogue.view.lives)

    async def _end(self, catalogue: Catalogue) -> None:
        """After the unmount: with nothing left, the fast tiers are given back; else they are kept for recovery.

        Until they are, this daemon is registered and has their lock: a mount of the same place waits for it. One that
        came in between would lose its files to the removal.
        """
        if self.serving.retired:
            self.staging.close()
            return
        if not fuse_mount.device(self.options.mountpoint):
            unprotect(self.options.mountpoint)
        keeps_data = self.serving.exit_code != 0 or bool(self.staging.orphans())
        try:
            if not keeps_data:
                await self._give_back(catalogue)
                log.info("the end: everything is on the PFS")
            else:
                log.error("the end, with data that is not on the PFS: mount again with the same options to go on")
        finally:
            self.staging.close()
            self._registration.remove(keeps_data=keeps_data)

    async def _give_back(self, catalogue: Catalogue) -> None:
        if isinstance(catalogue, BuiltinCatalogue):
            catalogue.close()
        stays = self.etcd is not None and bool(self._needed_by) and not self.etcd.was_dropped
        if self.etcd is not None and stays:  # with its data and certificates
            log.warning(
                "left before %s: this node's etcd member (process %s) stays for them, and ends when the last of them "
                "that has one, too, is unmounted", ", ".join(self._needed_by), self.etcd.pid,
            )  # fmt: skip
        elif self.etcd is not None:
            await self.etcd.stop()
        ours.remove_staging(self.staging.directory)
        if self.options.spill_directory is not None:
            ours.remove_spill(Path(self.options.spill_directory))
        if self.options.nvme_directory is not None:
            ours.remove_replicas(self._replicas) if stays else ours.remove_nvme(Path(self.options.nvme_directory))
        tmpfs.release(self.options)


class Answer:
    """How the start went, said once: on a descriptor, or in a file when a supervisor stands between."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd, self._path = fd, path

    def tell(self, message: dict[str, Any]) -> None:
        """Say it; what is said later does not count."""
        if self._fd >= 0:
            try:
                os.write(self._fd, json.dumps(message).encode() + b"\n")
                os.close(self._fd)
            except OSError as error:
                log.debug("nobody waits for the start any more: %s", error)
            self._fd = -1
        if self._path:
            Path(self._path).write_text(json.dumps(message))


def first_error(group: BaseException) -> BaseException:
    """The first real error inside nested exception groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _interrupt(number: int, frame: object) -> None:
    signal.raise_signal(signal.SIGINT)  # trio turns that into a KeyboardInterrupt where it does no harm


def main() -> int:
    """``python -m cachexfs.daemon --ready-fd N`` with the options on standard input."""
    parser = argparse.ArgumentParser(prog="cachexfs.daemon")
    parser.add_argument("--ready-fd", type=int, default=-1, help="where to say how the start went")
    parser.add_argument("--answer", default="", help="the same in a file")
    parser.add_argument("--options", default="", help="the options, JSON, in a file instead of standard input")
    arguments = parser.parse_args()
    raw = Path(arguments.options).read_bytes() if arguments.options else sys.stdin.buffer.read()
    options = msgspec.json.decode(raw, type=MountOptions)
    answer = Answer(arguments.ready_fd, arguments.answer)
    logging.basicConfig(
        filename=options.log_file, level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip
    # Before the mount answers, SIGTERM must not leave an etcd member behind; later ``_watch_signals`` has it.
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" has it ignored
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        daemon = Daemon(options, answer)
        return trio.run(daemon.run, clock=AwakeClock())
    except SystemExit:
        raise  # a process that was started ahead, and its mount has ended
    except BaseException as group:
        for number in (signal.SIGTERM, signal.SIGINT):  # the mount command may end us before the last word is out
            signal.signal(number, signal.SIG_IGN)
        error = first_error(group)
        if isinstance(error, CacheXError):
            log.error("%s", error)
            answer.tell({"ok": False, "error": str(error), "exit": error.exit_code})
            return EXIT_TRY_AGAIN if isinstance(error, CatalogueUnavailableError) else error.exit_code
        if isinstance(error, KeyboardInterrupt):
            log.error("ended by a signal before the mount answered")
            answer.tell({"ok": False, "error": "ended by a signal", "exit": EXIT_CANNOT_TELL})
            return EXIT_CANNOT_TELL
        log.exception("the daemon ended")
        why = f"{type(error).__name__}: {error}"
        answer.tell({"ok": False, "error": why, "exit": EXIT_CANNOT_TELL})
        return EXIT_CANNOT_TELL


if __name__ == "__main__":
    sys.exit(main())
