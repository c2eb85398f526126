"""Watchers of the directory: a snapshot, then changes; each message says where to go on from."""

from __future__ import annotations

import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import translate
from typing import Final

from kvstrata.master.directory.directory import TableKey
from kvstrata.master.hub import Hub
from kvstrata.master.index.converters import change_message, table_message
from kvstrata.master.index.following import Follower, following
from kvstrata.master.index.log import Entry, Kind, matching
from kvstrata.master.index.scan import scan
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import Busy, Forbidden, InvalidArgument
from kvstrata.transfer.security.rights import Rights

WATCHERS_MAX: Final = 32
#: Of them, those of one token.
SHARE_MAX: Final = 8
PATTERNS_MAX: Final = 64
PATTERN_CHARS_MAX: Final = 1024
#: A watcher that hears nothing looks up this often whether it is over, and is told where it is this often.
IDLE_S: Final = 1.0
ALIVE_S: Final = 5.0
#: Changes are gathered for so long before they are sent.
GATHER_S: Final = 0.01
#: Answers to "may it see this table" that are remembered.
REMEMBERED_MAX: Final = 1 << 14

Wanted = Callable[[TableKey], bool]


class Watchers:
    """Serves streams, each in its caller's thread. Thread-safe.

    A watcher costs the message that it is being sent. What it has yet to hear stays in the log, which all share; if it
    is so slow that the log has gone on without it, it is told to begin again.
    """

    def __init__(self, hub: Hub) -> None:
        self.epoch = int(hub.master_id, 16)
        self.counts: Counter[str] = Counter({"streams": 0, "resets": 0, "messages": 0})
        self._hub = hub
        self._lock = threading.Lock()
        self._watching = 0
        self._by_subject: Counter[str] = Counter()

    @property
    def watching(self) -> int:
        return self._watching

    def watch(
        self, query: control.IndexQuery, rights: Rights, active: Callable[[], bool]
    ) -> Iterator[control.IndexMessage]:
        """Messages while ``active``. Raises :class:`Busy` when too many watch, :class:`InvalidArgument`."""
        narrowed = _number(rights)
        mine = control.IndexQuery()
        mine.CopyFrom(query)
        mine.epoch ^= narrowed
        query = mine
        with self._joined(rights.subject), following(self._hub) as follower:
            names = _Names(self._hub, follower)
            wanted = names.filter(query, rights)
            for message in self._follow(follower, names, query, wanted, active):
                self.counts["messages"] += 1
                message.epoch ^= narrowed
                yield message

    def _follow(
        self,
        follower: Follower,
        names: _Names,
        query: control.IndexQuery,
        wanted: Wanted,
        active: Callable[[], bool],
    ) -> Iterator[control.IndexMessage]:
        resumed = query.epoch == self.epoch
        entries = follower.since(query.sequence) if resumed else None
        sequence, live, until, told_at = query.sequence, True, 0, 0.0
        reason = "" if entries is not None else "the log does not reach back so far" if resumed else "begin"
        while active():
            if reason:
                self.counts["resets"] += 1
                sequence, live = follower.sequence(), False
                yield control.IndexMessage(epoch=self.epoch, sequence=sequence, reset=reason)
                yield self._message(names, sequence, [Entry(Kind.NODES, nodes=follower.nodes())])
                told_at = time.monotonic()
                for part in scan(self._hub, wanted):
                    if not active():
                        return
                    if part or time.monotonic() - told_at >= ALIVE_S:
                        told_at = time.monotonic()
                        yield self._message(names, sequence, part)
                until, reason = follower.sequence(), ""
            entries = follower.since(sequence)
            if entries is None:
                reason = "it was too slow: the log has gone on without it"
                continue
            sequence += len(entries)
            now_live = not live and sequence >= until
            told = matching(entries, wanted)
            if told or now_live or time.monotonic() - told_at >= ALIVE_S:
                live, told_at = live or now_live, time.monotonic()
                message = self._message(names, sequence, told)
                message.live = now_live
                yield message
            if not entries:
                follower.wait(IDLE_S)
                time.sleep(GATHER_S)

    def _message(self, names: _Names, sequence: int, entries: Iterable[Entry]) -> control.IndexMessage:
        changes = [change for entry in entries if (change := change_message(entry, names.table)) is not None]
        return control.IndexMessage(epoch=self.epoch, sequence=sequence, changes=changes)

    @contextmanager
    def _joined(self, subject: str) -> Iterator[None]:
        with self._lock:
            if self._watching >= WATCHERS_MAX:
                raise Busy(f"{WATCHERS_MAX} watch the index of this master, which is the bound: watch another one")
            if subject and self._by_subject[subject] >= SHARE_MAX:
                raise Busy(f"{subject} watches the index of this master {SHARE_MAX} times, which is its bound")
            self._watching += 1
            self._by_subject[subject] += 1
            self.counts["streams"] += 1
        try:
            yield
        finally:
            with self._lock:
                self._watching -= 1
                self._by_subject[subject] -= 1
                self._by_subject += Counter()  # forgets who has none left


class _Names:
    """Tables by name, for one watcher: what it is told, and whether it wants and may have it."""

    def __init__(self, hub: Hub, follower: Follower) -> None:
        self._follower = follower
        self._tables: dict[TableKey, control.IndexTable | None] = {}

    def table(self, key: TableKey) -> control.IndexTable | None:
        """None when its group is none any more."""
        if key not in self._tables:
            group = self._follower.group(key.group)
            if len(self._tables) >= REMEMBERED_MAX:
                self._tables.clear()
            self._tables[key] = None if group is None else table_message(key, group)
        return self._tables[key]

    def filter(self, query: control.IndexQuery, rights: Rights) -> Wanted:
        groups, salts = _pattern(query.groups), _pattern(query.salts)
        answers: dict[TableKey, bool] = {}

        def wanted(key: TableKey) -> bool:
            answer = answers.get(key)
            if answer is None:
                table = self.table(key)
                answer = (
                    table is not None
                    and groups.match(table.group) is not None
                    and salts.match(table.salt) is not None
                    and _may_touch(rights, table.salt, table.group)
                )
                if len(answers) >= REMEMBERED_MAX:
                    answers.clear()
                answers[key] = answer
            return answer

        return wanted


def _number(rights: Rights) -> int:
    """A part of the epoch: what a watcher has learned by other rights is no beginning for these. 0 for all rights."""
    if rights.salts == rights.groups == ("*",):
        return 0
    return zlib.crc32(repr((sorted(rights.salts), sorted(rights.groups))).encode()) or 1


def _may_touch(rights: Rights, salt: str, group: str) -> bool:
    try:
        rights.touch(salt, group)
    except Forbidden:
        return False
    return True


def _pattern(patterns: Sequence[str]) -> re.Pattern[str]:
    """What matches one of them; all, if there are none."""
    if len(patterns) > PATTERNS_MAX or any(len(each) > PATTERN_CHARS_MAX for each in patterns):
        raise InvalidArgument(f"at most {PATTERNS_MAX} patterns of {PATTERN_CHARS_MAX} characters each")
    if any("[" in each for each in patterns):
        raise InvalidArgument("patterns know * and ? only, no [...]")
    return re.compile("|".join(translate(each) for each in patterns or ("*",)))
