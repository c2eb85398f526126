"""Sisters of blocks that have left for good: who holds them is told that they may leave first.

A block of a group with several shards is found only while each shard's is somewhere. When the last replica of one
shard's has been evicted, those of the others take room for nothing. What is worked out here is a hint at best, so
it is bounded, done some at a time, and dropped when more comes than that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.messages import Change, SendHint
from kvstrata.master.namespaces import Group, Namespaces
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import Departure

#: Blocks that wait to be looked at; what comes beyond is dropped.
WAITING_MAX: Final = 1 << 16
#: Blocks looked for in one turn, in all shards together: a few milliseconds.
LOOKED_FOR: Final = 8192
#: Only what left by the pool's own choice: what somebody took away is taken away from all shards.
EVICTIONS: Final = frozenset(int(why) for why in (Departure.ROOM, Departure.QUOTA, Departure.LOWERED, Departure.DEVICE))


class _Left(NamedTuple):
    """Blocks of one shard that left a tier of a node. ``number`` is their group's, ``hashes`` u8[n, width]."""

    number: int
    shard: int
    salt: str
    hashes: np.ndarray[tuple[int, int], np.dtype[np.uint8]]


@dataclass(slots=True)
class Counted:
    """Since the start. ``told``: replicas whose node was told; ``passed``: blocks that were too many to look at."""

    told: int = 0
    passed: int = 0


class Orphans:
    """Over the directory. Not thread-safe: its owner holds a lock."""

    def __init__(self, directory: Directory, namespaces: Namespaces) -> None:
        self.counted = Counted()
        self._directory = directory
        self._namespaces = namespaces
        self._waiting: deque[_Left] = deque()
        self._blocks = 0

    def __len__(self) -> int:
        """Blocks that wait to be looked at."""
        return self._blocks

    def left(self, changes: Iterable[Change]) -> None:
        """What a node has said, and the directory has taken in. O(changes): nothing is looked for yet."""
        for change in changes:
            namespace = change.namespace
            if change.added or namespace.shard_count == 1 or change.reason not in EVICTIONS:
                continue
            group = self._namespaces.find(namespace)
            if group is None or group.epoch != change.epoch:
                continue
            rows = np.frombuffer(change.hashes, np.uint8).reshape(-1, namespace.hash_bytes)
            fits = rows[: WAITING_MAX - self._blocks]
            self.counted.passed += len(rows) - len(fits)
            if len(fits):
                self._waiting.append(_Left(group.number, namespace.shard, change.salt, fits))
                self._blocks += len(fits)

    def turn(self, sessions: Mapping[int, int]) -> list[SendHint]:
        """Look at some of what waits; what to tell. ``sessions``: of attached nodes, by directory slot."""
        found: dict[tuple[int, Namespace, str, int], list[bytes]] = {}
        budget = LOOKED_FOR
        while self._waiting and budget > 0:
            some = self._waiting.popleft()
            group = self._namespaces.by_number(some.number)
            count = len(some.hashes)
            if group is not None:
                fits = max(1, budget // group.shard_count)
                if count > fits:
                    self._waiting.appendleft(some._replace(hashes=some.hashes[fits:]))
                    some, count = some._replace(hashes=some.hashes[:fits]), fits
                budget -= count * group.shard_count
                self._look(group, some, sessions, found)
            self._blocks -= count
        hints = [
            SendHint(session, namespace, salt, b"".join(parts), epoch)
            for (session, namespace, salt, epoch), parts in found.items()
        ]
        self.counted.told += sum(len(hint.hashes) // hint.namespace.hash_bytes for hint in hints)
        return hints

    def _look(
        self,
        group: Group,
        some: _Left,
        sessions: Mapping[int, int],
        found: dict[tuple[int, Namespace, str, int], list[bytes]],
    ) -> None:
        directory = self._directory
        keys = fold(some.hashes.tobytes(), group.hash_bytes)
        gone = directory.living_ids(TableKey(group.number, some.shard, some.salt), keys) == 0
        if not gone.any():
            return
        keys, rows = keys[gone], some.hashes[gone]
        for shard in range(group.shard_count):
            if shard == some.shard:
                continue
            ids = directory.living_ids(TableKey(group.number, shard, some.salt), keys)
            for set_id in np.unique(ids[ids != 0]).tolist():
                theirs = rows[ids == set_id].tobytes()
                for slot in {slot for slot, _ in directory.holders_of(set_id)}:
                    if slot in sessions:
                        to = (sessions[slot], group.namespace(shard), some.salt, group.epoch)
                        found.setdefault(to, []).append(theirs)

    def check(self) -> None:
        assert self._blocks == sum(len(some.hashes) for some in self._waiting) <= WAITING_MAX
