"""Which replica of a block an asker is sent to: on its own host first, then in memory, then on the least busy node.

Replicas that are as good as each other share the work: a prefix is read from all of them in runs of blocks, unless
they are on the asker's host, where one node is as fast as several.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.directory.holders import HIDDEN, Codes, HolderSets, Ids

#: Blocks in a row of one lookup that one of several equal replicas serves.
RUN_BLOCKS: Final = 64
#: A node's part of the runs is a whole number of these.
LANES: Final = 16


@dataclass(slots=True)
class _Table:
    """The answers for askers of one host, by holder set. ``best`` u16[n]; ``many``: it has equals, found in ``lanes``
    (u16[n, LANES]) where ``filled``; ``runs`` is 1 where they take turns in runs. ``replicas``: nodes that have it."""

    best: Codes = field(default_factory=lambda: np.zeros(0, np.uint16))
    many: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    runs: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    filled: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    lanes: Codes = field(default_factory=lambda: np.zeros((0, LANES), np.uint16))
    replicas: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    any_many: bool = False


class Routes:
    """Answers for the routable slots, worked out once a holder set and host."""

    def __init__(self, holders: HolderSets) -> None:
        self._holders = holders
        self._hosts: dict[int, str] = {}
        self._weights: dict[int, float] = {}
        self._tables: dict[str, _Table] = {}
        self._reuses = 0

    @property
    def slots(self) -> set[int]:
        """Those that readers may be sent to."""
        return set(self._hosts)

    def set_hosts(self, hosts: Mapping[int, str]) -> None:
        """The slots that readers may be sent to, with the boot id of each one's host."""
        if hosts != self._hosts:
            self._hosts = dict(hosts)
            self._tables.clear()

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """How much of the reads each slot should get, beside its equals; 1.0 for those not named."""
        if weights != self._weights:
            self._weights = dict(weights)
            for table in self._tables.values():
                table.filled[:] = False

    def forget(self, slot: int) -> None:
        """The slot is no more, or means something else from now on."""
        self._hosts.pop(slot, None)
        self._weights.pop(slot, None)
        self._tables.clear()

    def held(self, ids: Ids, boot_id: str) -> npt.NDArray[np.bool_]:
        """Blocks with these holder sets that somebody may be sent to: bool[n]."""
        held: npt.NDArray[np.bool_] = self._table(boot_id).best[ids] != 0
        return held

    def codes(self, ids: Ids, boot_id: str, start: int = 0, avoid: Collection[int] = ()) -> Codes:
        """The location code of each block (0: none), u16[n].

        ``start`` spreads callers over equal replicas: the same number, the same answer. A slot in ``avoid`` is
        named only where no other is left.
        """
        table = self._table(boot_id)
        start %= 1 << 32
        codes = table.best[ids]
        if table.any_many:
            at = np.flatnonzero(table.many[ids])
            if at.size:
                codes[at] = self._in_turns(table, boot_id, ids[at], at, start)
        return self._around(codes, ids, boot_id, start, avoid) if avoid else codes

    def few(self, ids: Sequence[int], boot_id: str) -> tuple[list[int], int] | None:
        """:meth:`codes` and :meth:`replicas` of few blocks, in plain integers; None when some of them have replicas
        that take turns."""
        table = self._table(boot_id)
        if table.any_many and any(map(table.many.item, ids)):
            return None
        best, replicas = table.best.item, table.replicas.item
        return [best(set_id) for set_id in ids], max(map(replicas, ids), default=0)

    def replicas(self, ids: Ids, boot_id: str) -> int:
        """How many nodes have the block that most of them have, of blocks with these holder sets; at most 255."""
        return int(self._table(boot_id).replicas[ids].max(initial=0))

    def _in_turns(self, table: _Table, boot_id: str, ids: Ids, positions: npt.NDArray[np.int64], start: int) -> Codes:
        empty = ids[~table.filled[ids]]
        for set_id in np.unique(empty).tolist() if empty.size else ():
            equals, _ = self._equals(set_id, boot_id)
            table.lanes[set_id] = _shared_out(equals, [self._weights.get((code - 1) >> 2, 1.0) for code in equals])
            table.filled[set_id] = True
        lane = (start + positions // RUN_BLOCKS * table.runs[ids]) % LANES
        chosen: Codes = table.lanes[ids, lane]
        return chosen

    def _around(self, codes: Codes, ids: Ids, boot_id: str, start: int, avoid: Collection[int]) -> Codes:
        slots = (codes.astype(np.int64) - 1) >> 2
        at = np.flatnonzero(np.isin(slots, np.fromiter(avoid, np.int64)))
        if not at.size:
            return codes
        sets, which = np.unique(ids[at], return_inverse=True)
        others = [self._equals(set_id, boot_id, avoid)[0] for set_id in sets.tolist()]
        instead = np.array([equals[start % len(equals)] if equals else 0 for equals in others], np.uint16)[which]
        codes[at] = np.where(instead != 0, instead, codes[at])
        return codes

    # ------------------------------------------------------------------ one holder set

    def _equals(self, set_id: int, boot_id: str, avoid: Collection[int] = ()) -> tuple[list[int], bool]:
        """Location codes of the best replicas, all as good as each other, and whether they are on the asker's host."""
        ranked = [
            ((code & 3) + (0 if boot_id and self._hosts[code >> 2] == boot_id else 4), code)
            for code in self._routable(set_id)
            if code >> 2 not in avoid
        ]
        if not ranked:
            return [], False
        best = min(ranked)[0]
        return [1 + code for rank, code in ranked if rank == best], best < 4

    def _routable(self, set_id: int) -> list[int]:
        return [code for code in self._holders.visible(set_id) if code & 3 != HIDDEN and code >> 2 in self._hosts]

    def _table(self, boot_id: str) -> _Table:
        if self._reuses != self._holders.reuses:
            self._tables.clear()
            self._reuses = self._holders.reuses
        if boot_id not in self._hosts.values():
            boot_id = ""
        table = self._tables.get(boot_id)
        if table is None:
            table = self._tables[boot_id] = _Table()
        if len(table.best) < self._holders.size:
            self._grow(table, boot_id)
        return table

    def _grow(self, table: _Table, boot_id: str) -> None:
        fresh = [self._equals(set_id, boot_id) for set_id in range(len(table.best), self._holders.size)]
        first = len(table.best)
        best = [equals[set_id % len(equals)] if equals else 0 for set_id, (equals, _) in enumerate(fresh, first)]
        table.best = np.concatenate((table.best, np.array(best, np.uint16)))
        table.many = np.concatenate((table.many, np.array([len(equals) > 1 for equals, _ in fresh], np.bool_)))
        table.runs = np.concatenate((table.runs, np.array([not near for _, near in fresh], np.uint8)))
        nodes = [len({code >> 2 for code in self._routable(at)}) for at in range(first, self._holders.size)]
        table.replicas = np.concatenate((table.replicas, np.minimum(nodes, 255).astype(np.uint8)))
        table.filled = np.concatenate((table.filled, np.zeros(len(fresh), np.bool_)))
        table.any_many = table.any_many or bool(table.many[first:].any())
        if table.any_many and len(table.lanes) < len(table.best):
            more = np.zeros((2 * len(table.best) - len(table.lanes), LANES), np.uint16)
            table.lanes = np.concatenate((table.lanes, more))


def _shared_out(codes: Sequence[int], weights: Sequence[float]) -> Codes:
    """``LANES`` choices from ``codes``, evenly spread, each by its weight (smooth weighted round robin)."""
    total = sum(weights)
    credit = [0.0] * len(codes)
    lanes = []
    for _ in range(LANES):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        best = credit.index(max(credit))
        credit[best] -= total
        lanes.append(codes[best])
    return np.array(lanes, np.uint16)
