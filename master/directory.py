"""Which node has which block: soft state, rebuilt from what the nodes say.

A node's inventory stands under a *slot*, a small number that one attachment owns. A snapshot loads under
a slot of its own while the old one still answers; taking the new one into service and dropping the old is
the swap. Only slots named by :meth:`Directory.route` are ever handed to a reader.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata.master.holders import HIDDEN, SLOTS_MAX, Codes, HolderSets, Ids
from kvstrata.master.probing import Keys
from kvstrata.master.table import Table
from kvstrata.proto.errors import Busy

#: Miss reports remembered for a slot, so that what they hid can be shown again. Past it the oldest stay
#: hidden until the node names those blocks again.
HIDDEN_REPORTS_MAX: Final = 1024


class TableKey(NamedTuple):
    """One tenant's part of one shard of one group."""

    group: int
    shard: int
    salt: str


@dataclass(frozen=True, slots=True)
class Found:
    """Where the blocks of a lookup are; arrays run over the asked hashes.

    ``codes`` is u16[n], 0 or 1 + 4 * slot + tier, for the asked shard; ``present`` is bool[n] after the
    AND over all shards. ``unroutable`` counts blocks whose only holders may not be read from now.
    """

    codes: Codes
    present: npt.NDArray[np.bool_]
    hit_blocks: int
    shard_hit_blocks: int
    unroutable: int


class _Report(NamedTuple):
    """Blocks that a reader did not find on a slot: shown again once delta ``seq`` has been applied."""

    seq: int
    table: TableKey
    keys: Keys
    tiers: npt.NDArray[np.uint8]


