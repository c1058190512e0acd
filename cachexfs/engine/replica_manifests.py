"""What partners keep beside a replica: a file's path, attributes, digests, base on the PFS, and for a commit file what
it stands for.

Role: used by ``Replicator``, which sends them; ``cachexfs recover`` reads them when nothing else is left. Concurrency:
nothing here waits.
"""

from __future__ import annotations

import os
from collections import OrderedDict

from cachexfs.core import records as rec
from cachexfs.core.commitfiles import POINTER_BYTES_MAX, is_commit_name, is_pointer_name, pointer_target
from cachexfs.core.manifest import LATER, MEMBERS_MAX, Base, Manifest, Member, still_to_land
from cachexfs.core.records import ROOT_FID, Dirent, Generation, Inode
from cachexfs.core.replica import Applied
from cachexfs.engine.content import Reader
from cachexfs.engine.node import Node

PAST_MAX = 10_000


class Manifests:
    """Makes manifests, and remembers what names stood for on the PFS."""

    def __init__(self, node: Node, reader: Reader) -> None:
        self.node = node
        self.reader = reader
        self._made_ns = 0
        self._past: OrderedDict[bytes, Base] = OrderedDict()  # path -> the PFS's file under it that lost its name here

    def note_past(self, changes: Applied) -> None:
        """Files that the PFS has were removed or replaced: what takes such a name is based on that file.

        Not those that were moved: there the PFS may have their only bytes.
        """
        view = self.node.catalogue.view
        gone = {key: old for key, old, _ in changes if isinstance(old, Inode)}
        for key, old, _ in changes:
            if not isinstance(old, Dirent) or view.names_of(old.fid):
                continue
            inode = gone.get(rec.inode_key(old.fid)) or view.inode(old.fid)
            parent, name = rec.split_dirent_key(key)
            above = self.reader.path(parent)
            if isinstance(inode, Inode) and inode.pfs is not None and above is not None:
                path = above + b"/" + name if above else name
                self._past[path] = Base(inode.pfs.ino, inode.pfs.size, inode.pfs.mtime_ns)
                while len(self._past) > PAST_MAX:
                    self._past.popitem(last=False)

    def make(
        self, fid: int, inode: Inode, stage: str, size: int,
        digests: tuple[bytes, bytes, list[bytes]], content: Generation | None,
    ) -> Manifest:  # fmt: skip
        """Of a file's bytes that lie in ``stage``; ``content``: the published content that they are, None before."""
        path = self.reader.path(fid) or b""
        base = self._past.get(path)
        # A hidden (withdrawn) one, too: where it is not under the path, nothing is.
        if inode.pfs is not None and inode.pfs.gen != (content.gen if content else -1):
            base = Base(inode.pfs.ino, inode.pfs.size, inode.pfs.mtime_ns)
        gen = content.gen if content else inode.gen + 1
        return Manifest(
            fid=fid, path=path, stage=stage, size=size, digest=digests[0], tree=digests[1],
            blocks=b"".join(digests[2]), mode=inode.mode, uid=inode.uid, gid=inode.gid, mtime_ns=inode.mtime_ns,
            atime_ns=inode.atime_ns, gen=gen, origin=self.node.name,
            revision=self.node.catalogue.view.published_at(fid) if content else 0, published=content is not None,
            base=base, members=self._members(fid, path, content) if content else (),
            earlier=still_to_land(self.node.catalogue.view, fid, gen), made_ns=self._now_ns(),
        )  # fmt: skip

    def _now_ns(self) -> int:
        self._made_ns = max(self._made_ns + 1, self.node.clock.now_ns())
        return self._made_ns

    def _members(self, fid: int, path: bytes, content: Generation) -> tuple[Member, ...]:
        """What a commit file stands for: the very contents beside and below it, of a pointer those below its target,
        that are not newer than itself. Of a file that was overwritten since, that it is not the one any more."""
        name = path.rpartition(b"/")[2]
        view, names = self.node.catalogue.view, self.node.catalogue.view.names_of(fid)
        if not is_commit_name(name) or not names:
            return ()
        start, top = b"", names[0][0]
        if is_pointer_name(name):
            goal = self._target(name, content)
            for part in goal.split(b"/"):
                entry = view.lookup(top, part)
                if entry is None or entry.kind != "d":
                    return ()
                top = entry.fid
            start = goal + b"/"
        elif top == ROOT_FID:
            return ()  # all checkpoints of the mount are below it
        inode = view.inode(fid)
        is_stale = inode is not None and inode.stale and not is_pointer_name(name)
        found: list[Member] = []
        stack, published = [(start, top)], view.published_at(fid)
        while stack:
            prefix, directory = stack.pop()
            for child, entry in view.children(directory).items():
                member = view.generation(entry.fid)
                if entry.kind == "d":
                    stack.append((prefix + child + b"/", entry.fid))
                elif member is not None and entry.fid != fid:
                    is_later = view.published_at(entry.fid) >= published
                    if not is_later or is_stale:
                        record = view.inode(entry.fid)
                        digest, mtime_ns = LATER if is_later else member.digest, record.mtime_ns if record else 0
                        found.append(Member(prefix + child, member.size, digest, mtime_ns))
            if len(found) + len(stack) > MEMBERS_MAX:
                return ()
        return tuple(sorted(found, key=lambda member: member.name))

    def _target(self, name: bytes, content: Generation) -> bytes:
        """What a pointer file names, read from this node's copy; b"" when it has none or names nothing."""
        path = self.node.local_path(content.stage, content.size)
        if path is None or content.size > POINTER_BYTES_MAX:
            return b""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return pointer_target(name, os.pread(fd, content.size, 0)) or b""
        finally:
            os.close(fd)
