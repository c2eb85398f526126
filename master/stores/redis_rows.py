"""Durable policy as Redis keeps it: a hash for each kind of row, a JSON object for each row.

A row that is written by a later build may have members that this one does not know: they are passed over. What
changes the meaning of members is a new :data:`FORMAT`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kvstrata.master.messages import (
    Save,
    SaveFallback,
    SaveGrants,
    SaveGroup,
    SaveNode,
    SavePolicy,
    SaveReplicas,
    SaveScope,
    SaveTombstone,
    Share,
    TenantPolicy,
)
from kvstrata.master.saved import Saved
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import Namespace

FORMAT: Final = 1
#: The hashes of rows, in the order in which :func:`saved_of` takes them.
ROW_KEYS: Final = ("nodes", "groups", "tombstones", "policies", "fallback", "grants", "scopes", "replicas")
#: The only field of the hash ``fallback``.
_ONE: Final = b"one"


class NodeRow(msgspec.Struct, frozen=True):
    dram_bytes: int
    ssd_bytes: int
    gone: bool
    draining: bool = False


class GroupRow(msgspec.Struct, frozen=True):
    block_bytes: int
    block_tokens: int
    hash_bytes: int
    shard_count: int
    epoch: int


class TombstoneRow(msgspec.Struct, frozen=True):
    group: str
    shard: int
    salt: str
    hashes: bytes
    waiting: tuple[str, ...]


class Amounts(msgspec.Struct, frozen=True):
    """A policy or a share. A limit of None is none."""

    dram_limit: int | None = None
    ssd_limit: int | None = None
    dram_floor: int = 0
    ssd_floor: int = 0


class FallbackRow(msgspec.Struct, frozen=True):
    amounts: Amounts
    deny: bool


class GrantsRow(msgspec.Struct, frozen=True):
    shares: dict[str, Amounts]
    fallback: Amounts | None = None


class ScopeRow(msgspec.Struct, frozen=True):
    group: str
    salt: str | None
    erase: bool
    epoch: int | None
    waiting: tuple[str, ...]


class ReplicasRow(msgspec.Struct, frozen=True):
    group: str
    salt: str | None
    count: int


def row_of(write: Save) -> tuple[str, bytes, bytes]:
    """Which hash, which field of it, and its value; an empty value deletes the row."""
    match write:
        case SaveNode():
            row = NodeRow(write.dram_bytes, write.ssd_bytes, write.gone, write.draining)
            return "nodes", write.node_id.encode(), b"" if write.removed else _json(row)
        case SaveGroup():
            ns = write.namespace
            layout = GroupRow(ns.block_bytes, ns.block_tokens, ns.hash_bytes, ns.shard_count, write.epoch)
            return "groups", ns.group.encode(), _json(layout)
        case SaveTombstone():
            ns = write.namespace
            stone = TombstoneRow(ns.group, ns.shard, write.salt, write.hashes, write.waiting)
            return "tombstones", _number(write.command), _json(stone) if write.waiting else b""
        case SavePolicy():
            value = b"" if write.policy is None else _json(_amounts(write.policy))
            return "policies", write.salt.encode(), value
        case SaveFallback():
            return "fallback", _ONE, _json(FallbackRow(_amounts(write.policy), write.deny))
        case SaveGrants():
            fallback = None if write.fallback is None else _amounts(write.fallback)
            grants = GrantsRow({share.salt: _amounts(share) for share in write.shares}, fallback)
            return "grants", write.node_id.encode(), _json(grants) if write.shares or write.fallback else b""
        case SaveScope():
            scope = ScopeRow(write.group, write.salt, write.erase, write.epoch, write.waiting)
            return "scopes", _number(write.command), _json(scope) if write.waiting else b""
        case SaveReplicas():
            wanted = ReplicasRow(write.group, write.salt, write.count)
            name = msgspec.json.encode((write.group, write.salt))
            return "replicas", name, _json(wanted) if write.count else b""


def command_of(write: Save) -> int:
    """The number of a removal or a drop; 0 for anything else."""
    return write.command if isinstance(write, (SaveTombstone, SaveScope)) else 0


def saved_of(facts: Mapping[bytes, bytes], hashes: Sequence[Mapping[bytes, bytes]]) -> Saved:
    """What the hashes of :data:`ROW_KEYS` say, in the order of their fields. Raises :class:`ValueError`,
    :class:`LookupError` or :class:`InvalidArgument` when a row makes no sense."""
    try:
        return _saved_of(facts, *hashes)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def _saved_of(
    facts: Mapping[bytes, bytes],
    nodes: Mapping[bytes, bytes],
    groups: Mapping[bytes, bytes],
    tombstones: Mapping[bytes, bytes],
    policies: Mapping[bytes, bytes],
    fallback: Mapping[bytes, bytes],
    grants: Mapping[bytes, bytes],
    scopes: Mapping[bytes, bytes],
    replicas: Mapping[bytes, bytes],
) -> Saved:
    saved_groups = tuple(_group(name, value) for name, value in sorted(groups.items()))
    by_name = {group.namespace.group: group.namespace for group in saved_groups}
    return Saved(
        nodes=tuple(_node(node_id, value) for node_id, value in sorted(nodes.items())),
        groups=saved_groups,
        tombstones=tuple(_tombstone(command, tombstones[command], by_name) for command in sorted(tombstones, key=int)),
        last_command=int(facts.get(b"last_command", 0)),
        policies=tuple(_policy(salt, value) for salt, value in sorted(policies.items())),
        fallback=_fallback(fallback[_ONE]) if _ONE in fallback else None,
        grants=tuple(_grants(node_id, value) for node_id, value in sorted(grants.items())),
        scopes=tuple(_scope(command, scopes[command]) for command in sorted(scopes, key=int)),
        replicas=tuple(sorted(map(_replicas, replicas.values()), key=_by_name)),
        revision=int(facts.get(b"revision", 0)),
        leader_epoch=int(facts.get(b"leader_epoch", 0)),
    )


def _json(row: msgspec.Struct) -> bytes:
    return msgspec.json.encode(row)


def _number(command: int) -> bytes:
    return str(command).encode()


def _amounts(policy: TenantPolicy | Share) -> Amounts:
    return Amounts(policy.dram_limit, policy.ssd_limit, policy.dram_floor, policy.ssd_floor)


def _share(salt: str, amounts: Amounts) -> Share:
    return Share(salt, amounts.dram_limit, amounts.ssd_limit, amounts.dram_floor, amounts.ssd_floor)


def _tenant(salt: str, amounts: Amounts) -> TenantPolicy:
    return TenantPolicy(salt, amounts.dram_limit, amounts.ssd_limit, amounts.dram_floor, amounts.ssd_floor)


def _node(node_id: bytes, value: bytes) -> SaveNode:
    row = msgspec.json.decode(value, type=NodeRow)
    return SaveNode(node_id.decode(), row.dram_bytes, row.ssd_bytes, row.gone, row.draining)


def _group(name: bytes, value: bytes) -> SaveGroup:
    row = msgspec.json.decode(value, type=GroupRow)
    namespace = Namespace(name.decode(), row.block_bytes, row.block_tokens, row.hash_bytes, 0, row.shard_count)
    return SaveGroup(namespace.validated(), row.epoch)


def _tombstone(command: bytes, value: bytes, groups: Mapping[str, Namespace]) -> SaveTombstone:
    row = msgspec.json.decode(value, type=TombstoneRow)
    if row.group not in groups:
        raise InvalidArgument(f"removal {command.decode()} is of {row.group!r}, which is no namespace here")
    of = groups[row.group]
    namespace = Namespace(row.group, of.block_bytes, of.block_tokens, of.hash_bytes, row.shard, of.shard_count)
    return SaveTombstone(int(command), namespace.validated(), row.salt, row.hashes, row.waiting)


def _policy(salt: bytes, value: bytes) -> TenantPolicy:
    return _tenant(salt.decode(), msgspec.json.decode(value, type=Amounts))


def _fallback(value: bytes) -> SaveFallback:
    row = msgspec.json.decode(value, type=FallbackRow)
    return SaveFallback(_tenant("", row.amounts), row.deny)


def _grants(node_id: bytes, value: bytes) -> SaveGrants:
    row = msgspec.json.decode(value, type=GrantsRow)
    shares = tuple(_share(salt, amounts) for salt, amounts in sorted(row.shares.items()))
    return SaveGrants(node_id.decode(), shares, None if row.fallback is None else _share("", row.fallback))


def _scope(command: bytes, value: bytes) -> SaveScope:
    row = msgspec.json.decode(value, type=ScopeRow)
    return SaveScope(int(command), row.group, row.salt, row.erase, row.epoch, row.waiting)


def _replicas(value: bytes) -> SaveReplicas:
    row = msgspec.json.decode(value, type=ReplicasRow)
    return SaveReplicas(row.group, row.salt, row.count)


def _by_name(row: SaveReplicas) -> tuple[str, bool, str]:
    """Of one group, what is of every salt comes last."""
    return row.group, row.salt is None, row.salt or ""
