"""Blocks that wait to be looked at, in the order in which they came: bounded, and what is too much is dropped.

What is dropped is found again by the scan of the directory, if it still lacks replicas then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.directory.directory import TableKey

Rows = npt.NDArray[np.uint8]  #: whole hashes: u8[n, hash_bytes]

#: Blocks, and bytes of hashes, that one queue holds.
BLOCKS_MAX: Final = 1 << 17
#: Blocks of which it is remembered that somebody asked for them lately, and in how many calls.
RECENT_BLOCKS: Final = 1 << 17
RECENT_CALLS: Final = 1 << 12


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Blocks of one table. ``pressing``: worth that something colder leaves for a copy."""

    table: TableKey
    rows: Rows
    pressing: bool
    due: float = 0.0
    attempts: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def like(self, other: Piece) -> bool:
        """Whether blocks of both may be looked at together."""
        return (self.table, self.pressing, self.attempts) == (other.table, other.pressing, other.attempts)

    def of(self, rows: Rows) -> Piece:
        return replace(self, rows=rows)


class Waiting:
    """A queue of pieces. ``dropped`` counts blocks that found it full."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self.dropped = 0
        self._pieces: deque[Piece] = deque()
        self._blocks = 0
        self._blocks_max = blocks_max

    def __len__(self) -> int:
        return self._blocks

    @property
    def room(self) -> int:
        """Blocks that it would still take."""
        return self._blocks_max - self._blocks

    def put(self, piece: Piece) -> None:
        fits = piece.rows[: self.room]
        self.dropped += len(piece) - len(fits)
        if len(fits):
            self._pieces.append(piece.of(fits))
            self._blocks += len(fits)

    def take(self, most: int, now: float) -> Piece | None:
        """Up to ``most`` blocks of the first piece, and of those like it that follow; None when nothing is due."""
        if not self._pieces or self._pieces[0].due > now:
            return None
        first = self._pieces.popleft()
        parts, count = [first.rows], len(first)
        while count < most and self._pieces and self._pieces[0].due <= now and self._pieces[0].like(first):
            parts.append(self._pieces.popleft().rows)
            count += len(parts[-1])
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if count > most:
            self._pieces.appendleft(first.of(rows[most:]))
            rows = rows[:most]
        self._blocks -= len(rows)
        return first.of(rows)

    def clear(self) -> None:
        self._pieces.clear()
        self._blocks = 0

    def check(self) -> None:
        assert self._blocks == sum(len(piece) for piece in self._pieces) <= self._blocks_max
        assert all(len(piece) for piece in self._pieces)


class Recent:
    """The last lookups. ``span_s``: none older than that are told of."""

    def __init__(self, span_s: float = 3600.0) -> None:
        self._span_s = span_s
        self._calls: deque[tuple[TableKey, int, bytes, float]] = deque()
        self._blocks = 0

    def asked(self, table: TableKey, hash_bytes: int, hashes: bytes, now: float) -> None:
        """O(1): the bytes are kept, not looked at."""
        self._calls.append((table, hash_bytes, hashes, now))
        self._blocks += len(hashes) // hash_bytes
        while self._blocks > RECENT_BLOCKS or len(self._calls) > RECENT_CALLS:
            self._forget_one()

    def _forget_one(self) -> None:
        _, width, oldest, _ = self._calls.popleft()
        self._blocks -= len(oldest) // width

    def within(self, now: float) -> list[tuple[TableKey, int, bytes]]:
        """(table, bytes of a hash, hashes) of the calls of the span, the newest first."""
        while self._calls and now - self._calls[0][3] > self._span_s:
            self._forget_one()
        return [(table, width, hashes) for table, width, hashes, _ in reversed(self._calls)]

    def newest_first(self, now: float) -> list[Piece]:
        """What they asked for, as pieces."""
        return [
            Piece(table, np.frombuffer(hashes, dtype=np.uint8).reshape(-1, width), pressing=True)
            for table, width, hashes in self.within(now)
            if hashes
        ]

    def check(self) -> None:
        assert self._blocks == sum(len(hashes) // width for _, width, hashes, _ in self._calls) <= RECENT_BLOCKS
