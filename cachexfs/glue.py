"""What ties the adaptors to the engine's interfaces.

Role: daemon layer. Small classes without policy: replicas as the engine asks for them, and the source of contents with
everything that open files need of the other parts.
"""

from __future__ import annotations

import random

from cachexfs.adapters.replica_store import ReplicaStore
from cachexfs.core.stages import make_stage
from cachexfs.engine.content import Reader
from cachexfs.engine.files import Vnode
from cachexfs.engine.hold import Keeper
from cachexfs.engine.replicate import Replicator


class HeldReplicas:
    """``ReplicaHolder`` on the replica store."""

    def __init__(self, store: ReplicaStore) -> None:
        self._store = store
        self.store = store.identity

    def path(self, stage: str, size: int) -> str | None:
        """See ``ReplicaHolder``."""
        committed = self._store.committed(stage)
        return committed.path if committed is not None and committed.manifest.size >= size else None

    def manifest(self, stage: str) -> bytes | None:
        """See ``ReplicaHolder``."""
        return self._store.manifest(stage)

    def stages(self) -> list[str]:
        """See ``ReplicaHolder``."""
        return [manifest.stage for manifest in self._store.list()]

    async def drop(self, stage: str) -> None:
        """See ``ReplicaHolder``."""
        await self._store.drop(stage)

    @property
    def used_bytes(self) -> int:
        """See ``ReplicaHolder``."""
        return self._store.used_bytes


class Source(Reader):
    """``ContentSource``: reading, sending ahead and room, as open files need them."""

    keeper: Keeper
    replicator: Replicator

    def new_stage(self, fid: int, gen: int) -> str:
        """See ``ContentSource``."""
        return make_stage(fid, gen, random.getrandbits(32))

    def grown(self, vnode: Vnode) -> None:
        """See ``ContentSource``."""
        self.replicator.grown(vnode)

    def make_room(self, length: int) -> bool:
        """See ``ContentSource``."""
        return self.keeper.make_room(length)

    async def room_freed(self) -> None:
        """See ``ContentSource``."""
        await self.keeper.room_freed()
