"""A snapshot of the directory as log entries, read in pieces between which others have the lock.

Each block is read at some moment between the beginning and the end. Whoever then applies the log from the beginning
has the truth: every entry says of a block what is so after it, whatever was known before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Final

import numpy as np

from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.holders import HIDDEN, Ids
from kvstrata.master.directory.probing import Keys
from kvstrata.master.directory.table import BEGIN, Cursor
from kvstrata.master.hub import Hub
from kvstrata.master.index.log import Entry, Kind

#: Slots of a table read at a time: about a millisecond.
SLOTS_A_PIECE: Final = 1 << 14
#: A pause after each piece, as for a snapshot's reader.
BREATH_S: Final = 0.001
#: Hashes in one entry.
HASHES_AN_ENTRY: Final = 1 << 12


def scan(hub: Hub, wanted: Callable[[TableKey], bool], slots: Collection[int] | None = None) -> Iterator[list[Entry]]:
    """STORED entries of the tables that are wanted, of ``slots`` only if they are given."""
    tables = hub.read(lambda state, now: [key for key, _ in state.directory.tables()])
    for table in filter(wanted, tables):  # outside the lock: whoever wants may ask the hub
        cursor: Cursor | None = BEGIN
        while cursor is not None:
            at = cursor
            entries, cursor = hub.read(lambda state, now, at=at, of=table: piece(state.directory, of, at, slots))  # type: ignore[misc]
            if entries:
                yield entries
            time.sleep(BREATH_S)


def piece(
    directory: Directory, table: TableKey, cursor: Cursor, slots: Collection[int] | None = None
) -> tuple[list[Entry], Cursor | None]:
    """What the next slots of a table hold, and where to go on."""
    keys, ids, after = directory.entries(table, cursor, SLOTS_A_PIECE)
    return list(_entries(directory, table, keys, ids, slots)), after


def _entries(
    directory: Directory, table: TableKey, keys: Keys, ids: Ids, slots: Collection[int] | None
) -> Iterator[Entry]:
    codes = {set_id: directory.holders_of(set_id) for set_id in np.unique(ids).tolist()}
    for slot, tier in sorted({code for held in codes.values() for code in held}):
        if tier == HIDDEN or (slots is not None and slot not in slots):
            continue
        having = np.isin(ids, [set_id for set_id, held in codes.items() if (slot, tier) in held])
        held = keys[having]
        for start in range(0, len(held), HASHES_AN_ENTRY):
            yield Entry(Kind.STORED, slot, tier, table, held[start : start + HASHES_AN_ENTRY].tobytes())
