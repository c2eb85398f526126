"""A master's quotas, nodes that obey them, a store and links between: all of it slow, lossy, and to be killed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvstrata.master import messages as m
from kvstrata.master.tenants.quotas import Quotas
from kvstrata.proto.status import Tier

MIB = 1 << 20
TIERS = (Tier.DRAM, Tier.SSD)
NOTHING = m.Share("", None, None)


def limit_in(share: m.Share, tier: Tier) -> int | None:
    return share.ssd_limit if tier == Tier.SSD else share.dram_limit


@dataclass
class FakeNode:
    """A node's quota book as the wire's contract has it, and what it holds, by tier and salt."""

    node_id: str
    capacity: dict[Tier, int]
    shares: dict[str, m.Share] = field(default_factory=dict)
    fallback: m.Share = NOTHING
    revision: int = 0
    heard_at: float | None = None
    ttl_s: float = 0.0
    session: int | None = None
    ready: bool = False  #: has heard an attach's answer in this process
    answered: bool = False  #: ... and that of the present session
    used: dict[Tier, dict[str, int]] = field(default_factory=lambda: {tier: {} for tier in TIERS})
    wanted: dict[Tier, dict[str, int]] = field(default_factory=lambda: {tier: {} for tier in TIERS})
    inbox: deque[m.SendShares] = field(default_factory=deque)
    outbox: deque[m.NodeUsage] = field(default_factory=deque)
    evicted: int = 0  #: bytes that a lowered share cost

    def limit(self, tier: Tier, salt: str) -> int | None:
        return limit_in(self.shares.get(salt, self.fallback), tier)

    def lapsed(self, now: float) -> bool:
        return self.heard_at is not None and self.ttl_s > 0 and now - self.heard_at >= self.ttl_s

    def admits(self, tier: Tier, salt: str, now: float) -> bool:
        """Within its share's time a limited tenant may grow also on a node without a link. One without a limit
        has only the master to send it there, which does not."""
        away = not self.answered and self.limit(tier, salt) is None
        return self.ready and not self.lapsed(now) and not away

    def may_use(self, tier: Tier, salt: str, now: float) -> int:
        """The most that this node may come to use, by all it heard and all that is on the way to it."""
        used = self.used[tier].get(salt, 0)
        if not self.ready and not self.inbox:
            return used
        heard = [self.limit(tier, salt)] if self.admits(tier, salt, now) else []
        fallback, named = self.fallback, salt in self.shares
        for message in self.inbox:
            by_salt = {share.salt: share for share in message.shares}
            fallback = message.fallback or (NOTHING if message.whole else fallback)
            named = (named and not message.whole and salt not in message.forgotten) or salt in by_salt
            if salt in by_salt:
                heard.append(limit_in(by_salt[salt], tier))
            elif not named:
                heard.append(limit_in(fallback, tier))
        return max([used, *(min(self.capacity[tier] if x is None else x, self.capacity[tier]) for x in heard)])

    def hear(self, now: float) -> None:
        message = self.inbox.popleft()
        if message.whole:
            self.shares, self.ready, self.answered = {}, True, True
            self.fallback = NOTHING
        for salt in message.forgotten:
            self.shares.pop(salt, None)
        self.shares.update((share.salt, share) for share in message.shares)
        self.fallback = message.fallback or self.fallback
        self.revision, self.heard_at, self.ttl_s = message.revision, now, message.ttl_ms / 1000

    def store(self, tier: Tier, salt: str, nbytes: int, now: float) -> None:
        """Admit what the share allows; the rest is refused, and reported as wanted."""
        used, limit = self.used[tier].get(salt, 0), self.limit(tier, salt)
        room = self.capacity[tier] - sum(self.used[tier].values())
        if limit is not None:
            room = min(room, max(0, limit - used))
        taken = min(nbytes, room) if self.admits(tier, salt, now) else 0
        if taken:
            self.used[tier][salt] = used + taken
        if taken < nbytes:
            self.wanted[tier][salt] = self.wanted[tier].get(salt, 0) + nbytes - taken

    def drain(self, nbytes: int) -> None:
        """Evict so much of each tenant that is above its share."""
        for tier in TIERS:
            for salt, used in self.used[tier].items():
                limit = self.limit(tier, salt)
                if limit is not None and used > limit:
                    self.used[tier][salt] = max(limit, used - nbytes)
                    self.evicted += used - self.used[tier][salt]

    def report(self) -> None:
        salts = {salt for table in (*self.used.values(), *self.wanted.values()) for salt in table}
        rows = tuple(
            m.TenantUsage(
                salt,
                self.used[Tier.DRAM].get(salt, 0),
                self.used[Tier.SSD].get(salt, 0),
                self.wanted[Tier.DRAM].get(salt, 0),
                self.wanted[Tier.SSD].get(salt, 0),
            )
            for salt in sorted(salts)
        )
        self.wanted = {tier: {} for tier in TIERS}
        self.outbox.append(m.NodeUsage(tenants=rows, shares_revision=self.revision))

    def cut(self) -> None:
        self.session, self.answered = None, False
        self.inbox.clear()
        self.outbox.clear()

    def restart(self) -> None:
        """Memory is gone; SSD and shares are not. Clients find it once the master has answered."""
        self.cut()
        self.ready, self.heard_at = False, None
        self.used[Tier.DRAM] = {}
        self.wanted = {tier: {} for tier in TIERS}


class QuotaWorld:
    """One master at a time. Writes become durable when :meth:`flush` says so; a crash forgets the others."""

    def __init__(self, nodes: dict[str, tuple[int, int]]) -> None:
        self.now = 1000.0
        self.nodes = {n: FakeNode(n, {Tier.DRAM: dram, Tier.SSD: ssd}) for n, (dram, ssd) in nodes.items()}
        self.policies: dict[str, m.TenantPolicy] = {}
        self.fallback: m.SaveFallback | None = None
        self.grants: dict[str, m.SaveGrants] = {}
        self._unsaved: list[m.Command] = []
        self._session = 0
        self._masters = 0
        self.sent: list[m.SendShares] = []
        self.reports: list[m.Report] = []
        self.start_master()

    # ------------------------------------------------------------------ master and store

    def start_master(self) -> None:
        """A new master with what the last one's store has; every link is cut."""
        for node in self.nodes.values():
            node.cut()
        self._unsaved = []
        self._masters += 1
        self.quotas = Quotas(self._emit, self._masters * 1_000_003)
        self.quotas.restore(self.policies.values(), self.fallback, self.grants.values(), self.now)

    def _emit(self, command: m.Command) -> None:
        if isinstance(command, m.SendShares):
            self.sent.append(command)
            for node in self.nodes.values():
                if node.session == command.session:
                    node.inbox.append(command)
        elif isinstance(command, m.Report):
            self.reports.append(command)
        else:
            self._unsaved.append(command)

    def flush(self) -> None:
        """The store takes everything that waits."""
        serial, batch, self._unsaved = self.quotas.saved_serial, self._unsaved, []
        for write in batch:
            match write:
                case m.SavePolicy(salt, None):
                    self.policies.pop(salt, None)
                case m.SavePolicy(salt, m.TenantPolicy() as policy):
                    self.policies[salt] = policy
                case m.SaveFallback():
                    self.fallback = write
                case m.SaveGrants():
                    self.grants[write.node_id] = write
        self.quotas.durable(serial, self.now)

    def set(self, policy: m.TenantPolicy) -> None:
        """As the hub does it: answered once it is durable."""
        self.quotas.set_policy(policy, self.now)
        self.flush()

    def tick(self, seconds: float = 0.25) -> None:
        self.now += seconds
        self.quotas.tick(self.now)
        while self.quotas.behind(self.now):
            self.quotas.step(self.now)

    # ------------------------------------------------------------------ links

    def attach(self, node_id: str) -> None:
        node = self.nodes[node_id]
        node.cut()
        self._session += 1
        node.session = self._session
        shares = tuple(node.shares.values())
        node.inbox.append(self.quotas.attached(node_id, self._session, node.capacity, shares, self.now))

    def lose_link(self, node_id: str) -> None:
        """Both ends notice; what was on its way is gone."""
        self.nodes[node_id].cut()
        self.quotas.unlinked(node_id, self.now)

    def stop(self, node_id: str) -> None:
        self.nodes[node_id].restart()
        self.quotas.stopped(node_id, self.now)

    def deliver(self, node_id: str) -> None:
        """One message each way."""
        node = self.nodes[node_id]
        if node.inbox:
            node.hear(self.now)
        if node.outbox and node.session is not None:
            self.quotas.reported(node_id, node.session, node.outbox.popleft(), self.now)

    def settle(self, seconds: float, *, drain: int = 1 << 40) -> None:
        """Time passes with every link and the store in order; linked nodes drain and report each second."""
        for step in range(int(seconds / 0.25)):
            self.tick()
            self.flush()
            for node in self.nodes.values():
                while node.inbox:
                    node.hear(self.now)
                if step % 4 == 3 and node.session is not None:
                    node.drain(drain)
                    node.report()
                    self.deliver(node.node_id)
            self.flush()
            self.quotas.check()

    # ------------------------------------------------------------------ truth

    def may_use(self, tier: Tier, salt: str) -> int:
        """Σ over nodes of what each may come to use."""
        return sum(node.may_use(tier, salt, self.now) for node in self.nodes.values())

    def used(self, tier: Tier, salt: str) -> int:
        return sum(node.used[tier].get(salt, 0) for node in self.nodes.values())

    def granted(self, salt: str, tier: Tier = Tier.DRAM) -> dict[str, int | None]:
        return {node_id: node.limit(tier, salt) for node_id, node in self.nodes.items()}
