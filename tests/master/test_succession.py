"""A master that begins to lead, ceases to, and follows: what it orders, what it saves, and what it still finds."""

from __future__ import annotations

import random

import pytest

from kvstrata.master import messages as m
from kvstrata.master.client_calls import ClientCalls
from kvstrata.master.hub import Hub
from kvstrata.master.leadership import succession
from kvstrata.master.leadership.campaign import BEHIND_LEASES, Campaign
from kvstrata.master.leadership.election import TTL_S
from kvstrata.master.leadership.office import Office
from kvstrata.master.leadership.standing import Standing
from kvstrata.master.outbox import Outbox, Stamp
from kvstrata.master.saved import Saved
from kvstrata.master.state import COMMAND_BITS, MasterState
from kvstrata.master.stores.base import LeaderRecord
from kvstrata.proto.errors import NotLeader, Unavailable
from kvstrata.proto.keys import Namespace
from tests.sim.shared_store import StoreClient, StoreServer

from .world import NS, SALT, World, hashes

ORDERS = (m.SendShares, m.SendRemove, m.SendEpoch, m.SendDrop, m.SendHint, m.SendCopy, m.SendDrain)
SAVES = (m.SaveNode, m.SaveGroup, m.SaveTombstone, m.SavePolicy, m.SaveFallback, m.SaveGrants, m.SaveScope)


class Standby(World):
    """A state that does not lead until it is told to."""

    def __init__(self, saved: Saved = Saved()) -> None:  # noqa: B008
        super().__init__(saved)
        self.state = MasterState(self.now, random.Random(1), saved, 5.0, Standing(leading=False, master_id="me"))

    def lead(self, saved: Saved = Saved(), epoch: int = 1) -> list[m.Command]:  # noqa: B008
        commands = succession.take_over(self.state, saved, epoch, self.now)
        self.state.check()
        self.commands += commands
        return commands

    def step_down(self) -> list[m.Command]:
        commands = succession.step_down(self.state, "a test", self.now)
        self.state.check()
        return commands

    def follow(self, saved: Saved, *, exact: bool = False) -> list[m.Command]:
        commands = succession.follow(self.state, saved, self.now, exact=exact)
        self.state.check()
        return commands


def test_a_standby_knows_where_blocks_are_and_says_nothing_that_a_leader_says() -> None:
    world = Standby()
    session = world.up(1, 2, 3)
    world.delta(session, 1, add=[4])
    assert world.found(1, 4, 9) == [1, 4]
    world.wait(3, [("n", 1)])
    world.tell(m.StatusReport(session, m.NodeUsage(tenants=(m.TenantUsage(SALT, 1 << 20),))))
    assert not world.of(ORDERS) and not world.of(SAVES)  # type: ignore[arg-type]
    attached = world.of(m.SendAttached)[0]
    assert isinstance(attached, m.SendAttached) and attached.shares is None and not attached.leading


def test_taking_over_finds_all_that_was_found_and_has_nodes_attach_again() -> None:
    world = Standby()
    session = world.up(1, 2, 3)
    policy = m.TenantPolicy(SALT, dram_limit=1 << 20)
    commands = world.lead(Saved(policies=(policy,), groups=(m.SaveGroup(NS, 0),)), epoch=3)
    assert [c.session for c in commands if isinstance(c, m.CloseSession)] == [session]
    assert world.found(1, 2, 3) == [1, 2, 3]
    again = world.attach()
    attached = world.commands[-1] if isinstance(world.commands[-1], m.SendAttached) else world.of(m.SendAttached)[-1]
    assert isinstance(attached, m.SendAttached)
    assert attached.session == again and attached.leading and attached.leader_epoch == 3
    assert attached.shares is not None and attached.shares.shares[0].dram_limit is not None
    assert world.state.quotas.policies == {SALT: policy}
    saved = [c for c in commands if isinstance(c, m.SaveNode)]
    assert [row.node_id for row in saved] == ["n"], "the store had not heard of it"


