"""A snapshot of the directory as log entries, read in pieces between which others have the lock.

Under the lock a piece is copied, and no more: entries are made of it outside.

Each block is read at some moment between the beginning and the end. Whoever then applies the log from the beginning
has the truth: every entry says of a block what is so after it, whatever was known before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.holders import HIDDEN, Holders, Ids
from kvstrata.master.directory.probing import Keys
from kvstrata.master.directory.table import BEGIN, Cursor
from kvstrata.master.hub import Hub
from kvstrata.master.index.log import Entry, Kind

#: Slots of a table read at a time: a millisecond, or a few where nearly every block has holders of its own.
SLOTS_A_PIECE: Final = 1 << 13
#: A pause after each piece, as for a snapshot's reader.
BREATH_S: Final = 0.001
#: Hashes in one entry.
HASHES_AN_ENTRY: Final = 1 << 12
#: Blocks times their replicas in one list of entries: about a megabyte.
REPLICAS_A_PART: Final = 1 << 16

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """A copy of some slots of a table. ``sets``: who holds a block, by the id of the set."""

    table: TableKey
    keys: Keys
    ids: Ids
    sets: dict[int, Holders]

    def parts(self) -> Iterator[list[Entry]]:
        """STORED entries, in each part so many that a message has room for them. O(blocks times replicas)."""
        if not len(self.keys):
            return
        unique, inverse = np.unique(self.ids, return_inverse=True)
        codes = [[code for code in self.sets[set_id] if code & 3 != HIDDEN] for set_id in unique.tolist()]
        sizes = np.array([len(each) for each in codes], dtype=np.int64)
        flat = np.array([code for each in codes for code in each], dtype=np.int64)
        starts, counts = np.cumsum(sizes) - sizes, sizes[inverse]
        upto = np.cumsum(counts)
        begin = 0
        while begin < len(counts):
            before = int(upto[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(upto, before + REPLICAS_A_PART, side="right")))
            entries = self._entries(slice(begin, end), counts[begin:end], starts[inverse[begin:end]], flat)
            if entries:
                yield entries
            begin = end

    def _entries(self, run: slice, counts: _Ints, starts: _Ints, flat: _Ints) -> list[Entry]:
        """Of the blocks in ``run``: their ``counts`` codes each stand in ``flat`` from ``starts`` on."""
        total = int(counts.sum())
        if not total:
            return []
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        codes = flat[np.repeat(starts, counts) + within]
        blocks = np.repeat(np.arange(len(counts)), counts)
        order = np.argsort(codes, kind="stable")
        codes, keys = codes[order], self.keys[run][blocks[order]]
        bounds = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), total]
        entries = []
        for first, last in pairwise(bounds):
            slot, tier = divmod(int(codes[first]), 4)
            for start in range(first, last, HASHES_AN_ENTRY):
                hashes = keys[start : min(start + HASHES_AN_ENTRY, last)].tobytes()
                entries.append(Entry(Kind.STORED, slot, tier, self.table, hashes))
        return entries


def scan(hub: Hub, wanted: Callable[[TableKey], bool]) -> Iterator[list[Entry]]:
    """STORED entries of the tables that are wanted. An empty list stands for a piece that has none, so that whoever
    reads comes round."""
    tables = hub.read(lambda state, now: [key for key, _ in state.directory.tables()])
    for table in filter(wanted, tables):  # outside the lock: whoever wants may ask the hub
        cursor: Cursor | None = BEGIN
        while cursor is not None:
            at = cursor
            read, cursor = hub.read(lambda state, now, at=at, of=table: piece(state.directory, of, at))  # type: ignore[misc]
            parts = read.parts()
            yield next(parts, [])
            yield from parts
            time.sleep(BREATH_S)


def piece(directory: Directory, table: TableKey, cursor: Cursor) -> tuple[Piece, Cursor | None]:
    """What the next slots of a table hold, and where to go on. O(slots): for use under the lock."""
    keys, ids, after = directory.entries(table, cursor, SLOTS_A_PIECE)
    return Piece(table, keys, ids, directory.holder_sets(ids)), after
