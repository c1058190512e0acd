"""A small pyfuse3 filesystem over a directory: what the supervisor's tests and benchmark put behind it.

Node ids are the inode numbers of the files below ``PLAIN_ROOT`` and file handles are numbered per life, so both
mean the same to the next daemon. Unlinked files that are open lie in ``PLAIN_ROOT.held``. Runs without a
supervisor when the environment names none (argument: the mount point).

Environment: ``PLAIN_ROOT``; ``PLAIN_DIRECT=1`` direct_io opens; ``PLAIN_DIE=op[,op]`` SIGKILL of itself after
``op`` is applied and before it is answered, once each; ``PLAIN_FAIL=1`` exit at once; ``PLAIN_SILENT=1`` never
ready; ``PLAIN_POISON=name`` dies when the name is looked up; ``PLAIN_HANG=path`` stats it when ``hang`` is looked
up in the first life; ``PLAIN_STOP=code`` exit code on STOP; ``PLAIN_INLINE=life[,life]`` lives that do not take the
bytes of large writes from the shared memory.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import time
from pathlib import Path

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from cachexfs.supervisor.client import Supervisor
from cachexfs.supervisor.messages import Event

ROOT = os.environ["PLAIN_ROOT"]
HELD = ROOT + ".held"
LOG = ROOT + ".applied"
DIRECT = os.environ.get("PLAIN_DIRECT") == "1"
HANG = os.environ.get("PLAIN_HANG", "")
POISON = os.fsencode(os.environ.get("PLAIN_POISON", ""))
DIE = set(filter(None, os.environ.get("PLAIN_DIE", "").split(",")))


def attributes(info: os.stat_result, node: int) -> EntryAttributes:
    entry = EntryAttributes()
    entry.st_ino = node
    entry.entry_timeout = entry.attr_timeout = 1
    entry.st_mode, entry.st_nlink, entry.st_uid, entry.st_gid = (
        info.st_mode,
        info.st_nlink,
        info.st_uid,
        info.st_gid,
    )
    entry.st_size, entry.st_blocks, entry.st_blksize = info.st_size, info.st_blocks, 131072
    entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns = info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns
    return entry


class Plain(pyfuse3.Operations):
    """The filesystem."""

    enable_writeback_cache = False

    def __init__(self, supervisor: Supervisor | None) -> None:
        super().__init__()
        self.supervisor = supervisor
        inline = os.environ.get("PLAIN_INLINE", "").split(",")
        shares = supervisor is not None and str(supervisor.state.life) not in inline
        self.payloads = supervisor.share_payloads() if supervisor is not None and shares else None
        self.paths = {pyfuse3.ROOT_INODE: ROOT}
        self.fds: dict[int, int] = {}
        self.open_nodes: dict[int, int] = {}
        self.nodes: dict[int, int] = {}
        life = supervisor.state.life if supervisor else 1
        self.next_fh = life << 32
        os.makedirs(ROOT, exist_ok=True)
        os.makedirs(HELD, exist_ok=True)
        self.root_ino = os.stat(ROOT).st_ino
        for top, dirs, files in os.walk(ROOT):
            for name in dirs + files:
                path = os.path.join(top, name)
                self.paths[os.lstat(path).st_ino] = path
        for name in os.listdir(HELD):
            self.paths[int(name)] = os.path.join(HELD, name)
        for handle in supervisor.state.handles if supervisor else ():
            if not handle.is_dir:
                self.nodes[handle.fh] = handle.node
                self.open_nodes[handle.node] = self.open_nodes.get(handle.node, 0) + handle.opens
        for node, path in list(self.paths.items()):
            if path.startswith(HELD) and node not in self.open_nodes:
                os.unlink(path)

    # -- helpers
    def path(self, node: int) -> str:
        try:
            return self.paths[node]
        except KeyError:
            raise FUSEError(errno.ESTALE) from None

    def at(self, parent: int, name: bytes) -> str:
        return os.path.join(self.path(parent), os.fsdecode(name))

    def entry(self, path: str) -> EntryAttributes:
        try:
            info = os.lstat(path)
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None
        node = pyfuse3.ROOT_INODE if info.st_ino == self.root_ino else info.st_ino
        self.paths[node] = path
        return attributes(info, node)

    def is_replay(self, ctx: pyfuse3.RequestContext) -> bool:
        """Nobody else changes what is below: EEXIST or ENOENT is the trace of the first application."""
        return self.supervisor is not None and ctx.pid in self.supervisor.replays

    def applied(self, op: str, what: object) -> None:
        """An operation has changed the state; the place to die before the answer."""
        if not DIE:
            return
        with open(LOG, "a") as log:
            log.write(f"{op} {what}\n")
        if op in DIE:
            try:
                os.close(os.open(f"{LOG}.died-{op}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    def new_handle(self, node: int, fd: int) -> int:
        self.next_fh += 1
        fh = self.next_fh
        self.fds[fh] = fd
        self.nodes[fh] = node
        self.open_nodes[node] = self.open_nodes.get(node, 0) + 1
        if self.supervisor is not None:
            self.supervisor.offer(fh, fd)
        return fh

    def fd(self, fh: int) -> int:
        if fh not in self.fds:
            self.fds[fh] = os.open(self.path(self.nodes[fh]), os.O_RDWR)
        return self.fds[fh]

    def info(self, fh: int) -> FileInfo:
        return FileInfo(fh=fh, direct_io=DIRECT, keep_cache=False)

    # -- names
    async def lookup(self, parent, name, ctx=None):
        if name == POISON:
            os._exit(5)
        if name == b"hang" and HANG and self.supervisor.state.life == 1:
            os.stat(HANG)
        if name == b"..":
            return self.entry(os.path.dirname(self.path(parent)))
        return self.entry(self.path(parent) if name == b"." else self.at(parent, name))

    async def getattr(self, node, ctx=None):
        return self.entry(self.path(node))

    async def create(self, parent, name, mode, flags, ctx):
        path = self.at(parent, name)
        replayed = self.is_replay(ctx)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode & 0o7777)
            self.applied("create", name)
        except FileExistsError:
            if flags & os.O_EXCL and not replayed:
                raise FUSEError(errno.EEXIST) from None
            fd = os.open(path, os.O_RDWR)
        entry = self.entry(path)
        return self.info(self.new_handle(entry.st_ino, fd)), entry

    async def mkdir(self, parent, name, mode, ctx):
        path = self.at(parent, name)
        if DIE and self.supervisor is not None:
            self.applied("id", (self.supervisor.request_id(ctx.pid), ctx.pid in self.supervisor.replays))
        if name == b"poke" and self.supervisor is not None:
            pyfuse3.invalidate_entry(parent, b"none")
        replayed = self.is_replay(ctx)
        try:
            os.mkdir(path, mode & 0o7777)
            self.applied("mkdir", name)
        except FileExistsError:
            if not replayed:
                raise FUSEError(errno.EEXIST) from None
        return self.entry(path)

    async def mknod(self, parent, name, mode, rdev, ctx):
        path = self.at(parent, name)
        replayed = self.is_replay(ctx)
        try:
            os.mknod(path, mode, rdev)
            self.applied("mknod", name)
        except FileExistsError:
            if not replayed:
                raise FUSEError(errno.EEXIST) from None
        return self.entry(path)

    async def symlink(self, parent, name, target, ctx):
        path = self.at(parent, name)
        replayed = self.is_replay(ctx)
        try:
            os.symlink(os.fsdecode(target), path)
            self.applied("symlink", name)
        except FileExistsError:
            if not replayed or os.readlink(path) != os.fsdecode(target):
                raise FUSEError(errno.EEXIST) from None
        return self.entry(path)

    async def readlink(self, node, ctx):
        return os.fsencode(os.readlink(self.path(node)))

    async def link(self, node, parent, name, ctx):
        path = self.at(parent, name)
        replayed = self.is_replay(ctx)
        try:
            os.link(self.path(node), path)
            self.applied("link", name)
        except FileExistsError:
            if not replayed or os.lstat(path).st_ino != node:
                raise FUSEError(errno.EEXIST) from None
        return self.entry(path)

    async def unlink(self, parent, name, ctx):
        path = self.at(parent, name)
        replayed = self.is_replay(ctx)
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            if replayed:
                return
            raise FUSEError(errno.ENOENT) from None
        self.remove(path, info)
        self.applied("unlink", name)

    def remove(self, path: str, info: os.stat_result) -> None:
        if info.st_nlink > 1:
            os.unlink(path)
            for top, _, files in os.walk(ROOT):
                for name in files:
                    if os.lstat(os.path.join(top, name)).st_ino == info.st_ino:
                        self.paths[info.st_ino] = os.path.join(top, name)
        elif self.open_nodes.get(info.st_ino):
            held = os.path.join(HELD, str(info.st_ino))
            os.rename(path, held)
            self.paths[info.st_ino] = held
        else:
            os.unlink(path)
            self.paths.pop(info.st_ino, None)

    async def rmdir(self, parent, name, ctx):
        replayed = self.is_replay(ctx)
        try:
            os.rmdir(self.at(parent, name))
            self.applied("rmdir", name)
        except FileNotFoundError:
            if not replayed:
                raise FUSEError(errno.ENOENT) from None
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None

    async def rename(self, parent, name, new_parent, new_name, flags, ctx):
        if flags:
            raise FUSEError(errno.EINVAL)
        old, new = self.at(parent, name), self.at(new_parent, new_name)
        replayed = self.is_replay(ctx)
        try:
            info = os.lstat(old)
        except FileNotFoundError:
            if replayed and os.path.lexists(new):
                return
            raise FUSEError(errno.ENOENT) from None
        if os.path.isfile(new) and os.lstat(new).st_ino != info.st_ino:
            self.remove(new, os.lstat(new))
        try:
            os.rename(old, new)
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None
        self.paths[info.st_ino] = new
        if stat.S_ISDIR(info.st_mode):
            for node, path in list(self.paths.items()):
                if path.startswith(old + "/"):
                    self.paths[node] = new + path[len(old) :]
        self.applied("rename", name)

    async def setattr(self, node, attr, fields, fh, ctx):
        path = self.path(node)
        if fields.update_size:
            os.truncate(path, attr.st_size)
            self.applied("truncate", attr.st_size)
        if fields.update_mode:
            os.chmod(path, stat.S_IMODE(attr.st_mode))
        if fields.update_mtime or fields.update_atime:
            info = os.lstat(path)
            atime = attr.st_atime_ns if fields.update_atime else info.st_atime_ns
            os.utime(path, ns=(atime, attr.st_mtime_ns if fields.update_mtime else info.st_mtime_ns))
        return self.entry(path)

    # -- data
    async def open(self, node, flags, ctx):
        if flags & os.O_TRUNC:
            os.truncate(self.path(node), 0)
        return self.info(self.new_handle(node, os.open(self.path(node), os.O_RDWR)))

    async def read(self, fh, offset, size):
        return os.pread(self.fd(fh), size, offset)

    async def write(self, fh, offset, buf):
        data = buf if self.payloads is None else self.payloads.of(buf)
        if len(data) and DIE:
            size = os.pwrite(self.fd(fh), data, offset)
            self.applied("write", (offset, size))
            return size
        return os.pwrite(self.fd(fh), data, offset)

    async def flush(self, fh):
        self.applied("flush", fh)

    async def fsync(self, fh, datasync):
        self.applied("fsync", fh)

    async def fsyncdir(self, fh, datasync):
        pass

    async def release(self, fh):
        node = self.nodes.pop(fh, None)
        if fh in self.fds:
            os.close(self.fds.pop(fh))
        if node is None:
            return
        left = self.open_nodes.get(node, 1) - 1
        self.open_nodes[node] = left
        if not left:
            del self.open_nodes[node]
            if self.paths.get(node, "").startswith(HELD):
                os.unlink(self.paths.pop(node))
        self.applied("release", fh)

    async def forget(self, inode_list):
        pass

    async def opendir(self, node, ctx):
        return node

    async def readdir(self, fh, start, token):
        rows = []
        with os.scandir(self.path(fh)) as entries:
            rows = sorted((e.inode(), e.name) for e in entries)
        for node, name in rows:
            if node > start and not pyfuse3.readdir_reply(
                token, os.fsencode(name), self.entry(os.path.join(self.path(fh), name)), node
            ):
                break

    async def releasedir(self, fh):
        pass

    async def access(self, node, mode, ctx):
        return True

    async def statfs(self, ctx):
        out, info = pyfuse3.StatvfsData(), os.statvfs(ROOT)
        for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"):
            setattr(out, name, getattr(info, name))
        out.f_namemax = 255
        return out

    async def setxattr(self, node, name, value, ctx):
        os.setxattr(self.path(node), name, value)
        if name == b"user.poke":
            pyfuse3.invalidate_inode(node)

    async def getxattr(self, node, name, ctx):
        try:
            return os.getxattr(self.path(node), name)
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None

    async def listxattr(self, node, ctx):
        return [os.fsencode(name) for name in os.listxattr(self.path(node))]

    async def removexattr(self, node, name, ctx):
        replayed = self.is_replay(ctx)
        try:
            os.removexattr(self.path(node), name)
        except OSError as error:
            if not (replayed and error.errno == errno.ENODATA):
                raise FUSEError(error.errno or errno.EIO) from None


async def follow(supervisor: Supervisor) -> None:
    """Do what the supervisor tells."""
    while True:
        await trio.lowlevel.wait_readable(supervisor.events_fd)
        event = supervisor.next_event()
        if event is Event.STOP:
            supervisor.stopping(int(os.environ.get("PLAIN_STOP", "0")))
        elif event is not None:
            pyfuse3.terminate()
            return


async def serve(supervisor: Supervisor | None) -> None:
    async with trio.open_nursery() as nursery:
        if supervisor is not None:
            nursery.start_soon(follow, supervisor)
            if os.environ.get("PLAIN_SILENT") != "1":
                supervisor.ready()
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


def main() -> int:
    if os.environ.get("PLAIN_FAIL") == "1" or os.path.exists(ROOT + ".fail"):
        print("plain daemon: told to fail", file=sys.stderr)
        told = Path(ROOT + ".fail").read_text() if os.path.exists(ROOT + ".fail") else ""
        return int(told or 1)
    supervisor = Supervisor.from_environ()
    options = set(pyfuse3.default_options) | {"fsname=plain"}
    mountpoint = supervisor.fuse_path if supervisor is not None else sys.argv[1]
    pyfuse3.init(Plain(supervisor), mountpoint, options)
    try:
        trio.run(serve, supervisor)
    finally:
        pyfuse3.close(unmount=supervisor is None)
    if supervisor is not None and os.environ.get("PLAIN_DRAIN") == "1":
        supervisor.draining()
        while not os.path.exists(ROOT + ".drained") and supervisor.next_event() is not Event.STOP:
            time.sleep(0.01)
        return 0 if os.path.exists(ROOT + ".drained") else 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
