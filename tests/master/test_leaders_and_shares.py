"""Two masters and their nodes while the lease changes hands: what nodes may use of a limit never adds up to more."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.master import messages as m
from kvstrata.master.hub import Hub
from kvstrata.master.leadership.campaign import Campaign
from kvstrata.master.leadership.election import TTL_S
from kvstrata.master.outbox import Outbox, Stamp
from kvstrata.master.stores.base import LeaderRecord
from kvstrata.proto.status import Tier
from kvstrata.storage.eviction.quotas import NodeShare, QuotaBook
from kvstrata.storage.masters.fence import Fence
from tests.sim.shared_store import StoreClient, StoreServer

NAMES = ("a", "b")
NODES = ("x", "y", "z")
LIMIT = 300 << 20
DRAM = 1 << 30


@dataclass
class SimpleMaster:
    """A hub and its campaign; ``runs`` False: it stands still."""

    hub: Hub
    campaign: Campaign
    runs: bool = True
    cut: bool = False


@dataclass
class SimpleNode:
    """Shares and fence as a node has them; both outlive everything here. ``links`` by master."""

    book: QuotaBook = field(default_factory=QuotaBook)
    fence: Fence = field(default_factory=Fence)
    links: dict[str, tuple[int, Outbox]] = field(default_factory=dict)
    wanted: int = 0
    away: bool = False  #: it hears and says nothing

    def hears(self, command: m.Send, stamp: Stamp, now: float) -> None:
        shares = command.shares if isinstance(command, m.SendAttached) else command
        if self.fence.admit(stamp.epoch, stamp.leader_id) or not isinstance(shares, m.SendShares):
            return
        told = [NodeShare(s.salt, s.dram_limit, s.ssd_limit, s.dram_floor, s.ssd_floor) for s in shares.shares]
        fallback = None if shares.fallback is None else NodeShare("", shares.fallback.dram_limit)
        self.book.apply(told, shares.forgotten, shares.whole, fallback, 0.0, now, revision=shares.revision)


class Leaders(RuleBasedStateMachine):
    """Each master is driven by hand: a turn of its campaign, a tick, a write to the store, a look into its outboxes."""

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.now = 1000.0
        self.server = StoreServer(lambda: self.now)
        self.masters: dict[str, SimpleMaster] = {}
        for name in NAMES:
            self._start(name, seed)
        self.nodes = {name: SimpleNode() for name in NODES}
        for name in NAMES:
            self.turn(name)
        self.now += TTL_S
        for name in NAMES:
            self.turn(name)
        for node in NODES:
            self.say(node)
        leader = self.masters["a"].hub
        leader.order(lambda state, now: (None, state.set_tenant(m.TenantPolicy("t", dram_limit=LIMIT), now)))
        for _ in range(8):
            self.settle()
        assert self.limits() and sum(self.limits()) <= LIMIT

    def _start(self, name: str, seed: int) -> None:
        store = StoreClient(self.server, lambda: not self.masters[name].cut if name in self.masters else True, True)
        hub = Hub(store, random.Random(f"{name}{seed}"), 5.0, lambda: self.now)
        me = LeaderRecord(hub.master_id, 0, f"{name}:1")
        campaign = Campaign(hub, store, lambda: me, lambda: self.now, lambda address: True)
        self.masters[name] = SimpleMaster(hub, campaign)

    # ------------------------------------------------------------------ what happens

    @rule(name=st.sampled_from(NAMES))
    def turn(self, name: str) -> None:
        if self.masters[name].runs:
            self.masters[name].campaign.turn()

    @rule(name=st.sampled_from(NAMES))
    def work(self, name: str) -> None:
        """A tick, and what waits for the store."""
        master = self.masters[name]
        if master.runs:
            master.hub.handle(m.Tick())
            master.hub._write_out()

    @rule(node=st.sampled_from(NODES))
    def say(self, node: str) -> None:
        """Attach where there is no link, hear what is on its way, and report."""
        it = self.nodes[node]
        for name, master in self.masters.items():
            if not master.runs or it.away:
                continue
            self._link(node, name)
            session, outbox = it.links[name]
            while (said := outbox.get(0.0)) is not None:
                it.hears(*said, self.now)
            limit = it.book.limit(Tier.DRAM, "t", self.now)
            used = min(it.wanted, DRAM if limit is None else limit)
            usage = m.NodeUsage(
                dram_bytes_free=DRAM,
                tenants=(m.TenantUsage("t", used, 0, max(0, it.wanted - used)),),
                shares_revision=it.book.revision,
                leader_epoch=it.fence.epoch,
                leader_id=it.fence.leader_id,
            )
            master.hub.handle(m.StatusReport(session, usage))
            if outbox.closed is not None:
                del it.links[name]

    def _link(self, node: str, name: str) -> None:
        it = self.nodes[node]
        if name in it.links:
            return
        facts = m.NodeFacts(node, 1, channel=f"{node}:1", dram_bytes=DRAM)
        shares = tuple(m.Share(s.salt, s.dram_limit, s.ssd_limit, s.dram_floor) for s in it.book.shares())
        attach = m.Attach(facts, shares, (), it.fence.epoch, it.fence.leader_id)
        it.links[name] = self.masters[name].hub.attach(attach)

    @rule(node=st.sampled_from(NODES), megabytes=st.integers(0, 400))
    def want(self, node: str, megabytes: int) -> None:
        self.nodes[node].wanted = megabytes << 20

    @rule(node=st.sampled_from(NODES), away=st.booleans())
    def come_and_go(self, node: str, away: bool) -> None:
        self.nodes[node].away = away

    @rule(seconds=st.sampled_from((0.1, 0.5, 1.5, 3.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for master in self.masters.values():
            for node in NODES:
                if master.runs:
                    master.hub.heartbeat(m.Heartbeat(node, 1))

    @rule(name=st.sampled_from(NAMES), runs=st.booleans(), cut=st.booleans())
    def disturb(self, name: str, runs: bool, cut: bool) -> None:
        self.masters[name].runs, self.masters[name].cut = runs, cut

    @rule(name=st.sampled_from(NAMES), seed=st.integers(0, 1000))
    def restart(self, name: str, seed: int) -> None:
        if self.masters[name].cut or self.server.down:
            return
        del self.masters[name]
        for node in self.nodes.values():
            node.links.pop(name, None)
        self._start(name, seed)

    @rule(down=st.booleans())
    def store_down(self, down: bool) -> None:
        self.server.down = down

    @rule()
    def empty(self) -> None:
        """Who leads is there to write it back: what a standby has read is half a second old."""
        leading = [one for one in self.masters.values() if one.runs and not one.cut and one.hub.leads()[0]]
        if len(leading) == 1 and not self.server.down and self.server.holder() is not None:
            leading[0].campaign.turn()
            if leading[0].hub.leads()[0]:
                self.server.empty()
                leading[0].campaign.turn()
                leading[0].hub.handle(m.Tick())
                leading[0].hub._write_out()

    @rule()
    def settle(self) -> None:
        """A second in which all goes as it should, where it may."""
        self.wait(1.1)
        for name in NAMES:
            self.turn(name)
            self.work(name)
        for node in NODES:
            self.say(node)

    # ------------------------------------------------------------------ what has to hold

    def limits(self) -> list[int]:
        """What each node may use, of those that have heard of the limit."""
        told = [node.book.limit(Tier.DRAM, "t", self.now) for node in self.nodes.values()]
        return [limit for limit in told if limit is not None]

    @invariant()
    def never_more_than_the_limit(self) -> None:
        limits = self.limits() if hasattr(self, "nodes") else []
        assert sum(limits) <= LIMIT, limits

    @rule()
    def heal(self) -> None:
        """One leads, all nodes obey it, and the tenant has its policy."""
        self.server.down = False
        for master in self.masters.values():
            master.runs, master.cut = True, False
        for node in self.nodes.values():
            node.away = False
        for _ in range(10):
            self.settle()
        leading = [master.hub for master in self.masters.values() if master.hub.leads()[0]]
        assert len(leading) == 1
        assert {node.fence.leader_id for node in self.nodes.values()} == {leading[0].master_id}
        assert set(leading[0].read(lambda state, now: dict(state.quotas.policies))) == {"t"}
        for master in self.masters.values():
            master.hub.read(lambda state, now: state.check())


def test_the_part_of_a_node_that_is_away_stays_its_own_through_a_takeover() -> None:
    """The next leader has it from the store; what the others want does not change that."""
    world = Leaders()
    world.begin(1)
    world.want("z", 250)
    for _ in range(10):
        world.settle()
    theirs = world.nodes["z"].book.limit(Tier.DRAM, "t", world.now)
    assert theirs is not None and theirs > LIMIT // 2
    world.nodes["z"].away = True
    world.masters["a"].runs = False
    world.want("x", 400)
    world.want("y", 400)
    for _ in range(20):
        world.settle()
        world.never_more_than_the_limit()
    assert world.masters["b"].hub.leads()[0]
    world.heal()
    world.never_more_than_the_limit()


TestLeaders = Leaders.TestCase
TestLeaders.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
