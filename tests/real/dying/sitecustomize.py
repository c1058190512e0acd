"""Put before a daemon's Python path: it dies right after it has applied a request, before the answer.

The directory in ``DYING`` holds orders. ``die`` (removed when obeyed): kill -9 once the next changing request is in the
catalogue. ``hold``: the next daemon does not take its mount up while this is there.
"""

import os
import sys

if "cachexfs.daemon" in sys.orig_argv and "DYING" in os.environ:
    import signal
    import time
    from pathlib import Path

    from cachexfs.engine.filesystem import Filesystem
    from cachexfs.engine.publishing import Publishing
    from cachexfs.frontend.fuse import Operations

    ORDERS = Path(os.environ["DYING"])
    _mutate, _publish, _resume = Filesystem._mutate, Publishing.publish, Operations.resume

    def _obey() -> None:
        try:
            (ORDERS / "die").rename(ORDERS / "died")
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    async def mutate(self, change, request=None):
        made = await _mutate(self, change, request)
        if request is not None:
            _obey()
        return made

    async def publish(self, vnode, request=None):
        await _publish(self, vnode, request)
        if request is not None:
            _obey()

    def resume(self, supervisor):
        while (ORDERS / "hold").exists():
            time.sleep(0.005)
        _resume(self, supervisor)

    Filesystem._mutate, Publishing.publish, Operations.resume = mutate, publish, resume
