"""GlusterFS without its management daemon: bricks and FUSE clients from volume files written here.

``disperse`` is coherent and answers with errors; it survives one of three bricks. ``distribute`` is the nasty one:
names of a brick that is down give ENOENT and are left out of listings, and a rename over a file has moments in which
the name is not there. With one brick on an XFS of its own it can be full, and its power can be cut.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from lab_base import Lab, LabError, Server, is_mounted, until

PORT = 49152
CLIENT_STARTS = 3
CONNECTED_S = 30.0
PROGRAMS = ("glusterfsd", "glusterfs", "setpriv", "nsenter", "ip", "chattr", "mkfs.xfs", "strace")

BRICK = """
volume posix
  type storage/posix
  option directory {directory}
end-volume
volume locks
  type features/locks
  subvolumes posix
end-volume
volume index
  type features/index
  option index-base {directory}/.glusterfs/indices
  subvolumes locks
end-volume
volume iot
  type performance/io-threads
  option thread-count 8
  subvolumes index
end-volume
volume brick
  type debug/io-stats
  subvolumes iot
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address {address}
  option transport.socket.listen-port {port}
  option auth.addr.brick.allow *
  option transport-address-family inet
  subvolumes brick
end-volume
"""

CONNECTION = """
volume c{number}
  type protocol/client
  option transport-type tcp
  option transport.address-family inet
  option remote-host {address}
  option remote-port {port}
  option remote-subvolume brick
  option ping-timeout {ping_s}
  option transport.tcp-user-timeout {ping_s}
  option filter-O_DIRECT disable
end-volume
"""

DISPERSE = """
volume ec
  type cluster/disperse
  option redundancy 1
  subvolumes {all}
end-volume
volume dht
  type cluster/distribute
  subvolumes ec
end-volume
"""

DISTRIBUTE = """
volume dht
  type cluster/distribute
  option lock-migration off
  subvolumes {all}
end-volume
"""

TOP = """
volume utime
  type features/utime
  option noatime on
  subvolumes dht
end-volume
volume wb
  type performance/write-behind
  option flush-behind on
  option cache-size 4MB
  subvolumes utime
end-volume
volume top
  type debug/io-stats
  subvolumes wb
end-volume
"""


class Gluster:
    """A volume with its bricks and clients. ``ping_s``: after so long a client gives a silent brick up (until then its
    callers hang). ``cache_s``: how long a client's kernel may answer from memory."""

    def __init__(
        self,
        lab: Lab,
        name: str,
        layout: str,
        bricks: int,
        clients: int,
        *,
        ping_s: int,
        cache_s: int,
        xfs_mib: int = 0,
    ) -> None:
        self.name = name
        self._lab = lab
        self._cache_s = cache_s
        self.bricks: list[Server] = []
        self.directories: list[Path] = []
        connections = ""
        self._where: list[tuple[str, int]] = []
        for number in range(bricks):
            directory = lab.xfs(f"{name}-b{number}", xfs_mib) if xfs_mib else lab.root / f"{name}-b{number}"
            (directory / ".glusterfs/indices").mkdir(parents=True)
            address = lab.address()
            volume = lab.root / f"{name}-b{number}.vol"
            volume.write_text(BRICK.format(directory=directory, address=address, port=PORT))
            connections += CONNECTION.format(number=number, address=address, port=PORT, ping_s=ping_s)
            log = lab.root / f"{name}-b{number}.glog"
            words = ("glusterfsd", "-N", "-f", volume, "-l", log, "-L", "WARNING", "-p", volume.with_suffix(".pid"))
            self.directories.append(directory)
            self._where.append((address, PORT))
            self.bricks.append(lab.server(f"{name}-b{number}", *words))
        for address, port in self._where:
            until(f"a brick of {name} at {address}", lambda a=address, p=port: lab.listens(a, p))
        every = " ".join(f"c{number}" for number in range(bricks))
        middle = {"disperse": DISPERSE, "distribute": DISTRIBUTE}[layout].format(all=every)
        self._volume = lab.root / f"{name}.vol"
        self._volume.write_text(connections + middle + TOP)
        self.mounts = [lab.mount_point(f"{name}-m{number}") for number in range(clients)]
        self.clients = [self._client(mount) for mount in self.mounts]
        self._until_connected()

    def _client(self, mount: Path) -> Server:
        cache = (f"--entry-timeout={self._cache_s}", f"--attribute-timeout={self._cache_s}", "--negative-timeout=0")
        return self._lab.server(
            mount.name, "glusterfs", "-N", "-f", self._volume, "-l", mount.with_suffix(".glog"), "-L", "WARNING",
            "--process-name", "fuse", *cache, "--fopen-keep-cache=false", "--auto-invalidation=on", mount,
        )  # fmt: skip

    def _until_connected(self) -> None:
        """A client that is not connected to a brick shows the files of it as absent. Raises ``LabError``."""
        for number in range(len(self.mounts)):
            for tries_left in reversed(range(CLIENT_STARTS)):
                try:
                    self._is_connected(number)
                    break
                except LabError as error:  # now and then one never connects; another one does at once
                    log = self.mounts[number].with_suffix(".glog")
                    if not tries_left:
                        raise LabError(f"{error}: {log.read_text(errors='replace')[-2000:]}") from error
                    self.unmount(number)
                    self.clients[number].start()

    def _is_connected(self, client: int) -> None:
        mount = self.mounts[client]
        until(f"{mount} is mounted", lambda: is_mounted(mount))
        for number in range(len(self.bricks)):
            told = mount / f".meta/graphs/active/c{number}/private"
            until(f"{mount} is connected to brick {number}", lambda t=told: _tells_connection(t), CONNECTED_S)

    def heal(self) -> None:
        """Everything runs, and every client sees all."""
        for server in [*self.bricks, *self.clients]:
            server.go_on()
        for brick, (address, port) in zip(self.bricks, self._where, strict=True):
            brick.start()
            until(f"{brick.name} answers", lambda a=address, p=port: self._lab.listens(a, p))
        for client, mount in zip(self.clients, self.mounts, strict=True):
            if not is_mounted(mount):
                client.kill()
                client.start()
        self._until_connected()

    def power_cut(self, number: int) -> None:
        """The machine of a brick (on XFS) loses its power and comes back."""
        self.bricks[number].kill()
        self._lab.power_cut(self.directories[number])
        self.heal()

    def unmount(self, client: int) -> None:
        """An administrator unmounts a client: its mount point is an empty directory."""
        self.clients[client].kill()
        if is_mounted(self.mounts[client]):
            self._lab.unmount(self.mounts[client])

    def clear(self) -> None:
        """Remove all files."""
        for entry in self.mounts[0].iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _tells_connection(told: Path) -> bool:
    with contextlib.suppress(OSError):  # without any brick nothing is read
        return "connected = 1" in told.read_text()
    return False