def test_commands_of_two_leaders_have_numbers_of_their_own() -> None:
    first = World()
    first.up(1)
    early = first.remove(1).command
    world = Standby()
    world.up(1)
    world.lead(Saved(last_command=early), epoch=2)
    late = world.remove(1).command
    assert late >= 2 << COMMAND_BITS > early
    world.step_down()
    world.lead(Saved(last_command=7), epoch=4)
    assert world.remove(1).command >= 4 << COMMAND_BITS


def test_revisions_of_shares_of_two_leaders_differ() -> None:
    def revisions(epoch: int) -> set[int]:
        world = Standby()
        world.lead(epoch=epoch)
        for _ in range(20):
            world.attach()
        sent = [c.shares.revision for c in world.of(m.SendAttached) if isinstance(c, m.SendAttached) and c.shares]
        return set(sent)

    assert not revisions(1) & revisions(2)


def test_what_waits_to_be_removed_is_found_no_more_by_the_next_leader() -> None:
    world = Standby()
    world.up(1, 2)
    stone = m.SaveTombstone(5, NS, SALT, hashes(1), ("n",))
    world.lead(Saved(nodes=(m.SaveNode("n", 1 << 30, 0, False),), tombstones=(stone,), groups=(m.SaveGroup(NS, 0),)))
    assert world.found(1, 2) == [2]
    world.attach()
    assert [c.command for c in world.of(m.SendRemove)] == [5]  # type: ignore[attr-defined]


def test_a_drop_that_a_node_has_not_confirmed_leaves_nothing_of_it_to_be_found() -> None:
    world = Standby()
    world.up(1, 2)
    scope = m.SaveScope(5, "", SALT, False, None, ("n",))
    world.lead(Saved(nodes=(m.SaveNode("n", 1 << 30, 0, False),), scopes=(scope,), groups=(m.SaveGroup(NS, 0),)))
    assert world.found(1, 2) == []
    session = world.attach()
    attached = world.of(m.SendAttached)[-1]
    assert isinstance(attached, m.SendAttached) and attached.resume_seq == 0, "it says anew what it has"
    world.snapshot(session, 3, 7)
    assert world.found(7) == [], "held back until it has obeyed"
    world.tell(m.CommandDone(session, 5))
    assert world.of(m.SendResync), "and asked for then"


def test_a_deposed_leader_forgets_what_it_ordered_and_saves_nothing_more() -> None:
    world = Standby()
    world.lead(epoch=1)
    session = world.up(1, 2)
    world.state.set_tenant(m.TenantPolicy(SALT, dram_limit=1 << 20), world.now)
    removal = world.remove(1)
    assert world.state.ordered(removal.command)
    commands = world.step_down()
    assert [c.session for c in commands if isinstance(c, m.CloseSession)] == [session]
    assert not world.state.ordered(removal.command), "nobody may take it for done"
    before = len(world.commands)
    world.attach()
    world.wait(2, [("n", 1)])
    assert not [c for c in world.commands[before:] if isinstance(c, (*ORDERS, *SAVES))]
    assert not world.state.quotas.policies and not len(world.state.tombstones)
    assert world.found(2) == [2], "it goes on answering"


def test_a_follower_learns_epochs_groups_and_nodes() -> None:
    world = Standby()
    world.up(1)
    assert world.found(1) == [1]
    later = m.SaveGroup(NS, 3)
    other = Namespace("other", 1 << 20, 16)
    world.follow(Saved(nodes=(m.SaveNode("away", 5, 0, False),), groups=(later, m.SaveGroup(other, 0))))
    assert world.found(1) == [], "its weights are of the past"
    assert world.state.namespaces.named(NS.group).epoch == 3
    assert world.state.namespaces.find(other) is not None
    assert {node.node_id for node in world.state.nodes} == {"n", "away"}
    world.follow(Saved(groups=(later,)))
    assert {node.node_id for node in world.state.nodes} == {"n"}, "the leader has taken it off the roster"


