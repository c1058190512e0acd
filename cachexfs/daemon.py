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
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pyfuse3
import trio

from cachexfs import config, tmpfs
from cachexfs.adapters.catalogue_builtin import BuiltinCatalogue
from cachexfs.adapters.catalogue_etcd import EtcdCatalogue
from cachexfs.adapters.clock import ReferenceClock
from cachexfs.adapters.etcd_server import EtcdServer
from cachexfs.adapters.file_digest import digest_file
from cachexfs.adapters.format_child import FormatChild
from cachexfs.adapters.journal_file import MENDED_NAME
from cachexfs.adapters.peer_client import PeerClients
from cachexfs.adapters.peer_server import PeerServer
from cachexfs.adapters.pfs_pool import PfsPool
from cachexfs.adapters.replica_copy import write_synced
from cachexfs.adapters.replica_store import ReplicaStore
from cachexfs.adapters.staging import Staging
from cachexfs.catalogues import etcd_nodes, read_secret, start_catalogue
from cachexfs.config import PFS_ID, MountOptions
from cachexfs.control_server import ControlServer
from cachexfs.core import manifest as manifests
from cachexfs.core import namespace
from cachexfs.core import records as rec
from cachexfs.core.changes import NewAttrs
from cachexfs.core.records import FID_STEP, FORMAT_VERSION, ROOT_FID, Job, Life
from cachexfs.core.replica import Tx
from cachexfs.engine import recover
from cachexfs.engine.filesystem import Filesystem
from cachexfs.engine.interfaces import Catalogue
from cachexfs.engine.node import Node
from cachexfs.engine.parts import Parts, assemble, load
from cachexfs.engine.reserve import Reserve
from cachexfs.engine.retention import Retention
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_NOT_DURABLE, CacheXError, CannotTellError, PeerError, UsageError
from cachexfs.forecast import Forecast
from cachexfs.frontend.fuse import TASKS_MAX, Operations
from cachexfs.glue import HeldReplicas
from cachexfs.mountpoint import unprotect
from cachexfs.supervisor.client import Supervisor
from cachexfs.supervisor.messages import Event
from cachexfs.supervisor.status import ask as ask_supervisor
from cachexfs.survive import go_on_without

log = logging.getLogger("cachexfs.daemon")

PFS_PROBE_S = 20.0
FIRST_LOOK_S = 3.0
READ_AHEAD_KIB = 1024
READ_AHEAD_DELAY_S = 1.0
CLOCK_INTERVAL_S = 30.0
MODE_POLL_S = 0.1
DEPART_S = 5.0
ALONE_TIMEOUT_S = 60.0  # kernel caching of names and attributes where nobody else can change them


