"""Put before a daemon's Python path: it dies right after it has applied a request, before the answer.

The directory in ``DYING`` holds orders, each removed when it is obeyed by kill -9: ``die`` once the next changing
request is in the catalogue; ``die-NAME`` once the handler of that name has done its work; ``die-orphaned`` when a file
has lost its last name, before anything is made of that; ``die-noting`` when the partner has what an fsync sent, and the
catalogue does not know. ``hold``: the next daemon does not take its mount up while this
is there.
"""

import os
import sys

if "cachexfs.daemon" in sys.orig_argv and "DYING" in os.environ:
    import signal
    import time
    from pathlib import Path

    from cachexfs.core import publication
    from cachexfs.engine.files import Files
    from cachexfs.engine.filesystem import Filesystem
    from cachexfs.engine.publishing import Publishing
    from cachexfs.frontend.fuse import Operations

    ORDERS = Path(os.environ["DYING"])
    _mutate, _publish, _resume = Filesystem._mutate, Publishing.publish, Operations.resume

    def _obey(order="die") -> None:
        try:
            (ORDERS / order).rename(ORDERS / "died")
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    async def mutate(self, change, request=None):
        made = await _mutate(self, change, request)
        if request is not None:
            _obey()
        return made

    async def publish(self, vnode, request=None, on_refused=None):
        await _publish(self, vnode, request, on_refused)
        if request is not None:
            _obey()

    def resume(self, supervisor):
        while (ORDERS / "hold").exists():
            time.sleep(0.005)
        _resume(self, supervisor)

    def dying(name, handler):
        async def handle(self, *arguments):
            result = await handler(self, *arguments)
            _obey(f"die-{name}")
            return result

        return handle

    _orphaned = Files.orphaned

    def orphaned(self, fid, inode):
        _obey("die-orphaned")
        _orphaned(self, fid, inode)

    _note_synced = publication.note_synced

    def note_synced(*arguments):
        _obey("die-noting")
        _note_synced(*arguments)

    Files.orphaned, publication.note_synced = orphaned, note_synced
    for name in ("open", "write", "fsync", "flush", "release", "opendir", "lookup"):
        setattr(Operations, name, dying(name, getattr(Operations, name)))
    Filesystem._mutate, Publishing.publish, Operations.resume = mutate, publish, resume