def test_a_follower_learns_an_epoch_from_what_nodes_have() -> None:
    world = Standby()
    session = world.up(1)
    world.delta(session, 1, add=[2], epoch=1)
    assert world.state.namespaces.named(NS.group).epoch == 1
    assert world.found(1, 2) == [2]


def test_a_follower_keeps_an_epoch_that_the_leader_has_yet_to_save() -> None:
    world = Standby()
    session = world.up(1)
    world.delta(session, 1, add=[2], epoch=1)
    world.follow(Saved(groups=(m.SaveGroup(NS, 0),)))
    assert world.state.namespaces.named(NS.group).epoch == 1 and world.found(2) == [2]


def test_an_epoch_that_a_deposed_leader_made_up_is_undone() -> None:
    world = Standby()
    world.lead(Saved(groups=(m.SaveGroup(NS, 0),)), epoch=1)
    session = world.up(1)
    world.bump()
    world.step_down()
    commands = world.follow(Saved(groups=(m.SaveGroup(NS, 0),)), exact=True)
    assert world.state.namespaces.named(NS.group).epoch == 0
    assert session not in {c.session for c in commands if isinstance(c, m.CloseSession)}
    session = world.attach()
    attached = world.of(m.SendAttached)[-1]
    assert isinstance(attached, m.SendAttached) and attached.resume_seq == 0
    world.snapshot(session, 0, 1)
    assert world.found(1) == [1]


def test_what_the_store_lost_is_written_again_and_what_it_has_too_much_goes() -> None:
    world = World()
    world.up(1)
    world.state.set_tenant(m.TenantPolicy("kept", dram_limit=1 << 20), world.now)
    world.state.replication.set_rule("", None, 2)
    world.state.taken()
    removed = m.TenantPolicy("removed", dram_limit=5)
    written = succession.reconcile(world.state, Saved(policies=(removed,), revision=1), world.now)
    assert m.SavePolicy("removed", None) in written
    assert m.SavePolicy("kept", m.TenantPolicy("kept", dram_limit=1 << 20)) in written
    assert m.SaveReplicas("", None, 2) in written
    assert any(isinstance(c, m.SaveNode) and c.node_id == "n" for c in written)
    assert any(isinstance(c, m.SaveGroup) for c in written)
    assert any(isinstance(c, m.SaveGrants) and c.node_id == "n" for c in written)


# ---------------------------------------------------------------------- resuming


def resume_of(world: World) -> int:
    attached = world.of(m.SendAttached)[-1]
    assert isinstance(attached, m.SendAttached)
    return attached.resume_seq


def test_a_node_that_attaches_again_goes_on_from_its_last_delta() -> None:
    world = World()
    session = world.up(1, 2)
    world.delta(session, 1, add=[3])
    session = world.attach()
    assert resume_of(world) == 1
    world.delta(session, 2, add=[4], remove=[1])
    assert world.found(1, 2, 3, 4) == [2, 3, 4]
    assert not world.of(m.SendResync)


def test_a_node_may_send_a_snapshot_nevertheless() -> None:
    world = World()
    session = world.up(1, 2)
    world.delta(session, 1, add=[3])
    session = world.attach()
    world.snapshot(session, 9, 7)
    world.delta(session, 10, add=[8])
    assert world.found(1, 2, 3, 7, 8) == [7, 8]


@pytest.mark.parametrize("why", ["another process", "a gap", "a snapshot was loading"])
def test_no_resuming_where_something_may_be_missing(why: str) -> None:
    world = World()
    session = world.up(1)
    world.delta(session, 1, add=[3])
    if why == "a gap":
        world.delta(session, 5, add=[4])
    elif why == "a snapshot was loading":
        world.snapshot(session, 2, 1, last=False)
    world.attach(incarnation=2 if why == "another process" else 1)
    assert resume_of(world) == 0


# ---------------------------------------------------------------------- hubs on one store


