"""A journal with a million entries, as a mount leaves it that its daemon never found time to compact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import trio

from cachexfs.adapters.catalogue_builtin import BuiltinCatalogue
from cachexfs.adapters.journal_file import JOURNAL_NAME, MENDED_NAME
from cachexfs.core import journal
from cachexfs.core.journal import Mutation
from cachexfs.core.records import FID_STEP, Inode, encode, inode_key
from cachexfs.core.replica import Replica
from cachexfs.core.transaction import Tx

ENTRIES = 1_000_000
FILES = 200_000
SIZES = 97
MIB = 1 << 20
#: All records of a file's five entries are held once, not five times: 100 MiB of journal take about 160 with its pages.
MEMORY_BYTES_MAX = 350 * MIB

#: Reads a journal, and says how many revisions and rows there are, and what they have taken of memory.
READ = """
import resource, sys
from pathlib import Path
from cachexfs.adapters.catalogue_builtin import BuiltinCatalogue
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
catalogue = BuiltinCatalogue(Path(sys.argv[1]))
print(catalogue.view.revision, sum(1 for _ in catalogue.view.items()), peak() - before)
catalogue.close()
"""


def file(number: int) -> bytes:
    return inode_key((number + 2) * FID_STEP)


@pytest.fixture(scope="module")
def long_journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the journal: entry ``n`` gives file ``n % FILES`` the size ``n % SIZES``."""
    directory = tmp_path_factory.mktemp("long")
    inode = Inode("f", 0o644, 0, 0, 1, 1, 1)
    records = [encode(msgspec.structs.replace(inode, size=size)) for size in range(SIZES)]
    keys = [file(number) for number in range(FILES)]
    with (directory / JOURNAL_NAME).open("wb") as out:
        out.write(journal.header())
        for entry in range(1, ENTRIES + 1):
            out.write(journal.encode(Mutation(entry, [(keys[entry % FILES], records[entry % SIZES])])))
    return directory


def size_of(view: Replica, number: int) -> int:
    entry = view.entry(file(number))
    assert entry is not None
    assert isinstance(entry.record, Inode)
    return entry.record.size


def test_a_million_entries_are_read_whole_in_bounded_memory(long_journal: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(long_journal)], capture_output=True, text=True, check=True
    )  # fmt: skip
    revision, rows, taken_bytes = map(int, done.stdout.split())
    assert (revision, rows) == (ENTRIES, FILES)
    assert taken_bytes < MEMORY_BYTES_MAX
    assert not (long_journal / MENDED_NAME).exists()


def test_a_torn_tail_costs_one_entry_and_compaction_loses_none(long_journal: Path) -> None:
    path = long_journal / JOURNAL_NAME
    whole = path.stat().st_size
    with path.open("r+b") as out:
        out.truncate(whole - 7)
    catalogue = BuiltinCatalogue(long_journal)
    assert (long_journal / MENDED_NAME).exists()
    assert catalogue.view.revision == ENTRIES - 1
    assert size_of(catalogue.view, ENTRIES % FILES) == (ENTRIES - FILES) % SIZES  # as the entry before had it
    assert size_of(catalogue.view, 1) == (ENTRIES - FILES + 1) % SIZES

    def grow(tx: Tx) -> None:
        inode = tx.inode(2 * FID_STEP)
        assert inode is not None
        tx.put(file(0), msgspec.structs.replace(inode, size=1234))

    trio.run(catalogue.mutate, grow)
    trio.run(catalogue.compact)
    sizes = [size_of(catalogue.view, number) for number in range(FILES)]
    assert (sizes[0], catalogue.view.revision) == (1234, ENTRIES)
    catalogue.close()
    assert path.stat().st_size < whole / 4
    again = BuiltinCatalogue(long_journal)
    try:
        assert again.view.revision == ENTRIES
        assert [size_of(again.view, number) for number in range(FILES)] == sizes
    finally:
        again.close()
