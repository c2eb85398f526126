"""The nodes that take new blocks, kept in the form in which placement weighs them."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from kvstrata.master.candidates import RAMP_MIN, RAMP_S, Amounts, Candidates, Lineup
from kvstrata.master.liveness import NodeState
from kvstrata.master.nodes import Node, Nodes
from kvstrata.master.tenants.rooms import Rooms


class Takers:
    """Part of the master's state. Follows the nodes: of what has changed since the last call (:attr:`Nodes.touched`)
    one row is made anew, and everything only when a node came, went, or is another."""

    def __init__(self, nodes: Nodes) -> None:
        self.lineup = Lineup((), ())
        self.node_ids: tuple[str, ...] = ()
        self._nodes = nodes
        self._row: dict[Node, int] = {}
        self._by_slot: dict[int, Node] = {}
        self._free: Amounts = np.zeros(0, dtype=np.int64)
        self._capacity = self._free
        self._since = np.zeros(0, dtype=np.float64)
        self._newest = -math.inf
        self._moved = False

    def moved(self) -> None:
        """Inventories may have come into service, or gone out of it, under other slots."""
        self._moved = True

    def node(self, slot: int) -> Node:
        """The taker that a slot stands for."""
        return self._by_slot[slot]

    def candidates(self, now: float) -> Candidates:
        """Those that take new blocks, in the order of :class:`Nodes`. Good until anything happens to a node."""
        self._follow()
        ramp = None
        if now - self._newest < RAMP_S:
            ramp = np.minimum(1.0, np.maximum(RAMP_MIN, (now - self._since) / RAMP_S))
        return Candidates(self.lineup, self._free, self._capacity, ramp)

    def _follow(self) -> None:
        touched = self._nodes.touched
        if not self._moved:
            for node in touched:
                row = self._row.get(node)
                if (row is not None) != _takes(node):
                    self._moved = True
                elif row is not None:
                    self._moved |= self._since[row] != _since(node)
                    self._free[row], self._capacity[row] = _free(node), node.dram_bytes
        touched.clear()
        if self._moved:
            self._begin()

    def _begin(self) -> None:
        nodes = [node for node in self._nodes if _takes(node)]
        self._by_slot = {_slot(node): node for node in nodes}
        self.lineup = Lineup([_slot(node) for node in nodes], [_boot_id(node) for node in nodes])
        self.node_ids = tuple(node.node_id for node in nodes)
        self._row = {node: row for row, node in enumerate(nodes)}
        self._free = np.array([_free(node) for node in nodes], dtype=np.int64)
        self._capacity = np.array([node.dram_bytes for node in nodes], dtype=np.int64)
        self._since = np.array([_since(node) for node in nodes], dtype=np.float64)
        self._newest = float(self._since.max(initial=-math.inf))
        self._moved = False

    def check(self) -> None:
        """Assert that what is kept is what the nodes say."""
        self._follow()
        nodes = [node for node in self._nodes if _takes(node)]
        assert list(self._row) == nodes and self.node_ids == tuple(node.node_id for node in nodes)
        assert self.lineup.slots.tolist() == [_slot(node) for node in nodes] == list(self._by_slot)
        hosts = {boot_id: [nodes[row] for row in rows] for boot_id, rows in self.lineup.hosts.items()}
        assert all(_boot_id(node) == boot_id for boot_id, here in hosts.items() for node in here)
        assert self._free.tolist() == [_free(node) for node in nodes]
        assert self._capacity.tolist() == [node.dram_bytes for node in nodes]
        assert self._since.tolist() == [_since(node) for node in nodes]


def limited(candidates: Candidates, rooms: Rooms | None, avoid: Collection[int]) -> Candidates:
    """The candidates as a tenant sees them whose shares leave it ``rooms``: what a share does not allow is as good as
    not there. Slots in ``avoid`` are left out while there are others."""
    if rooms is not None:
        free, capacity = np.minimum(candidates.free, rooms.free), np.minimum(candidates.capacity, rooms.share)
        candidates = Candidates(candidates.lineup, free, capacity, candidates.ramp)
    candidates.with_room()
    candidates.avoiding(avoid)
    return candidates


def _takes(node: Node) -> bool:
    return node.state is NodeState.ACTIVE and node.serving and not node.leaving


def _slot(node: Node) -> int:
    assert node.attachment is not None and node.attachment.slot is not None
    return node.attachment.slot


def _boot_id(node: Node) -> str:
    assert node.attachment is not None
    return node.attachment.facts.boot_id


def _since(node: Node) -> float:
    return math.inf if node.active_since is None else node.active_since


def _free(node: Node) -> int:
    reported = node.dram_bytes if node.usage is None else node.usage.dram_bytes_free
    return max(0, reported - node.placed_bytes)