class Pair:
    """Two hubs on one store in memory, with a clock of the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.server = StoreServer(lambda: self.now)
        self.cut: set[str] = set()
        self.hubs: dict[str, Hub] = {}
        self.campaigns: dict[str, Campaign] = {}
        for name in ("a", "b"):
            self.start(name)

    def start(self, name: str) -> None:
        """A new process."""
        store = StoreClient(self.server, lambda: name not in self.cut, True)
        hub = self.hubs[name] = Hub(store, random.Random(name), 5.0, lambda: self.now)
        me = LeaderRecord(hub.master_id, 0, f"{name}:1")
        self.campaigns[name] = Campaign(
            hub, store, lambda: me, lambda: self.now, lambda address: address[0] not in self.cut
        )

    def turn(self, *names: str, seconds: float = 0.5) -> None:
        self.now += seconds
        for name in names or ("a", "b"):
            self.campaigns[name].turn()
            self.campaigns[name].election.check()

    def calls(self, name: str) -> ClientCalls:
        return ClientCalls(self.hubs[name])

    def leads(self) -> str:
        return "".join(name for name, hub in self.hubs.items() if hub.leads()[0])

    def attach(self, name: str, epoch: int = 0, leader_id: str = "") -> Outbox:
        facts = m.NodeFacts("n", 1, channel="h:1", dram_bytes=1 << 30)
        return self.hubs[name].attach(m.Attach(facts, leader_epoch=epoch, leader_id=leader_id))[1]

    def limit(self, name: str, salt: str = "t", *, lasts: bool = True) -> None:
        policy = m.TenantPolicy(salt, dram_limit=1 << 20)
        self.hubs[name].order(lambda state, now: (None, state.set_tenant(policy, now)))
        assert self.hubs[name].durable() is lasts

    def policies(self, name: str) -> set[str]:
        return set(self.hubs[name].read(lambda state, now: state.quotas.policies))


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.turn()
    assert pair.leads() == "", "a master that knows more may come first"
    pair.turn(seconds=TTL_S)
    assert pair.leads() == "a"
    return pair


def drained(outbox: Outbox) -> list[tuple[m.Send, Stamp]]:
    said = []
    while (each := outbox.get(0.0)) is not None:
        said.append(each)
    return said


def raised(outbox: Outbox) -> bool:
    """Whether a tenant was given a share of anything."""
    said = [command for command, _ in drained(outbox) if isinstance(command, m.SendShares)]
    return any(share.dram_limit for command in said for share in command.shares)


def test_who_is_new_lets_a_leader_that_knows_more_go_first(pair: Pair) -> None:
    """The store is emptied while nobody reaches it, and a master that is started again reaches it first."""
    pair.limit("a")
    pair.cut = {"a"}
    pair.turn("a")
    pair.server.empty()
    pair.start("b")
    pair.turn("b")
    assert pair.leads() == "a"
    pair.cut = set()
    for _ in range(8):
        pair.turn("b", "a")
    assert pair.leads() == "a" and pair.policies("a") == {"t"}
    assert [policy.salt for policy in pair.hubs["a"].journal._store.load().policies] == ["t"]


def test_a_store_that_is_filled_again_and_has_the_revision_of_before_is_read_again(pair: Pair) -> None:
    pair.turn()
    known = pair.campaigns["b"]._saved
    assert known is not None
    pair.server.empty()
    pair.turn("a")  # the leader takes the lease anew, and writes it all again
    pair.limit("a", "new")
    pair.server.revision = known.revision
    pair.turn("b")
    assert [policy.salt for policy in pair.campaigns["b"]._saved.policies] == ["new"]  # type: ignore[union-attr]


def test_one_of_two_leads_and_the_other_says_who(pair: Pair) -> None:
    assert pair.hubs["b"].leads() == (False, "a:1")
    with pytest.raises(NotLeader, match=r"the leader is a:1$"):
        pair.limit("b")
    opened = pair.calls("b").open_namespace(NS)
    with pytest.raises(NotLeader, match=r"the leader is a:1$"):
        pair.calls("b").place(opened, "", hashes(1), "")
    with pytest.raises(NotLeader):
        pair.calls("b").remove(opened, "", hashes(1), 0.0)


def test_orders_are_stamped_with_who_leads(pair: Pair) -> None:
    outbox = pair.attach("a")
    assert {stamp for _, stamp in drained(outbox)} == {Stamp(1, pair.hubs["a"].master_id)}
    assert {stamp for _, stamp in drained(pair.attach("b"))} == {Stamp()}


def test_policies_go_over_to_the_next_leader(pair: Pair) -> None:
    pair.limit("a")
    pair.turn("b", seconds=3)
    assert pair.leads() == "ab", "a has not noticed yet"
    assert pair.policies("b") == {"t"}
    pair.limit("b", "u")
    pair.turn("a")
    assert pair.leads() == "b" and not pair.policies("a")
    with pytest.raises(NotLeader, match=r"the leader is b:1$"):
        pair.limit("a")


def test_what_a_deposed_leader_writes_is_refused(pair: Pair) -> None:
    pair.turn("b", seconds=3)
    policy = m.TenantPolicy("late", dram_limit=1)
    pair.hubs["a"].order(lambda state, now: (None, state.set_tenant(policy, now)))
    assert not pair.hubs["a"].durable()
    pair.turn()
    assert pair.leads() == "b"
    assert ("SavePolicy", "late") not in pair.server.rows and "late" not in str(pair.server.rows)


def test_what_a_deposed_leader_had_not_written_is_not_written_when_it_leads_again(pair: Pair) -> None:
    pair.cut.add("a")
    policy = m.TenantPolicy("late", dram_limit=1)
    pair.hubs["a"].order(lambda state, now: (None, state.set_tenant(policy, now)))
    assert not pair.hubs["a"].durable()
    pair.turn("b", seconds=3)
    pair.cut.clear()
    pair.turn("a")
    assert pair.leads() == "b"
    pair.campaigns["b"].resign()
    pair.turn("a")
    assert pair.leads() == "a" and pair.hubs["a"].durable()
    assert "late" not in str(pair.server.rows) and not pair.policies("a")


def test_a_leader_that_slept_through_anothers_lead_takes_what_that_one_did(pair: Pair) -> None:
    pair.limit("a", "before")
    pair.turn("b", seconds=3)
    pair.limit("b", "meanwhile")
    cleared = pair.hubs["b"].order(lambda state, now: state.drop("", "t", False, now))
    scope = pair.hubs["b"].read(lambda state, _: state.unconfirmed(cleared.command))
    del pair.hubs["b"], pair.campaigns["b"]  # killed; its lease runs out before the first leader wakes
    pair.now += 3
    for _ in range(3):
        pair.turn("a")
    assert pair.leads() == "a" and pair.policies("a") == {"before", "meanwhile"}
    assert {policy.salt for policy in pair.hubs["a"].journal._store.load().policies} == {"before", "meanwhile"}
    assert pair.hubs["a"].read(lambda state, _: state.unconfirmed(cleared.command)) == scope


def test_a_node_that_obeys_another_deposes(pair: Pair) -> None:
    pair.cut.add("a")
    pair.turn("b", seconds=3)
    assert pair.leads() == "ab"
    epoch = pair.hubs["b"].standing().epoch
    pair.attach("a", epoch, pair.hubs["b"].master_id)
    pair.turn("a")
    assert pair.leads() == "b"


def test_without_the_store_the_leader_goes_on_and_changes_are_refused(pair: Pair) -> None:
    pair.limit("a")
    pair.server.down = True
    pair.turn(seconds=30)
    assert pair.leads() == "a" and pair.hubs["b"].leads() == (False, "a:1")
    with pytest.raises(Unavailable, match="nothing was changed"):
        pair.limit("a", "u")
    opened = pair.calls("a").open_namespace(NS)
    pair.calls("a").place(opened, "", b"", "")
    pair.server.down = False
    pair.turn()
    pair.limit("a", "u")
    assert pair.leads() == "a"


def test_without_the_store_and_the_leader_a_standby_places(pair: Pair) -> None:
    pair.server.down = True
    pair.cut.add("a")
    pair.turn("b", seconds=3)
    assert pair.hubs["b"].leads() == (False, "")
    opened = pair.calls("b").open_namespace(NS)
    pair.calls("b").place(opened, "", b"", "")
    with pytest.raises(NotLeader, match="there is none now"):
        pair.limit("b")


def test_an_emptied_store_is_filled_by_the_leader(pair: Pair) -> None:
    pair.limit("a")
    pair.turn()
    pair.server.empty()
    pair.turn()
    assert pair.leads() == "a" and pair.hubs["a"].standing().epoch == 2
    pair.turn("b", seconds=3)
    assert pair.policies("b") == {"t"}


def test_an_emptied_store_that_was_written_to_meanwhile_is_filled_too(pair: Pair) -> None:
    pair.limit("a")
    pair.turn()
    before = pair.server.revision
    pair.server.empty()
    pair.limit("a", "late", lasts=False)
    pair.server.revision = before + 1
    pair.turn()
    pair.turn("b", seconds=3)
    assert pair.policies("b") == {"t", "late"}


def test_an_emptied_store_is_filled_by_a_standby_when_no_leader_is_left(pair: Pair) -> None:
    pair.limit("a")
    pair.turn()
    pair.server.empty()
    pair.turn("b")
    assert pair.hubs["b"].standing().leading is False, "the leader first, for it knows more"
    pair.turn("b", seconds=2 * TTL_S)
    assert pair.leads() == "ab" and pair.policies("b") == {"t"}
    assert "'t'" in str(pair.server.rows), "written back"


def test_who_is_new_leaves_an_emptied_store_to_a_standby_that_had_read_it(pair: Pair) -> None:
    """By what nodes say there was a leader, of whom the store knows nothing; the one that was is gone."""
    pair.limit("a")
    pair.turn()
    pair.server.empty()
    pair.turn("b")
    pair.start("a")
    pair.attach("a", 1, "gone")
    for _ in range(12):
        pair.turn("a", "b")
    assert pair.leads() == "b" and pair.policies("b") == {"t"} and "'t'" in str(pair.server.rows)


def test_who_stood_still_since_there_was_nothing_leaves_an_emptied_store_to_who_read_more(pair: Pair) -> None:
    pair.start("c")
    pair.limit("a")
    pair.turn("a", "c")
    pair.server.empty()
    pair.turn("c")
    assert not pair.campaigns["b"]._seen, "the revision is what it was when b looked last"
    for _ in range(12):
        pair.turn("b", "c")
    assert pair.leads() == "ac" and pair.policies("c") == {"t"} and "'t'" in str(pair.server.rows)


def test_a_wait_for_who_read_more_ends(pair: Pair) -> None:
    pair.server.empty()
    pair.start("a")
    pair.attach("a", 1, "gone")
    pair.turn("a")
    pair.turn("a", seconds=(BEHIND_LEASES - 1) * TTL_S)
    assert not pair.hubs["a"].standing().leading
    pair.turn("a", seconds=2 * TTL_S)
    assert pair.hubs["a"].standing().leading


def test_nothing_is_written_to_an_emptied_store_before_all_the_rest(pair: Pair) -> None:
    """Were the leader killed now, it would be all that a master finds that starts; and what a standby writes is what it
    had read before, as if this had never been."""
    pair.limit("a")
    pair.turn()
    pair.server.empty()
    pair.limit("a", "late", lasts=False)
    assert "late" not in str(pair.server.rows)
    assert "emptied" in pair.hubs["a"].why_not_durable()
    pair.turn()
    assert pair.hubs["a"].durable()


def test_the_store_is_asked_before_a_write_and_after_it_and_once_when_nothing_waits(pair: Pair) -> None:
    hub, asked = pair.hubs["a"], list[int]()
    kept = hub.kept

    def counted() -> bool | None:
        asked.append(hub.journal.waiting())
        return kept()

    hub.kept = counted
    assert hub.durable() and asked == [0]
    pair.limit("a")
    assert asked == [0, 1, 0]
    pair.cut = {"a"}
    assert not hub.durable(), "a store that does not answer may have lost what it took"


def test_a_raise_that_an_emptied_store_has_not_does_not_go_out(pair: Pair) -> None:
    pair.limit("a")
    outbox = pair.attach("a")
    pair.turn()
    pair.server.empty()
    pair.hubs["a"].handle(m.Tick())
    pair.hubs["a"]._write_out()
    assert not pair.server.rows and not raised(outbox)
    pair.turn()
    pair.hubs["a"]._write_out()
    assert raised(outbox)


def test_a_leader_that_stood_still_while_the_store_was_emptied_has_the_time_to_fill_it(pair: Pair) -> None:
    pair.limit("a")
    pair.turn()
    pair.limit("a", "unread")
    pair.server.empty()
    for _ in range(6):
        pair.turn("b")
    pair.turn("a")
    pair.turn("b")
    assert pair.leads() == "a" and "unread" in str(pair.server.rows)


def test_a_leader_hears_from_a_report_that_a_node_obeys_another_in_its_own_epoch(pair: Pair) -> None:
    """Two led in one epoch, as the store was emptied between; the node attached when neither did."""
    pair.attach("a")
    (session,) = (node.attachment.session for node in pair.hubs["a"]._state.nodes if node.attachment is not None)
    epoch = pair.hubs["a"].standing().epoch
    pair.hubs["a"].handle(m.StatusReport(session, m.NodeUsage(leader_epoch=epoch, leader_id=pair.hubs["a"].master_id)))
    pair.turn("a")
    assert pair.hubs["a"].standing().epoch == epoch, "it obeys this one"
    pair.hubs["a"].handle(m.StatusReport(session, m.NodeUsage(leader_epoch=epoch, leader_id="another")))
    pair.turn("a")
    pair.turn("a")
    assert pair.leads() == "a" and pair.hubs["a"].standing().epoch > epoch


def test_who_resigns_hands_over_at_once(pair: Pair) -> None:
    pair.limit("a")
    pair.campaigns["a"].resign()
    assert pair.leads() == ""
    pair.turn(seconds=0.1)
    assert pair.leads() == "b" and pair.policies("b") == {"t"}


def test_waiting_for_nodes_ends_when_deposed(pair: Pair) -> None:
    pair.attach("a")
    removal = pair.hubs["a"].order(lambda state, now: state.remove(NS, "", hashes(1), now), durable=False)
    Office(pair.hubs["a"]).step_down("a test")
    with pytest.raises(Unavailable, match="deposed"):
        pair.hubs["a"].confirmations(removal.command, removal.awaited, 1e9)


def test_a_sole_master_outdoes_what_a_node_has_obeyed() -> None:
    """Its store was another one, or none: else no node would ever obey it again."""
    server = StoreServer(lambda: 0.0)
    hub = Hub(StoreClient(server, lambda: True, False), random.Random(1), 5.0)
    assert hub.standing().epoch == 1
    facts = m.NodeFacts("n", 1, channel="h:1", dram_bytes=1 << 30)
    _, outbox = hub.attach(m.Attach(facts, leader_epoch=7, leader_id="gone"))
    assert {stamp for _, stamp in drained(outbox)} == {Stamp(8, hub.master_id)}
    _, outbox = hub.attach(m.Attach(facts, leader_epoch=8, leader_id="also gone"))
    assert {stamp.epoch for _, stamp in drained(outbox)} == {9}
    _, outbox = hub.attach(m.Attach(facts, leader_epoch=9, leader_id=hub.master_id))
    assert {stamp.epoch for _, stamp in drained(outbox)} == {9}
