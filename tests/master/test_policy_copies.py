"""What nodes keep of policies comes back from them when the state store is lost, and nothing that is older."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstrata.master import messages as m
from kvstrata.master.converters import attach_of, message_of
from kvstrata.master.hub import Hub
from kvstrata.master.leadership import policy_copies
from kvstrata.master.leadership.campaign import Campaign
from kvstrata.master.leadership.election import TTL_S
from kvstrata.master.outbox import Outbox
from kvstrata.master.state import COMMAND_BITS
from kvstrata.master.stores.base import LeaderRecord
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import wire
from kvstrata.storage.masters.fence import Fence
from kvstrata.storage.masters.policy_copy import PolicyCopy
from tests.sim.shared_store import StoreClient, StoreServer

LIMIT = 1 << 20


class Node:
    """What a node keeps for its masters, over the messages of the wire."""

    def __init__(self, name: str = "n") -> None:
        self.name = name
        self.copy = PolicyCopy()
        self.fence = Fence()
        self.shares: dict[str, control.Share] = {}
        self._outbox = Outbox()

    def attach(self, hub: Hub) -> None:
        attach = control.Attach(
            node_id=self.name, incarnation=1, channel="h:1", dram_bytes=1 << 30, protocol=wire.PROTOCOL,
            leader_epoch=self.fence.epoch, leader_id=self.fence.leader_id, policy=self.copy.message(),
        )  # fmt: skip
        self.shares.clear()
        _, self._outbox = hub.attach(attach_of(control.Attach.FromString(attach.SerializeToString())))
        self.hear(hub)

    def hear(self, hub: Hub) -> None:
        while (said := self._outbox.get(0.0)) is not None:
            command, stamp = said
            message = message_of(command, hub.cluster_id)
            if self.fence.admit(stamp.epoch, stamp.leader_id):
                continue
            if message.HasField("attached"):
                self.copy.take(message.attached.policy)
                self.shares |= {share.salt: share for share in message.attached.shares.shares}
            elif message.HasField("policy"):
                self.copy.take(message.policy)
            elif message.HasField("shares"):
                self.shares |= {share.salt: share for share in message.shares.shares}


class Masters:
    """Hubs on one store in memory; ``gone`` ones take no turns any more."""

    def __init__(self, *names: str) -> None:
        self.now = 100.0
        self.server = StoreServer(lambda: self.now)
        self.gone: set[str] = set()
        self.hubs: dict[str, Hub] = {}
        self.campaigns: dict[str, Campaign] = {}
        for name in names:
            self.start(name)

    def start(self, name: str) -> Hub:
        store = StoreClient(self.server, lambda: True, True)
        hub = self.hubs[name] = Hub(store, random.Random(name), 5.0, lambda: self.now)
        me = LeaderRecord(hub.master_id, 0, f"{name}:1")
        self.campaigns[name] = Campaign(hub, store, lambda: me, lambda: self.now, lambda address: True)
        return hub

    def turn(self, seconds: float = 0.5, times: int = 1) -> None:
        for _ in range(times):
            self.now += seconds
            for name in [name for name in self.campaigns if name not in self.gone]:
                self.campaigns[name].turn()

    def leader(self) -> Hub:
        (name,) = (name for name, hub in self.hubs.items() if hub.leads()[0] and name not in self.gone)
        return self.hubs[name]

    def lost(self, *gone: str) -> Hub:
        """The store is emptied and masters die; the one that leads then."""
        self.gone.update(gone)
        self.server.empty()
        self.turn(times=2 + int(3 * TTL_S / 0.5))
        return self.leader()


@pytest.fixture
def masters() -> Masters:
    masters = Masters("a", "b")
    masters.turn()
    masters.turn(TTL_S)
    assert masters.leader() is masters.hubs["a"]
    masters.turn()
    return masters


def limit(hub: Hub, salt: str, nbytes: int | None = LIMIT) -> None:
    policy = m.TenantPolicy(salt, dram_limit=nbytes)
    hub.order(lambda state, now: (None, state.set_tenant(policy, now)))
    assert hub.durable()


def policies(hub: Hub) -> dict[str, int | None]:
    return hub.read(lambda state, now: {salt: one.dram_limit for salt, one in state.quotas.policies.items()})


def test_a_limit_that_no_standby_has_read_outlives_the_leader_and_the_store(masters: Masters) -> None:
    node = Node()
    node.attach(masters.hubs["a"])
    limit(masters.hubs["a"], "t")
    node.hear(masters.hubs["a"])
    leader = masters.lost("a")
    assert policies(leader) == {}, "it never read it"
    node.attach(leader)
    assert policies(leader) == {"t": LIMIT}
    assert node.shares["t"].HasField("dram_limit"), "the node is told no other share than one of that limit"
    assert leader.durable() and "dram_limit=1048576" in str(masters.server.rows)
    leader.read(lambda state, now: state.check())


def test_a_limit_that_was_taken_away_does_not_come_back(masters: Masters) -> None:
    node = Node()
    node.attach(masters.hubs["a"])
    limit(masters.hubs["a"], "t")
    masters.turn()
    masters.hubs["a"].order(lambda state, now: (None, state.remove_tenant("t", now)))
    node.hear(masters.hubs["a"])
    leader = masters.lost("a")
    assert policies(leader) == {"t": LIMIT}, "all that it read"
    node.attach(leader)
    assert policies(leader) == {}


def test_numbers_of_replicas_the_default_and_drains_come_back_too(masters: Masters) -> None:
    node, leaver = Node(), Node("leaver")
    hub = masters.hubs["a"]
    for each in (node, leaver):
        each.attach(hub)
    masters.turn()
    hub.order(lambda state, now: (state.replication.set_rule("", "t", 3), state.taken()))
    hub.order(lambda state, now: (None, state.set_default(m.TenantPolicy("", dram_limit=LIMIT), False, now)))
    hub.order(lambda state, now: (state.replication.leavers.drain("leaver", 0.0, now), state.taken()))
    node.hear(hub)
    leader = masters.lost("a")
    node.attach(leader)
    assert leader.read(lambda state, now: state.replication.rules.wanted("", "t")) == 3
    assert leader.read(lambda state, now: state.quotas.fallback.dram_limit) == LIMIT
    assert leader.read(lambda state, now: [one.node_id for one in state.nodes if one.draining]) == ["leaver"]
    leader.read(lambda state, now: state.check())


def test_what_the_new_leader_was_asked_for_stands_and_the_rest_comes_back(masters: Masters) -> None:
    node = Node()
    node.attach(masters.hubs["a"])
    limit(masters.hubs["a"], "t")
    limit(masters.hubs["a"], "u")
    node.hear(masters.hubs["a"])
    leader = masters.lost("a")
    limit(leader, "t", 5 << 20)
    node.attach(leader)
    assert policies(leader) == {"t": 5 << 20, "u": LIMIT}


def test_a_node_that_was_away_brings_nothing_old_back(masters: Masters) -> None:
    """Neither to a leader whose store has all, nor to one after a store that was lost and written again."""
    away, here = Node("away"), Node("here")
    hub = masters.hubs["a"]
    for each in (away, here):
        each.attach(hub)
    limit(hub, "t")
    for each in (away, here):
        each.hear(hub)
    hub.order(lambda state, now: (None, state.remove_tenant("t", now)))
    here.hear(hub)
    leader = masters.lost("a")
    here.attach(leader)
    away.attach(leader)
    assert policies(leader) == {}
    assert leader.durable()
    masters.gone.add("b")
    masters.start("c")
    masters.turn(times=10)
    old = Node("old")
    old.copy = PolicyCopy(hub.cluster_id, (1 << COMMAND_BITS) + 1, {("policies", "t"): "{}"})
    old.fence = Fence(1, "x")
    old.attach(masters.leader())
    assert policies(masters.leader()) == {}
    assert masters.server.last_command >= here.copy.as_of, "the store was told again how far its policies go"


def test_the_newest_of_several_copies_counts(masters: Masters) -> None:
    older, newer = Node("older"), Node("newer")
    hub = masters.hubs["a"]
    for each in (older, newer):
        each.attach(hub)
    limit(hub, "t")
    older.hear(hub)
    limit(hub, "t", 2 * LIMIT)
    limit(hub, "u")
    newer.hear(hub)
    leader = masters.lost("a")
    older.attach(leader)
    assert policies(leader) == {"t": LIMIT}
    newer.attach(leader)
    assert policies(leader) == {"t": 2 * LIMIT, "u": LIMIT}
    older.attach(leader)
    assert policies(leader) == {"t": 2 * LIMIT, "u": LIMIT}
    for each in (older, newer):
        each.hear(leader)
    assert older.copy.rows == newer.copy.rows and older.copy.as_of == newer.copy.as_of


def test_a_leader_that_leads_by_its_memory_counts_by_that_and_not_by_what_another_wrote_meanwhile(
    masters: Masters,
) -> None:
    node = Node()
    node.attach(masters.hubs["a"])
    limit(masters.hubs["a"], "read")
    masters.turn()
    limit(masters.hubs["a"], "t")
    node.hear(masters.hubs["a"])
    masters.gone.add("a")
    masters.server.empty()
    masters.server.last_command = 9 << COMMAND_BITS  # who led for a moment knew nothing
    masters.turn(times=2 + int(3 * TTL_S / 0.5))
    node.attach(masters.leader())
    assert policies(masters.leader()) == {"read": LIMIT, "t": LIMIT}


def test_a_leader_whose_store_lost_nothing_takes_nothing_from_nodes(masters: Masters) -> None:
    """Though an earlier leader ordered it: it was deposed, and told that it could not be kept."""
    node = Node()
    node.attach(masters.hubs["a"])
    unsaved = m.TenantPolicy("t", dram_limit=LIMIT)
    masters.hubs["a"].order(lambda state, now: (None, state.set_tenant(unsaved, now)))
    node.hear(masters.hubs["a"])
    masters.gone.add("a")
    masters.turn(times=2 + int(3 * TTL_S / 0.5))
    node.attach(masters.leader())
    assert policies(masters.leader()) == {}


def test_a_master_that_never_read_anything_takes_what_nodes_have(masters: Masters) -> None:
    """It is started again and has the lease of the emptied store, before any node tells it of the leader that was."""
    node = Node()
    node.attach(masters.hubs["a"])
    limit(masters.hubs["a"], "t")
    node.hear(masters.hubs["a"])
    masters.gone.update(("a", "b"))
    masters.server.empty()
    masters.start("c")
    masters.turn(times=10)
    assert masters.leader() is masters.hubs["c"]
    node.attach(masters.hubs["c"])
    masters.turn(times=2)
    assert masters.leader() is masters.hubs["c"], "in an epoch past the one that the node has heard"
    node.attach(masters.hubs["c"])
    assert policies(masters.hubs["c"]) == {"t": LIMIT}


def test_a_copy_of_another_cluster_is_worth_nothing(masters: Masters) -> None:
    leader, node = masters.lost("a"), Node()
    rows = {("policies", "t"): '{"dram_limit":5}'}
    for cluster, taken in (("another", {}), (leader.cluster_id, {"t": 5})):
        node.copy, node.fence = PolicyCopy(cluster, 2, dict(rows)), Fence(1, "x")
        node.attach(leader)
        assert policies(leader) == taken


@pytest.mark.parametrize(
    "row",
    [
        ("policies", "t", "no JSON"),
        ("policies", "t", '{"dram_limit":-1}'),
        ("policies", "t", '{"dram_limit":1,"dram_floor":2}'),
        ("replicas", "x", "[]"),
        ("fallback", "one", '{"deny":false}'),
        ("what is this", "t", "1"),
    ],
)
def test_of_a_copy_that_makes_no_sense_nothing_is_taken(masters: Masters, row: tuple[str, str, str]) -> None:
    leader, node = masters.lost("a"), Node()
    rows = {("policies", "good"): '{"dram_limit":5}', row[:2]: row[2]}
    node.copy, node.fence = PolicyCopy(leader.cluster_id, 2, rows), Fence(1, "x")
    node.attach(leader)
    assert policies(leader) == {}
    leader.read(lambda state, now: state.check())


def test_a_number_that_no_leader_of_the_node_has_given_is_refused(masters: Masters) -> None:
    leader, node = masters.lost("a"), Node()
    node.copy = PolicyCopy(leader.cluster_id, 1 << 62, {("policies", "t"): '{"dram_limit":5}'})
    node.attach(leader)
    assert policies(leader) == {}


def test_what_is_too_much_is_not_given(masters: Masters, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, node = masters.hubs["a"], Node()
    limit(hub, "t")
    node.attach(hub)
    assert ("policies", "t") in node.copy.rows
    monkeypatch.setattr(policy_copies, "COPY_BYTES_MAX", 10)
    node.attach(hub)
    assert node.copy.message() is None


def test_rows_that_are_as_they_were_are_not_sent_again(masters: Masters) -> None:
    hub, node = masters.hubs["a"], Node()
    limit(hub, "t")
    node.attach(hub)
    as_of = node.copy.as_of
    limit(hub, "t")
    hub.handle(m.Heartbeat("n", 1))
    node.hear(hub)
    assert node.copy.as_of == as_of
    again = replace(m.TenantPolicy("t"), dram_limit=7)
    hub.order(lambda state, now: (None, state.set_tenant(again, now)))
    node.hear(hub)
    assert node.copy.as_of > as_of and '"dram_limit":7' in node.copy.rows["policies", "t"]
