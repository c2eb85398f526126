"""A bounded log of what happened to blocks, so that "why is it not here" has an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstrata.storage.records import Block, Shelf

ENTRIES_MAX: Final = 4096
#: Hashes remembered of one entry: a longer call is known by its beginning.
HASHES_MAX: Final = 128


@dataclass(slots=True)
class Entry:
    """One verb on some blocks of one tenant at ``at`` (monotonic seconds); ``hashes`` is packed."""

    at: float
    verb: str
    shelf: Shelf
    hashes: bytearray
    count: int


class Story:
    """Remembers the last ``ENTRIES_MAX`` verbs."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=ENTRIES_MAX)

    def tell(self, at: float, verb: str, shelf: Shelf, blocks: Sequence[Block]) -> None:
        if blocks:
            hashes = bytearray().join([block.hash for block in blocks[:HASHES_MAX]])
            self._entries.append(Entry(at, verb, shelf, hashes, len(blocks)))

    def tell_one(self, at: float, verb: str, shelf: Shelf, block: Block) -> None:
        """As :meth:`tell`; one after the other at one time they are one entry."""
        entries = self._entries
        if entries:
            last = entries[-1]
            if last.at == at and last.shelf is shelf and last.verb == verb and last.count < HASHES_MAX:
                last.hashes += block.hash
                last.count += 1
                return
        entries.append(Entry(at, verb, shelf, bytearray(block.hash), 1))

    def tell_each(self, at: float, verb: str, shelf: Shelf, blocks: Sequence[Block]) -> None:
        """As :meth:`tell_one` of one after the other."""
        entries, done = self._entries, 0
        while done < len(blocks):
            self.tell_one(at, verb, shelf, blocks[done])
            last, done = entries[-1], done + 1
            part = blocks[done : done + HASHES_MAX - last.count]
            last.hashes += b"".join([block.hash for block in part])
            last.count += len(part)
            done += len(part)

    def of(self, shelf_key: tuple[int, str], key: bytes) -> list[tuple[float, str]]:
        """(when, verb) of every remembered entry that names the block, oldest first; O(entries)."""
        width = len(key)
        found = []
        for entry in self._entries:
            if (entry.shelf.entry.handle, entry.shelf.salt) != shelf_key:
                continue
            packed = entry.hashes
            if any(packed[start : start + width] == key for start in range(0, len(packed), width)):
                found.append((entry.at, entry.verb))
        return found
