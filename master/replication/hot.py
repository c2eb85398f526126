"""Blocks that one busy node is asked for again and again: another node gets them too, so that readers spread.

Off unless the operator asks for it: placement spreads long prefixes in runs anyway, and each copy takes room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.directory.directory import TableKey
from kvstrata.master.directory.probing import Keys
from kvstrata.master.directory.table import Table
from kvstrata.master.nodes import Node
from kvstrata.master.replication.waiting import Recent, Rows

#: A node is busy when it sends this many times what nodes send on average, and at least so many bytes a second.
BUSY_FACTOR: Final = 1.5
BUSY_BYTES: Final = 64 << 20
#: Rates are averages over about so long, and looked at this often.
SMOOTH_S: Final = 3.0
LOOK_S: Final = 1.0
#: A prefix is hot when it was asked for this often in the window.
WINDOW_S: Final = 10.0
ASKED_MIN: Final = 8
#: Blocks copied at one look, and for how long a copy is kept though it is one too many (at least; at most twice that).
COPIED_AT_ONCE: Final = 512
KEPT_S: Final = 300.0
KEPT_MAX: Final = 1 << 18


class Rates:
    """Bytes a second that nodes send, from the totals in their reports."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[int, float]] = {}
        self.by_node: dict[str, float] = {}

    def seen(self, totals: Mapping[str, int], now: float) -> None:
        """Totals since each node's start; one that is lower than before is of another process."""
        for node_id, total in totals.items():
            before, at = self._totals.get(node_id, (total, now))
            if now > at and total >= before:
                rate, weight = (total - before) / (now - at), min(1.0, (now - at) / SMOOTH_S)
                known = self.by_node.get(node_id, rate)
                self.by_node[node_id] = known + weight * (rate - known)
            self._totals[node_id] = (total, now)
        for gone in self._totals.keys() - totals.keys():
            del self._totals[gone]
            self.by_node.pop(gone, None)

    @property
    def mean(self) -> float:
        return sum(self.by_node.values()) / len(self.by_node) if self.by_node else 0.0

    def busiest(self) -> str | None:
        """The node that sends far more than the others; None when none does."""
        if len(self.by_node) < 2:
            return None
        node_id = max(self.by_node, key=lambda name: self.by_node[name])
        return node_id if self.by_node[node_id] > max(BUSY_BYTES, BUSY_FACTOR * self.mean) else None

    def idle(self) -> frozenset[str]:
        """Nodes that send less than the average."""
        return frozenset(name for name, rate in self.by_node.items() if rate < self.mean)


class Hot:
    """What is asked for, who is busy with it, and which copies were made for that."""

    def __init__(self) -> None:
        self.enabled = False
        self.rates = Rates()
        self._recent = Recent(WINDOW_S)
        self._kept = Table()
        self._older = Table()
        self._rotated_at = 0.0
        self._looked_at = 0.0

    def asked(self, table: TableKey, hash_bytes: int, hashes: bytes, now: float) -> None:
        """A lookup. O(1)."""
        if self.enabled and hashes:
            self._recent.asked(table, hash_bytes, hashes, now)

    def due(self, nodes: list[Node], now: float) -> tuple[str, list[tuple[TableKey, Rows]]] | None:
        """The busy node, and the prefixes that were asked for most, if it is time to look and there is such a node."""
        if not self.enabled or now - self._looked_at < LOOK_S:
            return None
        self._looked_at = now
        self.rates.seen({node.node_id: node.usage.bytes_out for node in nodes if node.usage is not None}, now)
        busy = self.rates.busiest()
        return None if busy is None else (busy, self._hottest(now))

    def _hottest(self, now: float) -> list[tuple[TableKey, Rows]]:
        calls = self._recent.within(now)
        count: Counter[tuple[TableKey, bytes]] = Counter()
        longest: dict[tuple[TableKey, bytes], tuple[int, bytes]] = {}
        for table, width, hashes in calls:
            head = (table, hashes[:width])
            count[head] += 1
            if len(hashes) > len(longest.get(head, (0, b""))[1]):
                longest[head] = (width, hashes)
        found = []
        for head, times in count.most_common(8):
            if times >= ASKED_MIN:
                width, hashes = longest[head]
                found.append((head[0], np.frombuffer(hashes, dtype=np.uint8).reshape(-1, width)))
        return found

    # ------------------------------------------------------------------ copies that were made

    def copied(self, scoped: Keys) -> None:
        """These blocks (scoped keys) get a copy for now."""
        if self._kept.live < KEPT_MAX:
            self._kept.put(scoped, np.ones(len(scoped), dtype=np.uint32))

    def kept(self, scoped: Keys) -> npt.NDArray[np.bool_]:
        """Which blocks have such a copy that is to stay: bool[n]."""
        if not self._kept.live and not self._older.live:
            return np.zeros(len(scoped), dtype=np.bool_)
        kept: npt.NDArray[np.bool_] = (self._kept.find(scoped) != 0) | (self._older.find(scoped) != 0)
        return kept

    def turn(self, now: float) -> None:
        """Time passes: copies of long ago are as any other that is one too many."""
        if now - self._rotated_at >= KEPT_S:
            self._older = self._kept if now - self._rotated_at < 2 * KEPT_S else Table()
            self._kept, self._rotated_at = Table(), now

    def check(self) -> None:
        self._recent.check()
        self._kept.check()
        self._older.check()
