"""A node's index of its readable DRAM blocks, as a client on the same host maps it: read-only, and found by key.

See :mod:`.index_layout`. Nothing that is found counts before :meth:`SharedIndex.stands`, or :meth:`changed`, has said
so after the copy, together with :meth:`in_force`.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import ProtocolError
from kvstrata.transfer import index_layout as layout
from kvstrata.transfer.index_layout import BUCKET_BYTES, BUCKET_ROWS, BUCKET_TAGS, ROW, ROW_TYPE, ROW_WORDS, U64s

_SERVING: Final = layout.WORD_SERVING
_BEAT: Final = layout.WORD_BEAT
_DIGEST: Final = ROW_WORDS - 1
_STEPS: Final = np.arange(BUCKET_ROWS, dtype=np.int64)


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


class Rows(NamedTuple):
    """Where some blocks of a call are: ``positions`` of the call, ascending, have ``rows`` (:data:`ROW_TYPE`), found in
    table ``table[i]`` at ``number[i]``."""

    positions: npt.NDArray[np.int64]
    rows: npt.NDArray[np.void]
    table: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]


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
        self.tags = words[: self.buckets * BUCKET_ROWS]
        self.rows = words[self.buckets * BUCKET_ROWS :].reshape(-1, ROW_WORDS)


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
        tag, *numbers = layout.spread(low, high, scope)
        for table in self._tables:
            for number in numbers:
                bucket = number & table.mask
                tags = BUCKET_TAGS.unpack_from(table.bytes, bucket * BUCKET_TAGS.size)
                if tag in tags:
                    row = bucket * BUCKET_ROWS + tags.index(tag)
                    return self._row(table, row, (low, high), scope)
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

    def find_all(self, packed: bytes, width: int, scope: int) -> Rows:
        """Where the blocks are that are here."""
        keys = layout.keys_of(packed, width)
        tags, buckets = layout.spread_all(keys, scope)
        left = np.arange(len(keys))
        found: list[Rows] = []
        for index, table in enumerate(self._tables):
            rows = _probed(table, tags[left], buckets[left], left, index)
            rows = _sound(rows, keys, scope)
            if len(rows.positions):
                found.append(rows)
                left = np.setdiff1d(left, rows.positions, assume_unique=True)
                if not len(left):
                    break
        return _joined(found)

    def changed(self, found: Rows) -> npt.NDArray[np.int64]:
        """Which of the rows, by their index in ``found``, do not stand any more."""
        now = np.empty(len(found.number), np.uint64)
        for index, table in enumerate(self._tables):
            here = found.table == index
            if here.all():
                return np.flatnonzero(table.rows[found.number, _DIGEST] != found.rows["digest"])
            now[here] = table.rows[found.number[here], _DIGEST]
        return np.flatnonzero(now != found.rows["digest"])


def _probed(table: _Table, tags: U64s, buckets: U64s, positions: npt.NDArray[np.int64], index: int) -> Rows:
    """Rows of one table with these tags, whatever else is in them."""
    first = (buckets & np.uint64(table.mask)).astype(np.int64) * BUCKET_ROWS
    numbers = (first[:, :, None] + _STEPS).reshape(len(tags), -1)
    same = table.tags[numbers] == tags[:, None]
    at = same.argmax(axis=1)
    every = np.arange(len(tags))
    hits = np.flatnonzero(same[every, at])
    number = numbers[hits, at[hits]]
    rows = table.rows[number].view(ROW_TYPE).reshape(-1)
    return Rows(positions[hits], rows, np.full(len(hits), index), number)


def _sound(found: Rows, keys: U64s, scope: int) -> Rows:
    """Those that are of their keys and of the scope, and whole."""
    words = found.rows.view(np.uint64).reshape(-1, ROW_WORDS)
    same = (words[:, :2] == keys[found.positions]).all(axis=1) & (found.rows["scope"] == scope)
    sound = same & (layout.digests_of(words) == found.rows["digest"])
    if sound.all():
        return found
    return _chosen(found, sound)


def _chosen(found: Rows, which: npt.NDArray[Any]) -> Rows:
    return Rows(found.positions[which], found.rows[which], found.table[which], found.number[which])


def _joined(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = np.zeros(0, np.int64)
        return Rows(none, np.zeros(0, ROW_TYPE), none, none)
    joined = Rows(
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.table for part in parts]),
        np.concatenate([part.number for part in parts]),
    )
    return _chosen(joined, np.argsort(joined.positions))


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, OverflowError, ValueError) as error:
        raise ProtocolError(f"{nbytes} bytes of the shared index cannot be mapped: {error}") from error
