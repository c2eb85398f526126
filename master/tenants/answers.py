"""Tenants as operators see and change them: rows, and policies that are checked before they apply."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from kvstrata.master import messages as m
from kvstrata.master.content.calls import Content
from kvstrata.master.converters import share_message
from kvstrata.master.hub import Hub
from kvstrata.master.state import MasterState
from kvstrata.master.status import orders
from kvstrata.master.tenants.tenancy import TIERS, by_tier, denied, used_of
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.proto.keys import check_salt
from kvstrata.proto.limits import limits_of
from kvstrata.proto.status import Tier

#: Rows of one listing, whatever the caller asks for.
ROWS_MAX: Final = 2000
#: Largest limit: more than any cluster has, and a whole number in every store.
BYTES_MAX: Final = 1 << 60

Amounts: TypeAlias = Mapping[Tier, int]


class Tenants:
    """Thread-safe: everything goes through the hub's lock."""

    def __init__(self, hub: Hub, content: Content) -> None:
        self._hub = hub
        self._content = content

    # ------------------------------------------------------------------ asking

    def list(self, query: control.TenantQuery) -> control.TenantList:
        """Those named, or all that have a policy or use anything; with predicted hit rates if asked.

        Raises :class:`NotLeader`: only the leader knows what tenants use.
        """
        self._hub.require_leader()
        salts = [check_salt(salt) for salt in query.salts]
        limit = min(query.limit or ROWS_MAX, ROWS_MAX)
        listed = self._hub.read(lambda state, _: _list(state, salts, limit))
        for row in listed.tenants:
            self._add_lookups(row, predict=query.what_if)
        return listed

    def row(self, salt: str) -> control.TenantRow:
        return self.list(control.TenantQuery(salts=[salt])).tenants[0]

    def _add_lookups(self, row: control.TenantRow, *, predict: bool) -> None:
        """What it asked for lately, and what other quotas would give: sampled, so 0 for most of very many tenants."""
        salt, nbytes = row.policy.salt, _quota(row)
        asked = self._hub.lookup_log.read(lambda what_if: what_if.asked_by(salt))
        row.blocks_asked, row.blocks_hit, row.sampled = asked.blocks_asked, asked.blocks_hit, asked.references
        if predict and nbytes:
            for factor, size, rate in self._hub.lookup_log.read(lambda w: w.predict_row(salt, nbytes)):
                row.what_if.add(factor=factor, bytes=size, hit_rate=rate)

    # ------------------------------------------------------------------ changing

    def set(self, request: control.TenantSet) -> control.TenantChanged:
        """Give a tenant, or those without a policy, their policy, whole.

        Raises :class:`InvalidArgument` with the numbers when it cannot be, :class:`Unavailable` when it is in
        effect and may be forgotten in a restart.
        """
        policy = m.TenantPolicy(**limits_of(request.policy))
        if request.is_default:
            return self._set_default(policy, request.deny, request.dry_run)
        if request.deny:
            raise InvalidArgument("deny is for the default; a tenant that may store nothing has limits of 0")
        warnings = self._hub.read(lambda state, _: checked(state, policy))
        before = self.row(policy.salt)
        if request.dry_run:
            return control.TenantChanged(before=before, after=_as_if(before, policy), warnings=warnings)
        self._hub.order(lambda state, now: (None, state.set_tenant(policy, now)))
        self._hub.ordered(
            orders.tenant_set(policy_message(policy), before.policy if before.defined else control.TenantPolicy())
        )
        self._make_durable("the policy is in effect")
        return control.TenantChanged(before=before, after=self.row(policy.salt), warnings=warnings)

    def _set_default(self, policy: m.TenantPolicy, deny: bool, dry_run: bool) -> control.TenantChanged:
        warnings = self._hub.read(lambda state, _: checked_default(state, policy, deny))
        before = self._hub.read(lambda state, _: denied(state.quotas.fallback, state.quotas.denies))
        changed = control.TenantChanged(
            before=control.TenantRow(policy=policy_message(before), defined=True),
            after=control.TenantRow(policy=policy_message(denied(policy, deny)), defined=True),
            warnings=warnings,
        )
        if not dry_run:
            self._hub.order(lambda state, now: (None, state.set_default(policy, deny, now)))
            self._hub.ordered(orders.default_set(changed.after.policy, changed.before.policy, deny))
            self._make_durable("the default is in effect")
        return changed

    def remove(self, request: control.TenantRemove) -> control.TenantChanged:
        """Take a tenant's policy away, and its blocks if asked. Raises as :meth:`set`."""
        salt = check_salt(request.salt)
        if request.erase and not request.drop_blocks:
            raise InvalidArgument("erase goes with drop_blocks: there is nothing to erase otherwise")
        before = self.row(salt)
        fallback = self._hub.read(lambda state, _: denied(state.quotas.fallback, state.quotas.denies))
        changed = control.TenantChanged(before=before)
        if not before.defined:
            changed.warnings.append(f"tenant {salt!r} has no policy: the default applies to it already")
        if not request.dry_run:
            self._hub.order(lambda state, now: (None, state.remove_tenant(salt, now)))
            self._hub.ordered(orders.tenant_removed(salt, named=before.defined))
            self._make_durable("the policy is removed")
        if request.drop_blocks:
            changed.dropped.CopyFrom(self._content.clear("", salt, request.erase, request.dry_run))
        if request.dry_run:
            changed.after.CopyFrom(_as_if(before, m.TenantPolicy(salt, fallback.dram_limit, fallback.ssd_limit)))
            changed.after.defined = False
        else:
            changed.after.CopyFrom(self.row(salt))
        return changed

    def _make_durable(self, what: str) -> None:
        if not self._hub.durable():
            raise Unavailable(f"{what}, but a restart of this master may forget it: {self._hub.why_not_durable()}")


