"""The replica store against a model: any order of writes, commits, restarts and losses of a file's owner."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from peer_support import MIB, STAGE, content, manifest_of

from cachexfs.adapters.replica_store import ReplicaStore
from cachexfs.core.digest import block_digest
from cachexfs.errors import CorruptError

SIZE_MAX = 3 * MIB
sizes = st.sampled_from([0, 1, 5000, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 77, SIZE_MAX])


class ReplicaMachine(RuleBasedStateMachine):
    """An owner changes ``source`` and sends blocks; ``committed`` is what must be readable."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="cx-model-", dir="/dev/shm"))
        self.store = ReplicaStore.open_blocking(str(self.directory))
        self.source = b""
        self.sent: dict[int, bytes] = {}
        self.committed: bytes | None = None
        self.generation = 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.directory)

    def block(self, data: bytes, index: int) -> bytes:
        return data[index * MIB : (index + 1) * MIB]

    def needed(self) -> list[int]:
        """Blocks that the store has neither received nor committed (or the beginning of it) as they are now."""
        found = []
        for index in range(-(-len(self.source) // MIB)):
            block = self.block(self.source, index)
            known = self.sent[index] if index in self.sent else self.block(self.committed or b"", index)[: len(block)]
            if known != block:
                found.append(index)
        return found

    def send(self, index: int) -> None:
        data = self.block(self.source, index)
        trio.run(self.store.write_block, STAGE, index * MIB, data, block_digest(data))
        self.sent[index] = data

    @rule(size=sizes, seed=st.integers(0, 3))
    def resize(self, size: int, seed: int) -> None:
        self.source = self.source[:size] + content(max(0, size - len(self.source)), seed)

    @rule(at=st.integers(0, SIZE_MAX - 1), value=st.integers(0, 255))
    def overwrite(self, at: int, value: int) -> None:
        if at < len(self.source):
            self.source = self.source[:at] + bytes([value]) + self.source[at + 1 :]

    @rule(index=st.integers(0, 2))
    def push(self, index: int) -> None:
        if self.block(self.source, index):
            self.send(index)

    @rule()
    def commit(self) -> None:
        for index in self.needed():
            self.send(index)
        self.generation += 1
        manifest = manifest_of(self.source, gen=self.generation)
        assert trio.run(self.store.commit, STAGE, manifest) == self.store.identity
        self.committed, self.sent = self.source, {}
        assert self.store.manifest(STAGE) == manifest

    @precondition(lambda self: self.needed())
    @rule(data=st.data())
    def commit_without_a_block(self, data: st.DataObject) -> None:
        needed = self.needed()
        left_out = data.draw(st.sampled_from(needed))
        for index in needed:
            if index != left_out:
                self.send(index)
        try:
            trio.run(self.store.commit, STAGE, manifest_of(self.source, gen=self.generation + 1))
        except CorruptError as error:
            assert f"block {left_out} " in str(error)  # noqa: PT017
        else:
            raise AssertionError("a commit without a block that was needed")

    @rule()
    def abandon(self) -> None:
        trio.run(self.store.abandon, STAGE)
        self.sent = {}

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = ReplicaStore.open_blocking(str(self.directory))
        self.sent = {}

    @rule()
    def drop(self) -> None:
        trio.run(self.store.drop, STAGE)
        self.sent, self.committed = {}, None

    @invariant()
    def the_committed_version_is_whole(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.damaged == {}
        if self.committed is None:
            assert self.store.list() == ()
        else:
            assert trio.run(self.store.read, STAGE, 0, SIZE_MAX + 1) == self.committed
        data = list(self.directory.glob("*.data"))
        assert len(data) == (self.committed is not None)
        assert len(list((self.directory / "partial").iterdir())) <= 1


ReplicaMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestReplicaModel = ReplicaMachine.TestCase
