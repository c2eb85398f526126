"""Entries of the log as messages for those who watch."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.master.directory.directory import TableKey
from kvstrata.master.index.log import Entry
from kvstrata.master.messages import NodeFacts
from kvstrata.master.namespaces import Group
from kvstrata.proto import control_pb2 as control


def table_message(key: TableKey, group: Group) -> control.IndexTable:
    return control.IndexTable(
        group=group.name,
        epoch=group.epoch,
        shard=key.shard,
        shard_count=group.shard_count,
        salt=key.salt,
        hash_bytes=group.hash_bytes,
        block_tokens=group.block_tokens,
        block_bytes=group.block_bytes,
    )


def change_message(
    entry: Entry, table_of: Callable[[TableKey], control.IndexTable | None]
) -> control.IndexChange | None:
    """None for a table that has no name any more."""
    change = control.IndexChange(
        kind=control.IndexChange.Kind.Name(entry.kind), slot=entry.slot, tier=entry.tier, hashes=entry.hashes
    )
    if entry.table is not None:
        table = table_of(entry.table)
        if table is None:
            return None
        change.table.CopyFrom(table)
    if entry.nodes is not None:
        change.nodes.extend(_node(slot, facts) for slot, facts in entry.nodes.items())
    return change


def _node(slot: int, facts: NodeFacts) -> control.IndexNode:
    return control.IndexNode(
        slot=slot, node_id=facts.node_id, incarnation=facts.incarnation, boot_id=facts.boot_id, host=facts.host
    )
