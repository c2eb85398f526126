"""A copy of a master's directory, kept by applying what ``WatchIndex`` says: for routers that ask often.

It reads no clock and no socket; :class:`kvstrata.client.index_watch.IndexWatch` feeds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import FOLDED_BYTES, Namespace, check_salt, pack_hashes, split_hashes

_Kind = control.IndexChange
#: Where one block is: 4 * slot + tier each, ascending.
Codes = tuple[int, ...]


class TableName(NamedTuple):
    """One tenant's part of one shard of one group, in one weight epoch."""

    group: str
    epoch: int
    shard: int
    salt: str


class MirrorPrefix(NamedTuple):
    """``blocks``: the longest prefix that the pool has, in all shards. ``by_node``: that each node alone has, of the
    asked shard; nodes without any are left out."""

    blocks: int
    by_node: dict[str, int]


@dataclass(slots=True)
class _Content:
    """``nodes`` by slot: only what they have counts."""

    tables: dict[TableName, dict[bytes, Codes]] = field(default_factory=dict)
    nodes: dict[int, control.IndexNode] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)  #: the latest of each group

    def apply(self, change: control.IndexChange) -> None:
        match change.kind:
            case _Kind.STORED:
                self._stored(change)
            case _Kind.REMOVED:
                self._removed(change, lambda codes: tuple(c for c in codes if c != 4 * change.slot + change.tier))
            case _Kind.CLEARED:
                self._removed(change, lambda codes: ())
            case _Kind.DROPPED:
                self.tables.pop(_name(change.table), None)
            case _Kind.SLOT_DROPPED:
                self._slot_dropped(change.slot)
            case _Kind.NODES:
                self.nodes = {node.slot: node for node in change.nodes}

    def _stored(self, change: control.IndexChange) -> None:
        name, code = _name(change.table), 4 * change.slot + change.tier
        table = self.tables.setdefault(name, {})
        self.epochs[name.group] = max(name.epoch, self.epochs.get(name.group, 0))
        for key in split_hashes(change.hashes, FOLDED_BYTES):
            codes = table.get(key, ())
            if code not in codes:
                table[key] = tuple(sorted((*codes, code)))

    def _removed(self, change: control.IndexChange, left: Callable[[Codes], Codes]) -> None:
        name = _name(change.table)
        table = self.tables.get(name, {})
        for key in split_hashes(change.hashes, FOLDED_BYTES):
            if key in table:
                table[key] = left(table[key])
                if not table[key]:
                    del table[key]
        if name in self.tables and not table:
            del self.tables[name]

    def _slot_dropped(self, slot: int) -> None:
        self.nodes.pop(slot, None)
        for name, table in list(self.tables.items()):
            for key in [key for key, codes in table.items() if any(code >> 2 == slot for code in codes)]:
                table[key] = tuple(code for code in table[key] if code >> 2 != slot)
                if not table[key]:
                    del table[key]
            if not table:
                del self.tables[name]


class IndexMirror:
    """Not thread-safe. It answers from the moment that it is first ``live``, and while a new snapshot comes from what
    it knew before."""

    def __init__(self) -> None:
        self.live = False
        self.epoch = 0
        self.sequence = 0
        self.resets = 0
        self._content = _Content()
        self._coming: _Content | None = None  #: a snapshot that is not complete

    @property
    def resumable(self) -> bool:
        """Whether ``epoch`` and ``sequence`` are where to go on: not in the midst of a snapshot."""
        return self.live and self._coming is None

    def apply(self, message: control.IndexMessage) -> None:
        """Messages of one stream, in order; of the next one if it goes on from there, or begins with a reset."""
        if message.reset:
            self.resets += 1
            self._coming = _Content()
        content = self._content if self._coming is None else self._coming
        for change in message.changes:
            content.apply(change)
        self.epoch, self.sequence = message.epoch, message.sequence
        if message.live and self._coming is not None:
            self._content, self._coming, self.live = self._coming, None, True

    # ------------------------------------------------------------------ questions

    @property
    def nodes(self) -> list[control.IndexNode]:
        """Nodes that may be read from."""
        return list(self._content.nodes.values())

    def prefix(self, namespace: Namespace, salt: str, hashes: bytes) -> MirrorPrefix:
        """How much of a chain is where. ``hashes``: packed. O(blocks, times shards)."""
        check_salt(salt)
        keys = list(_folded(hashes, namespace))
        content = self._content
        epoch = content.epochs.get(namespace.group, 0)
        tables = [
            content.tables.get(TableName(namespace.group, epoch, shard, salt), {})
            for shard in range(namespace.shard_count)
        ]
        blocks = next((index for index, key in enumerate(keys) if not self._everywhere(tables, key)), len(keys))
        return MirrorPrefix(blocks, self._by_node(tables[namespace.shard], keys))

    def _everywhere(self, tables: list[dict[bytes, Codes]], key: bytes) -> bool:
        nodes = self._content.nodes
        return all(any(code >> 2 in nodes for code in table.get(key, ())) for table in tables)

    def _by_node(self, table: dict[bytes, Codes], keys: list[bytes]) -> dict[str, int]:
        found: dict[str, int] = {}
        having = set(self._content.nodes)
        for index, key in enumerate(keys):
            still = {code >> 2 for code in table.get(key, ())} & having
            for slot in having - still:
                if index:
                    found[self._content.nodes[slot].node_id] = index
            having = still
            if not having:
                return found
        for slot in having:
            if keys:
                found[self._content.nodes[slot].node_id] = len(keys)
        return found

    def tables(self) -> Iterator[tuple[TableName, dict[bytes, Codes]]]:
        """All that is known, nodes that may not be read from included."""
        return iter(self._content.tables.items())

    def check(self) -> None:
        for content in (self._content, *([self._coming] if self._coming is not None else [])):
            for name, table in content.tables.items():
                assert table, f"an empty table was kept for {name}"
                assert all(codes and list(codes) == sorted(set(codes)) for codes in table.values()), name
                assert all(len(key) == FOLDED_BYTES for key in table), name
                assert name.epoch <= content.epochs[name.group], name
            assert all(slot == node.slot for slot, node in content.nodes.items())


def _folded(hashes: bytes, namespace: Namespace) -> Iterator[bytes]:
    packed = pack_hashes(hashes, namespace.hash_bytes)
    return split_hashes(fold(packed, namespace.hash_bytes).tobytes(), FOLDED_BYTES)


def _name(table: control.IndexTable) -> TableName:
    return TableName(table.group, table.epoch, table.shard, table.salt)
