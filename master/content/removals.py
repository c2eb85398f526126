"""Removals of blocks by clients: found no more at once, then gone on every node, those too that are away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.master import messages as m
from kvstrata.master.content.chronicle import Chronicle
from kvstrata.master.content.misses import MissReason
from kvstrata.master.content.tombstones import Tombstone, Tombstones
from kvstrata.master.directory.directory import Directory
from kvstrata.master.naming import Naming
from kvstrata.master.nodes import Node, Nodes
from kvstrata.proto.keys import Namespace


@dataclass(frozen=True, slots=True)
class Removal:
    """``removed`` blocks were known; ``awaited`` nodes are attached and have been told."""

    command: int
    removed: int
    awaited: frozenset[str]


class Removals:
    """Part of the master's state; gives commands to ``emit``."""

    def __init__(
        self,
        directory: Directory,
        naming: Naming,
        nodes: Nodes,
        tombstones: Tombstones,
        chronicle: Chronicle,
        emit: Callable[[m.Command], None],
    ) -> None:
        self._directory = directory
        self._naming = naming
        self._nodes = nodes
        self._tombstones = tombstones
        self._chronicle = chronicle
        self._emit = emit

    def order(self, namespace: Namespace, salt: str, hashes: bytes, now: float) -> Removal:
        """Remove blocks of one shard everywhere; nodes that are away learn of it when they attach.

        Raises :class:`Busy` when too many removals wait for absent nodes.
        """
        holders = [node.node_id for node in self._nodes if node.may_hold_blocks]
        stone = self._tombstones.add(namespace, salt, hashes, holders)
        table, keys = self._naming.where(namespace, salt, hashes)
        removed = self._directory.remove_everywhere(table, keys)
        self._chronicle.note(now, "removed by a client", "", self._naming.about(table), keys, MissReason.REMOVED)
        if stone.waiting:
            self._emit(stone.saved())
        linked = [node for node in self._nodes if node.linked]
        for node in linked:
            assert node.attachment is not None
            self._emit(m.SendRemove(node.attachment.session, stone.command, namespace, salt, hashes))
        return Removal(stone.command, removed, frozenset(node.node_id for node in linked))

    def keep_out(self, node: Node) -> None:
        """Whatever the node says that it has: what it has yet to remove is not found there."""
        for stone in self._tombstones.waiting_for(node.node_id):
            self.keep_one_out(node, stone)

    def keep_one_out(self, node: Node, stone: Tombstone | m.SaveTombstone) -> None:
        """As :meth:`keep_out`, of one removal."""
        if node.attachment is not None and node.attachment.slot is not None:
            table, keys = self._naming.where(stone.namespace, stone.salt, stone.hashes)
            self._directory.remove_slot_blocks(node.attachment.slot, table, keys)

    def confirmed(self, node_id: str, command: int) -> None:
        """The node has done as it was told; of other commands than removals nothing is kept here."""
        stone = self._tombstones.confirm(command, node_id)
        if stone is not None:
            self._emit(stone.saved())

    def forget(self, node_id: str) -> None:
        """Nothing waits for this node any more."""
        for stone in self._tombstones.waiting_for(node_id):
            self.confirmed(node_id, stone.command)
