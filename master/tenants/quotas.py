"""Cluster-wide limits of tenants as shares of nodes: who may use how much where, and the messages for it.

Sans-IO: what happens comes in with its time, commands go to ``emit``. Lowering is sent at once. A raise
first becomes durable, so that a new master knows what is out, and takes only what the donor's report has
shown to be free. So the sum of what nodes may use stays within the limit, whatever is lost or restarts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvstrata.master import messages as m
from kvstrata.master.tenants.division import grain_of
from kvstrata.master.tenants.floors import Floors
from kvstrata.master.tenants.ledger import UNLIMITED, Ledger, Part
from kvstrata.master.tenants.rooms import KnownRooms, Rooms
from kvstrata.master.tenants.share_mail import TTL_MS, ShareMail
from kvstrata.master.tenants.tenancy import (
    TIERS,
    Member,
    Room,
    Tenant,
    by_tier,
    denied,
    equal_parts,
    floor_of,
    limit_of,
    tenant_of,
    used_of,
)
from kvstrata.proto.status import Tier

#: A node that has been away for so long is counted out: its parts go to others.
LONG_GONE_S: Final = 600.0
#: A node that said goodbye may hold its memory for so long: until then others do not get its parts of DRAM.
LEAVING_S: Final = 15.0
#: A tenant's shares are worked out anew at most this often, when something of it changed.
REBALANCE_S: Final = 1.0
#: (tenant, node) pairs that one step works on at most: the lock is held for some ten milliseconds.
PAIRS_A_STEP: Final = 256
#: Saved grants that are higher than they need be are corrected this often.
SAVE_S: Final = 5.0
#: Tenants without a policy that have shares of their own, under a default of so many bytes each. Those past
#: it work by an equal part of the default on each node.
GUESTS_MAX: Final = 4096
#: A guest that uses nothing for this long is a stranger again.
GUEST_IDLE_S: Final = 600.0

#: After a start nothing is lowered for so long while nodes that hold grants have not said what they know:
#: what was saved last may say more than is out.
RECOVERY_S: Final = 60.0
#: Guests that one tick looks at for being idle.
GUESTS_A_TICK: Final = 64
#: Floors that have no room are told of in the log this often.
UNMET_SAID_S: Final = 60.0


class Quotas:
    """Policies, their shares, and who confirmed what. The key None is the default of salts without a policy."""

    def __init__(self, emit: Callable[[m.Command], None], first_revision: int = 0) -> None:
        self.nodes: dict[str, Member] = {}
        self.fallback = m.TenantPolicy("")
        self.denies = False
        self._emit = emit
        self._durable_serial = 0
        self._tenants: dict[str | None, Tenant] = {None: tenant_of(self.fallback, defined=True)}
        self._guests: set[str] = set()
        self._to_look_at: list[str] = []
        self._recovers_until = 0.0
        self._unmet_said_at = 0.0
        self._floors = Floors()
        self._due: dict[str | None, None] = {}
        self._rising: dict[str | None, None] = {}
        self._granting: list[str | None] = []
        self._mail = ShareMail(emit, first_revision, self._tenants, self.nodes)
        self._known_rooms = KnownRooms(self._room)

    # ------------------------------------------------------------------ policies

    def restore(
        self,
        policies: Iterable[m.TenantPolicy],
        fallback: m.SaveFallback | None,
        grants: Iterable[m.SaveGrants],
        now: float,
    ) -> None:
        """What was durable at the start: nodes hold what they were granted until they say otherwise."""
        if fallback is not None:
            self.fallback, self.denies = fallback.policy, fallback.deny
        self._recovers_until = now + RECOVERY_S
        self._tenants[None] = tenant_of(denied(self.fallback, self.denies), defined=True)
        for policy in policies:
            self._tenants[policy.salt] = tenant_of(policy, defined=True)
        for saved in grants:
            member = self.nodes.setdefault(saved.node_id, Member())
            member.away_since = now
            if saved.fallback is not None:
                self._restore_share(saved.node_id, self._default, saved.fallback)
            for share in saved.shares:
                tenant = self._tenants.get(share.salt)
                if tenant is None and self._limiting:
                    tenant = self._new_guest(share.salt, now)
                if tenant is not None:
                    self._restore_share(saved.node_id, tenant, share)
        for key, tenant in self._tenants.items():
            for ledger in tenant.ledgers.values():
                ledger.excuse()
            self._touch(key)

    def _restore_share(self, node_id: str, tenant: Tenant, share: m.Share) -> None:
        for tier, limit, floor in by_tier(share):
            part = tenant.part(tier, node_id)
            self._floors.give(tier, node_id, part, floor)
            ledger = tenant.ledgers[tier]
            if ledger.limited:
                # Saved before there was a limit: the node may have been told of any part of it since.
                part.granted = part.peak = ledger.limit if limit is None else limit
                part.restored = True

    @property
    def policies(self) -> dict[str, m.TenantPolicy]:
        """Of salts that have one."""
        return {key: tenant.policy for key, tenant in self._tenants.items() if key is not None and tenant.defined}

    def policy_of(self, salt: str) -> m.TenantPolicy:
        """The policy that applies to a salt, the default where it has none of its own."""
        tenant = self._tenants.get(salt)
        if tenant is not None:
            return tenant.policy
        effective = denied(self.fallback, self.denies)
        return m.TenantPolicy(salt, effective.dram_limit, effective.ssd_limit)

    def defined(self, salt: str) -> bool:
        tenant = self._tenants.get(salt)
        return tenant is not None and tenant.defined

    def set_policy(self, policy: m.TenantPolicy, now: float) -> None:
        """A tenant's limits and floors from now on. Takes effect on nodes with the commands that follow."""
        tenant = self._tenants.get(policy.salt)
        if tenant is None:
            tenant = self._stranger(policy.salt, now)
        tenant.defined = True
        self._guests.discard(policy.salt)
        self._change(policy.salt, tenant, policy, now)
        self._emit(m.SavePolicy(policy.salt, policy))
        self._mail.flush(now)

    def remove_policy(self, salt: str, now: float) -> None:
        """The default applies to this salt from now on."""
        tenant = self._tenants.get(salt)
        if tenant is None or not tenant.defined:
            return
        self._emit(m.SavePolicy(salt, None))
        if self._limiting:
            tenant.defined, tenant.seen_at = False, now
            self._guests.add(salt)
            self._change(salt, tenant, self._guest_policy(salt), now)
        else:
            self._forget(salt)
        self._mail.flush(now)

    def set_fallback(self, policy: m.TenantPolicy, deny: bool, now: float) -> None:
        """The policy of salts without one: limits of each such salt, or ``deny``."""
        self.fallback, self.denies = m.TenantPolicy("", policy.dram_limit, policy.ssd_limit), deny
        self._change(None, self._default, denied(self.fallback, deny), now)
        for salt in list(self._guests):
            if self._limiting:
                self._change(salt, self._tenants[salt], self._guest_policy(salt), now)
            else:
                self._forget(salt)
        self._adopt_strangers(now)
        self._emit(m.SaveFallback(self.fallback, deny))
        self._mail.flush(now)

    def _change(self, key: str | None, tenant: Tenant, policy: m.TenantPolicy, now: float) -> None:
        tenant.policy = policy
        for tier, limit, floor in by_tier(policy):
            ledger = tenant.ledgers[tier]
            was_limited = ledger.limited
            ledger.limit, ledger.floor = UNLIMITED if limit is None else limit, floor
            for node_id, member in self.nodes.items():
                part = ledger.part(node_id)
                if limit is None:
                    part.granted = part.peak = UNLIMITED
                    part.rise = None
                elif not was_limited:
                    # Until the node has heard, it may fill itself with this tenant; one that is away has what it said.
                    part.granted = member.capacity[tier] if member.session is not None else part.used
                    part.peak = max(part.granted, part.used)
                    part.rise = None
                    self._mail.save(node_id)  # the store has it without a limit
            ledger.excuse()
        for node_id in self.nodes:
            self._mail.say(node_id, key)
        self._plan(key, now)  # which forgets its rooms

    # ------------------------------------------------------------------ strangers and guests

    @property
    def _default(self) -> Tenant:
        return self._tenants[None]

    @property
    def _limiting(self) -> bool:
        return any(ledger.limited for ledger in self._default.ledgers.values())

    @property
    def _guestly(self) -> bool:
        """The default is so many bytes a salt: those that come are given shares of their own."""
        return any(ledger.limited and ledger.limit > 0 for ledger in self._default.ledgers.values())

    def _guest_policy(self, salt: str) -> m.TenantPolicy:
        policy = self._default.policy
        return m.TenantPolicy(salt, policy.dram_limit, policy.ssd_limit)

    def _new_guest(self, salt: str, now: float) -> Tenant:
        guest = self._tenants[salt] = tenant_of(self._guest_policy(salt), defined=False)
        guest.seen_at = now
        self._guests.add(salt)
        self._known_rooms.forget(salt)
        return guest

    def _stranger(self, salt: str, now: float) -> Tenant:
        """A tenant as nodes see a salt that they were never told of: by the default's parts."""
        stranger = self._new_guest(salt, now)
        for tier in TIERS:
            ledger, default = stranger.ledgers[tier], self._default.ledgers[tier]
            for node_id, member in self.nodes.items():
                base, part = default.part(node_id), ledger.part(node_id)
                usage = member.usage.get(salt)
                part.used = 0 if usage is None else used_of(usage, tier)
                part.granted, part.peak = base.granted, max(base.granted, base.peak, part.used)
                part.pending, part.restored = base.pending, base.restored
                if part.pending:
                    member.unconfirmed.add(salt)
            ledger.excuse()
        return stranger

    def _admit_guest(self, salt: str, now: float) -> Tenant | None:
        if not self._guestly or len(self._guests) >= GUESTS_MAX:
            return None
        guest = self._stranger(salt, now)
        for node_id in self.nodes:
            self._mail.say(node_id, salt)
        self._touch(salt)
        return guest

    def _adopt_strangers(self, now: float) -> None:
        for member in self.nodes.values():
            for salt in member.usage:
                if salt not in self._tenants:
                    self._admit_guest(salt, now)

    def _forget(self, salt: str) -> None:
        tenant = self._tenants.pop(salt, None)
        if tenant is not None:
            for tier, ledger in tenant.ledgers.items():
                self._floors.unmet.pop((tier, salt), None)
                for node_id, part in ledger:
                    self._floors.give(tier, node_id, part, 0)
        self._guests.discard(salt)
        self._due.pop(salt, None)
        self._rising.pop(salt, None)
        self._mail.forget(salt)
        self._known_rooms.forget(salt)

    # ------------------------------------------------------------------ nodes

    def attached(
        self, node_id: str, session: int, capacity: Mapping[Tier, int], shares: Iterable[m.Share], now: float
    ) -> m.SendShares:
        """A node is here, with what it had persisted: the shares that it works by from now on, whole."""
        self.unlinked(node_id, now)
        self._known_rooms.forget()
        member = self.nodes.setdefault(node_id, Member())
        first, member.linked_before = not member.linked_before, True
        if member.leaves_at is not None:  # another process, with empty memory
            self._left(node_id, member)
        member.session, member.capacity = session, {tier: capacity.get(tier, 0) for tier in TIERS}
        member.reported, member.placed, member.said_at = False, {}, now
        told = {share.salt: share for share in shares}
        for salt in told:
            if salt not in self._tenants:
                self._admit_guest(salt, now)
        self._mail.unsay(node_id)
        member.attach_revision = member.last_revision = self._mail.next_revision()
        member.unconfirmed = set(self._tenants)
        for key, tenant in self._tenants.items():
            of_node = None if key is None else told.get(key)
            for tier, ledger in tenant.ledgers.items():
                ledger.welcome(node_id, None if of_node is None else limit_of(of_node, tier), first=first)
                if first and of_node is not None and tenant.defined:
                    part = ledger.parts[node_id]
                    self._floors.give(tier, node_id, part, max(part.floor, floor_of(of_node, tier)))
                ledger.parts[node_id].pending = member.attach_revision
            tenant.planned_at = now - REBALANCE_S  # a node that waits for its shares refuses writers
            self._touch(key)
        self._mail.save(node_id)
        return m.SendShares(
            session,
            member.attach_revision,
            whole=True,
            shares=tuple(tenant.share(node_id) for key, tenant in self._tenants.items() if key is not None),
            fallback=self._default.share(node_id),
            ttl_ms=TTL_MS,
        )

    def unlinked(self, node_id: str, now: float) -> None:
        """Its stream ended. What it was granted stays its own until it is back, or long gone."""
        member = self.nodes.get(node_id)
        if member is None or member.session is None:
            return
        member.session, member.away_since, member.placed = None, now, {}
        self._known_rooms.forget()
        self._mail.unsay(node_id)
        member.rising.clear()
        for key, tenant in self._tenants.items():
            for ledger in tenant.ledgers.values():
                part = ledger.part(node_id)
                if part.rise is not None:
                    part.rise = None
                    part.relax()
            self._touch(key)

    def stopped(self, node_id: str, now: float) -> None:
        """It said goodbye: its memory will be free soon (:data:`LEAVING_S`), what is on its SSD stays."""
        self.unlinked(node_id, now)
        member = self.nodes.get(node_id)
        if member is not None:
            member.leaves_at = now + LEAVING_S

    def _left(self, node_id: str, member: Member) -> None:
        """Its process is gone for sure, and its memory with it."""
        member.leaves_at, member.usage = None, {}
        self._known_rooms.forget()
        for key, tenant in self._tenants.items():
            if self._drop_part(tenant, Tier.DRAM, node_id):
                self._touch(key)
        self._mail.save(node_id)

    def _drop_part(self, tenant: Tenant, tier: Tier, node_id: str) -> bool:
        part = tenant.ledgers[tier].parts.pop(node_id, None)
        if part is None:
            return False
        self._floors.give(tier, node_id, part, 0)
        return True

    def removed(self, node_id: str) -> None:
        """It is off the roster: its parts go to others."""
        if node_id in self.nodes:
            self._count_out(node_id)

    def _count_out(self, node_id: str) -> None:
        del self.nodes[node_id]
        self._known_rooms.forget()
        self._mail.count_out(node_id)
        for key, tenant in self._tenants.items():
            for tier in TIERS:
                self._drop_part(tenant, tier, node_id)
            self._touch(key)

    # ------------------------------------------------------------------ reports

    def reported(self, node_id: str, session: int, usage: m.NodeUsage, now: float) -> None:
        """A node's report: who uses what there, what was refused, and which shares it works by."""
        member = self.nodes.get(node_id)
        if member is None or member.session != session:
            return
        of_late = {*member.placed, *(row.salt for row in usage.tenants)}
        member.placed = {}
        if not member.reported:
            self._first_report(node_id, member)
        for row in usage.tenants:
            self._used(node_id, member, row, now)
        for salt in of_late:
            self._known_rooms.changed(salt, node_id)
        revision = usage.shares_revision
        if member.attach_revision <= revision <= member.last_revision:
            self._confirmed(node_id, member, revision, now)

    def _first_report(self, node_id: str, member: Member) -> None:
        """It names every tenant that uses anything: the others use nothing."""
        member.reported, member.usage = True, {}
        self._known_rooms.forget()
        for tenant in self._tenants.values():
            for ledger in tenant.ledgers.values():
                ledger.part(node_id).used = 0

    def _used(self, node_id: str, member: Member, row: m.TenantUsage, now: float) -> None:
        if row.dram_bytes or row.ssd_bytes:
            member.usage[row.salt] = row
        else:
            member.usage.pop(row.salt, None)
        tenant = self._tenants.get(row.salt) or self._admit_guest(row.salt, now)
        if tenant is None:
            return
        tenant.seen_at = now
        tenant.refused += row.dram_wanted + row.ssd_wanted
        for tier, ledger in tenant.ledgers.items():
            part = ledger.part(node_id)
            before, part.used = part.peak, used_of(row, tier)
            wanted = row.ssd_wanted if tier == Tier.SSD else row.dram_wanted
            if wanted:
                part.press(wanted, now)
            if ledger.limited:
                self._relaxed(ledger, part, before, member, now)
        self._touch(row.salt)

    def _confirmed(self, node_id: str, member: Member, revision: int, now: float) -> None:
        for key in list(member.unconfirmed):
            tenant = self._tenants[key]
            still = False
            for ledger in tenant.ledgers.values():
                part = ledger.part(node_id)
                if part.pending and part.pending <= revision:
                    before, part.pending = part.peak, 0
                    if ledger.limited:
                        self._relaxed(ledger, part, before, member, now)
                still |= bool(part.pending)
            if not still:
                member.unconfirmed.discard(key)
                self._touch(key)

    def _relaxed(self, ledger: Ledger, part: Part, before: int, member: Member, now: float) -> None:
        part.relax()
        if part.peak > before:
            ledger.excuse()  # it had more than anybody knew
        elif part.peak < before:
            ledger.settle()
            member.stale(now)

    # ------------------------------------------------------------------ placement

    def seen(self, salt: str, block_bytes: int, now: float) -> None:
        """A tenant wants to store. One that was never seen gets its shares now."""
        tenant = self._tenants.get(salt)
        if tenant is None:
            tenant = self._admit_guest(salt, now)
            if tenant is not None:
                self._plan(salt, now)
                self._mail.flush(now)
        if tenant is not None:
            tenant.seen_at = now
            tenant.block_bytes = max(tenant.block_bytes, block_bytes)

    def placed(self, salt: str, node_id: str, nbytes: int) -> None:
        """So much was sent there; counts until the node's next report."""
        member = self.nodes.get(node_id)
        if member is not None:
            member.placed[salt] = member.placed.get(salt, 0) + nbytes
            self._known_rooms.changed(salt, node_id)

    def rooms(self, salt: str, tier: Tier = Tier.DRAM) -> dict[str, Room]:
        """A salt's share of a tier of each node, and what it has left of it. Empty: it has no limit."""
        ledger = self._of(salt, tier)
        if not ledger.limited:
            return {}
        return {node_id: _room_of(part, self.nodes[node_id], salt, tier) for node_id, part in ledger}

    def rooms_along(self, salt: str, node_ids: tuple[str, ...]) -> Rooms | None:
        """As :meth:`rooms`, of DRAM, of these nodes in this order; None: it has no limit. As quick as
        :meth:`KnownRooms.along`."""
        return self._known_rooms.along(salt, node_ids) if self._of(salt, Tier.DRAM).limited else None

    def _of(self, salt: str, tier: Tier) -> Ledger:
        return (self._tenants.get(salt) or self._default).ledgers[tier]

    def _room(self, salt: str, node_id: str) -> Room | None:
        part = self._of(salt, Tier.DRAM).parts.get(node_id)
        return None if part is None else _room_of(part, self.nodes[node_id], salt, Tier.DRAM)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Count out who is long gone, keep links warm, rebalance part of what is due. Bounded."""
        for node_id, member in list(self.nodes.items()):
            if member.session is None and now - member.away_since >= LONG_GONE_S:
                self._count_out(node_id)
                continue
            if member.leaves_at is not None and now >= member.leaves_at:
                self._left(node_id, member)
            if member.stale_since is not None and now - member.stale_since >= SAVE_S:
                self._mail.save(node_id)
        self._look_at_guests(now)
        self._say_unmet(now)
        self.step(now)

    def step(self, now: float) -> None:
        """Part of what is due; :attr:`behind` says whether more is."""
        budget = self._grant(PAIRS_A_STEP)
        for key in list(self._due):
            if budget <= 0:
                break
            tenant = self._tenants[key]
            if now - tenant.planned_at >= REBALANCE_S:
                budget -= max(1, len(self.nodes))
                self._plan(key, now)
        self._mail.flush(now)

    def save_all(self, now: float) -> None:
        """Have what every node was granted saved again, some of it with each step."""
        for node_id in self.nodes:
            self._mail.save(node_id)
        self._mail.flush(now)

    def durable(self, serial: int, now: float) -> None:
        """Everything saved up to ``serial`` is in the store: its raises may go out, part of them with each step."""
        self._durable_serial = max(self._durable_serial, serial)
        self._granting = list(reversed(self._rising))
        self._grant(PAIRS_A_STEP)
        self._mail.flush(now)

    def _grant(self, budget: int) -> int:
        """Let raises that are durable go out; what is left of ``budget``."""
        while self._granting and budget > 0:
            key = self._granting.pop()
            if key not in self._rising:
                continue
            budget -= max(1, len(self.nodes))
            if not self._grant_to(key, self._tenants[key]):
                del self._rising[key]
            self._touch(key)
        return budget

    def _grant_to(self, key: str | None, tenant: Tenant) -> bool:
        """One tenant's raises; True when some of them are not durable yet."""
        waiting = False
        for ledger in tenant.ledgers.values():
            for node_id, part in ledger:
                if part.rise is None:
                    continue
                if not part.rise_serial or part.rise_serial > self._durable_serial:
                    waiting = True
                    continue
                part.granted, part.rise = part.rise, None
                self._mail.say(node_id, key)
        self._known_rooms.forget(key)
        return waiting

    # ------------------------------------------------------------------ planning

    def _touch(self, key: str | None) -> None:
        self._due[key] = None

    def _plan(self, key: str | None, now: float) -> None:
        """Work out one tenant's parts anew."""
        self._known_rooms.forget(key)
        self._due.pop(key, None)
        tenant = self._tenants[key]
        tenant.planned_at, tenant.waiting = now, 0
        if not tenant.defined and self._leaves(str(key), tenant, now):
            return
        grain = grain_of(tenant.block_bytes)
        ranks = {node_id: zlib.crc32(f"{key}/{node_id}".encode("utf-8", "replace")) for node_id in self.nodes}
        unheard = {node_id for node_id, member in self.nodes.items() if not member.reported}
        for tier, ledger in tenant.ledgers.items():
            here = {n: member.capacity[tier] for n, member in self.nodes.items() if member.session is not None}
            if ledger.limited:
                if key is None:
                    plan = ledger.toward(equal_parts(ledger, here), 1)
                elif not tenant.defined and self._idle(tenant, now):
                    default = self._default.ledgers[tier]
                    plan = ledger.toward({n: default.part(n).granted for n in here}, 1)
                else:
                    plan = ledger.plan(here, grain, ranks, unheard, now, tenant.least(tier))
                if now >= self._recovers_until or not ledger.guessed:
                    self._lower(key, ledger, plan.lowered)
                self._raise(key, ledger, plan.raised)
                tenant.waiting += plan.waiting
                ledger.settle()
            if ledger.floor or any(part.floor for _, part in ledger):
                self._plan_floors(key, tier, here, grain, ranks)
            else:
                self._floors.unmet.pop((tier, key), None)

    def _lower(self, key: str | None, ledger: Ledger, lowered: Mapping[str, int]) -> None:
        for node_id, target in lowered.items():
            part = ledger.parts[node_id]
            part.rise = None
            if target < part.granted:
                part.granted = target
                self._mail.say(node_id, key)
            part.relax()

    def _raise(self, key: str | None, ledger: Ledger, raised: Mapping[str, int]) -> None:
        for node_id, target in raised.items():
            part = ledger.parts[node_id]
            part.rise, part.peak = target, max(part.peak, target)
            part.rise_serial = 0
            self.nodes[node_id].rising.add(key)
            self._mail.save(node_id)
            self._rising[key] = None

    def _plan_floors(
        self, key: str | None, tier: Tier, here: Mapping[str, int], grain: int, ranks: Mapping[str, int]
    ) -> None:
        """Move a tenant's floor to where its blocks are, beside the floors of others."""
        ledger, floors = self._tenants[key].ledgers[tier], self._floors
        room = {n: capacity - floors.beside(tier, n, ledger.part(n)) for n, capacity in here.items()}
        for node_id, floor in ledger.plan_floors(room, grain, ranks).items():
            floors.give(tier, node_id, ledger.parts[node_id], floor)
            self._mail.say(node_id, key)
        floors.note(tier, key, ledger.floor - sum(ledger.parts[n].floor for n in here))

    def _say_unmet(self, now: float) -> None:
        """Floors without room, in the log: not while nodes may still be on their way."""
        if self._floors.unmet and now >= self._recovers_until and now - self._unmet_said_at >= UNMET_SAID_S:
            self._unmet_said_at = now
            missing = {f"{tier.name.lower()}_bytes": nbytes for tier, nbytes in self._floors.missing().items()}
            tenants = len({key for _, key in self._floors.unmet})
            self._emit(m.Report("floors do not fit the nodes that are here", {"tenants": tenants, **missing}))

    def _idle(self, guest: Tenant, now: float) -> bool:
        return now - guest.seen_at >= GUEST_IDLE_S and not any(
            part.used for ledger in guest.ledgers.values() for _, part in ledger
        )

    def _look_at_guests(self, now: float) -> None:
        if not self._to_look_at:
            self._to_look_at = list(self._guests)
        for salt in self._to_look_at[-GUESTS_A_TICK:]:
            if salt in self._guests and self._idle(self._tenants[salt], now):
                self._touch(salt)
        del self._to_look_at[-GUESTS_A_TICK:]

    def _leaves(self, salt: str, guest: Tenant, now: float) -> bool:
        """A guest that is idle, and has exactly what the default gives everywhere, needs no shares of its own."""
        if not self._idle(guest, now):
            return False
        for tier in TIERS:
            default = self._default.ledgers[tier]
            for node_id, part in guest.ledgers[tier]:
                base = default.part(node_id)
                if part.granted != base.granted or not part.settled or base.pending or part.peak > base.peak:
                    return False
        self._forget(salt)
        return True

    # ------------------------------------------------------------------ for people and tests

    def tenants(self) -> list[tuple[str, Tenant]]:
        """Salts with shares of their own."""
        return [(key, tenant) for key, tenant in self._tenants.items() if key is not None]

    def tenant(self, salt: str) -> Tenant | None:
        return self._tenants.get(salt)

    def unmet(self, salt: str, tier: Tier) -> int:
        """Bytes of a tenant's floor for which the nodes that are here have no room."""
        return self._floors.unmet.get((tier, salt), 0)

    @property
    def floors_missing(self) -> Mapping[Tier, int]:
        """As :meth:`unmet`, of all tenants."""
        return self._floors.missing()

    @property
    def saved_serial(self) -> int:
        """What was emitted to be saved has at most this number: see :meth:`durable`."""
        return self._mail.saved_serial

    @property
    def waiting(self) -> int:
        """Bytes of raises that wait for a donor, or for the store."""
        rising = sum(
            max(0, part.rise - part.granted)
            for key in self._rising
            for ledger in self._tenants[key].ledgers.values()
            for _, part in ledger
            if part.rise is not None
        )
        return rising + sum(tenant.waiting for tenant in self._tenants.values())

    def behind(self, now: float) -> bool:
        """More is due than one step does."""
        return bool(self._granting) or any(now - self._tenants[key].planned_at >= REBALANCE_S for key in self._due)

    @property
    def outstanding(self) -> int:
        """Shares that nodes have not confirmed."""
        return sum(len(member.unconfirmed) for member in self.nodes.values())

    def check(self) -> None:
        """Assert every invariant."""
        self._floors.check(self._tenants)
        self._known_rooms.check()
        for key, tenant in self._tenants.items():
            for ledger in tenant.ledgers.values():
                ledger.check()
                assert ledger.limited or all(part.granted == UNLIMITED for _, part in ledger), key
                for node_id, part in ledger:
                    assert node_id in self.nodes, (key, node_id)
                    member = self.nodes[node_id]
                    assert member.session is None or not part.pending or key in member.unconfirmed, (key, node_id)
                    assert part.rise is None or key in self._rising, (key, node_id)


def _room_of(part: Part, member: Member, salt: str, tier: Tier) -> Room:
    usage = member.usage.get(salt)
    used = 0 if usage is None else used_of(usage, tier)
    if tier == Tier.DRAM:
        used += member.placed.get(salt, 0)
    return Room(part.granted, max(0, part.granted - used))
