"""A node's index of its readable DRAM blocks, as a client on the same host maps it: read-only, and found by key.

See :mod:`.index_layout`. Nothing that is found counts before :meth:`SharedIndex.stands`, or :meth:`changed`, has said
so after the copy, together with :meth:`in_force`.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import ProtocolError
from kvstrata.transfer import index_layout as layout
from kvstrata.transfer.index_layout import BUCKET_BYTES, BUCKET_ROWS, BUCKET_TAGS, ROW, ROW_TYPE, ROW_WORDS, U64s

_SERVING: Final = layout.WORD_SERVING
_BEAT: Final = layout.WORD_BEAT
_DIGEST: Final = ROW_WORDS - 1
_SCOPE: Final = ROW_WORDS - 2
_1, _32 = np.uint64(1), np.uint64(32)
assert BUCKET_ROWS == 8

Int64s = npt.NDArray[np.int64]


class Row(NamedTuple):
    """Where one block is, and where that is said: word ``at`` of ``words`` is the row's digest while it stands."""

    slab: int
    slot: int
    offset: int
    generation: int
    checksum: int
    digest: int
    words: memoryview
    at: int


class Found(NamedTuple):
    """Where some blocks of a call are: those at ``positions``, ascending, have ``rows`` (:data:`ROW_TYPE`). ``places``:
    the numbers of these rows, table by table, each with the indexes in ``rows`` that they are of; None: all."""

    positions: Int64s
    rows: npt.NDArray[np.void]
    places: list[tuple[_Table, Int64s, Int64s | None]]


class _Table:
    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        self.bytes = memoryview(mapping)
        self.buckets = nbytes // BUCKET_BYTES
        if not self.buckets or self.buckets & (self.buckets - 1) or nbytes % BUCKET_BYTES:
            raise ProtocolError(f"a table of the shared index has {nbytes} bytes")
        self.mask = self.buckets - 1
        self.rows_at = BUCKET_TAGS.size * self.buckets
        self.row_words = self.bytes[self.rows_at :].cast("Q")
        words = np.frombuffer(mapping, np.uint64)
        self.tags = words[: self.buckets * BUCKET_ROWS].reshape(-1, BUCKET_ROWS)
        self.rows = words[self.buckets * BUCKET_ROWS :].reshape(-1, ROW_WORDS)

    def probe(self, spread: U64s) -> Int64s:
        """The number of a row that has each one's tag; of any row where none has."""
        buckets = np.empty((len(spread), 2), np.uint64)
        buckets[:, 0] = spread
        buckets[:, 1] = spread >> _32
        buckets &= np.uint64(self.mask)
        at = buckets.view(np.int64)
        same = self.tags[at] == (spread | _1)[:, None, None]
        first = same.reshape(len(spread), -1).argmax(axis=1)
        numbers: Int64s = at[np.arange(len(spread)), first >> 3] * BUCKET_ROWS + (first & 7)
        return numbers


