"""The receiver dies, its disk is full or loses power: what was acknowledged is whole, the rest is gone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio
from peer_support import MIB, SECRET, STAGE, blocks_of, content, manifest_of, pair, put, source, write_blocks

from cachexfs.adapters.peer_client import ClientLimits, PeerClients
from cachexfs.adapters.replica_store import ReplicaStore
from cachexfs.core import manifest as manifests
from cachexfs.errors import CacheXError

RECEIVER = Path(__file__).with_name("peer_receiver.py")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a filesystem: needs root")


@contextlib.contextmanager
def receiver(directory: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A receiving process and its port; killed at the end if it still runs."""
    process = subprocess.Popen([sys.executable, RECEIVER, directory, "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def unfinished_files(directory: Path) -> list[str]:
    """What lies in ``partial`` and data files that no manifest goes with."""
    stages = {path.name.removesuffix(".manifest") for path in directory.glob("*.manifest")}
    data = [path.name for path in directory.glob("*.data") if path.name.rsplit(".", 2)[0] not in stages]
    return data + os.listdir(directory / "partial")


@contextlib.asynccontextmanager
async def reopened(
    directory: Path, acknowledged: dict[str, bytes], tried: dict[str, set[bytes]]
) -> AsyncIterator[ReplicaStore]:
    """Reopen: every acknowledged manifest (or a later one that was tried) is there and its bytes are right."""
    store = ReplicaStore.open_blocking(str(directory))
    try:
        await check(store, directory, acknowledged, tried)
        yield store
    finally:
        store.close()


async def check(
    store: ReplicaStore, directory: Path, acknowledged: dict[str, bytes], tried: dict[str, set[bytes]]
) -> None:
    """See ``reopened``."""
    assert store.damaged == {}
    for stage, raw in acknowledged.items():
        held = store.manifest(stage)
        assert held == raw or held in tried.get(stage, set()), stage
    for manifest in store.list():
        assert await store.verify(manifest.stage) == (), manifest.stage
    assert unfinished_files(directory) == []


@pytest.mark.parametrize("seed", range(6))
async def test_killed_in_the_middle_of_commits(tmp_path: Path, seed: int) -> None:
    """kill -9 while several files are pushed, grown, overwritten and committed at once."""
    directory = tmp_path / "replicas"
    chance = random.Random(seed)
    acknowledged: dict[str, bytes] = {}
    tried: dict[str, set[bytes]] = {}

    async def owner(clients: PeerClients, number: int) -> None:
        stage, size, round_ = f"{number:x}.1", 0, 0
        path = tmp_path / f"source-{number}"
        path.write_bytes(b"")
        while True:
            round_ += 1
            rng = random.Random(f"{seed} {number} {round_}")
            data = bytearray(path.read_bytes())
            if rng.random() < 0.3 and size:
                at = rng.randrange(size)
                data[at : at + 1000] = rng.randbytes(min(1000, size - at))
            data += rng.randbytes(rng.randrange(1, MIB))
            path.write_bytes(data)
            size = len(data)
            raw = manifest_of(bytes(data), stage, gen=round_)
            with source(tmp_path, bytes(data), f"source-{number}") as fd:
                await clients.push("n2", stage, fd, blocks_of(bytes(data)))
            tried.setdefault(stage, set()).add(raw)
            await clients.commit("n2", stage, raw)
            acknowledged[stage] = raw
            tried[stage] = set()

    with receiver(directory) as (process, port):
        clients = PeerClients(
            node="n1",
            job="job",
            secret=SECRET,
            resolve=lambda name: ("127.0.0.1", port),
            limits=ClientLimits(stall_s=5),
        )

        async def guarded(number: int) -> None:
            with contextlib.suppress(OSError, CacheXError):
                await owner(clients, number)

        commits_before_kill = chance.randrange(5, 25)
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(guarded, number)
            while sum(manifests.decode(raw).gen for raw in acknowledged.values()) < commits_before_kill:  # noqa: ASYNC110
                await trio.sleep(chance.random() / 300)
            process.send_signal(signal.SIGKILL)
        clients.close()
    assert acknowledged
    async with reopened(directory, acknowledged, tried):
        pass


async def test_a_receiver_that_comes_back_serves_what_it_had(tmp_path: Path) -> None:
    directory = tmp_path / "replicas"
    data = content(3 * MIB + 5)
    ports: list[int] = []
    clients = PeerClients(node="n1", job="job", secret=SECRET, resolve=lambda name: ("127.0.0.1", ports[-1]))
    with receiver(directory) as (_, port), source(tmp_path, data) as fd:
        ports.append(port)
        await clients.push("n2", STAGE, fd, blocks_of(data))
        identity = await clients.commit("n2", STAGE, manifest_of(data))
        await clients.push("n2", "beef", fd, blocks_of(data))
    with receiver(directory) as (_, port):
        ports.append(port)
        assert await clients.read("n2", STAGE, 0, 4 * MIB) == data
        with pytest.raises(CacheXError, match="block 0 of beef is missing"):
            await clients.commit("n2", "beef", manifest_of(data, "beef"))
        assert await clients.commit("n2", STAGE, manifest_of(data)) == identity
    clients.close()


# --- a full disk -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    point = tmp_path / "nvme"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", point], check=True)
    yield point
    subprocess.run(["umount", "--lazy", point], check=True)


@needs_root
async def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    kept, large = content(3 * MIB + 5), content(7 * MIB, seed=1)
    async with pair(small_disk / "replicas") as link:
        with source(tmp_path, kept, "kept") as fd:
            await link.clients.push("n2", "beef", fd, blocks_of(kept))
            await link.clients.commit("n2", "beef", manifest_of(kept, "beef"))
        with source(tmp_path, large, "large") as fd:
            with pytest.raises(OSError, match=r"n2: .*No space") as caught:
                await link.clients.push("n2", STAGE, fd, blocks_of(large))
            assert caught.value.errno == errno.ENOSPC
            # The failed push is given up: blocks that were still on their way may have begun another.
            await link.clients.drop("n2", STAGE)
            # A private copy of the committed version has no room either; growing it in place has.
            with pytest.raises(OSError, match="No space"):
                await link.clients.push("n2", "beef", fd, blocks_of(large))
            await link.store.abandon("beef")
        assert unfinished_files(small_disk / "replicas") == []
        assert await link.clients.read("n2", "beef", 0, 9 * MIB) == kept
        grown = kept + content(MIB, seed=2)
        with source(tmp_path, grown, "grown") as fd:
            await link.clients.push("n2", "beef", fd, blocks_of(grown)[3:])
            await link.clients.commit("n2", "beef", manifest_of(grown, "beef"))
            await link.clients.drop("n2", "beef")
            await link.clients.push("n2", STAGE, fd, blocks_of(grown))
            await link.clients.commit("n2", STAGE, manifest_of(grown))
        assert await link.store.verify(STAGE) == ()


@needs_root
async def test_a_disk_too_full_for_a_manifest(small_disk: Path) -> None:
    store = ReplicaStore.open_blocking(str(small_disk / "replicas"))
    kept, data = content(5), content(MIB, seed=1)
    await put(store, kept, "beef")
    await write_blocks(store, data)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(8 * MIB))
    assert os.statvfs(small_disk).f_bfree == 0
    with pytest.raises(OSError, match="No space"):
        await store.commit(STAGE, manifest_of(data))
    assert unfinished_files(small_disk / "replicas") == []
    assert await store.read("beef", 0, 9) == kept
    filler.unlink()
    await put(store, data)
    store.close()


# --- power cut -------------------------------------------------------------------------------------------------

FS_IOC_SHUTDOWN = 0x8004587D  # of ext4 and XFS
_SHUTDOWN_WITHOUT_LOG = 2


def _have_ext4_shutdown() -> bool:
    return os.geteuid() == 0 and shutil.which("mkfs.ext4") is not None and os.path.exists("/dev/loop-control")


class Disk:
    """An ext4 on a loop device, whose power can be cut."""

    def __init__(self, directory: Path) -> None:
        self.image = directory / "image"
        self.point = directory / "disk"
        self.point.mkdir()
        with open(self.image, "wb") as file:
            file.truncate(256 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-F", self.image], check=True)
        self.mount()

    def mount(self) -> None:
        # A long commit interval: nothing reaches the journal but what somebody fsyncs.
        subprocess.run(["mount", "-o", "loop,commit=600", self.image, self.point], check=True)

    def umount(self) -> None:
        subprocess.run(["umount", self.point], check=True)

    def cut(self) -> None:
        """Everything that is not on the medium is lost."""
        fd = os.open(self.point, os.O_RDONLY)
        fcntl.ioctl(fd, FS_IOC_SHUTDOWN, struct.pack("I", _SHUTDOWN_WITHOUT_LOG))
        os.close(fd)
        self.umount()
        self.mount()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    subprocess.run(["umount", "--lazy", made.point], check=True)


power_cut = pytest.mark.skipif(not _have_ext4_shutdown(), reason="needs root, mkfs.ext4 and loop devices")


@power_cut
def test_the_power_cut_is_one(disk: Disk) -> None:
    """The check of the check: without fsync a file does not survive."""
    (disk.point / "lost").write_bytes(b"x" * 100)
    disk.cut()
    assert not (disk.point / "lost").exists() or (disk.point / "lost").read_bytes() != b"x" * 100


@power_cut
@pytest.mark.parametrize("seed", range(4))
async def test_power_cut(disk: Disk, seed: int) -> None:
    """Commits, growth, overwrites and drops; at a random moment the disk keeps only what was synced."""
    directory = disk.point / "replicas"
    store = ReplicaStore.open_blocking(str(directory))
    identity = store.identity
    acknowledged: dict[str, bytes] = {}
    tried: dict[str, set[bytes]] = {}
    dropped: set[str] = set()
    chance = random.Random(seed)
    steps = 0

    async def owner(number: int) -> None:
        nonlocal steps
        rng = random.Random(f"{seed} {number}")
        stage, data = f"{number:x}.1", bytearray()
        for round_ in range(1, 1000):
            if rng.random() < 0.1 and stage in acknowledged:
                tried[stage] = {acknowledged.pop(stage)}
                await store.drop(stage)
                dropped.add(stage)
                stage, data = f"{number:x}.{round_:x}", bytearray()
            if rng.random() < 0.3 and data:
                at = rng.randrange(len(data))
                data[at] ^= 1
            data += rng.randbytes(rng.randrange(1, MIB // 2))
            raw = manifest_of(bytes(data), stage, gen=round_)
            await write_blocks(store, bytes(data), stage=stage)
            tried.setdefault(stage, set()).add(raw)
            await store.commit(stage, raw)
            acknowledged[stage] = raw
            tried[stage] = set()
            steps += 1

    async def guarded(number: int) -> None:
        with contextlib.suppress(OSError):
            await owner(number)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(guarded, number)
        wanted = chance.randrange(5, 30)
        while steps < wanted:  # noqa: ASYNC110 (the cut is to come at no particular point)
            await trio.sleep(0.001)
        fd = os.open(disk.point, os.O_RDONLY)
        fcntl.ioctl(fd, FS_IOC_SHUTDOWN, struct.pack("I", _SHUTDOWN_WITHOUT_LOG))
        os.close(fd)
    store.close()
    disk.umount()
    disk.mount()
    async with reopened(directory, acknowledged, tried) as again:
        assert again.identity == identity
        for stage in dropped:
            assert again.find(stage) is None, stage
