"""What arrives on the PFS: bytes, names, modes, times; and that asking twice does no harm."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import xxhash
from pfs_support import ATTRS, LONG_S, FaultMount, running, tmp_file, tmp_names

from cachexfs.adapters import pfs_copy
from cachexfs.adapters.pfs_pool import NotPreparedError, PfsPool
from cachexfs.core.landed import CHANGED, Landed
from cachexfs.engine.pfs_interface import PfsAttrs, PfsStat

NAMES = [b"plain", b"with\nnewline", b"\xff\xfe not utf-8", b"x" * 255, "ü".encode(), b"-rf *", b".hidden", b"a~b.rec"]


async def put(pool: PfsPool, source: Path, path: bytes, hidden: str = "h1") -> None:
    await pool.prepare(str(source), source.stat().st_size, hidden, ATTRS, b"record", LONG_S)
    await pool.land(hidden, path, ATTRS, LONG_S)


async def test_a_landed_file_has_bytes_mode_and_times_and_leaves_nothing_behind(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), source.stat().st_size, "h1", ATTRS, b"the record", LONG_S)
        assert tmp_names(pfs_dir) == ["h1", "h1.rec"]
        assert tmp_file(pfs_dir, "h1", ".rec").read_bytes() == b"the record"
        found = await pool.land("h1", b"f", ATTRS, LONG_S)
        real = (pfs_dir / "f").stat()
        assert (pfs_dir / "f").read_bytes() == source.read_bytes()
        assert stat.S_IMODE(real.st_mode) == ATTRS.mode
        assert (real.st_mtime_ns, real.st_atime_ns) == (ATTRS.mtime_ns, ATTRS.atime_ns)
        assert (found.kind, found.size, found.ino, found.mtime_ns) == ("f", real.st_size, real.st_ino, ATTRS.mtime_ns)
        assert tmp_names(pfs_dir) == []
        assert stat.S_IMODE((pfs_dir / ".cachexfs").stat().st_mode) == 0o700


async def test_a_file_that_must_not_be_seen_lands_where_it_can_be_brought_back_from(
    pfs_dir: Path, source: Path
) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await put(pool, source, b".cachexfs/held/1.2")
        assert [path.name for path in pfs_dir.iterdir()] == [".cachexfs"]
        await pool.run("hide", b"f", b"1.2", None, LONG_S)  # nothing is there: it is held already
        await pool.run("unhide", b"f", b"1.2", None, LONG_S)
        assert (pfs_dir / "f").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("size", [0, 1, pfs_copy.CHUNK_BYTES, pfs_copy.CHUNK_BYTES + 1])
async def test_only_the_first_bytes_of_a_longer_staged_file_are_copied(
    pfs_dir: Path, tmp_path: Path, size: int
) -> None:
    staged = tmp_path / "long"
    staged.write_bytes(os.urandom(size + 1000))
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(staged), size, "h", ATTRS, b"", LONG_S)
        await pool.land("h", b"f", ATTRS, LONG_S)
    assert (pfs_dir / "f").read_bytes() == staged.read_bytes()[:size]


async def test_a_staged_file_that_is_too_short_is_an_error_and_leaves_nothing(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        with pytest.raises(OSError, match="staged file ends") as caught:
            await pool.prepare(str(source), source.stat().st_size + 1, "h", ATTRS, b"", LONG_S)
        assert caught.value.errno == errno.EIO
        assert tmp_names(pfs_dir) == []


@pytest.mark.parametrize("name", NAMES)
async def test_every_name_that_linux_allows(pfs_dir: Path, source: Path, name: bytes) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.run("mkdir", b"d", b"", ATTRS, LONG_S)
        await put(pool, source, b"d/" + name)
        assert [entry for entry, _ in await pool.listing(b"d", LONG_S)] == [name]
        await pool.run("rename", b"d/" + name, name, None, LONG_S)
        assert (await pool.stat(name, LONG_S)).size == source.stat().st_size
        await pool.run("hide", name, b"held", None, LONG_S)
        assert not os.path.lexists(os.path.join(os.fsencode(pfs_dir), name))
        await pool.run("unhide", name, b"held", None, LONG_S)
        await pool.run("unlink", name, b"", None, LONG_S)
        assert [entry for entry, _ in await pool.listing(b"", LONG_S)] == [b"d"]


@pytest.mark.parametrize(
    "path", [b"", b"/etc/passwd", b"../x", b"a/../../x", b"a//b", b"./a", b"a/.", b"a\0b", b"x" * 256]
)
async def test_a_path_that_is_not_plain_is_refused(pfs_dir: Path, source: Path, path: bytes) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), 5, "h", ATTRS, b"", LONG_S)
        with pytest.raises(OSError, match=r"plain relative path|cannot be changed so|name too long"):
            await pool.land("h", path, ATTRS, LONG_S)


@pytest.mark.parametrize("path", [b".cachexfs/id", b".cachexfs", b".cachexfs/tmp/x", b"d/.cachexfs-tmp-1"])
async def test_our_own_names_are_not_the_users(pfs_dir: Path, path: bytes) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.probe()
        with pytest.raises(PermissionError):
            await pool.run("unlink", path, b"", None, LONG_S)


async def test_landing_over_a_file_replaces_it_and_over_a_symlink_does_not_follow(pfs_dir: Path, source: Path) -> None:
    (pfs_dir / "other").write_bytes(b"other")
    (pfs_dir / "link").symlink_to("other")
    (pfs_dir / "old").write_bytes(b"old")
    async with running(PfsPool(str(pfs_dir))) as pool:
        await put(pool, source, b"old", "h1")
        await put(pool, source, b"link", "h2")
    assert (pfs_dir / "old").read_bytes() == source.read_bytes()
    assert (pfs_dir / "other").read_bytes() == b"other"
    assert not (pfs_dir / "link").is_symlink()


async def test_what_is_missing_has_its_own_error(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        with pytest.raises(NotPreparedError) as caught:
            await pool.land("never", b"f", ATTRS, LONG_S)
        assert caught.value.errno == errno.ENODATA
        await pool.prepare(str(source), 100, "h", ATTRS, b"", LONG_S)
        with pytest.raises(FileNotFoundError) as missing:
            await pool.land("h", b"no/such/f", ATTRS, LONG_S)
        assert missing.value.errno == errno.ENOENT
        await pool.land("h", b"f", ATTRS, LONG_S)  # the failure above took nothing away


async def test_a_prepared_file_of_another_size_does_not_land(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), 100, "h", ATTRS, b"", LONG_S)
        os.truncate(tmp_file(pfs_dir, "h"), 99)
        with pytest.raises(NotPreparedError, match="99 bytes, not 100"):
            await pool.land("h", b"f", ATTRS, LONG_S)
        assert not (pfs_dir / "f").exists()


async def test_preparing_again_replaces_bytes_and_record(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), 100, "h", ATTRS, b"first", LONG_S)
        source.write_bytes(b"y" * 100)
        await pool.prepare(str(source), 100, "h", ATTRS, b"second", LONG_S)
        (only,) = await pool.prepared(LONG_S)
        assert (only.hidden, only.record) == ("h", b"second")
        assert only.stat is not None
        assert only.stat.size == 100
        assert tmp_file(pfs_dir, "h").read_bytes() == b"y" * 100
        await pool.discard("h", LONG_S)
        assert tmp_names(pfs_dir) == []


async def test_two_preparations_of_one_name_at_once_both_end_well(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(pool.prepare, str(source), source.stat().st_size, "h", ATTRS, b"r", LONG_S)
        assert tmp_names(pfs_dir) == ["h", "h.rec"]
        assert pool._preparing == {}


async def test_a_restart_finds_and_removes_the_parts_of_an_earlier_process(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.probe()
        for hidden in ("h", "other"):
            await pool.prepare(str(source), 10, hidden, ATTRS, b"", LONG_S)
            await pool.discard(hidden, LONG_S)
    for hidden, rest in (("h", "~0123"), ("h", ".rec~0123"), ("other", "~0123")):
        tmp_file(pfs_dir, hidden, rest).write_bytes(b"half")
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), 10, "h", ATTRS, b"", LONG_S)
    assert tmp_names(pfs_dir) == ["h", "h.rec", "other~0123"]


async def test_a_takeover_removes_parts_that_came_later(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.probe()
        await pool.prepare(str(source), 10, "h", ATTRS, b"", LONG_S)
        tmp_file(pfs_dir, "h", "~0123").write_bytes(b"another node's")
        await pool.prepare(str(source), 10, "h", ATTRS, b"", LONG_S, takeover=True)
    assert tmp_names(pfs_dir) == ["h", "h.rec"]


async def test_verify_reads_back_and_refuses_a_wrong_digest(pfs_dir: Path, source: Path) -> None:
    data = source.read_bytes()
    good = xxhash.xxh3_128(data).digest()
    async with running(PfsPool(str(pfs_dir), verify=True)) as pool:
        await pool.prepare(str(source), len(data), "h", ATTRS, b"", LONG_S, digest=good)
        await pool.land("h", b"f", ATTRS, LONG_S)
        bad = bytes([good[0] ^ 1]) + good[1:]
        with pytest.raises(OSError, match="read back from the PFS"):
            await pool.prepare(str(source), len(data), "h", ATTRS, b"", LONG_S, digest=bad)
        assert tmp_names(pfs_dir) == []


async def test_changes_asked_for_twice_are_done_once(pfs_dir: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        for _ in range(2):
            await pool.run("mkdir", b"d", b"", ATTRS, LONG_S)
            await pool.run("symlink", b"l", b"d/target", ATTRS, LONG_S)
            await pool.run("mknod:p:0", b"fifo", b"", ATTRS, LONG_S)
            (pfs_dir / "f").touch()
            await pool.run("link", b"f", b"g", None, LONG_S)
            await pool.run("attr", b"f", b"", ATTRS, LONG_S)
        kinds = {name: found.kind for name, found in await pool.listing(b"", LONG_S)}
        assert kinds == {b"d": "d", b"l": "l", b"fifo": "p", b"f": "f", b"g": "f"}
        assert os.readlink(pfs_dir / "l") == "d/target"
        assert (pfs_dir / "l").lstat().st_mtime_ns == ATTRS.mtime_ns
        assert (pfs_dir / "f").stat().st_ino == (pfs_dir / "g").stat().st_ino
        for _ in range(2):
            for name in (b"l", b"fifo", b"f", b"g", b"gone/deeper"):
                await pool.run("unlink", name, b"", None, LONG_S)
            await pool.run("rmdir", b"d", b"", None, LONG_S)
        assert await pool.listing(b"", LONG_S) == []


async def test_a_symlink_with_another_target_is_replaced(pfs_dir: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.run("symlink", b"latest", b"step-1", ATTRS, LONG_S)
        await pool.run("symlink", b"latest", b"step-2", ATTRS, LONG_S)
    assert os.readlink(pfs_dir / "latest") == "step-2"
    assert tmp_names(pfs_dir) == []


async def test_a_held_file_can_be_removed_and_nothing_else_of_ours(pfs_dir: Path) -> None:
    (pfs_dir / "f").touch()
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.run("hide", b"f", b"name", None, LONG_S)
        for _ in range(2):
            await pool.run("unlink", b".cachexfs/held/name", b"", None, LONG_S)
        assert os.listdir(pfs_dir / ".cachexfs/held") == []
        for path in (b".cachexfs/held/../id", b".cachexfs/held/", b".cachexfs/held/a/b"):
            with pytest.raises(OSError, match="not a hidden name"):
                await pool.run("unlink", path, b"", None, LONG_S)


async def test_a_held_file_can_be_read_and_hidden_again_by_another_process(pfs_dir: Path) -> None:
    (pfs_dir / "f").write_bytes(b"commit")
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.run("hide", b"f", b"name", None, LONG_S)
    async with running(PfsPool(str(pfs_dir))) as pool:  # its predecessor died before it could tell
        await pool.run("hide", b"f", b"name", None, LONG_S)
        assert await pool.read(b".cachexfs/held/name", 0, 100, LONG_S) == b"commit"


async def test_a_file_that_is_ready_can_be_read(pfs_dir: Path, source: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), 10, "h", ATTRS, b"record", LONG_S)
        assert await pool.read(b".cachexfs/tmp/h", 2, 100, LONG_S) == source.read_bytes()[2:10]
        for path in (b".cachexfs/tmp/../id", b".cachexfs/tmp/", b".cachexfs/tmp/0/h"):
            with pytest.raises(OSError, match="not a hidden name"):
                await pool.read(path, 0, 100, LONG_S)


async def test_user_xattrs_are_set_read_and_removed_and_ours_are_nobodys(pfs_dir: Path, source: Path) -> None:
    some = ((b"user.one", b"1"), (b"user.two", bytes(range(256))))
    (pfs_dir / "d").mkdir()
    (pfs_dir / "d/plain").touch()
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), 10, "h", replace(ATTRS, xattrs=some), b"", LONG_S)
        await pool.land("h", b"d/f", ATTRS, LONG_S)
        await pool.run("mkdir", b"d/sub", b"", replace(ATTRS, xattrs=some[:1]), LONG_S)
        os.setxattr(pfs_dir / "d/f", "user.cachex.stage", b"planted")
        assert await pool.xattrs(b"d", LONG_S) == {b"f": some, b"sub": some[:1]}
        await pool.run("attr", b"d/f", b"", replace(ATTRS, xattrs=()), LONG_S)
        assert await pool.xattrs(b"d", LONG_S) == {b"sub": some[:1]}
        assert os.listxattr(pfs_dir / "d/f") == ["user.cachex.stage"]


async def test_a_pfs_without_xattrs_takes_files_and_says_so_once(
    fault_mount: Callable[..., FaultMount], source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mount = fault_mount()
    some = ((b"user.one", b"1"),)
    async with running(PfsPool(str(mount.path))) as pool:
        for name in ("f", "g"):
            await pool.prepare(str(source), 10, name, replace(ATTRS, xattrs=some), b"", LONG_S)
            await pool.land(name, name.encode(), ATTRS, LONG_S)
        assert await pool.xattrs(b"", LONG_S) == {}
    assert sorted(os.listdir(mount.backing))[-2:] == ["f", "g"]
    assert [r.getMessage() for r in caplog.records if "user xattrs stay in the mount" in r.getMessage()] != []
    assert caplog.text.count("user xattrs stay in the mount") == 1


async def test_many_paths_are_looked_at_in_one_call(pfs_dir: Path) -> None:
    (pfs_dir / "a").write_bytes(b"1")
    (pfs_dir / "file").touch()
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.probe()
        found, missing, below = await pool.stats([b"a", b"b", b"file/c"], LONG_S)
        assert isinstance(found, PfsStat)
        assert (found.kind, found.size) == ("f", 1)
        assert (missing, below) == (None, errno.ENOTDIR)
        names = pfs_dir / ".cachexfs/names"
        next(names.iterdir()).unlink()  # a server is down
        with pytest.raises(OSError, match="does not show all of its files"):
            await pool.stats([b"a", b"b"], LONG_S)


async def test_a_file_that_is_not_the_one_that_landed_is_not_read(pfs_dir: Path, tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), 100, "h", ATTRS, b"", LONG_S)
        found = await pool.land("h", b"f", ATTRS, LONG_S)
        landed = Landed(found.ino, found.size, found.mtime_ns)
        data = source.read_bytes()[:100]
        assert await pool.read(b"f", 0, 100, LONG_S, landed) == data
        assert await pool.fetch(b"f", 0, 100, str(target), LONG_S, landed) == 100
        digest = xxhash.xxh3_128_digest(data)
        checked = await pool.check(b"f", 100, digest, LONG_S)
        assert checked is not None
        assert (checked.ino, checked.mtime_ns) == (found.ino, found.mtime_ns)
        with (pfs_dir / "f").open("r+b") as file:
            file.write(bytes(100))  # of the same size
        for call in (pool.read(b"f", 0, 100, LONG_S, landed), pool.fetch(b"f", 0, 100, str(target), LONG_S, landed)):
            with pytest.raises(OSError, match="not the file that landed") as caught:
                await call
            assert caught.value.errno == CHANGED
        assert await pool.check(b"f", 100, digest, LONG_S) is None
        assert len(await pool.read(b"f", 0, 100, LONG_S, replace(landed, mtime_ns=None))) == 100
        assert pool.state == "ok"


async def test_attributes_of_the_root(pfs_dir: Path) -> None:
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.run("attr", b"", b"", replace(ATTRS, mode=0o750), LONG_S)
    assert stat.S_IMODE(pfs_dir.stat().st_mode) == 0o750
    assert pfs_dir.stat().st_mtime_ns == ATTRS.mtime_ns


async def test_what_is_really_in_the_way_is_an_error(pfs_dir: Path) -> None:
    (pfs_dir / "file").touch()
    (pfs_dir / "full").mkdir()
    (pfs_dir / "full" / "x").touch()
    async with running(PfsPool(str(pfs_dir))) as pool:
        with pytest.raises(FileExistsError):
            await pool.run("mkdir", b"file", b"", ATTRS, LONG_S)
        with pytest.raises(OSError, match="not empty"):
            await pool.run("rmdir", b"full", b"", None, LONG_S)
        with pytest.raises(IsADirectoryError):
            await pool.run("unlink", b"full", b"", None, LONG_S)
        with pytest.raises(FileNotFoundError):
            await pool.run("rename", b"nothing", b"x", None, LONG_S)
        with pytest.raises(NotADirectoryError):
            await pool.run("mkdir", b"file/x", b"", ATTRS, LONG_S)
        await pool.run("hide", b"file", b"name", None, LONG_S)
        (pfs_dir / "file").touch()
        with pytest.raises(FileExistsError):
            await pool.run("hide", b"file", b"name", None, LONG_S)
        assert pool.state == "ok"


async def test_attributes_of_a_symlink_do_not_reach_its_target(pfs_dir: Path) -> None:
    (pfs_dir / "target").touch(mode=0o600)
    before = (pfs_dir / "target").stat()
    (pfs_dir / "l").symlink_to("target")
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.run("attr", b"l", b"", ATTRS, LONG_S)
    after = (pfs_dir / "target").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert (pfs_dir / "l").lstat().st_mtime_ns == ATTRS.mtime_ns


async def test_owner_is_set_by_root_and_set_id_bits_survive_it(pfs_dir: Path, source: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    attrs = PfsAttrs(0o4755, 12345, 23456, ATTRS.atime_ns, ATTRS.mtime_ns)
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), 10, "h", attrs, b"", LONG_S)
        found = await pool.land("h", b"f", attrs, LONG_S)
    assert (found.uid, found.gid, found.mode) == (12345, 23456, 0o4755)


async def test_listing_is_whole_over_many_pages_and_leaves_out_our_own(pfs_dir: Path) -> None:
    wanted = {f"n{number}".encode() for number in range(1234)}
    for name in wanted:
        (pfs_dir / os.fsdecode(name)).touch()
    (pfs_dir / ".cachexfs-tmp-0123").touch()
    async with running(PfsPool(str(pfs_dir))) as pool:
        rows = await pool.listing(b"", LONG_S)
    assert {name for name, _ in rows} == wanted
    assert len(rows) == len(wanted)


async def test_a_directory_with_only_our_temporaries_can_be_removed(pfs_dir: Path) -> None:
    (pfs_dir / "d").mkdir()
    (pfs_dir / "d/.cachexfs-tmp-0123").touch()
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.run("rmdir", b"d", b"", None, LONG_S)
    assert not (pfs_dir / "d").exists()


async def test_reading_in_pieces_and_past_the_end(pfs_dir: Path) -> None:
    data = os.urandom(9 << 20)
    (pfs_dir / "f").write_bytes(data)
    os.mkfifo(pfs_dir / "fifo")
    async with running(PfsPool(str(pfs_dir))) as pool:
        assert await pool.read(b"f", 0, 20 << 20, LONG_S) == data
        assert await pool.read(b"f", 1000, 5 << 20, LONG_S) == data[1000 : 1000 + (5 << 20)]
        assert await pool.read(b"f", len(data), 10, LONG_S) == b""
        with pytest.raises(OSError, match="not a regular file"):
            await pool.read(b"fifo", 0, 10, LONG_S)
        assert (await pool.statvfs(LONG_S))[0] == os.statvfs(pfs_dir).f_frsize


@pytest.mark.parametrize("operation", ["land", "mkdir", "unlink", "attr", "read", "listing"])
async def test_a_symlink_planted_on_the_pfs_leads_nowhere(
    pfs_dir: Path, tmp_path: Path, source: Path, operation: str
) -> None:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "f").write_bytes(b"secret")
    before = os.lstat(outside / "f")
    async with running(PfsPool(str(pfs_dir))) as pool:
        await pool.prepare(str(source), 10, "h", ATTRS, b"", LONG_S)
        (pfs_dir / "d").symlink_to(outside)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "land": lambda: pool.land("h", b"d/f", ATTRS, LONG_S),
            "read": lambda: pool.read(b"d/f", 0, 10, LONG_S),
            "listing": lambda: pool.listing(b"d/sub", LONG_S),
        }
        call = calls.get(operation, lambda: pool.run(operation, b"d/f", b"", ATTRS, LONG_S))
        with pytest.raises(NotADirectoryError):
            await call()
    assert sorted(os.listdir(outside)) == ["f", "sub"]
    assert os.lstat(outside / "f") == before
    assert (outside / "f").read_bytes() == b"secret"


async def test_a_limit_on_bandwidth_is_shared_and_kept(pfs_dir: Path, source: Path) -> None:
    size = source.stat().st_size
    rate = 4 * size
    async with running(PfsPool(str(pfs_dir), bandwidth_bytes_s=rate)) as pool:
        start_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(pool.prepare, str(source), size, f"h{number}", ATTRS, b"", LONG_S)
        took_s = trio.current_time() - start_s
    assert took_s >= 0.9 * 4 * size / rate  # at least: nothing here can be too slow
