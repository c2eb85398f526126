"""What changes in a master's state when it begins to lead, ceases to, or hears what the leader has saved.

The directory stays as it is: nodes tell every master what they have. What a leader alone works by (policies,
grants, orders that are not confirmed) is taken from the store, and nodes attach again, so that each is told anew.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from kvstrata.master import messages as m
from kvstrata.master.journal import row_key
from kvstrata.master.membership import Membership
from kvstrata.master.saved import Saved
from kvstrata.master.state import MasterState
from kvstrata.proto.errors import Busy, FingerprintMismatch


def take_over(state: MasterState, saved: Saved, epoch: int, now: float) -> list[m.Command]:
    """Lead in ``epoch`` by what the store has; O(nodes and rows)."""
    state.standing.lead(epoch)
    state.restore_orders(saved, now)
    adopt(state, saved, now)
    _clear_away(state, saved, now)
    state.membership.close_all("another master leads now: attach again", now)
    _write(state, saved)
    state.emit(m.Report("leads", {"epoch": epoch, "nodes": len(state.nodes)}))
    return state.taken()


def go_on(state: MasterState, epoch: int) -> list[m.Command]:
    """Lead on in a greater epoch: the lease had lapsed, and nobody else took it."""
    state.standing.lead(epoch)
    state.emit(m.Report("leads on", {"epoch": epoch}))
    return state.taken()


def step_down(state: MasterState, reason: str, now: float) -> list[m.Command]:
    """Another master leads: its orders count, and not what was ordered here."""
    epoch = state.standing.epoch
    state.standing.follow()
    state.forget_orders()
    state.membership.close_all("this master leads no more: attach again", now)
    state.emit(m.Report("leads no more", {"epoch": epoch, "reason": reason}))
    return state.taken()


def follow(state: MasterState, saved: Saved, now: float, *, exact: bool = False) -> list[m.Command]:
    """Take note of what the leader saved. ``exact``: this master led until now, and may know what never was."""
    if exact and _epochs_lowered(state, saved, now):
        for node in state.nodes:
            if node.attachment is not None:
                state.membership.forget(node, now)
        state.membership.close_all("weight epochs are not what this master took them for: attach again", now)
    adopt(state, saved, now)
    return state.taken()


def adopt(state: MasterState, saved: Saved, now: float) -> None:
    """Namespaces, weight epochs and nodes that are in the store and not known here."""
    for group in saved.groups:
        try:
            state.namespaces.register(group.namespace)
        except (FingerprintMismatch, Busy) as error:
            state.emit(m.Report("a saved namespace is refused", {"group": group.namespace.group, "reason": str(error)}))
            continue
        state.clearing.learned([(group.namespace.group, group.epoch)], now)
    _adopt_roster(state.membership, saved.nodes, now)
    state.replication.load(saved.replicas, saved.nodes)


def _adopt_roster(membership: Membership, nodes: Collection[m.SaveNode], now: float) -> None:
    rostered = {saved.node_id for saved in nodes}
    for known in [known for known in membership.nodes if known.node_id not in rostered and known.attachment is None]:
        membership.remove(known, now)
    for saved in nodes:
        node = membership.nodes.get(saved.node_id)
        if node is None:
            membership.nodes.restore(saved)
        elif node.attachment is None:
            node.dram_bytes, node.ssd_bytes, node.gone = saved.dram_bytes, saved.ssd_bytes, saved.gone


def _epochs_lowered(state: MasterState, saved: Saved, now: float) -> bool:
    lowered = False
    for group in saved.groups:
        known = state.namespaces.find(group.namespace)
        if known is not None and known.epoch > group.epoch:
            state.clearing.renew(known.name, group.epoch, now)
            lowered = True
    return lowered


def _clear_away(state: MasterState, saved: Saved, now: float) -> None:
    """What nodes have yet to remove is found no more, though they have not said that it is gone."""
    for stone in saved.tombstones:
        for node in filter(None, map(state.nodes.get, stone.waiting)):
            state.removals.keep_one_out(node, stone)
    dropping = {node_id for scope in saved.scopes if scope.epoch is None for node_id in scope.waiting}
    for node in state.nodes:
        if node.node_id in dropping and node.attachment is not None:
            state.membership.forget(node, now)


# ---------------------------------------------------------------------- what the store is to have


def reconcile(state: MasterState, saved: Saved, now: float) -> list[m.Command]:
    """Write what the store has not, or has otherwise: it was emptied, or an old copy of it was put back."""
    _write(state, saved)
    state.quotas.save_all(now)
    state.emit(m.Report("the state store had lost something: written again", {"revision": saved.revision}))
    return state.taken()


def _write(state: MasterState, saved: Saved) -> None:
    ours = {row_key(write): write for write in everything(state)}
    theirs = {row_key(write): write for write in rows(saved)}
    for key, write in ours.items():
        if theirs.get(key) != write:
            state.emit(write)
    for key, write in theirs.items():
        if key not in ours and not isinstance(write, m.SaveGrants):
            state.emit(_deleted(write))
    for grants in saved.grants:
        if grants.node_id not in state.quotas.nodes:
            state.emit(m.SaveGrants(grants.node_id, ()))


def everything(state: MasterState) -> list[m.Save]:
    """All that is to be durable, but what nodes were granted (:meth:`Quotas.save_all`)."""
    quotas = state.quotas
    writes: list[m.Save] = [node.saved() for node in state.nodes]
    writes += [m.SaveGroup(group.namespace(0), group.epoch) for group in state.namespaces.groups]
    writes += [stone.saved() for stone in state.tombstones]
    writes += [scope.saved() for scope in state.clearing.scopes]
    writes += [m.SavePolicy(salt, policy) for salt, policy in quotas.policies.items()]
    writes += state.replication.rules.rows()
    if quotas.denies or quotas.fallback != m.TenantPolicy(""):
        writes.append(m.SaveFallback(quotas.fallback, quotas.denies))
    return writes


def rows(saved: Saved) -> list[m.Save]:
    """The writes that make a store what it was when ``saved`` was loaded."""
    writes: list[m.Save] = [*saved.nodes, *saved.tombstones, *saved.scopes, *saved.grants, *saved.replicas]
    writes += [m.SaveGroup(replace(group.namespace, shard=0), group.epoch) for group in saved.groups]
    writes += [m.SavePolicy(policy.salt, policy) for policy in saved.policies]
    if saved.fallback is not None:
        writes.append(saved.fallback)
    return writes


def _deleted(write: m.Save) -> m.Save:
    match write:
        case m.SaveNode():
            return m.SaveNode(write.node_id, 0, 0, gone=True, removed=True)
        case m.SaveTombstone():
            return m.SaveTombstone(write.command, write.namespace, write.salt, write.hashes, ())
        case m.SaveScope():
            return m.SaveScope(write.command, write.group, write.salt, write.erase, write.epoch, ())
        case m.SavePolicy():
            return m.SavePolicy(write.salt, None)
        case m.SaveFallback():
            return m.SaveFallback(m.TenantPolicy(""), deny=False)
        case m.SaveGrants():
            return m.SaveGrants(write.node_id, ())
        case m.SaveReplicas():
            return m.SaveReplicas(write.group, write.salt, 0)
        case m.SaveGroup():
            return write  # never forgotten: its epoch outlives its blocks
