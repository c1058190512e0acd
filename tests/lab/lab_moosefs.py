"""MooseFS: a metadata server, chunk servers, FUSE clients.

Where GlusterFS answers with errors it hangs; modification times are whole seconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from lab_base import NET, Lab, is_mounted, until

PROGRAMS = ("mfsmaster", "mfschunkserver", "mfsmount", "mfssettrashtime")
EMPTY = Path("/var/lib/mfs/metadata.mfs.empty")
CLIENT_PORT = 9421
OPTIONS = (
    "nonempty,mfsnice=0,mfsallowoomkiller,mfswritecachesize=64,mfsreadaheadsize=64,mfscachemode=AUTO,"
    "mfsxattrcacheto=0,mfsattrcacheto=1,mfsentrycacheto=0,mfsioretries=30,mfserroronnospace"
)

MASTER = """
WORKING_USER = root
WORKING_GROUP = root
LOCK_MEMORY = 0
DISABLE_OOM_KILLER = 0
NICE_LEVEL = 0
DATA_PATH = {data}
EXPORTS_FILENAME = {data}/exports.cfg
TOPOLOGY_FILENAME = {data}/topology.cfg
MATOML_LISTEN_HOST = {address}
MATOCS_LISTEN_HOST = {address}
MATOCL_LISTEN_HOST = {address}
MATOCS_TIMEOUT = 2
REPLICATIONS_DELAY_INIT = 1
ATIME_MODE = 4
"""

CHUNKS = """
WORKING_USER = root
WORKING_GROUP = root
DISABLE_OOM_KILLER = 0
NICE_LEVEL = 0
DATA_PATH = {data}
HDD_CONF_FILENAME = {data}/hdd.cfg
HDD_LEAVE_SPACE_DEFAULT = 1MiB
BIND_HOST = {address}
MASTER_HOST = {master}
MASTER_RECONNECTION_DELAY = 1
CSSERV_LISTEN_HOST = {address}
WORKERS_MAX = 16
WORKERS_MAX_IDLE = 4
"""


class MooseFs:
    """A metadata server, ``chunk_servers`` and ``clients``."""

    def __init__(self, lab: Lab, name: str, chunk_servers: int, clients: int) -> None:
        self.name = name
        data, address = self._directory(lab, f"{name}-master"), lab.address()
        shutil.copy(EMPTY, data / "metadata.mfs")
        (data / "exports.cfg").write_text(f"{NET}.0/24 / rw,alldirs,admin,maproot=0:0\n")
        (data / "topology.cfg").write_text("")
        (data / "m.cfg").write_text(MASTER.format(data=data, address=address))
        # -a: rebuilt from its change log after a crash
        self.master = lab.server(f"{name}-master", "mfsmaster", "-f", "-n", "-a", "-c", data / "m.cfg", "start")
        until("the metadata server answers", lambda: lab.listens(address, CLIENT_PORT))
        self.chunk_servers = []
        for number in range(chunk_servers):
            data, chunks = (self._directory(lab, f"{name}-{part}{number}") for part in ("cs", "b"))
            (data / "c.cfg").write_text(CHUNKS.format(data=data, address=lab.address(), master=address))
            (data / "hdd.cfg").write_text(f"{chunks}\n")
            words = ("mfschunkserver", "-f", "-n", "-c", data / "c.cfg", "start")
            self.chunk_servers.append(lab.server(f"{name}-cs{number}", *words))
        self.mounts = [lab.mount_point(f"{name}-m{number}") for number in range(clients)]
        self.clients = [
            lab.server(mount.name, "mfsmount", mount, "-f", "-H", address, "-o", OPTIONS) for mount in self.mounts
        ]
        for mount in self.mounts:
            until(f"{mount} is mounted", lambda m=mount: is_mounted(m))
        until("chunk servers take data", self._takes_data)
        (self.mounts[0] / "ready").unlink()

    @staticmethod
    def _directory(lab: Lab, name: str) -> Path:
        path = lab.root / name
        path.mkdir()
        return path

    def _takes_data(self) -> bool:
        with contextlib.suppress(OSError):
            fd = os.open(self.mounts[0] / "ready", os.O_WRONLY | os.O_CREAT)
            try:
                os.write(fd, b"x")
                os.fsync(fd)
            finally:
                os.close(fd)
            return True
        return False

    def heal(self) -> None:
        """Everything runs."""
        for server in [self.master, *self.chunk_servers, *self.clients]:
            server.go_on()
            server.start()