# ---------------------------------------------------------------------- rows


def _list(state: MasterState, salts: Iterable[str], limit: int) -> control.TenantList:
    quotas = state.quotas
    wanted = list(salts)
    if not wanted:
        known = {salt for salt, _ in quotas.tenants()}
        known.update(salt for member in quotas.nodes.values() if member.session is not None for salt in member.usage)
        wanted = sorted(known)
    shown = set(wanted[:limit])
    blocks: Counter[str] = Counter()
    for table, count in state.directory.tables():
        if table.salt in shown:
            blocks[table.salt] += count
    capacity = capacities(state)
    return control.TenantList(
        tenants=[_row(state, salt, blocks[salt]) for salt in wanted[:limit]],
        fallback=policy_message(denied(quotas.fallback, quotas.denies)),
        fallback_denies=quotas.denies,
        dram_bytes=capacity[Tier.DRAM],
        ssd_bytes=capacity[Tier.SSD],
        left_out=max(0, len(wanted) - limit),
    )


def _row(state: MasterState, salt: str, blocks: int) -> control.TenantRow:
    quotas = state.quotas
    policy = quotas.policy_of(salt)
    row = control.TenantRow(
        policy=policy_message(policy),
        defined=quotas.defined(salt),
        blocks=blocks,
        dram_floor_unmet=quotas.unmet(salt, Tier.DRAM),
        ssd_floor_unmet=quotas.unmet(salt, Tier.SSD),
    )
    tenant = quotas.tenant(salt)
    for node_id, member in quotas.nodes.items():
        usage = member.usage.get(salt)
        if member.session is None or (usage is None and tenant is None):
            continue
        usage = usage or m.TenantUsage(salt)
        row.dram_bytes += usage.dram_bytes
        row.ssd_bytes += usage.ssd_bytes
        row.nodes.add(
            node_id=node_id,
            usage=control.TenantUsage(
                salt=salt,
                dram_bytes=usage.dram_bytes,
                ssd_bytes=usage.ssd_bytes,
                dram_wanted=usage.dram_wanted,
                ssd_wanted=usage.ssd_wanted,
            ),
            share=None if tenant is None else share_message(tenant.share(node_id)),
            confirmed=salt not in member.unconfirmed,
        )
    return row


def _as_if(row: control.TenantRow, policy: m.TenantPolicy) -> control.TenantRow:
    """The row were this its policy: shares as they are."""
    other = control.TenantRow()
    other.CopyFrom(row)
    other.policy.CopyFrom(policy_message(policy))
    other.defined = True
    return other


