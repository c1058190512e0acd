"""This node's etcd member: a detached process that outlives the daemon.

Role: adaptor. ``EtcdServer.start`` adopts the member that a previous daemon left running, or starts one over the
data that is there, or joins a cluster that goes on without it (``etcd_membership``); ``run`` starts it again when it
dies. The process has a session of its own; a file with its
id and start time says which it is. Nothing here waits for a majority: a member without one runs and does not answer.

Concurrency: one daemon per directory (it holds the staging's lock). Blocking calls are short (a spawn, reads in
/proc). Called by the daemon, and by ``cachexfs recover --dead`` for ``force_new_cluster``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from cachexfs import etcd_process
from cachexfs.adapters.etcd_client import Endpoint
from cachexfs.adapters.etcd_membership import Membership, NotAdmittedError, Standing
from cachexfs.adapters.job_tls import TlsFiles
from cachexfs.errors import CannotTellError, UsageError

#: Operations (and conditions) in one transaction, for members that are started here.
TXN_OPS_MAX = 4096
REQUEST_BYTES_MAX = 8 << 20
QUOTA_BYTES = 4 << 30
#: Revisions kept: a watch that was away for fewer continues without a reload.
RETAINED_REVISIONS = 20_000
SNAPSHOT_COUNT = 10_000
HEARTBEAT_MS = 100
ELECTION_MS = 1000
LOG_BYTES_MAX = 16 << 20
#: A member that is going to fail (port in use, foreign data) does so within this time.
START_CHECK_S = 0.3
RESTART_DELAY_S_MIN = 0.2
RESTART_DELAY_S_MAX = 10.0


_SIGNALS = tuple(number for number in signal.valid_signals() if isinstance(number, signal.Signals))


@dataclass(frozen=True, slots=True)
class Member:
    """One member of the cluster: ``host`` is its name or address for the others."""

    name: str
    host: str
    client_port: int
    peer_port: int


class EtcdServer:
    """The member ``name`` of ``members``, with its data in ``directory`` (on NVMe).

    ``token`` separates clusters: the job's name, and the nodes' catalogues must use the same. Without ``tls``
    everything is in the clear: for tests.
    Raises ``UsageError`` when there is no etcd.
    """

    def __init__(
        self, members: Sequence[Member], name: str, directory: Path, token: str, tls: TlsFiles | None = None
    ) -> None:
        self._members = tuple(members)
        self._own = next(member for member in members if member.name == name)
        self._directory = directory
        self._token = token
        self._tls = tls
        self._binary = _find_binary()
        self.data_directory = directory / "data"
        self.log_path = directory / "etcd.log"
        self._pid_path = directory / etcd_process.PID_NAME
        others = [Endpoint(member.host, member.client_port) for member in members if member is not self._own]
        peer_url = _url("https" if tls else "http", self._own.host, self._own.peer_port)
        self._lock = trio.Lock()
        self.is_leaving = False  # its node is: what ends is not started again
        self._membership = Membership(others, name, peer_url, token, tls)

    @property
    def pid(self) -> int | None:
        """Process id of the running member, None when there is none."""
        return etcd_process.running(self._pid_path)

    async def start(self, *, force_new_cluster: bool = False) -> bool:
        """Make sure that the member runs; True when it was running already.

        ``force_new_cluster`` makes it the only member, with the data that it has: only when somebody confirms that
        the others will not come back. Raises ``CannotTellError`` when it ends at once, with its last words, and
        ``NotAdmittedError`` when a cluster that goes on without it does not take it back yet.
        """
        async with self._lock:  # against ``run``, which starts what has ended
            try:
                return await self._start(force_new_cluster=force_new_cluster)
            except OSError as error:
                raise CannotTellError(f"this node's etcd member cannot be started: {error}") from error

    async def _start(self, *, force_new_cluster: bool) -> bool:
        if force_new_cluster:
            await self.stop()
        elif self.pid is not None:
            return True
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        standing = Standing()
        if not force_new_cluster:
            standing = await self._membership.standing(has_data=self.data_directory.exists())
            if standing.is_stale:
                self._set_aside()
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_BYTES_MAX:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        pid = self._spawn(self._arguments(standing.cluster, force_new_cluster=force_new_cluster))
        with trio.move_on_after(START_CHECK_S):
            await self._wait_end(pid)
            raise CannotTellError(f"etcd ended at once: {self.last_words()} (log: {self.log_path})")
        return False

    @property
    def was_dropped(self) -> bool:
        """Whether it has ended because the others have taken it out of the cluster."""
        return self.pid is None and "permanently removed from the cluster" in self.last_words()

    async def stop(self) -> None:
        """End the member: SIGTERM, after ``etcd_process.STOP_TIMEOUT_S`` SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            pid = self.pid
            if pid is None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            with trio.move_on_after(etcd_process.STOP_TIMEOUT_S):
                await self._wait_end(pid)
        with contextlib.suppress(OSError):  # NVMe fails: nobody has that process id any more, or not this identity
            self._pid_path.unlink(missing_ok=True)

    async def drop(self, names: Collection[str]) -> None:
        """Take the members of nodes that have left for good out of the cluster: their processes end by themselves.

        Raises ``NotAdmittedError`` when etcd refuses it, or does not answer.
        """
        scheme = "https" if self._tls else "http"
        urls = [_url(scheme, m.host, m.peer_port) for m in self._members if m.name in names and m is not self._own]
        if urls:
            await self._membership.drop(urls, Endpoint(self._own.host, self._own.client_port))

    async def run(
        self,
        report: Callable[[str], None],
        task_status: trio.TaskStatus[bool] = trio.TASK_STATUS_IGNORED,
        *,
        is_needed: bool = True,
    ) -> None:
        """Start the member (the status is whether it was running), then start it again whenever it has died.

        Each failure is told to ``report``, but ``CannotTellError`` of the first start is raised where the member
        ``is_needed``. Cancelling leaves the member running.
        """
        try:
            adopted = await self.start()
        except CannotTellError as error:  # the catalogue works without this member
            if is_needed and not isinstance(error, NotAdmittedError):
                raise
            report(str(error))
            adopted = False
        task_status.started(adopted)
        delay_s = RESTART_DELAY_S_MIN
        while True:
            began_s = trio.current_time()
            had_started = await self._attend()
            if self.is_leaving:
                await trio.sleep_forever()
            if trio.current_time() - began_s > RESTART_DELAY_S_MAX:
                delay_s = RESTART_DELAY_S_MIN
            if had_started:
                report(f"etcd has ended: {self.last_words()} (log: {self.log_path}); starting it again")
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, RESTART_DELAY_S_MAX)
            try:
                await self.start()
            except CannotTellError as error:
                report(str(error))

    async def _attend(self) -> bool:
        """Return when the member has ended; end it when the others have dropped it. False when it had not started."""
        pid = self.pid
        if pid is None:
            return False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._settle)
            await self._wait_end(pid)
            nursery.cancel_scope.cancel()
        return True

    async def _settle(self) -> None:
        if len(self._members) > 1 and not await self._membership.settle():
            await self.stop()

    def _set_aside(self) -> None:
        """Keep the data of a past cluster, but not in the way. One such copy is kept."""
        past = self.data_directory.with_name("data.past")
        if past.exists():
            shutil.rmtree(past)
        self.data_directory.rename(past)

    async def _wait_end(self, pid: int) -> None:
        """Return when the member with this id has ended."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            if self.pid == pid:
                await trio.lowlevel.wait_readable(fd)
        finally:
            os.close(fd)

    def last_words(self) -> str:
        """The last line of the log that tells of an error."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return "no log"
        bad = [line for line in lines if any(mark in line for mark in ('"fatal"', '"error"', '"panic"', "panic:"))]
        return (bad or lines or ["empty log"])[-1][:500]

    # ---- the process
    def _spawn(self, arguments: list[str]) -> int:
        # etcd takes every flag from ETCD_* too: a user's own settings must not reach this member
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ]
            pid = os.posix_spawn(
                self._binary,
                arguments,
                environment,
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=_SIGNALS,
            )
        finally:
            os.close(log)
        process = etcd_process.identity(pid)
        if process is None:
            raise CannotTellError(f"etcd ended at once: {self.last_words()} (log: {self.log_path})")
        fresh = self._pid_path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(process))
        fresh.replace(self._pid_path)
        return pid

    def _arguments(self, existing: str, *, force_new_cluster: bool) -> list[str]:
        scheme = "https" if self._tls else "http"
        own = self._own
        bind = _bind_address(own.host)
        cluster = ",".join(f"{m.name}={_url(scheme, m.host, m.peer_port)}" for m in self._members)
        flags = {
            "name": own.name,
            "data-dir": str(self.data_directory),
            "listen-peer-urls": _url(scheme, bind, own.peer_port),
            "listen-client-urls": _url(scheme, bind, own.client_port),
            "initial-advertise-peer-urls": _url(scheme, own.host, own.peer_port),
            "advertise-client-urls": _url(scheme, own.host, own.client_port),
            "initial-cluster": existing or cluster,
            "initial-cluster-token": self._token,
            "initial-cluster-state": "existing" if existing else "new",
            "heartbeat-interval": str(HEARTBEAT_MS),
            "election-timeout": str(ELECTION_MS),
            "snapshot-count": str(SNAPSHOT_COUNT),
            "quota-backend-bytes": str(QUOTA_BYTES),
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": str(RETAINED_REVISIONS),
            "max-txn-ops": str(TXN_OPS_MAX),
            "max-request-bytes": str(REQUEST_BYTES_MAX),
            "logger": "zap",
            "log-level": "warn",
            "log-outputs": "stderr",
            "pre-vote": "true",
        }
        if self._tls:
            for side in ("", "peer-"):
                flags[f"{side}cert-file"] = flags[f"{side}key-file"] = str(self._tls.node)
                flags[f"{side}trusted-ca-file"] = str(self._tls.ca)
                flags[f"{side}client-cert-auth"] = "true"
            # A node may call from another of its addresses than the others call it by; the certificate is proof enough
            flags[_skip_san_flag(self._binary)] = "true"
        if force_new_cluster:
            flags["force-new-cluster"] = "true"
        return [self._binary, *(f"--{key}={value}" for key, value in flags.items())]


def _find_binary() -> str:
    wanted = os.environ.get("CACHEXFS_ETCD", "etcd")
    found = shutil.which(wanted)
    if found is None:
        raise UsageError(
            f"no program {wanted!r}: install etcd (Debian: package etcd-server), name it in CACHEXFS_ETCD, or give the "
            "endpoints of a running one with catalogue="
        )
    return found


def _skip_san_flag(binary: str) -> str:
    """The flag lost its prefix in etcd 3.6."""
    text = subprocess.run([binary, "--help"], capture_output=True, text=True, check=False)
    prefix = "experimental-" if "--experimental-peer-skip-client-san" in text.stdout + text.stderr else ""
    return f"{prefix}peer-skip-client-san-verification"


def _bind_address(host: str) -> str:
    """etcd listens on addresses only."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(f"the node's own name {host!r} has no address ({error.strerror})") from error


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
