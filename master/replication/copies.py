"""Copies that nodes were told to take: who is busy with what, until they answer, fall silent, or it is too late.

A command that has been answered stays for a moment as *landing*: its blocks are still under way to the directory,
by the deltas of the node that took them, and are not ordered twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.directory.directory import TableKey
from kvstrata.master.directory.probing import Keys
from kvstrata.master.directory.table import Table
from kvstrata.master.messages import CopyDone
from kvstrata.master.replication.waiting import Rows
from kvstrata.proto.status import BlockStatus, CopyReason

#: Commands in flight in the whole cluster, and blocks of one.
COMMANDS_MAX: Final = 512
COMMAND_BLOCKS: Final = 512
COMMAND_BYTES: Final = 32 << 20
#: Bytes under way to a node and from one, and commands: a node's cap on its bandwidth decides how fast they go.
BYTES_TO_MAX: Final = 64 << 20
BYTES_FROM_MAX: Final = 128 << 20
COMMANDS_TO_MAX: Final = 8
#: A command's deadline: this, and what its two nodes have under way at the lowest bandwidth that is reckoned with. The
#: answer may take longer by ``ANSWER_S``.
DEADLINE_S: Final = 10.0
SPEED_MIN: Final = 1 << 20
ANSWER_S: Final = 5.0
LANDING_S: Final = 3.0
#: A node that could not take or give a copy is left alone for so long, twice as long each time it goes on.
PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0
#: A tenant without room on a node is not tried there for so long.
NO_ROOM_S: Final = 30.0
PAUSES_MAX: Final = 10_000
#: A block that was copied is remembered for one to two times so long, or until so many others were.
LATELY_S: Final = 60.0
LATELY_BLOCKS_MAX: Final = 1 << 20

_TAKEN: Final = (int(BlockStatus.STORED), int(BlockStatus.ALREADY_PRESENT))


@dataclass(slots=True, eq=False)
class Copy:
    """One command. ``drains`` names the node whose drain it serves. ``keys`` are scoped to their table."""

    command: int
    session: int
    source: str
    target: str
    table: TableKey
    rows: Rows
    keys: Keys
    nbytes: int
    reason: CopyReason
    expires_at: float
    drains: str = ""
    attempts: int = 0
    landed_at: float | None = None


@dataclass(slots=True)
class _Pause:
    until: float
    seconds: float


class Copies:
    """All of them, by command number. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        #: Blocks since the start, by what became of them.
        self.blocks: Counter[str] = Counter()
        self.bytes_copied = 0
        self._open: dict[int, Copy] = {}
        self._landing: dict[int, Copy] = {}
        self._keys: set[bytes] = set()
        self._to: Counter[str] = Counter()
        self._from: Counter[str] = Counter()
        self._commands_to: Counter[str] = Counter()
        self._pauses: dict[tuple[str, str], _Pause] = {}
        self._lately = Table()
        self._before = Table()
        self._rotated_at = 0.0

    def __len__(self) -> int:
        """Commands that have not been answered."""
        return len(self._open)

    # ------------------------------------------------------------------ questions

    def moving(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Blocks (scoped keys) that are in a command already: bool[n]."""
        if not self._keys:
            return np.zeros(len(keys), dtype=np.bool_)
        return np.fromiter((key in self._keys for key in _each(keys)), dtype=np.bool_, count=len(keys))

    def lately(self, keys: Keys) -> npt.NDArray[np.uint32]:
        """How often each block (scoped keys) was taken lately: u32[n]. Copies beyond those wanted did not last."""
        return self._lately.find(keys) + self._before.find(keys)

    def room(self, source: str, target: str) -> int:
        """Bytes that may be ordered now from one node to another; 0 for none."""
        if len(self._open) >= COMMANDS_MAX or self._commands_to[target] >= COMMANDS_TO_MAX:
            return 0
        return max(0, min(BYTES_TO_MAX - self._to[target], BYTES_FROM_MAX - self._from[source], COMMAND_BYTES))

    def idle(self, source: str, target: str) -> bool:
        """Whether nothing is under way to one or from the other: then a block may be larger than all bounds."""
        return len(self._open) < COMMANDS_MAX and not self._to[target] and not self._from[source]

    def bytes_to(self, node_id: str) -> int:
        """Bytes under way to a node."""
        return self._to[node_id]

    def bytes_from(self, node_id: str) -> int:
        """Bytes under way from a node."""
        return self._from[node_id]

    def commands_to(self, node_id: str) -> int:
        """Commands that a node has not answered."""
        return self._commands_to[node_id]

    def deadline_s(self, source: str, target: str, nbytes: int) -> float:
        """How long a copy of so many bytes may take, with what is under way already."""
        return DEADLINE_S + (max(self._to[target], self._from[source]) + nbytes) / SPEED_MIN

    def of_drain(self, node_id: str) -> int:
        """Bytes under way because of a node's drain."""
        return sum(copy.nbytes for copy in self._open.values() if copy.drains == node_id)

    # ------------------------------------------------------------------ one command

    def order(self, copy: Copy) -> None:
        """It has been sent."""
        self._open[copy.command] = copy
        self._keys.update(_each(copy.keys))
        self._to[copy.target] += copy.nbytes
        self._from[copy.source] += copy.nbytes
        self._commands_to[copy.target] += 1

    def done(self, event: CopyDone, now: float) -> tuple[Copy, npt.NDArray[np.bool_]] | None:
        """An answer: the copy, and which of its blocks the target has now. None for a second answer, or another's."""
        copy = self._open.get(event.command)
        if copy is None or copy.session != event.session:
            return None
        status = np.frombuffer(event.status, dtype=np.uint8)
        if event.error or len(status) != len(copy.rows):
            status = np.full(len(copy.rows), BlockStatus.UNKNOWN, dtype=np.uint8)
        taken = np.isin(status, _TAKEN)
        self._judge(copy, status, now)
        for value, count in zip(*np.unique(status, return_counts=True), strict=True):
            self.blocks[_name(int(value))] += int(count)
        self.bytes_copied += min(event.nbytes, copy.nbytes)
        self._close(copy)
        if taken.any():
            some = copy.keys[taken]
            self._lately.put(some, self._lately.find(some) + np.uint32(1))
            self._landing[copy.command] = copy
            copy.landed_at = now
        else:
            self._keys.difference_update(_each(copy.keys))
        return copy, taken

    def _judge(self, copy: Copy, status: npt.NDArray[np.uint8], now: float) -> None:
        """Who is to blame for what was not taken is left alone for a while."""
        salt = copy.table.salt
        if (status == BlockStatus.QUOTA).any():
            self._pause((copy.target, _tenant(salt)), now, NO_ROOM_S)
        if np.isin(status, (BlockStatus.UNKNOWN, BlockStatus.FULL, BlockStatus.REFUSED)).any():
            self.pause(copy.target, now)
        if (status == BlockStatus.NODE_LOST).any():
            self.pause(copy.source, now)
        if np.isin(status, _TAKEN).all():
            self._pauses.pop((copy.target, ""), None)
            self._pauses.pop((copy.source, ""), None)

    def _close(self, copy: Copy) -> None:
        del self._open[copy.command]
        for counts, key, less in (
            (self._to, copy.target, copy.nbytes),
            (self._from, copy.source, copy.nbytes),
            (self._commands_to, copy.target, 1),
        ):
            counts[key] -= less
            if not counts[key]:
                del counts[key]

    # ------------------------------------------------------------------ time, and nodes that go

    def turn(self, sessions: Mapping[str, int], now: float) -> list[Copy]:
        """Time passes; returns the copies that failed: too late, or their target's session or source is over.

        ``sessions``: of the nodes that are linked.
        """
        for copy in [copy for copy in self._landing.values() if now - (copy.landed_at or 0.0) >= LANDING_S]:
            del self._landing[copy.command]
            self._keys.difference_update(_each(copy.keys))
        if now - self._rotated_at >= LATELY_S or self._lately.live >= LATELY_BLOCKS_MAX:
            self._before, self._lately, self._rotated_at = self._lately, Table(), now
        for name in [name for name, pause in self._pauses.items() if now >= pause.until + PAUSE_MAX_S]:
            del self._pauses[name]
        failed = []
        for copy in list(self._open.values()):
            late = now >= copy.expires_at + ANSWER_S
            if late or sessions.get(copy.target) != copy.session or copy.source not in sessions:
                failed.append(copy)
                self.blocks["late" if late else "node_lost"] += len(copy.rows)
                if late:
                    self.pause(copy.target, now)
                self._close(copy)
                self._keys.difference_update(_each(copy.keys))
        return failed

    def forget(self) -> None:
        """Another master leads: its copies are its own."""
        self._open.clear()
        self._landing.clear()
        self._keys.clear()
        for counts in (self._to, self._from, self._commands_to):
            counts.clear()
        self._pauses.clear()
        self._lately, self._before = Table(), Table()

    def pause(self, node_id: str, now: float) -> None:
        """Leave a node alone for a while, and longer if it goes on."""
        before = self._pauses.get((node_id, ""))
        if before is not None and now < before.until:
            return
        seconds = PAUSE_S if before is None else min(PAUSE_MAX_S, 2 * before.seconds)
        self._pause((node_id, ""), now, seconds)

    def _pause(self, name: tuple[str, str], now: float, seconds: float) -> None:
        if name in self._pauses or len(self._pauses) < PAUSES_MAX:
            self._pauses[name] = _Pause(now + seconds, seconds)

    def paused(self, node_id: str, salt: str | None, now: float) -> bool:
        """Whether a node, or a tenant on it (None: of no tenant), is to be left alone yet."""
        names = [(node_id, "")] if salt is None else [(node_id, ""), (node_id, _tenant(salt))]
        return any((pause := self._pauses.get(name)) is not None and now < pause.until for name in names)

    def check(self) -> None:
        """Assert that counts and keys agree, and that no block moves twice."""
        self._lately.check()
        self._before.check()
        assert len(self._open) <= COMMANDS_MAX
        copies = [*self._open.values(), *self._landing.values()]
        assert len({copy.command for copy in copies}) == len(copies)
        keys = [key for copy in copies for key in _each(copy.keys)]
        assert len(keys) == len(self._keys) and set(keys) == self._keys, "a block moves twice"
        assert self._to == _sums((copy.target, copy.nbytes) for copy in self._open.values())
        assert self._from == _sums((copy.source, copy.nbytes) for copy in self._open.values())
        assert self._commands_to == _sums((copy.target, 1) for copy in self._open.values())
        for copy in self._open.values():
            assert copy.source != copy.target and copy.landed_at is None
        # One command may be larger than all that is allowed, where a block is.
        for node_id, nbytes in self._to.items():
            assert nbytes <= BYTES_TO_MAX or self._commands_to[node_id] == 1, node_id
        assert all(count <= COMMANDS_TO_MAX for count in self._commands_to.values())


def _each(keys: Keys) -> Iterator[bytes]:
    raw = keys.tobytes()
    return (raw[start : start + 16] for start in range(0, len(raw), 16))


def _sums(parts: Iterable[tuple[str, int]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for name, amount in parts:
        sums[name] += amount
    return sums


def _tenant(salt: str) -> str:
    """A tenant's name among pauses; "" is the node's own."""
    return f"tenant {salt}"


def _name(status: int) -> str:
    try:
        return BlockStatus(status).name.lower()
    except ValueError:
        return "unknown"


#: Gives out the numbers of commands.
TakeNumber = Callable[[], int]