class SharedIndex:
    """Of one incarnation of one node. ``head`` is a descriptor, which stays the caller's.

    Raises :class:`ProtocolError` for what is no index that this build can read.
    """

    def __init__(self, head: int, nbytes: int, incarnation: int) -> None:
        if nbytes != layout.HEAD_BYTES:
            raise ProtocolError(f"the head of the shared index has {nbytes} bytes, not {layout.HEAD_BYTES}")
        self._words = memoryview(_mapped(head, nbytes)).cast("Q")
        told = self._words[layout.WORD_MAGIC], self._words[layout.WORD_LAYOUT], self._words[layout.WORD_INCARNATION]
        if told != (layout.MAGIC, layout.LAYOUT, incarnation):
            raise ProtocolError("the node's shared index is of another layout, or of another start of the node")
        self._tables: tuple[_Table, ...] = ()  #: the newest, which has most, first

    def add(self, table: int, nbytes: int) -> None:
        """Map one more table by its descriptor, which stays the caller's."""
        if len(self._tables) >= layout.TABLES_MAX:
            raise ProtocolError(f"the shared index has more than {layout.TABLES_MAX} tables")
        self._tables = (_Table(_mapped(table, nbytes), nbytes), *self._tables)

    @property
    def memories(self) -> int:
        """How many of the node's descriptors are mapped, the head's among them."""
        return 1 + len(self._tables)

    @property
    def behind(self) -> bool:
        """Whether the node has tables that are not mapped here."""
        return self._words[layout.WORD_TABLES] > len(self._tables)

    def in_force(self, scope: int) -> bool:
        """Whether the node serves, has said so lately, and has not taken the whole scope away."""
        words = self._words
        fresh = layout.beats(words[_BEAT], time.monotonic_ns())
        return fresh and words[_SERVING] == 1 and words[layout.HEAD_WORDS + (scope & layout.SCOPES - 1)] == scope

    # ------------------------------------------------------------------ a few

    def find(self, packed: bytes, scope: int) -> Row | None:
        """Where the block of one hash is."""
        low, high = layout.key_of(packed)
        spread = layout.spread(low, high, scope)
        tag = spread | 1
        for table in self._tables:
            for number in (spread, spread >> 32):
                bucket = number & table.mask
                tags = BUCKET_TAGS.unpack_from(table.bytes, bucket * BUCKET_TAGS.size)
                if tag in tags:
                    return self._row(table, bucket * BUCKET_ROWS + tags.index(tag), (low, high), scope)
        return None

    def _row(self, table: _Table, number: int, key: tuple[int, int], scope: int) -> Row | None:
        fields = ROW.unpack_from(table.bytes, table.rows_at + number * ROW.size)
        low, high, slab, slot, offset, generation, checksum, of, digest = fields
        if (low, high) != key or of != scope:
            return None
        if digest != layout.digest(low, high, slab | slot << 32, offset, generation, checksum, scope):
            return None  # half of it was another block's
        return Row(slab, slot, offset, generation, checksum, digest, table.row_words, number * ROW_WORDS + _DIGEST)

    # ------------------------------------------------------------------ many

    def find_all(self, packed: bytes, width: int, scope: int) -> Found:
        """Where the blocks are that are here."""
        keys = layout.keys_of(packed, width)
        spread, left = layout.spread_all(keys, scope), np.arange(len(keys))
        parts: list[tuple[_Table, Int64s, Int64s, U64s]] = []
        for table in self._tables:
            numbers = table.probe(spread)
            words = table.rows[numbers]
            good = _sound(words, keys, scope)
            if good is None:
                parts.append((table, numbers, left, words))
                break
            if good.any():
                parts.append((table, numbers[good], left[good], words[good]))
            keys, spread, left = keys[~good], spread[~good], left[~good]
        return _joined(parts)

    def changed(self, found: Found) -> Int64s:
        """Which of the rows, by their index in ``found``, do not stand any more."""
        now = np.empty(len(found.rows), np.uint64)
        for table, numbers, here in found.places:
            now[slice(None) if here is None else here] = table.rows[numbers, _DIGEST]
        return np.flatnonzero(now != found.rows["digest"])


def _sound(words: U64s, keys: U64s, scope: int) -> npt.NDArray[np.bool_] | None:
    """Which rows are of these keys and of the scope, and whole; None: all of them."""
    same = words[:, :2] == keys
    rest = (words[:, _SCOPE] == np.uint64(scope)) & (layout.digests_of(words) == words[:, _DIGEST])
    if same.all() and rest.all():
        return None
    good: npt.NDArray[np.bool_] = same.all(axis=1) & rest
    return good


def _joined(parts: Sequence[tuple[_Table, Int64s, Int64s, U64s]]) -> Found:
    if not parts:
        return Found(np.zeros(0, np.int64), np.zeros(0, ROW_TYPE), [])
    if len(parts) == 1:
        table, numbers, positions, words = parts[0]
        return Found(positions, words.view(ROW_TYPE)[:, 0], [(table, numbers, None)])
    positions = np.concatenate([part[2] for part in parts])
    words = np.concatenate([part[3] for part in parts])
    order = np.argsort(positions)
    index = np.empty(len(order), np.int64)
    index[order] = np.arange(len(order))
    places: list[tuple[_Table, Int64s, Int64s | None]] = []
    start = 0
    for table, numbers, _, _ in parts:
        places.append((table, numbers, index[start : start + len(numbers)]))
        start += len(numbers)
    return Found(positions[order], words[order].view(ROW_TYPE)[:, 0], places)


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, OverflowError, ValueError) as error:
        raise ProtocolError(f"{nbytes} bytes of the shared index cannot be mapped: {error}") from error
