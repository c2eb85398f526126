"""Who leads, as one master sees it, and several masters of one store: never two that one node obeys out of order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.master.leadership.election import LEADERLESS_S, TTL_S, Ask, Election, Move
from kvstrata.master.leadership.standing import EPOCH_MAX, Standing
from kvstrata.master.stores.base import LeaderRecord
from kvstrata.storage.masters.fence import Fence

ME = LeaderRecord("me", channel="h:1")
OTHER = LeaderRecord("other", channel="h:2")


def led(epoch: int = 1) -> Election:
    """One that leads since 0."""
    election = Election("me", 0.0)
    assert election.answered(replace(ME, epoch=epoch), 0.0) is Move.LEAD
    election.check()
    return election


def test_the_lease_is_asked_for_and_renewed() -> None:
    election = Election("me", 0.0)
    assert election.ask(0.0) is Ask.CAMPAIGN and not election.leading
    assert election.answered(replace(ME, epoch=4), 0.0) is Move.LEAD
    assert election.leading and election.epoch == 4
    assert election.ask(0.5) is Ask.CAMPAIGN
    assert election.answered(replace(ME, epoch=4), 0.5) is Move.NONE
    assert election.answered(replace(ME, epoch=5), 9.0) is Move.LEAD, "it had lapsed: a greater epoch"
    election.check()


def test_a_lease_that_was_anothers_meanwhile_is_taken_over_and_not_gone_on_with() -> None:
    election = led(4)
    assert election.answered(replace(ME, epoch=6), 9.0) is Move.STEP_DOWN, "somebody led in epoch 5"
    election.check()
    assert election.ask(9.5) is Ask.CAMPAIGN
    assert election.answered(replace(ME, epoch=6), 9.5) is Move.LEAD
    assert election.epoch == 6
    election.check()


def test_another_has_the_lease() -> None:
    election = Election("me", 0.0)
    assert election.answered(replace(OTHER, epoch=3), 0.0) is Move.FOLLOW
    assert election.answered(replace(OTHER, epoch=3), 0.5) is Move.NONE
    assert election.leader == replace(OTHER, epoch=3) and election.heard == 3
    election = led()
    assert election.answered(replace(OTHER, epoch=2), 1.0) is Move.STEP_DOWN
    assert not election.leading
    election.check()


def test_a_leader_without_the_store_goes_on_and_a_standby_does_not_begin() -> None:
    election = led()
    election.unreachable("gone", 100.0)
    assert election.leading and election.problems(100.0) == ["the state store does not answer: gone"]
    standby = Election("me", 0.0)
    standby.answered(replace(OTHER, epoch=1), 0.0)
    standby.unreachable("gone", 100.0)
    assert not standby.leading and standby.leader is not None


def test_what_a_node_has_heard_deposes_at_once_and_the_next_epoch_is_greater() -> None:
    election = led(3)
    assert election.told(3, False, 1.0) is Move.NONE
    assert election.told(5, False, 1.0) is Move.STEP_DOWN
    assert election.ask(1.0) is Ask.RENEW, "the lease is of an epoch that nodes obey no more"
    assert election.answered(replace(ME, epoch=3), 1.0) is Move.NONE and not election.leading
    assert election.answered(replace(ME, epoch=6), 1.0) is Move.LEAD
    assert election.ask(1.0) is Ask.CAMPAIGN
    election.check()


def test_who_stood_still_leaves_an_emptied_store_to_the_leader_that_knows_more() -> None:
    election = led(3)
    election.told(5, False, 1.0)
    election.hold(1.0)
    assert election.ask(1.0 + TTL_S - 0.1) is Ask.WATCH
    assert election.answered(replace(OTHER, epoch=6), 1.5) is Move.FOLLOW
    election = led(3)
    election.told(5, False, 1.0)
    election.hold(1.0)
    assert election.ask(1.0 + TTL_S) is Ask.RENEW, "nobody came"
    election.check()


def test_two_of_one_epoch_neither_goes_on_in_it() -> None:
    election = led(3)
    assert election.told(3, True, 1.0) is Move.STEP_DOWN
    assert election.heard == 4
    assert election.answered(replace(ME, epoch=4), 1.0) is Move.LEAD


def test_an_emptied_store_is_the_leaders_first() -> None:
    standby = Election("me", 0.0)
    standby.hold(10.0)
    assert standby.ask(10.0) is Ask.WATCH
    assert standby.answered(None, 10.0) is Move.NONE
    assert standby.ask(10.0 + TTL_S) is Ask.CAMPAIGN
    leader = led()
    leader.hold(10.0)
    assert leader.ask(10.0) is Ask.CAMPAIGN


def test_one_that_cannot_read_the_store_leads_no_more() -> None:
    election = led()
    assert election.failed(1.0) is Move.STEP_DOWN
    assert election.ask(1.0) is Ask.WATCH
    election.check()


def test_resigning_is_for_good() -> None:
    election = led()
    assert election.resign(1.0) is Move.STEP_DOWN
    assert election.ask(1.0) is Ask.WATCH
    assert election.answered(replace(ME, epoch=1), 1.0) is Move.NONE and not election.leading
    assert election.problems(100.0) == []
    election.check()


def test_while_the_store_is_silent_the_leader_is_listened_for() -> None:
    election = Election("me", 0.0)
    election.answered(replace(OTHER, epoch=1), 0.0)
    assert not election.silent(TTL_S / 2) and election.silent(TTL_S)
    assert election.probed(True, 3.0) is Move.NONE and election.leader is not None
    assert election.probed(False, 3.0) is Move.FOLLOW and election.leader is None
    assert any("no master has led" in said for said in election.problems(3.0 + LEADERLESS_S))
    assert led().probed(False, 3.0) is Move.NONE


def test_standing() -> None:
    standing = Standing(leading=True, epoch=2, master_id="me", heard=2)
    standing.told(1)
    standing.told(2, "me")
    assert not standing.deposed
    standing.told(EPOCH_MAX + 1)
    assert not standing.deposed, "that was never an epoch"
    standing.told(2, "other")
    assert standing.deposed and standing.contested
    standing.follow()
    assert not standing.deposed and standing.terms == 1
    standing.lead(3)
    standing.told(4)
    assert standing.deposed and standing.terms == 2


# ---------------------------------------------------------------------- many masters


@dataclass
class Store:
    """A lease with a clock of its own, and the epochs that it has given."""

    now: float = 0.0
    holder: LeaderRecord | None = None
    ends: float = 0.0
    epoch: int = 0

    def leader(self) -> LeaderRecord | None:
        return self.holder if self.holder is not None and self.now < self.ends else None

    def campaign(self, me: LeaderRecord) -> LeaderRecord:
        held = self.leader()
        if held is not None and held.master_id != me.master_id:
            return held
        if held is None:
            self.epoch = 1 + max(self.epoch, me.epoch)
            self.holder = replace(me, epoch=self.epoch)
        self.ends = self.now + TTL_S
        assert self.holder is not None
        return self.holder

    def resign(self, me: LeaderRecord) -> None:
        if self.holder is not None and self.holder.master_id == me.master_id:
            self.holder = None


@dataclass
class Candidate:
    """A master: its election, whether it runs, and whether it reaches the store."""

    election: Election
    runs: bool = True
    reaches: bool = True


@dataclass
class Obeying:
    """A node: its fence, what it has obeyed, and the masters that it can hear."""

    fence: Fence = field(default_factory=Fence)
    obeyed: list[tuple[int, str]] = field(default_factory=list)
    hears: set[str] = field(default_factory=set)


class Masters(RuleBasedStateMachine):
    """Masters come and go, stand still and are cut off; stores are emptied; nodes obey whom they hear."""

    names = ("a", "b", "c")

    @initialize()
    def begin(self) -> None:
        self.store = Store()
        self.masters = {name: Candidate(Election(name, 0.0)) for name in self.names}
        self.nodes = [Obeying(hears=set(self.names)) for _ in range(3)]
        self.given: dict[int, str] = {}
        self.emptied = False

    @rule(name=st.sampled_from(names))
    def turn(self, name: str) -> None:
        master, now = self.masters[name], self.store.now
        if not master.runs:
            return
        election = master.election
        if not master.reaches:
            election.unreachable("cut off", now)
            return
        me = LeaderRecord(name, election.heard)
        ask = election.ask(now)
        if ask is Ask.RENEW:
            self.store.resign(me)
        record = self.store.leader() if ask is Ask.WATCH else self.store.campaign(me)
        if election.answered(record, now) is Move.LEAD and not self.emptied:
            assert self.given.setdefault(election.epoch, name) == name, "two masters were given one epoch"

    @rule(name=st.sampled_from(names), node=st.integers(0, 2))
    def order(self, name: str, node: int) -> None:
        """Also of a master that has been standing still, and does not know that it is deposed."""
        election, obeying = self.masters[name].election, self.nodes[node]
        if not (election.leading and self.masters[name].runs and name in obeying.hears):
            return
        if not obeying.fence.admit(election.epoch, name):
            obeying.obeyed.append((election.epoch, name))

    @rule(name=st.sampled_from(names), node=st.integers(0, 2))
    def report(self, name: str, node: int) -> None:
        """What a node says in its attach, or in its status."""
        master, fence = self.masters[name], self.nodes[node].fence
        if master.runs and name in self.nodes[node].hears:
            contested = fence.epoch == master.election.epoch and fence.leader_id not in ("", name)
            master.election.told(fence.epoch, contested, self.store.now)

    @rule(seconds=st.sampled_from((0.1, 0.5, 3.0)))
    def wait(self, seconds: float) -> None:
        self.store.now += seconds

    @rule(name=st.sampled_from(names), runs=st.booleans(), reaches=st.booleans())
    def disturb(self, name: str, runs: bool, reaches: bool) -> None:
        self.masters[name].runs, self.masters[name].reaches = runs, reaches

    @rule(name=st.sampled_from(names))
    def restart(self, name: str) -> None:
        """Another process: it knows nothing, and is another master."""
        self.masters[name] = Candidate(Election(name, self.store.now))
        self.store.resign(LeaderRecord(name))

    @rule(node=st.integers(0, 2), hears=st.sets(st.sampled_from(names)))
    def cut(self, node: int, hears: set[str]) -> None:
        self.nodes[node].hears = set(hears)

    @rule()
    def empty(self) -> None:
        self.store = Store(now=self.store.now)
        self.emptied = True

    @rule()
    def heal(self) -> None:
        """Whatever happened: one leads soon, and every node obeys it."""
        for master in self.masters.values():
            master.runs = master.reaches = True
        for node in range(3):
            self.nodes[node].hears = set(self.names)
        for _ in range(12):
            self.store.now += 0.5
            for name in self.names:
                self.turn(name)
                for node in range(3):
                    self.order(name, node)
                    self.report(name, node)
        leading = [name for name in self.names if self.masters[name].election.leading]
        assert len(leading) == 1
        assert {node.fence.leader_id for node in self.nodes} == set(leading)

    @invariant()
    def in_order(self) -> None:
        for node in getattr(self, "nodes", []):
            assert node.obeyed == sorted(node.obeyed, key=lambda order: order[0]), "an earlier leader was obeyed"
            by_epoch = dict(node.obeyed)
            assert set(node.obeyed) == set(by_epoch.items()), "two masters were obeyed in one epoch"
            node.fence.check()
        for master in getattr(self, "masters", {}).values():
            master.election.check()


TestMasters = Masters.TestCase
TestMasters.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