class Daemon:
    """One mount's life."""

    def __init__(self, options: MountOptions, answer: Answer) -> None:
        self.options = options
        self._answer = answer
        self.clock = ReferenceClock()
        self.staging = Staging(tmpfs.prepare(options), options.memory, options.spill_directory)
        self.supervisor = Supervisor.from_environ()
        self.etcd: EtcdServer | None = None
        self._registry: Path | None = None
        self._manifests: OrderedDict[str, bytes] = OrderedDict()
        self._retired = False
        self._needed_by: list[str] = []  # nodes that were still there when this one left
        self._serving = False
        self._is_new = False  # the catalogue, when this daemon came
        self._control: ControlServer | None = None
        self._services = trio.CancelScope()
        self.exit_code = 0

    # ---- start
    async def run(self) -> int:
        """Mount, serve, unmount; returns the exit code."""
        self.staging.open()
        fresh = not self.staging.stages() and not (self.staging.directory / tmpfs.PFS_TOKEN).exists()
        try:
            return await self._run()
        except BaseException:
            if fresh and not self._serving:
                self._undo_start()
            raise

    def _has_member(self, server: EtcdServer) -> None:
        self.etcd = server

    def _undo_start(self) -> None:
        """A mount that never answered leaves nothing behind: neither an etcd member of its own nor a tmpfs."""
        if self.etcd is not None and self.etcd.pid is not None:
            os.kill(self.etcd.pid, signal.SIGTERM)
        self.staging.close()
        _remove_tree(self.staging.directory)
        tmpfs.release(self.options)

    async def _run(self) -> int:
        async with trio.open_nursery() as services:
            self._services = services.cancel_scope
            if self.supervisor is not None:
                services.start_soon(self._follow, self.supervisor)
            catalogue = await start_catalogue(self.options, self.staging.directory, services, self._has_member)
            node = Node(self.options, self.options.node, catalogue, self.staging, self.clock, digest_file)
            await self._start_pfs(services, node)
            store = await self._start_replicas(node)
            self._is_new = catalogue.view.inode(ROOT_FID) is None
            await self._register(node, catalogue)
            parts = self._build(node, catalogue)
            await self._start_peers(services, node, store)
            handles = self.supervisor.state.handles if self.supervisor is not None else ()
            open_files = {h.node // FID_STEP * FID_STEP: h.node for h in handles if not h.is_dir}
            await recover.adopt(node, parts.keeper, parts.files, open_files, self._set_aside())
            load(parts)
            services.start_soon(parts.reader.fills.run)
            for task in (
                parts.replicator.run,
                parts.drainer.run,
                parts.claims.run,
                parts.keeper.run,
                parts.takeover.run,
            ):
                services.start_soon(task)
            services.start_soon(parts.completeness.run)
            services.start_soon(parts.files.passing.watch)
            services.start_soon(self._forecast.run)
            services.start_soon(self._retention.run)
            services.start_soon(Reserve(node).run)
            services.start_soon(recover.verify, node)
            services.start_soon(self._look_at_pfs, parts)
            services.start_soon(self._keep_clock, node)
            await self._serve(services, parts)
            await self._depart(catalogue)
            services.cancel_scope.cancel()
        await self._end(catalogue)
        return self.exit_code

    async def _start_pfs(self, services: trio.Nursery, node: Node) -> None:
        if self.options.offline:
            return
        token = self.staging.directory / tmpfs.PFS_TOKEN
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
                    write_synced(os.path.join(self.options.nvme_directory, PFS_ID), known.encode())
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
            await parts.importer.ensure(ROOT_FID)
        except (CacheXError, OSError, trio.TooSlowError) as error:
            log.warning("the PFS directory %s: %s", self.options.pfs, error or "no answer")

    async def _start_replicas(self, node: Node) -> ReplicaStore | None:
        if self.options.nvme_directory is None:
            return None
        directory = Path(self.options.nvme_directory) / "replicas"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = await ReplicaStore.open(str(directory))
        node.replicas = HeldReplicas(store)
        return store

    async def _register(self, node: Node, catalogue: Catalogue) -> None:
        """Say who and where this node is; the first one makes the root and names the reference clock."""
        options = self.options
        own = next((n for n in options.nodes if n.name == options.node), None)
        index = [n.name for n in options.nodes].index(options.node) if own is not None else 0
        record = rec.Node(
            options.node, own.host if own else "", own.port if own else 0, index, self.staging.store,
            node.replicas.store if node.replicas is not None else "", options.domains.get(options.node, options.node),
        )  # fmt: skip
        ctx = node.ctx()
        attrs = NewAttrs(0o755, os.geteuid(), os.getegid())
        if node.pfs is not None and catalogue.view.inode(ROOT_FID) is None:
            found = await node.pfs.stat(b"", PFS_PROBE_S)
            attrs = NewAttrs(found.mode, found.uid, found.gid)

        def register(tx: Tx) -> None:
            job = tx.read(rec.JOB_KEY)
            if not isinstance(job, Job):
                tx.put(rec.JOB_KEY, Job(FORMAT_VERSION, ROOT_FID, options.node, node.replica_count))
            elif job.replicas != node.replica_count:
                raise UsageError(f"the job's other nodes keep {job.replicas} replicas: use -o replicas={job.replicas}")
            tx.put(rec.node_key(options.node), record)
            namespace.join_root(tx, ctx, attrs, imported=node.pfs is None)

        await catalogue.mutate(register)
        if options.alone:
            await catalogue.mutate(lambda tx: tx.put(rec.life_key(options.node), Life(options.node, "")))

    def _set_aside(self) -> Callable[[str], None] | None:
        """How staged files without a name are kept, where the catalogue is new or was mended; else None."""
        mended = self.staging.directory / MENDED_NAME
        if not self._is_new and not mended.exists():
            return None
        mended.unlink(missing_ok=True)
        return self.staging.set_aside

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
        self._forecast = Forecast(node, parts.completeness, self._records_path())
        self._retention = Retention(node, parts.keeper, parts.completeness)
        for part in (self._forecast, self._retention):
            catalogue.listen(part.notice)
        parts.attributes.eta_s = self._forecast.eta_s
        return parts

    def _records_path(self) -> Path:
        """Where the boundary times of this mount are kept, for ``cachexfs fit``: beside its log."""
        base = Path(self.options.runtime_dir or config.default_runtime_dir())
        return base / f"{config.mount_id(self.options.mountpoint, self.options.node)}.records"

    async def _start_peers(self, services: trio.Nursery, node: Node, store: ReplicaStore | None) -> None:
        options = self.options
        if store is None:
            return
        addresses = {n.name: (n.host, n.port) for n in options.nodes}

        def resolve(name: str) -> tuple[str, int]:
            if name not in addresses:
                raise PeerError(f"{name} is not a node of this job")
            return addresses[name]

        secret = read_secret(options)
        server = PeerServer(
            node=options.node, job=options.job, secret=secret, store=store, is_member=lambda name: name in addresses,
            open_copy=self._open_memory, memory_manifest=lambda stage: self._memory_manifest(node, stage),
            now_s=self.clock.now_s,
        )  # fmt: skip
        host, port = (
            options.listen_host or addresses[options.node][0],
            options.listen_port or addresses[options.node][1],
        )
        try:
            await services.start(server.serve, host, port)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another with -o listen="
            ) from error
        node.peers = PeerClients(node=options.node, job=options.job, secret=secret, resolve=resolve)

    def _open_memory(self, stage: str) -> tuple[int, int] | None:
        if not self.staging.has(stage):
            return None
        fd = self.staging.open_file(stage)
        return fd, os.fstat(fd).st_size

    def _memory_manifest(self, node: Node, stage: str) -> bytes | None:
        """Manifest of a staged content, computed at the first question and kept."""
        if not self.staging.has(stage):
            return None
        fid = int(stage.partition(".")[0], 16)
        content, inode = node.catalogue.view.generation(fid), node.catalogue.view.inode(fid)
        if content is None or inode is None or content.stage != stage:
            return None
        key = f"{stage}-{content.size}"
        if key not in self._manifests:
            fd = self.staging.open_file(stage)
            try:
                digests = digest_file(fd, content.size)
            finally:
                os.close(fd)
            manifest = manifests.Manifest(
                fid=fid, path=b"", stage=stage, size=content.size, digest=digests[0], tree=digests[1],
                blocks=b"".join(digests[2]), mode=inode.mode, uid=inode.uid, gid=inode.gid, mtime_ns=inode.mtime_ns,
                atime_ns=inode.atime_ns, gen=content.gen, origin=content.origin, revision=0, published=True,
            )  # fmt: skip
            self._manifests[key] = manifests.encode(manifest)
            while len(self._manifests) > 1024:
                self._manifests.popitem(last=False)
        return self._manifests[key]

    async def _keep_clock(self, node: Node) -> None:
        """Keep the offset to the reference node's clock."""
        while True:
            job = node.catalogue.view.job
            if job is not None and node.peers is not None and job.clock_node != node.name:
                try:
                    with trio.fail_after(5):
                        theirs_s = await node.peers.ping(job.clock_node)
                        self.clock.offset_s += theirs_s - self.clock.now_s()
                except (CacheXError, OSError, trio.TooSlowError) as error:
                    log.debug("the reference clock of %s does not answer: %s", job.clock_node, error)
            await trio.sleep(CLOCK_INTERVAL_S)

    # ---- serve
    async def _serve(self, services: trio.Nursery, parts: Parts) -> None:
        options = self.options
        facts: dict[str, Any] = {
            "mountpoint": options.mountpoint, "pfs": options.pfs,
            "kernel": "passthrough" if self._passes else "handler",
            "kernel_reason": "" if self._passes else self._why_handler(),
            "supervisor": "off" if self.supervisor is None else "on",
            "catalogue": "builtin" if options.alone else "etcd",
        }  # fmt: skip
        control = ControlServer(parts, facts)
        control.leaving = None if options.alone else lambda deadline_s: self._leave(parts.node, deadline_s)
        control.vouch = None if options.alone else lambda dead: self._vouch(parts.node, dead)
        filesystem = Filesystem(parts)
        operations = Operations(
            filesystem, timeout_s=ALONE_TIMEOUT_S if options.alone else 0.0, hide_xattrs=options.hide_xattrs
        )
        control.on_stale = operations.forget_entry
        self._mount(operations)
        if self.supervisor is not None:
            operations.resume(self.supervisor)
        registry = Path(options.runtime_dir or config.default_runtime_dir())
        name = config.mount_id(options.mountpoint, options.node)
        socket = str(registry / f"{name}.sock")
        await services.start(control.serve, socket)
        self._write_registry(registry / f"{name}.json", socket)
        services.start_soon(self._watch_signals, control)
        services.start_soon(self._say_ready)
        services.start_soon(self._read_ahead)
        services.start_soon(self._stop_when_asked, control)
        if self.supervisor is not None:
            services.start_soon(self._learn_mode, self.supervisor, facts, str(registry / f"{name}.supervisor"))
        self._control = control
        await pyfuse3.main(min_tasks=2, max_tasks=TASKS_MAX)
        pyfuse3.close(unmount=self.supervisor is None)
        if self._retired:
            return
        if not control.stop_requested.is_set():
            await operations.end()
            await self._drain_unmounted(parts, control)

    @property
    def _passes(self) -> bool:
        """Whether the kernel may read and write staged files itself."""
        return self.supervisor is not None and self.supervisor.passthrough

    def _why_handler(self) -> str:
        if self.supervisor is None:
            why = self.options.unsupervised_why or "nobody holds the privilege that passthrough needs"
            return f"supervisor=off: {why}"
        return "passthrough=off" if self.options.passthrough == "off" else "the supervisor has not said why yet"

    def _mount(self, operations: Operations) -> None:
        options = self.options
        fuse_options = set(pyfuse3.default_options) | {f"fsname={_fsname(options.pfs)}", "subtype=cachexfs"}
        fuse_options.discard("nonempty")
        if options.allow_other:
            fuse_options.add("allow_other")
        fuse_options.add("default_permissions")
        try:
            where = self.supervisor.fuse_path if self.supervisor is not None else options.mountpoint
            pyfuse3.init(operations, where, fuse_options)
        except RuntimeError as error:
            raise CannotTellError(
                f"FUSE did not mount {options.mountpoint}: {error}; see {options.log_file or 'the messages above'}"
            ) from error

    async def _learn_mode(self, supervisor: Supervisor, facts: dict[str, Any], socket: str) -> None:
        """Whether the kernel serves staged files itself, and why not: settled once it has the answer to INIT."""
        while True:
            await trio.sleep(MODE_POLL_S)
            try:
                said = await trio.to_thread.run_sync(ask_supervisor, socket, "status", abandon_on_cancel=True)
            except (OSError, ValueError) as error:
                log.debug("the supervisor does not say how the mount works: %s", error)
                return
            if said.get("phase") == "serving":
                break
        why = str(said.get("passthrough_reason") or "")
        supervisor.passthrough = supervisor.passthrough and not why
        facts["kernel"], facts["kernel_reason"] = ("handler", why) if why else ("passthrough", "")

    async def _read_ahead(self) -> None:
        """Let the kernel read ahead in requests as large as FUSE has them (as root; else it stays at 128 KiB).

        The kernel sets its own value when it gets the answer to INIT, which nothing here can see.
        """
        await trio.sleep(READ_AHEAD_DELAY_S)
        try:
            Path(f"/sys/class/bdi/{_device(self.options.mountpoint)}/read_ahead_kb").write_text(str(READ_AHEAD_KIB))
        except OSError as error:
            log.debug("read-ahead stays as it is: %s", error)

    def _write_registry(self, path: Path, socket: str, *, mounted: bool = True) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._registry = path
        entry = {
            "mountpoint": self.options.mountpoint, "pfs": self.options.pfs, "node": self.options.node,
            "job": self.options.job, "pid": os.getpid(), "socket": socket, "log": self.options.log_file or "",
            "device": _device(self.options.mountpoint) if mounted else "", "started_s": self.clock.now_s(),
        }  # fmt: skip
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(entry))
        temporary.replace(path)

    async def _say_ready(self) -> None:
        if self.supervisor is not None:
            self.supervisor.ready()
        self._serving = True
        self._answer.tell({"ok": True})
        log.info("mounted %s on %s", self.options.pfs, self.options.mountpoint)

    async def _watch_signals(self, control: ControlServer) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for number in signals:
                await self._stop(control, f"signal {number}")

    async def _stop(self, control: ControlServer, who: str) -> None:
        """End without waiting for the drain: what is not on the PFS stays in staging, and the exit code says so."""
        log.warning("%s ends the mount; what is not on the PFS yet stays in staging", who)
        failed = await control.parts.files.publish_all()
        for text in failed:
            log.error("not published: %s", text)
        if failed or control.parts.drainer.own_pending():
            control.facts["left"] = 1
        control.stop_requested.set()

    async def _stop_when_asked(self, control: ControlServer) -> None:
        await control.stop_requested.wait()
        if control.facts.get("left") or control.abandon:
            self.exit_code = EXIT_NOT_DURABLE
        await trio.sleep(0.05)  # the answer to ``umount`` leaves first
        if self.supervisor is not None:
            self.supervisor.stopping(self.exit_code)  # it unmounts, then tells us the end
        else:
            pyfuse3.terminate()

    async def _follow(self, supervisor: Supervisor) -> None:
        """Do what the supervisor says; before the mount answers, any word ends the start."""
        while True:
            await trio.lowlevel.wait_readable(supervisor.events_fd)
            event = supervisor.next_event()
            if event is None:
                continue
            if self._control is None:
                raise CannotTellError("stopped while it was starting")
            if event is Event.STOP:
                await self._stop(self._control, "the supervisor")
                continue
            if event is Event.RETIRE:
                log.info("another daemon takes over")
                self._retired = True
            pyfuse3.terminate()
            break
        while not self._retired:  # END; a STOP after it ends the drain too
            await trio.lowlevel.wait_readable(supervisor.events_fd)
            event = supervisor.next_event()
            if event is Event.STOP:
                self._control.stop_requested.set()
            if event in (Event.STOP, Event.END):
                return

    async def _drain_unmounted(self, parts: Parts, control: ControlServer) -> None:
        """umount(8) cannot drain: go on without the mount until everything is on the PFS, or somebody ends it."""
        control.facts["unmounted"] = True
        if self._registry is not None and self._registry.exists():  # the kernel gives the device's number to others
            self._write_registry(self._registry, str(self._registry.with_suffix(".sock")), mounted=False)
        parts.node.errors["unmounted"] = (
            "the mount was taken away without 'cachexfs umount': what is pending is still being copied to the PFS; "
            "'cachexfs mount' with the same options goes on with it"
        )
        if self.supervisor is not None:
            self.supervisor.draining()
        log.warning("unmounted from outside: draining %d operations before the end", len(parts.drainer.own_pending()))
        failed = await parts.files.publish_all()
        if failed:
            self.exit_code = EXIT_NOT_DURABLE
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_stopped, control, nursery.cancel_scope)
            while parts.drainer.in_progress():
                await parts.drainer.changed()
            nursery.cancel_scope.cancel()
        if (
            left := parts.drainer.own_pending()
        ):  # perhaps held for a commit file that nobody can write any more, or lost
            log.error("%d operations are not done; 'cachexfs recover' says what they are", len(left))
            self.exit_code = EXIT_NOT_DURABLE

    @staticmethod
    async def _cancel_when_stopped(control: ControlServer, scope: trio.CancelScope) -> None:
        await control.stop_requested.wait()
        scope.cancel()

    async def _vouch(self, node: Node, dead: list[str]) -> tuple[bool, str]:
        """Somebody vouches that these nodes will not come back."""
        return await go_on_without(node, self.etcd, [member.name for member in etcd_nodes(self.options)], dead)

    async def _leave(self, node: Node, deadline_s: float | None) -> AsyncIterator[None]:
        """This node is done: go on serving the others until all of them are."""

        def mark(tx: Tx) -> None:
            record = tx.read(rec.node_key(node.name))
            if isinstance(record, rec.Node):
                tx.put(rec.node_key(node.name), msgspec.structs.replace(record, leaving=True))

        await node.catalogue.mutate(mark)
        view = node.catalogue.view
        while deadline_s is None or trio.current_time() < deadline_s:
            if all(record.leaving for name, record in view.nodes.items() if view.is_live(name)):
                return
            yield
            await trio.sleep(0.1)

    # ---- end
    async def _depart(self, catalogue: Catalogue) -> None:
        """Leave the catalogue at once, and keep its member until the others have left too."""
        if self._retired or not isinstance(catalogue, EtcdCatalogue):
            return
        with trio.move_on_after(DEPART_S):
            try:
                await catalogue.leave()
            except CacheXError as error:
                log.warning("left without a word to the catalogue: %s", error)
            while catalogue.view.lives and self.exit_code == 0:  # noqa: ASYNC110
                await trio.sleep(0.05)
        self._needed_by = sorted(catalogue.view.lives)

    async def _end(self, catalogue: Catalogue) -> None:
        """After the unmount: with nothing left, the fast tiers are given back; else they are kept for recovery."""
        self.staging.close()
        if self._retired:
            return
        if not _device(self.options.mountpoint):
            unprotect(self.options.mountpoint)
        clean = self.exit_code == 0 and not self.staging.orphans()
        if self._registry is not None:
            self._registry.unlink(missing_ok=True)
            self._registry.with_suffix(".sock").unlink(missing_ok=True)
        if not clean:
            log.error("the end, with data that is not on the PFS: mount again with the same options to go on")
            return
        if isinstance(catalogue, BuiltinCatalogue):
            catalogue.close()
        if self.etcd is not None and self._needed_by:
            log.warning(
                "left before %s: this node's etcd member (pid %s) stays for them, and must be ended by hand after them",
                ", ".join(self._needed_by), self.etcd.pid,
            )  # fmt: skip
        elif self.etcd is not None:
            await self.etcd.stop()
        _remove_tree(self.staging.directory)
        for own in (self.options.spill_directory, self.options.nvme_directory):
            if own is not None:
                _remove_tree(Path(own))
        tmpfs.release(self.options)
        log.info("the end: everything is on the PFS")


def _remove_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), key=lambda p: len(p.parts), reverse=True):
        try:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as error:
            log.warning("left behind: %s: %s", path, error)
    try:
        directory.rmdir()
    except OSError:
        return  # a mount point, or shared with others


def _fsname(pfs: str) -> str:
    return pfs.replace("\\", "_").replace(",", "_")


def _device(mountpoint: str) -> str:
    """major:minor of a mount, read from the kernel's table without touching the mount."""
    found = ""
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            fields = line.split(b" ")
            if fields[4].decode("unicode_escape").encode("latin-1") == os.fsencode(mountpoint):
                found = fields[2].decode()
    return found


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
        return trio.run(daemon.run)
    except SystemExit:
        raise  # a process that was started ahead, and its mount has ended
    except BaseException as group:
        for number in (signal.SIGTERM, signal.SIGINT):  # the mount command may end us before the last word is out
            signal.signal(number, signal.SIG_IGN)
        error = first_error(group)
        if isinstance(error, CacheXError):
            log.error("%s", error)
            answer.tell({"ok": False, "error": str(error), "exit": error.exit_code})
            return error.exit_code
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
