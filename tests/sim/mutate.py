"""Checks of the checks: each mutation undoes one fix in a copy of the package, and its scene must fail; each planted
fault must be seen by a scenario.

Role: a program, run by hand: ``python tests/sim/mutate.py [WORD...]`` (of the scenes' names). Prints each mutation
whose scene passes all the same, or whose text is not in the code any more. Concurrency: none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Scene -> (file of the engine, what stands there, what stood there before the fix).
MUTATIONS = {
    "test_what_a_dead_daemon_prepared_goes_though_the_first_discard_fails": (
        "engine/drain_files.py",
        "await self.discard(record.fid, hidden)  # noted",
        "self._made.setdefault(record.fid, {})[hidden] = record.gen; await self.discard(record.fid, hidden)  # noted",
    ),
    "test_what_a_passed_writer_changes_within_one_stamp_of_a_publication_is_published": (
        "engine/stamps.py",
        "os.utime(fd, ns=(stamp_ns, stamp_ns - 1))",
        "return size, stamp_ns",
    ),
    "test_a_write_that_was_under_way_while_another_writer_closed_is_published": (
        "engine/publishing.py",
        "if tree != content.tree and",
        "if False and",
    ),
    "test_an_fsync_of_a_passed_file_without_bytes_leaves_nothing": (
        "engine/drain.py",
        "self.files.busy(vnode.fid) and not vnode.content.open",
        "self.files.busy(vnode.fid)",
    ),
    "test_the_old_name_of_a_renamed_and_removed_file_does_not_come_back_with_a_power_cut": (
        "engine/drain_names.py",
        'await self._run("unlink", op.path)  # gone, and perhaps not synced',
        "pass",
    ),
    "test_bytes_that_a_commit_file_waits_for_stay_when_the_last_close_comes_after_the_removal": (
        "engine/files.py",
        "self.on_orphan_closed(stage)",
        "self.node.staging.remove(stage)",
    ),
    "test_what_a_passed_writer_changes_after_a_publication_outlives_the_daemon": (
        "engine/passing.py",
        "return stat.S_IMODE(os.stat(file).st_mode) == PASSED_MODE",
        "return False",
    ),
    "test_a_directory_is_looked_at_for_the_first_time_while_its_rename_lands": (
        "engine/pfs_import.py",
        "for path in paths:",
        "for path in paths[:1]:",
    ),
    "test_what_was_fsynced_is_there_however_soon_its_lost_node_is_replaced": (
        "engine/recover.py",
        "if record.synced is not None and not node.staging.has(record.synced.stage):",
        "if False:",
    ),
    "test_a_call_that_hangs_on_a_node_which_was_cut_off_hits_nothing_newer": (
        "engine/owners.py",
        "FENCE_S = 100.0",
        "FENCE_S = 0.0",
    ),
    "test_two_nodes_never_carry_out_one_operation": (
        "engine/owners.py",
        "return await catalogue.mutate(",
        "return op if op.owner != node.name else await catalogue.mutate(",
    ),
    "test_truncate_is_seen_everywhere_though_the_release_of_a_closed_writer_is_on_its_way": (
        "engine/filesystem.py",
        "version = vnode.version\n        if vnode.dirty:",
        "version = vnode.version\n        if vnode.dirty and vnode.writers == 0:",
    ),
    "test_attributes_of_what_a_passed_writer_has_emptied_since_wait_for_its_next_content": (
        "engine/drain_names.py",
        "and not awaited and",
        "and",
    ),
    "test_damaged_bytes_that_a_commit_file_claims_and_that_were_overwritten_hold_nothing_up": (
        "engine/drain_files.py",
        'if await is_whole(node, source, size, op.tree if exact else b""):',
        "if True:",
    ),
    "test_what_nvme_cannot_read_of_what_was_overwritten_holds_nothing_up": (
        "engine/damaged.py",
        'log.warning("%s: %s", path, error)\n        return False',
        "raise",
    ),
    "test_one_content_that_two_changes_bring_lands_without_going_round": (
        "engine/drain.py",
        "current = op.cancelled and inode is not None",
        "current = inode is not None",
    ),
    "test_a_change_that_nothing_comes_of_is_tried_slowly": (
        "engine/drain.py",
        "if state.ready == ready and self._goes_round(key, op, ready):",
        "if False:",
    ),
    "test_a_commit_file_that_two_changes_are_to_hide_is_hidden_once": (
        "engine/drain_names.py",
        "except FileExistsError:\n                if not again:",
        "except FileExistsError:\n                if True:",
    ),
    "test_a_rename_of_a_hard_link_is_recognised": (
        "core/order.py",
        "if op.kind == OpKind.PUT and op.fid in self._moves and",
        "if False and",
    ),
    "test_a_member_that_waits_ready_for_the_next_commit_file_is_read": (
        "engine/node.py",
        " or self.ready_put(fid, inode) is not None)",
        ")",
    ),
    "test_what_the_pfs_denied_once_is_read_and_claimed_again": (
        "core/publication.py",
        "pfs = None if again else",
        "pfs = None if True else",
    ),
    "test_the_manifest_of_a_commit_file_says_what_was_overwritten_before_it_was_sent": (
        "engine/replica_manifests.py",
        "LATER if is_later else member.digest",
        "member.digest",
    ),
    "test_a_removed_file_is_never_renamed_though_the_pfs_says_at_first_that_it_is_not_there": (
        "engine/drain_names.py",
        "(found is None or found.kind",
        "(found is not None and found.kind",
    ),
    "test_of_two_writers_one_wins_whole_and_the_other_is_told": (
        "core/publication.py",
        "before.gen != base_gen",
        "False",
    ),
}


#: A fault of a kind that a scenario is to see -> (scenario, seeds, file, what stands there, what is to stand there).
PLANTED = {
    "spilled bytes are read unchecked": (
        "disks", "0-39", "engine/files.py",
        "return self.node.in_memory(vnode.stage)",
        "return True",
    ),
    "a replica is committed without an fsync of its data": (
        "disks", "0-39", "adapters/replica_copy.py",
        "os.ftruncate(fd, size)\n            os.fsync(fd)",
        "os.ftruncate(fd, size)",
    ),
    "what a damaged journal has forgotten is removed": (
        "journal", "0-39", "engine/recover.py",
        "if set_aside is not None and generation is None and size:",
        "if False and set_aside is not None:",
    ),
    "a mended journal lands its commit files": (
        "journal", "0-99", "core/mending.py",
        "if new is not None and not new.cancelled and _lists(new):",
        "if False and new is not None:",
    ),
    "the last whole checkpoint goes before the next is there": (
        "rotate", "300000-300059", "engine/last_whole.py",
        "return fid in self._landed and path is not None and self.stays(fid, path)",
        "return False",
    ),
    "what somebody has changed on the PFS is still claimed there": (
        "behind", "0-19", "core/publication.py",
        "there = msgspec.structs.replace(before, missing=True)",
        "there = before",
    ),
}  # fmt: skip


def check_planted(scenario: str, seeds: str, file: str, there: str, fault: str) -> str:
    """Why a planted fault is not noticed; empty when it is."""
    with tempfile.TemporaryDirectory() as directory:
        if why := _mutate(directory, file, there, fault):
            return why
        command = [sys.executable, str(ROOT / "tests/sim/sim_run.py"), "--scenario", scenario, "--seeds", seeds]
        environment = {**os.environ, "PYTHONPATH": directory, "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=directory)
    return "" if "SEED" in done.stdout else f"{seeds} of {scenario} end well"


def _mutate(directory: str, file: str, there: str, before: str) -> str:
    """Copy the package, with one text in the place of another; returns why that cannot be done."""
    shutil.copytree(ROOT / "cachexfs", Path(directory, "cachexfs"), ignore=shutil.ignore_patterns("__pycache__"))
    path = Path(directory, "cachexfs", file)
    text = path.read_text()
    path.write_text(text.replace(there, before, 1))
    return "" if there in text else f"{file} has no {there!r}"


def check(name: str, file: str, there: str, before: str) -> str:
    """Why a mutation is not noticed; empty when it is."""
    with tempfile.TemporaryDirectory() as directory:
        if why := _mutate(directory, file, there, before):
            return why
        scenes = [str(path) for path in sorted((ROOT / "tests/sim").glob("test_found*.py"))]
        scenes.append(str(ROOT / "tests/sim/test_stuck.py"))
        options = ["-q", "-x", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "-k", name]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *scenes],
            env={**os.environ, "PYTHONPATH": directory}, capture_output=True, text=True, cwd=directory,
        )  # fmt: skip
    return "" if done.returncode == 1 else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main() -> int:
    bad = 0
    for name, planted in PLANTED.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        why = check_planted(*planted)
        bad += bool(why)
        print(f"{name}: {why or 'noticed'}", flush=True)
    for name, mutation in MUTATIONS.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        why = check(name, *mutation)
        bad += bool(why)
        print(f"{name}: {why or 'noticed'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
