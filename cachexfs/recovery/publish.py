"""Bringing contents to their paths on the PFS, so that no checkpoint ever looks whole and is not.

Role: the order. First everything is made ready under hidden names, whatever it waits for; from there any later run, on
any node, can finish. Then files land that no commit file on the PFS names; then, directory by directory, the deepest
first, commit files with the members that they replace, only when all that they name is whole; pointers last.

Concurrency: copies run in ``WORKERS`` threads, the rest in one. Killed at any instant, a second run goes on.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from cachexfs.adapters.pfs_dir import RootError
from cachexfs.core import formats
from cachexfs.core.commitfiles import is_commit_name, is_pointer_name, pointer_target
from cachexfs.core.formats import FormatError, Members
from cachexfs.core.landed import same_time
from cachexfs.core.manifest import Member
from cachexfs.errors import CacheXError, CannotTellError, CorruptError
from cachexfs.recovery import held
from cachexfs.recovery.choice import Candidate, Chosen
from cachexfs.recovery.report import LEFT, Outcome, OutcomeKind
from cachexfs.recovery.target import Content, Target, is_damage, is_ours

log = logging.getLogger(__name__)

WORKERS = 4
SHOWN_MAX = 3
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def parent(path: bytes) -> bytes:
    """The directory of a path; "" is the root."""
    return path.rpartition(b"/")[0]


def name_of(path: bytes) -> bytes:
    """The last component."""
    return path.rpartition(b"/")[2]


def shown(path: bytes) -> str:
    """A path for a message."""
    return os.fsdecode(path)


class Publisher:
    """One run. ``tell`` as in ``Target``; ``landed`` is called after each file."""

    def __init__(self, target: Target, chosen: Chosen, landed: Callable[[Candidate], None], tell: held.Tell) -> None:
        self.target = target
        self.chosen = chosen
        self._landed = landed
        self._tell = tell
        self.outcomes: dict[bytes, Outcome] = {}
        self._open: dict[bytes, Candidate] = {}  # to be published: nothing at the path, or the recorded base
        self._over: set[bytes] = set()  # of these, those that replace their base
        self._ready: set[str] = {c.hidden for c in chosen.wanted.values() if c.ready}
        self._described: dict[bytes, Members | str | None] = {}

    def run(self) -> list[Outcome]:
        """Publish what may be published. Raises ``CannotTellError`` when the PFS directory does not answer."""
        try:
            with ThreadPoolExecutor(WORKERS) as pool:
                wanted = sorted(self.chosen.wanted.values(), key=lambda c: c.path)
                list(pool.map(self._classify, wanted))
                list(pool.map(self._prepare, list(self._open.values())))
                guards = self._guards()
                guarded = {path for paths in guards.values() for path in paths}
                plain = [c for p, c in self._open.items() if p not in guarded and not is_commit_name(name_of(p))]
                list(pool.map(self._land, plain))
            self._commit_all(guards)
            self._pointers()
            self._clean()
        except RootError as error:
            raise CannotTellError(f"the PFS directory does not answer: {error.strerror}") from None
        extra = [self._outcome(c, "superseded") for c in self.chosen.superseded if c.path]
        extra += [self._outcome(c, "conflict", why) for c, why in self.chosen.disputed]
        return [*self.outcomes.values(), *extra]

    # ---- words
    def _outcome(self, candidate: Candidate, kind: OutcomeKind, reason: str = "") -> Outcome:
        record = candidate.record
        return Outcome(shown(record.path), kind, record.size, record.gen, record.job, record.origin, reason)

    def _end(self, candidate: Candidate, kind: OutcomeKind, reason: str = "") -> None:
        self._open.pop(candidate.path, None)
        self.outcomes[candidate.path] = self._outcome(candidate, kind, reason)

    # ---- what is there
    def _classify(self, candidate: Candidate) -> None:
        record, path = candidate.record, candidate.path
        try:
            if is_ours(path):
                self._end(candidate, "damaged", "its manifest has no path of a user's file")
                return
            row = self.target.lstat(path)
            if row is None:
                self._open[path] = candidate
            elif row[0] == "f" and (record.base == (row[5], row[4], row[9]) or self._is_earlier(candidate, row[4])):
                self._open[path] = candidate
                self._over.add(path)
            elif row[0] == "f" and row[4] == record.size and self._is_there(candidate):
                self._end(candidate, "there")
            else:
                newer = "newer" if row[9] > record.mtime_ns else "older"
                what = f"{newer} content there, {row[4]} bytes," if row[0] == "f" else "something else there"
                self._end(candidate, "conflict", f"the PFS has {what} that this content was not based on")
        except OSError as error:
            self._failed(candidate, error)

    def _is_earlier(self, candidate: Candidate, size: int) -> bool:
        """Whether an earlier content of the file lies at its path: it has landed after the record was made."""
        trees = {tree for length, tree in candidate.record.earlier if length == size}
        content = self.target.content(candidate.path) if trees else None
        return content is not None and content.tree in trees

    def _is_there(self, candidate: Candidate) -> bool:
        content = self.target.content(candidate.path)
        if content is None:
            return False
        if not candidate.record.tree and not candidate.record.digest:
            return content == self.target.hidden_content(candidate.hidden)
        return content.is_of(candidate.record)

    def _failed(self, candidate: Candidate, error: OSError) -> None:
        if isinstance(error, RootError):
            raise error
        kind: OutcomeKind = "damaged" if is_damage(error) else "failed"
        full = "; make room on the PFS and run this again" if error.errno in _NO_ROOM else ""
        self._end(candidate, kind, f"{error.strerror or error}{full}")

    # ---- ready under hidden names
    def _prepare(self, candidate: Candidate) -> None:
        try:
            if candidate.hidden in self._ready:
                self._check_ready(candidate)
            elif candidate.source:
                self.target.prepare(candidate)
                self._tell(candidate.record.size)
                self._ready.add(candidate.hidden)
            else:
                self._end(candidate, "failed", "its file is not there")
        except CorruptError as error:
            self._end(candidate, "damaged", str(error))
        except OSError as error:
            self._failed(candidate, error)

    def _check_ready(self, candidate: Candidate) -> None:
        """A file that is there under its hidden name: of the right bytes, as far as anybody knows them."""
        record = candidate.record
        content = self.target.hidden_content(candidate.hidden)
        if content.is_of(record):
            return
        if not candidate.source:
            if content.size == record.size and content.tree in record.before:
                return  # the fsync that was to replace them had not returned
            raise CorruptError(f"the file that was made safe on the PFS ({candidate.hidden}) has other bytes")
        self.target.prepare(candidate)

    # ---- landing
    def _land(self, candidate: Candidate) -> bool:
        if candidate.path not in self._open:
            return False
        try:
            self.target.land(candidate)
        except OSError as error:
            self._failed(candidate, error)
            return False
        self._end(candidate, "published")
        self._ready.discard(candidate.hidden)
        self._landed(candidate)
        return True

    def _guards(self) -> dict[bytes, list[bytes]]:
        """Directory -> paths that a commit file of it, on the PFS, names and that are to be replaced."""
        found: dict[bytes, list[bytes]] = defaultdict(list)
        for path in sorted(self._over):
            if path not in self._open or is_commit_name(name_of(path)):
                continue
            directory = parent(path)
            while True:
                if self._names(directory, path):
                    found[directory].append(path)
                    break
                if not directory:
                    break
                directory = parent(directory)
        return found

    def _names(self, directory: bytes, path: bytes) -> bool:
        """Whether a checkpoint on the PFS, in ``directory``, has ``path`` as a member, or may have."""
        if directory not in self._described:
            if formats.recognise(self.target.names(directory)):
                try:
                    self._described[directory] = formats.describe(Overlay(self.target, directory, ()))
                except FormatError as error:
                    self._described[directory] = str(error)
            else:
                self._described[directory] = None
        members = self._described[directory]
        relative = path[len(directory) + 1 :] if directory else path
        return isinstance(members, str) or (members is not None and relative in members.needs)

    # ---- commit files
    def _commit_all(self, guards: Mapping[bytes, list[bytes]]) -> None:
        commits: dict[bytes, list[Candidate]] = defaultdict(list)
        for path, candidate in self._open.items():
            name = name_of(path)
            if is_commit_name(name) and not is_pointer_name(name):
                commits[parent(path)].append(candidate)
        deepest = sorted({*commits, *guards}, key=lambda d: (-d.count(b"/") if d else 1, d))
        for directory in deepest:
            members = [self._open[path] for path in guards.get(directory, ()) if path in self._open]
            self._commit(directory, commits.get(directory, []), members)

    def _commit(self, directory: bytes, commits: list[Candidate], members: list[Candidate]) -> None:
        why = self._problem(directory, commits, members)
        if why:
            for candidate in [*members, *commits]:
                self._end(candidate, "withheld", why)
            return
        replaced = [c for c in commits if c.path in self._over]
        try:
            held_names = [self.target.hide(c.path) for c in replaced] if replaced or members else []
        except OSError as error:
            self._failed(commits[0], error)
            self._wait_for(commits[0], [*members, *commits])
            return
        order = [*members, *_last_first_format(directory, commits)]
        refused = next((candidate for candidate in order if not self._land(candidate)), None)
        if refused is not None:
            self._wait_for(refused, order)
            return
        for name in filter(None, held_names):
            self.target.forget_held(name)

    def _wait_for(self, refused: Candidate, others: Iterable[Candidate]) -> None:
        """One of a set could not be published: the rest of it is left, and said to be."""
        for candidate in others:
            if candidate.path in self._open:
                self._end(candidate, "withheld", f"waits for {shown(refused.path)}, which could not be published")

    def _problem(self, directory: bytes, commits: list[Candidate], members: list[Candidate]) -> str:
        """Why a set must not be published now; "" when it may."""
        if not commits:
            return (
                f"it would change the checkpoint '{shown(directory)}', which is whole on the PFS, and the commit file "
                "that belongs to it is not here: run this on the other nodes, then again"
            )
        for commit in commits:
            if commit.record.members is None and commit.manifest is None:
                return "its list of members is too long for a record: run this on the node that holds its replica"
        replaced = {name_of(c.path) for c in commits}
        stay = [name for _, name in formats.recognise(self.target.names(directory)) if name not in replaced]
        if members and stay:
            return f"{shown(stay[0])} on the PFS belongs to the files that are there now, and is not replaced"
        overlay = Overlay(self.target, directory, [*commits, *members])
        try:
            found = formats.describe(overlay)
        except CacheXError as error:
            return f"cannot be read: {error}"
        needs: Collection[bytes] = ()
        reasons: list[str] = []
        if found is not None:
            needs = found.needs.keys()
            reasons = overlay.problems(found)
        bad = [path for path, o in self.outcomes.items() if o.outcome in LEFT and _below(path, directory)]
        named = {name_of(c.path) for c in commits} <= {found.commit, *needs} if found is not None else False
        for path in bad:
            relative = path[len(directory) + 1 :] if directory else path
            if relative in needs or not named:
                reasons.append(f"{shown(relative)}: {self.outcomes[path].outcome}")
        reasons = reasons or self._mixed(overlay, commits, found)
        more = f", and {len(reasons) - SHOWN_MAX} more" if len(reasons) > SHOWN_MAX else ""
        return "waits for " + "; ".join(reasons[:SHOWN_MAX]) + more if reasons else ""

    def _mixed(self, overlay: Overlay, commits: Iterable[Candidate], found: Members | None) -> list[str]:
        """Members that are not the very files that a commit file was saved with."""
        wrong = []
        for commit in commits:
            expected = commit.members
            for name in sorted(found.needs) if found is not None else ():
                due = expected.get(name)
                if due is not None and not overlay.is_as(name, due):
                    wrong.append(f"{shown(name)}: not the file that {shown(name_of(commit.path))} was saved with")
        return wrong

    def _pointers(self) -> None:
        """Files that name a checkpoint land after it, and only if it is there."""
        pointers = [c for path, c in self._open.items() if is_pointer_name(name_of(path))]
        for candidate in sorted(pointers, key=lambda c: (-c.path.count(b"/"), c.path)):
            directory = parent(candidate.path)
            overlay = Overlay(self.target, directory, [candidate])
            try:
                data = overlay.read(name_of(candidate.path), 0, candidate.record.size)
                goal = pointer_target(name_of(candidate.path), data)
                found = formats.describe(overlay)
                reasons = overlay.problems(found) if found is not None else []
                reasons = reasons or overlay.lost(candidate) or self._mixed(overlay, [candidate], found)
            except CacheXError as error:
                reasons, goal = [f"what it names cannot be read: {error}"], None
            if not reasons and goal is not None and self.target.lstat(_join(directory, goal)) is None:
                reasons = [f"'{shown(goal)}', which it names, is not on the PFS"]
            if not reasons:
                reasons = [
                    f"{shown(path)}: {outcome.outcome}"
                    for path, outcome in self.outcomes.items()
                    if goal is not None and outcome.outcome in LEFT and _below(path, _join(directory, goal))
                ]
            if reasons:
                self._end(candidate, "withheld", "waits for " + "; ".join(reasons[:SHOWN_MAX]))
            else:
                self._land(candidate)

    def _clean(self) -> None:
        """Hidden files that nobody needs any more: older contents of what is there, second copies, lone records."""
        settled = {c.record.fid for c in self.chosen.wanted.values() if self._settled(c.path)}
        doomed = [c for c in self.chosen.superseded if c.ready and c.record.fid in settled]
        doomed += [c for c in self.chosen.wanted.values() if c.hidden in self._ready and self._settled(c.path)]
        doomed += [c for c in self.chosen.spent if self._settled(c.path)]
        for candidate in doomed:
            try:
                self.target.discard(candidate.hidden)
            except RootError:
                raise
            except OSError as error:
                log.warning("%s stays under its hidden name: %s", shown(candidate.path), error)

    def _settled(self, path: bytes) -> bool:
        outcome = self.outcomes.get(path)
        return outcome is not None and outcome.outcome in ("published", "there")


class Overlay:
    """``formats.Files``: a directory of the PFS with some candidates laid over it."""

    def __init__(self, target: Target, directory: bytes, over: Iterable[Candidate]) -> None:
        self._target = target
        self._directory = directory
        self._over = {c.path[len(directory) + 1 if directory else 0 :]: c for c in over}
        self.sizes = target.tree(directory) | {name: c.record.size for name, c in self._over.items()}

    def names(self) -> Collection[bytes]:
        return self.sizes.keys()

    def size(self, name: bytes) -> int | None:
        return self.sizes.get(name)

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        try:
            if name in self._over:
                return self._target.read_hidden(self._over[name].hidden, offset, length)
            return self._target.read(_join(self._directory, name), offset, length)
        except RootError:
            raise
        except OSError as error:
            raise CannotTellError(f"{shown(name)}: {error.strerror}") from None

    def content(self, name: bytes) -> Content | None:
        """Digests of a file, read in full."""
        try:
            if name in self._over:
                return self._target.hidden_content(self._over[name].hidden)
            return self._target.content(_join(self._directory, name))
        except RootError:
            raise
        except OSError as error:
            raise CannotTellError(f"{shown(name)}: {error.strerror}") from None

    def is_as(self, name: bytes, due: Member) -> bool:
        """Whether a file is the one that a commit file was saved with. Where its digest was not known then, two saves
        are told apart by the mtime."""
        if due.digest:
            content = self.content(name)
            return content is not None and (content.size, content.digest) == (due.size, due.digest)
        if name in self._over:
            mtime_ns: int | None = self._over[name].record.mtime_ns
        else:
            row = self._target.lstat(_join(self._directory, name))
            mtime_ns = row[9] if row is not None else None
        return not due.mtime_ns or (mtime_ns is not None and same_time(mtime_ns, due.mtime_ns))

    def lost(self, pointer: Candidate) -> list[str]:
        """Files that lay below a pointer's target when it was saved, and are not there or shorter now."""
        short = [m for m in pointer.record.members or () if self.sizes.get(m.name, -1) < m.size]
        return [f"{shown(member.name)}: absent or short" for member in short]

    def problems(self, members: Members) -> list[str]:
        """What keeps the checkpoint from being whole, by names and sizes."""
        if members.incomplete_reason:
            return [members.incomplete_reason]
        found = [f"{shown(lack.name)}: {lack.reason}" for lack in formats.evaluate(members.needs, self.sizes)]
        if members.exact and not found:
            found = [
                f"{shown(name)}: {self.sizes[name]} bytes instead of {size}"
                for name, size in members.needs.items()
                if size > 1 and self.sizes[name] != size
            ]
        return found


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


def _below(path: bytes, directory: bytes) -> bool:
    return not directory or path == directory or path.startswith(directory + b"/")


def _last_first_format(directory: bytes, commits: list[Candidate]) -> Iterator[Candidate]:
    """The commit file that stands for all (the first that a format recognises) lands last."""
    names = [name_of(c.path) for c in commits]
    order = [commit for _, commit in formats.recognise(names)]
    rank = {name: order.index(name) if name in order else len(order) for name in names}
    yield from sorted(commits, key=lambda c: rank[name_of(c.path)], reverse=True)