def _quota(row: control.TenantRow) -> int:
    """What predictions are multiples of: the limits of both tiers, or what is used where one has none."""
    policy = row.policy
    if policy.HasField("dram_limit") and policy.HasField("ssd_limit"):
        return policy.dram_limit + policy.ssd_limit
    return row.dram_bytes + row.ssd_bytes


def policy_message(policy: m.TenantPolicy) -> control.TenantPolicy:
    """Limits that are None stay absent."""
    return control.TenantPolicy(**dataclasses.asdict(policy))


# ---------------------------------------------------------------------- checks


def capacities(state: MasterState) -> Amounts:
    """Bytes of all nodes that are part of the cluster, present or away."""
    nodes = [node for node in state.nodes if not node.gone]
    return {
        Tier.DRAM: sum(node.dram_bytes for node in nodes),
        Tier.SSD: sum(node.ssd_bytes for node in nodes),
    }


def checked(state: MasterState, policy: m.TenantPolicy) -> list[str]:
    """Warnings; raises :class:`InvalidArgument` with the numbers when the cluster cannot keep what it promises."""
    capacity = capacities(state)
    warnings = []
    for tier, limit, floor in by_tier(policy):
        _check_amounts(tier.name, limit, floor)
        others = sum(
            by_tier(other)[TIERS.index(tier)][2]
            for other in state.quotas.policies.values()
            if other.salt != policy.salt
        )
        if floor and capacity[tier] and others + floor > capacity[tier]:
            raise InvalidArgument(
                f"a {tier.name} floor of {floor} bytes does not fit: floors of other tenants take {others} of the "
                f"cluster's {capacity[tier]} bytes, {max(0, capacity[tier] - others)} are left"
            )
        warnings += _warnings(state, policy.salt, tier, limit, floor, capacity[tier])
    return warnings


def _check_amounts(name: str, limit: int | None, floor: int) -> None:
    for what, value in (("limit", limit), ("floor", floor)):
        if value is not None and not 0 <= value <= BYTES_MAX:
            raise InvalidArgument(f"a {name} {what} of {value} bytes: 0 to {BYTES_MAX} are allowed")
    if limit is not None and floor > limit:
        raise InvalidArgument(f"the {name} floor of {floor} bytes is above the limit of {limit} bytes")


def _warnings(state: MasterState, salt: str, tier: Tier, limit: int | None, floor: int, capacity: int) -> list[str]:
    said = []
    if not capacity and (limit or floor):
        where = "no node has an SSD" if tier == Tier.SSD else "no node is known"
        said.append(f"{where}: what is said of {tier.name} has no effect until one joins")
    elif limit is not None and limit > capacity:
        said.append(f"the {tier.name} limit of {limit} bytes is more than the cluster's {capacity}")
    used = sum(used_of(member.usage[salt], tier) for member in state.quotas.nodes.values() if salt in member.usage)
    if limit is not None and used > limit:
        said.append(f"{used} bytes of {tier.name} are in use: {used - limit} of them leave")
    return said


def checked_default(state: MasterState, policy: m.TenantPolicy, deny: bool) -> list[str]:
    """Warnings about a default; raises :class:`InvalidArgument`."""
    if policy.dram_floor or policy.ssd_floor:
        raise InvalidArgument("a default has no floors: they would be promised to every salt there may ever be")
    if deny and (policy.dram_limit or policy.ssd_limit):
        raise InvalidArgument("a default either denies or has limits: give one of them")
    warnings = []
    for tier, limit, _ in by_tier(denied(policy, deny)):
        _check_amounts(tier.name, limit, 0)
        used: Counter[str] = Counter()
        for member in state.quotas.nodes.values():
            for salt, usage in member.usage.items():
                if not state.quotas.defined(salt):
                    used[salt] += used_of(usage, tier)
        over = {salt: nbytes for salt, nbytes in used.items() if limit is not None and nbytes > limit}
        if over and limit is not None:
            leaving = sum(over.values()) - limit * len(over)
            warnings.append(f"{len(over)} tenants without a policy use more {tier.name}: {leaving} bytes leave")
    return warnings