class Directory:
    """All tables, under one set of holder ids. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.holders = HolderSets()
        self._tables: dict[TableKey, Table] = {}
        self._slots: set[int] = set()
        self._free_slots: list[int] = []
        self._reports: dict[int, deque[_Report]] = {}
        self._per_set = np.zeros(64, dtype=np.int64)
        self._hosts: dict[int, str] = {}
        self._routes: dict[str, Codes] = {}
        self._routes_reuses = 0

    # ------------------------------------------------------------------ slots

    def take_slot(self) -> int:
        """A slot with nothing in it. Raises :class:`Busy` when all are in use."""
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        if slot >= SLOTS_MAX:
            raise Busy(f"the directory has {SLOTS_MAX} inventories, which is the bound")
        self._slots.add(slot)
        return slot

    def drop_slot(self, slot: int) -> int:
        """Forget an inventory, in one pass over each table; returns the replicas forgotten."""
        dropped = self.blocks_of(slot)
        self._slots.remove(slot)
        self._free_slots.append(slot)
        self._reports.pop(slot, None)
        if self._hosts.pop(slot, None) is not None:
            self._routes.clear()
        mapping = self.holders.mapping_without_slot(slot)
        if dropped:
            self._remap(mapping)
        self.holders.forget_slot(slot)
        self._routes.clear()
        return dropped

    def _remap(self, mapping: Ids) -> None:
        counts = np.zeros(max(self.holders.size, len(self._per_set)), dtype=np.int64)
        np.add.at(counts, mapping, self._per_set[: len(mapping)])
        counts[0] = 0
        self._per_set = counts
        for key, table in list(self._tables.items()):
            table.remap(mapping)
            self._drop_if_empty(key, table)

    def route(self, hosts: Mapping[int, str]) -> None:
        """Set the slots that readers may be sent to, with the boot id of each one's host."""
        if hosts != self._hosts:
            self._hosts = dict(hosts)
            self._routes.clear()

    # ------------------------------------------------------------------ changes

    def add(self, slot: int, table: TableKey, tier: int, keys: Keys) -> int:
        """``slot`` has these blocks in ``tier``; returns how many that is news for."""
        return self._change(table, keys, lambda ids: self.holders.with_holder(ids, slot, tier))

    def remove(self, slot: int, table: TableKey, tier: int, keys: Keys) -> int:
        """``slot`` no longer has these blocks in ``tier``."""
        return self._change(table, keys, lambda ids: self.holders.without_holder(ids, slot, tier))

    def remove_everywhere(self, table: TableKey, keys: Keys) -> int:
        """No one is known to have these blocks any more; returns how many were known."""
        return self._change(table, keys, np.zeros_like)

    def remove_slot_blocks(self, slot: int, table: TableKey, keys: Keys) -> int:
        """``slot`` has these blocks in no tier."""
        return sum(self.remove(slot, table, tier, keys) for tier in range(HIDDEN))

    def hide(self, slot: int, table: TableKey, keys: Keys, seq: int) -> int:
        """Route no one to these blocks of ``slot`` until its delta ``seq`` has been applied (:meth:`applied`)."""
        known = self._tables.get(table)
        if known is None:
            return 0
        tiers = self.holders.tiers_of(known.find(keys), slot)
        seen = tiers != 0
        if not seen.any():
            return 0
        reports = self._reports.setdefault(slot, deque(maxlen=HIDDEN_REPORTS_MAX))
        reports.append(_Report(seq, table, keys[seen].copy(), tiers[seen]))
        return self._change(table, keys, lambda ids: self.holders.hidden(ids, slot))

    def applied(self, slot: int, seq: int) -> None:
        """Delta ``seq`` of ``slot`` is in: what was hidden up to it, and not removed since, shows again."""
        reports = self._reports.get(slot)
        if reports is None:
            return
        due = [report for report in reports if report.seq <= seq]
        later = [report for report in reports if report.seq > seq]
        for report in reversed(due):  # of two reports on one block the newer knows its tiers
            self._show(slot, _less(report, later))
        if later:
            self._reports[slot] = deque(later, maxlen=HIDDEN_REPORTS_MAX)
        else:
            del self._reports[slot]

    def _show(self, slot: int, report: _Report) -> None:
        for tiers in np.unique(report.tiers).tolist():
            keys = report.keys[report.tiers == tiers]
            self._change(report.table, keys, lambda ids, tiers=tiers: self.holders.shown(ids, slot, tiers))  # type: ignore[misc]

    def _change(self, key: TableKey, keys: Keys, change: Callable[[Ids], Ids]) -> int:
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = Table()
        before, after = table.update(keys, change)
        if len(self._per_set) < self.holders.size:
            self._per_set = np.concatenate((self._per_set, np.zeros(self.holders.size, dtype=np.int64)))
        size = len(self._per_set)
        self._per_set += np.bincount(after, minlength=size) - np.bincount(before, minlength=size)
        self._per_set[0] = 0
        self._drop_if_empty(key, table)
        return len(before)

    def _drop_if_empty(self, key: TableKey, table: Table) -> None:
        if not table.live:
            del self._tables[key]

    # ------------------------------------------------------------------ questions

    def lookup(self, group: int, shard: int, shard_count: int, salt: str, keys: Keys, boot_id: str = "") -> Found:
        """Where the blocks are, and the longest prefix of which every shard is there."""
        count = len(keys)
        routes = self._routes_for(boot_id)
        table = self._tables.get(TableKey(group, shard, salt))
        if table is None:
            nothing = np.zeros(count, dtype=np.uint16)
            return Found(nothing, np.zeros(count, dtype=np.bool_), 0, 0, 0)
        ids = table.find(keys)
        codes = routes[ids]
        present = codes != 0
        shard_hit_blocks = prefix_length(present)
        unroutable = int(np.count_nonzero(ids)) - int(np.count_nonzero(present))
        if shard_count > 1:
            present = self._with_sisters(present, group, shard, shard_count, salt, keys, routes)
        return Found(codes, present, prefix_length(present), shard_hit_blocks, unroutable)

    def _with_sisters(
        self,
        present: npt.NDArray[np.bool_],
        group: int,
        shard: int,
        shard_count: int,
        salt: str,
        keys: Keys,
        routes: Codes,
    ) -> npt.NDArray[np.bool_]:
        left = np.flatnonzero(present)
        for sister in range(shard_count):
            table = self._tables.get(TableKey(group, sister, salt)) if left.size else None
            if sister == shard:
                continue
            left = left[:0] if table is None else left[routes[table.find(keys[left])] != 0]
        everywhere = np.zeros_like(present)
        everywhere[left] = True
        return everywhere

    def _routes_for(self, boot_id: str) -> Codes:
        if boot_id not in self._hosts.values():
            boot_id = ""
        if self._routes_reuses != self.holders.reuses:
            self._routes.clear()
            self._routes_reuses = self.holders.reuses
        known = self._routes.get(boot_id)
        if known is None or len(known) < self.holders.size:
            known = self._routes[boot_id] = self.holders.routes(self._hosts, boot_id, known)
        return known

    def known_ids(self, table: TableKey, keys: Keys) -> Ids:
        """Holder set ids of the blocks, routable or not: u32[n], 0 where no one has it."""
        known = self._tables.get(table)
        return np.zeros(len(keys), dtype=np.uint32) if known is None else known.find(keys)

    # ------------------------------------------------------------------ counts

    @property
    def blocks(self) -> int:
        """Distinct blocks with at least one replica on an attached node, one being synced included."""
        return sum(table.live for table in self._tables.values())

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())

    def blocks_of(self, slot: int) -> int:
        """Distinct blocks that ``slot`` has in any tier, hidden ones included."""
        sets = np.flatnonzero(self._per_set[: self.holders.size]).tolist()
        holding = [set_id for set_id in sets if any(code >> 2 == slot for code in self.holders.holders(set_id))]
        return int(self._per_set[holding].sum())

    def blocks_by_slot(self) -> Counter[int]:
        """:meth:`blocks_of` for every slot that has any, in one pass over the holder sets."""
        counts: Counter[int] = Counter()
        for set_id in np.flatnonzero(self._per_set[: self.holders.size]).tolist():
            for slot in {code >> 2 for code in self.holders.holders(set_id)}:
                counts[slot] += int(self._per_set[set_id])
        return counts

    def tables(self) -> Iterator[tuple[TableKey, int]]:
        """(group, shard, salt) and blocks, for every tenant that has any."""
        return ((key, table.live) for key, table in self._tables.items())

    def check(self) -> None:
        """Assert that tables, counts, sets and slots agree. O(all blocks)."""
        self.holders.check()
        counts = np.zeros(len(self._per_set), dtype=np.int64)
        for key, table in self._tables.items():
            assert table.live, f"an empty table was kept for {key}"
            table.check()
            counts += table.histogram(len(counts))
        assert np.array_equal(counts, self._per_set), "counts by holder set have drifted"
        used = {code >> 2 for set_id in np.flatnonzero(counts).tolist() for code in self.holders.holders(set_id)}
        assert used <= self._slots, f"blocks of dropped slots: {used - self._slots}"
        assert set(self._hosts) <= self._slots and set(self._reports) <= self._slots
        assert not self._slots & set(self._free_slots)


def _less(report: _Report, others: Iterable[_Report]) -> _Report:
    """The report without the blocks that one of ``others`` names too."""
    for other in others:
        if other.table == report.table:
            named = Table()
            named.put(other.keys, np.ones(len(other.keys), dtype=np.uint32))
            rest = named.find(report.keys) == 0
            report = report._replace(keys=report.keys[rest], tiers=report.tiers[rest])
    return report


def prefix_length(present: npt.NDArray[np.bool_]) -> int:
    """Length of the leading run of True."""
    if not present.size:
        return 0
    first_hole = int(np.argmin(present))
    return len(present) if present[first_hole] else first_hole
