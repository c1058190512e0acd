"""What open files need of the rest of the engine, in one object.

Role: ``ContentSource`` on the reader, the replicator, the keeper and the spiller. Without policy.
"""

from __future__ import annotations

from cachexfs.core.stages import make_stage
from cachexfs.engine.content import Reader
from cachexfs.engine.hold import Keeper
from cachexfs.engine.replicate import Replicator
from cachexfs.engine.vnode import Vnode
from cachexfs.errors import FsError


class Source(Reader):
    """``ContentSource``. ``keeper`` and ``replicator`` are set once they exist."""

    keeper: Keeper
    replicator: Replicator

    def new_stage(self, fid: int, gen: int) -> str:
        """See ``ContentSource``."""
        return make_stage(fid, gen, self.node.random.getrandbits(32))

    def grown(self, vnode: Vnode) -> None:
        """See ``ContentSource``."""
        self.replicator.grown(vnode)

    def make_room(self, length: int) -> bool:
        """See ``ContentSource``."""
        return self.keeper.make_room(length)

    async def ask_room(self, length: int) -> bool:
        """See ``ContentSource``."""
        return await self.keeper.ask_room(length)

    async def room_freed(self) -> None:
        """See ``ContentSource``."""
        await self.keeper.room_freed()

    async def spill(self, length: int) -> bool:
        """See ``ContentSource``."""
        return await self.keeper.spiller.spill(length)

    def spill_soon(self, length: int) -> None:
        """See ``ContentSource``."""
        self.keeper.spill_soon(length)

    async def spill_own(self, vnode: Vnode) -> bool:
        """See ``ContentSource``."""
        return await self.keeper.spiller.move(vnode.stage, vnode)

    def can_spill(self, length: int) -> bool:
        """See ``ContentSource``."""
        return self.keeper.spiller.can_take(length)

    def spill_refused(self, error: OSError) -> FsError:
        """See ``ContentSource``."""
        return self.keeper.spiller.refused(error)

    async def write_spilled(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> int:
        """See ``ContentSource``."""
        return await self.keeper.spiller.write(fd, data, offset)

    async def sync_spilled(self, fd: int) -> None:
        """See ``ContentSource``."""
        await self.keeper.spiller.sync(fd)
