"""What ties the adaptors to the engine's interfaces.

Role: daemon layer. Without policy: replicas as the engine asks for them.
"""

from __future__ import annotations

from cachexfs.adapters.replica_store import ReplicaStore


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
