"""Shares of cluster limits: never more out than the limit, there within seconds, and not as slivers."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.master import messages as m
from kvstrata.master.tenants.division import GRAIN_MIN, Claim, divide
from kvstrata.master.tenants.ledger import UNLIMITED
from kvstrata.master.tenants.quotas import LEAVING_S, LONG_GONE_S
from kvstrata.master.tenants.share_mail import TTL_MS
from kvstrata.proto.status import Tier
from tests.master.quota_world import MIB, TIERS, QuotaWorld, limit_in

GIB = 1 << 30
SALT = "t"


def world(count: int = 3, dram: int = 10 * GIB, ssd: int = 0) -> QuotaWorld:
    return QuotaWorld({f"n{number}": (dram, ssd) for number in range(count)})


def up(count: int = 3, limit: int = 3 * GIB, dram: int = 10 * GIB, ssd: int = 0) -> QuotaWorld:
    """Nodes that are attached, one tenant with its shares out."""
    w = world(count, dram, ssd)
    w.set(m.TenantPolicy(SALT, limit))
    for node_id in w.nodes:
        w.attach(node_id)
    w.settle(5)
    return w


def total(w: QuotaWorld, salt: str = SALT) -> int:
    return sum(limit or 0 for limit in w.granted(salt).values())


# ---------------------------------------------------------------------- the division


def test_demands_come_first_and_the_rest_goes_by_capacity() -> None:
    parts = divide(100, [Claim("a", 60, 0, 1000), Claim("b", 10, 0, 1000), Claim("c", 0, 0, 500)], grain=1)
    assert sum(parts.values()) == 100 and parts["a"] > 60 and parts["b"] > 10 and parts["c"] > 0
    assert divide(30, [Claim("a", 60, 0, 99), Claim("b", 30, 0, 99)], grain=1) == {"a": 20, "b": 10}
    assert divide(500, [Claim("a", 0, 0, 50), Claim("b", 0, 0, 0)], grain=1) == {"a": 50, "b": 0}
    assert divide(5, [], grain=1) == {} and divide(0, [Claim("a", 5, 0, 9)], grain=1) == {"a": 0}


def test_small_totals_live_on_few_nodes() -> None:
    claims = [Claim(f"n{number}", 0, 0, 1000, rank=number) for number in range(10)]
    parts = divide(35, claims, grain=10)
    assert sorted(parts.values(), reverse=True)[:4] == [12, 12, 11, 0] or sum(map(bool, parts.values())) == 3
    assert sum(parts.values()) == 35 and min(part for part in parts.values() if part) >= 10
    wanting = [*claims[:9], Claim("n9", 50, 0, 1000, rank=99)]
    assert divide(8, wanting, grain=10)["n9"] == 8, "the one that wants it, though its rank is last"
    held = [*claims[:9], Claim("n9", 0, 8, 1000, rank=99)]
    assert divide(8, held, grain=10)["n9"] == 8, "or the one that has it"
    assert divide(35, [Claim("a", 0, 0, 5), Claim("b", 0, 0, 40)], grain=50) == {"a": 5, "b": 30}


def test_a_node_that_has_blocks_below_gets_what_reading_them_takes() -> None:
    wanting = Claim("a", 90, 0, 1000)
    parts = divide(100, [wanting, Claim("b", 0, 0, 1000, least=10), Claim("c", 0, 0, 1000)], grain=80)
    assert parts == {"a": 90, "b": 10, "c": 0}
    many = [wanting, *(Claim(f"n{i}", 0, 0, 1000, least=10) for i in range(20))]
    parts = divide(100, many, grain=80)
    assert sum(parts.values()) == 100 and sorted(parts.values())[-10:] == [10] * 10, "as far as it goes round"
    assert divide(15, [wanting, Claim("b", 0, 0, 1000, least=10)], grain=80) == {"a": 15, "b": 0}, (
        "not a half of little"
    )


def test_memory_follows_what_is_on_ssd() -> None:
    """A limit that would live on one node: another that has the tenant's blocks on SSD must be able to read them."""
    w = up(count=3, limit=48 << 20, ssd=10 * GIB)
    w.quotas.seen(SALT, 1 << 20, w.now)
    home = next(node_id for node_id, part in w.granted(SALT).items() if part)
    other = next(node_id for node_id in w.nodes if node_id != home)
    w.nodes[home].store(Tier.DRAM, SALT, 48 << 20, w.now)
    w.nodes[other].store(Tier.SSD, SALT, GIB, w.now)
    w.settle(20)
    assert w.granted(SALT)[other] == 16 << 20 and total(w) == 48 << 20


# ---------------------------------------------------------------------- the life of a share


def test_a_limit_is_out_in_shares_and_all_of_it() -> None:
    w = up()
    assert total(w) == 3 * GIB and min(limit or 0 for limit in w.granted(SALT).values()) > GIB // 2
    assert w.quotas.waiting == 0 and w.quotas.outstanding == 0


def test_the_first_answer_carries_everything_and_unlimited_salts_have_no_share() -> None:
    w = world(1)
    w.set(m.TenantPolicy(SALT, 5 * GIB, None, GIB))
    w.attach("n0")
    first = w.nodes["n0"].inbox[0]
    assert first.whole and first.ttl_ms == TTL_MS
    assert [share.salt for share in first.shares] == [SALT]
    assert first.fallback is not None and limit_in(first.fallback, Tier.DRAM) is None
    w.settle(3)
    assert w.nodes["n0"].shares[SALT] == m.Share(SALT, 5 * GIB, None, GIB, 0)


def test_shares_follow_demand_within_seconds_and_stay() -> None:
    w = up()
    for second in range(20):
        w.nodes["n1"].store(Tier.DRAM, SALT, GIB // 4, w.now)
        w.settle(1)
        assert w.may_use(Tier.DRAM, SALT) <= 3 * GIB, second
    assert w.used(Tier.DRAM, SALT) > 2.5 * GIB, w.granted(SALT)
    before, w.sent = w.granted(SALT), []
    w.settle(20)
    assert w.granted(SALT) == before
    assert not [message for message in w.sent if message.shares], "nothing changed, nothing is said"


def test_equal_churn_does_not_flap() -> None:
    w = up(limit=3 * GIB)
    for node in w.nodes.values():
        node.store(Tier.DRAM, SALT, 2 * GIB, w.now)
    w.settle(10)
    w.sent = []
    for _ in range(30):
        for number, node in enumerate(w.nodes.values()):
            node.store(Tier.DRAM, SALT, (10 + number) * MIB, w.now)
        w.settle(1)
    assert len([message for message in w.sent if message.shares]) <= 6


def test_a_raise_waits_for_its_donor() -> None:
    w = up(count=2, limit=2 * GIB)
    w.nodes["n0"].store(Tier.DRAM, SALT, GIB, w.now)
    w.settle(2)
    w.lose_link("n0")
    w.nodes["n1"].store(Tier.DRAM, SALT, 2 * GIB, w.now)
    w.settle(60)
    had = w.granted(SALT)["n1"] or 0
    assert 0 < had <= GIB, "what is away keeps its part"
    w.attach("n0")
    w.nodes["n0"].drain(0)
    for _ in range(3):
        w.settle(1, drain=0)
        assert w.granted(SALT)["n1"] <= 2 * GIB - w.used(Tier.DRAM, SALT) + w.nodes["n1"].used[Tier.DRAM][SALT]
        w.nodes["n1"].store(Tier.DRAM, SALT, GIB, w.now)
    assert (w.granted(SALT)["n0"] or 0) < GIB and w.quotas.waiting, "lowered, but it has not let go yet"
    w.settle(5)
    assert (w.granted(SALT)["n1"] or 0) > had and w.may_use(Tier.DRAM, SALT) <= 2 * GIB


def test_a_raise_takes_only_what_its_donor_has_drained() -> None:
    w = up(count=2, limit=2 * GIB)
    for _ in range(10):
        w.nodes["n0"].store(Tier.DRAM, SALT, GIB, w.now)
        w.settle(1)
    assert w.nodes["n0"].used[Tier.DRAM][SALT] > 1.8 * GIB
    for second in range(20):
        w.nodes["n1"].store(Tier.DRAM, SALT, GIB, w.now)
        w.settle(1, drain=20 * MIB)
        assert w.may_use(Tier.DRAM, SALT) <= 2 * GIB, second
    assert w.nodes["n0"].evicted > 0 and w.nodes["n1"].used[Tier.DRAM][SALT] > 200 * MIB


def test_a_raise_waits_for_the_store() -> None:
    w = world(2)
    w.set(m.TenantPolicy(SALT, 2 * GIB))
    for node_id in w.nodes:
        w.attach(node_id)
    for _ in range(20):
        w.tick()
        for node in w.nodes.values():
            while node.inbox:
                node.hear(w.now)
    assert total(w) == 0 and w.quotas.waiting == 2 * GIB
    w.quotas.durable(w.quotas.saved_serial - 1000, w.now)
    assert not any(node.inbox for node in w.nodes.values()), "what is in the store is not this"
    w.flush()
    for node in w.nodes.values():
        node.hear(w.now)
    assert total(w) == 2 * GIB


def test_who_is_long_gone_is_counted_out() -> None:
    w = up(count=2, limit=2 * GIB)
    w.nodes["n0"].restart()
    w.quotas.unlinked("n0", w.now)
    w.settle(LONG_GONE_S - 10)
    assert w.granted(SALT)["n1"] == GIB
    w.settle(15)
    assert w.granted(SALT)["n1"] == 2 * GIB
    w.attach("n0")
    w.settle(10)
    assert total(w) == 2 * GIB and (w.granted(SALT)["n0"] or 0) > GIB // 2


def test_who_says_goodbye_frees_its_memory_once_its_process_is_gone() -> None:
    w = up(count=2, limit=2 * GIB)
    w.stop("n0")
    w.settle(LEAVING_S - 2)
    assert w.granted(SALT)["n1"] == GIB, "it may still hold what it had"
    w.settle(5)
    assert w.granted(SALT)["n1"] == 2 * GIB


def test_who_comes_back_from_a_goodbye_in_time_has_its_part() -> None:
    w = up(count=2, limit=2 * GIB)
    w.stop("n0")
    w.settle(LEAVING_S - 5)
    w.attach("n0")
    w.settle(1)
    w.nodes["n0"].store(Tier.DRAM, SALT, GIB, w.now)
    tenant = w.quotas.tenant(SALT)
    assert tenant is not None
    out = tenant.ledgers[Tier.DRAM].out
    for _ in range(60):
        w.settle(0.25)
        assert (w.granted(SALT)["n0"] or 0) >= GIB and w.used(Tier.DRAM, SALT) == GIB, "its part was taken from it"
        assert w.may_use(Tier.DRAM, SALT) <= out() <= 2 * GIB


def test_who_comes_back_from_a_goodbye_has_empty_memory() -> None:
    w = up(count=2, limit=2 * GIB)
    w.nodes["n0"].store(Tier.DRAM, SALT, GIB, w.now)
    w.settle(2)
    tenant = w.quotas.tenant(SALT)
    assert tenant is not None and tenant.ledgers[Tier.DRAM].parts["n0"].used == GIB
    w.stop("n0")
    w.attach("n0")
    assert tenant.ledgers[Tier.DRAM].parts["n0"].used == 0, "what its process held is gone with it"


def test_a_restart_of_the_master_evicts_nothing_and_forgets_nothing() -> None:
    w = up(limit=3 * GIB)
    for _ in range(8):
        w.nodes["n2"].store(Tier.DRAM, SALT, GIB, w.now)
        w.settle(1)
    held, shares = w.used(Tier.DRAM, SALT), w.granted(SALT)
    assert held > 2 * GIB
    evicted = sum(node.evicted for node in w.nodes.values())
    w.start_master()
    for node_id in ("n2", "n0"):
        w.attach(node_id)
        w.settle(3)
    assert w.granted(SALT) == shares
    w.settle(30)
    w.attach("n1")
    w.settle(120)
    assert w.used(Tier.DRAM, SALT) == held and sum(node.evicted for node in w.nodes.values()) == evicted


def test_a_master_that_lost_its_store_believes_the_nodes() -> None:
    w = up(limit=3 * GIB)
    for node in w.nodes.values():
        node.store(Tier.DRAM, SALT, GIB, w.now)
    w.settle(2)
    w.grants = {}
    w.start_master()
    for node_id in w.nodes:
        w.attach(node_id)
    w.settle(10)
    assert w.used(Tier.DRAM, SALT) == 3 * GIB and total(w) == 3 * GIB


def test_a_lowered_limit_drains_to_it() -> None:
    w = up(limit=3 * GIB)
    for node in w.nodes.values():
        node.store(Tier.DRAM, SALT, GIB, w.now)
    w.settle(2)
    w.set(m.TenantPolicy(SALT, GIB))
    usage = [w.used(Tier.DRAM, SALT)]
    for _ in range(12):
        w.settle(1, drain=100 * MIB)
        usage.append(w.used(Tier.DRAM, SALT))
    assert usage == sorted(usage, reverse=True) and usage[-1] <= GIB and total(w) == GIB


def test_a_limit_for_one_that_had_none_is_there_at_once() -> None:
    w = world(2)
    for node_id in w.nodes:
        w.attach(node_id)
    w.settle(2)
    w.nodes["n0"].store(Tier.DRAM, SALT, 8 * GIB, w.now)
    w.settle(2)
    w.set(m.TenantPolicy(SALT, 4 * GIB))
    w.settle(3)
    assert w.used(Tier.DRAM, SALT) <= 4 * GIB and total(w) == 4 * GIB
    assert (w.granted(SALT)["n0"] or 0) > 2 * GIB, "most where its blocks are"
    w.set(m.TenantPolicy(SALT, None, 7 * GIB))
    w.settle(2)
    assert w.granted(SALT) == {"n0": None, "n1": None}
    w.quotas.remove_policy(SALT, w.now)
    w.settle(1)
    assert all(not node.shares for node in w.nodes.values())


def test_a_tiny_limit_is_no_slivers() -> None:
    w = up(count=6, limit=GRAIN_MIN)
    assert sorted(w.granted(SALT).values()) == [0, 0, 0, 0, 0, GRAIN_MIN]
    w.quotas.seen("big", 40 * MIB, w.now)
    w.set(m.TenantPolicy("big", 20 * 64 * MIB))
    w.quotas.seen("big", 40 * MIB, w.now)
    w.set(m.TenantPolicy("big", 21 * 64 * MIB))
    w.settle(3)
    assert min(limit for limit in w.granted("big").values() if limit) >= 16 * 40 * MIB


def test_floors_are_where_the_blocks_are_and_all_of_them() -> None:
    w = world(3)
    w.set(m.TenantPolicy(SALT, None, None, 2 * GIB))
    for node_id in w.nodes:
        w.attach(node_id)
    w.settle(2)
    w.nodes["n1"].store(Tier.DRAM, SALT, 5 * GIB, w.now)
    w.settle(5)
    floors = {node_id: node.shares[SALT].dram_floor for node_id, node in w.nodes.items()}
    assert sum(floors.values()) == 2 * GIB and floors["n1"] > 1.7 * GIB
    w.lose_link("n1")
    w.settle(3)
    assert sum(w.nodes[n].shares[SALT].dram_floor for n in ("n0", "n2")) == 2 * GIB, "others hold it meanwhile"
    w.attach("n1")
    assert w.nodes["n1"].inbox[0].shares[0].dram_floor == floors["n1"], "and it comes back with its own"
    w.settle(5)
    assert sum(node.shares[SALT].dram_floor for node in w.nodes.values()) == 2 * GIB


def test_floors_of_all_fit_each_node() -> None:
    w = world(2, dram=10 * GIB)
    for number in range(4):
        w.set(m.TenantPolicy(f"t{number}", None, None, 5 * GIB))
    for node_id in w.nodes:
        w.attach(node_id)
    w.settle(3)
    for number in range(4):
        w.nodes["n0"].store(Tier.DRAM, f"t{number}", 2 * GIB, w.now)
        w.settle(2)
    for node in w.nodes.values():
        assert sum(share.dram_floor for share in node.shares.values()) <= 10 * GIB
    everywhere = [share.dram_floor for node in w.nodes.values() for share in node.shares.values()]
    assert sum(everywhere) == 20 * GIB


# ---------------------------------------------------------------------- salts without a policy


def test_by_default_nothing_is_limited_and_deny_denies() -> None:
    w = up()
    assert w.granted("new") == {"n0": None, "n1": None, "n2": None} and w.quotas.rooms("new") == {}
    w.quotas.set_fallback(m.TenantPolicy(""), True, w.now)
    w.settle(1)
    assert set(w.granted("new").values()) == {0}
    assert total(w) == 3 * GIB, "those with a policy keep theirs"
    w.quotas.remove_policy(SALT, w.now)
    w.settle(1)
    assert total(w) == 0


def test_a_default_of_bytes_holds_for_each_salt_across_nodes() -> None:
    w = world(3)
    w.quotas.set_fallback(m.TenantPolicy("", 3 * GIB), False, w.now)
    w.flush()
    for node_id in w.nodes:
        w.attach(node_id)
    w.settle(6)
    assert set(w.granted("never seen").values()) == {GIB}
    w.quotas.seen("guest", MIB, w.now)
    w.settle(1)
    for _ in range(12):
        w.nodes["n0"].store(Tier.DRAM, "guest", GIB, w.now)
        w.settle(1)
        assert w.may_use(Tier.DRAM, "guest") <= 3 * GIB
    assert w.used(Tier.DRAM, "guest") > 2.5 * GIB, "its demand counts"
    w.start_master()
    for node_id in w.nodes:
        w.attach(node_id)
    w.settle(10)
    assert w.used(Tier.DRAM, "guest") > 2.5 * GIB and set(w.granted("never seen").values()) == {GIB}


def test_a_guest_that_is_idle_is_a_stranger_again() -> None:
    w = world(2)
    w.quotas.set_fallback(m.TenantPolicy("", 2 * GIB), False, w.now)
    for node_id in w.nodes:
        w.attach(node_id)
    w.settle(5)
    w.quotas.seen("guest", MIB, w.now)
    w.nodes["n0"].store(Tier.DRAM, "guest", GIB, w.now)
    w.settle(5)
    w.nodes["n0"].used[Tier.DRAM].clear()
    w.attach("n0")
    w.settle(800)
    assert w.quotas.tenants() == [] and all(not node.shares for node in w.nodes.values())


def test_an_idle_link_is_kept_warm() -> None:
    w = up()
    w.settle(300)
    assert not any(node.lapsed(w.now) for node in w.nodes.values())
    w.lose_link("n0")
    w.settle(TTL_MS / 1000 + 1)
    assert w.nodes["n0"].lapsed(w.now) and not w.nodes["n1"].lapsed(w.now)


@pytest.mark.parametrize("revision", [0, 10**9])
def test_a_report_under_shares_of_another_master_confirms_nothing(revision: int) -> None:
    w = up(count=2, limit=2 * GIB)
    w.set(m.TenantPolicy(SALT, GIB))
    session = w.nodes["n0"].session
    assert session is not None
    w.quotas.reported("n0", session, m.NodeUsage(shares_revision=revision), w.now)
    assert w.quotas.outstanding == 2


# ---------------------------------------------------------------------- whatever happens

NODES = {"a": (1000 * MIB, 2000 * MIB), "b": (1000 * MIB, 0), "c": (500 * MIB, 500 * MIB)}
SALTS = ("s", "u")
NODE = st.sampled_from(sorted(NODES))
NODE_IDS = tuple(sorted(NODES))
ANY_SALT = st.sampled_from(SALTS)
LIMIT = st.none() | st.integers(0, 2500).map(lambda mib: mib * MIB)


class Shares(RuleBasedStateMachine):
    """Links break, nodes and masters die, messages wait: nobody may use more than the limit in sum."""

    @initialize(limit=LIMIT, fallback=LIMIT)
    def begin(self, limit: int | None, fallback: int | None) -> None:
        self.world = QuotaWorld(NODES)
        self.bound: dict[tuple[Tier, str], int] = {}
        self.world.quotas.set_fallback(m.TenantPolicy("", fallback, fallback), False, self.world.now)
        self.world.set(m.TenantPolicy("s", limit, limit))
        self.policies_changed()

    def limit(self, tier: Tier, salt: str) -> int | None:
        policy = self.world.quotas.policy_of(salt)
        return policy.ssd_limit if tier == Tier.SSD else policy.dram_limit

    def policies_changed(self) -> None:
        """What is out by now may be out until it has drained. While a salt has no limit, what an away node has of
        an older one is not kept count of: policies are taken to change less often than shares lapse."""
        for node in self.world.nodes.values():
            if node.session is None and any(self.limit(tier, salt) is None for tier in TIERS for salt in SALTS):
                node.ready = False
        for tier in TIERS:
            for salt in SALTS:
                self.bound[tier, salt] = self.world.may_use(tier, salt)

    @rule(node_id=NODE)
    def attach(self, node_id: str) -> None:
        self.world.attach(node_id)

    @rule(node_id=NODE, count=st.integers(1, 4))
    def deliver(self, node_id: str, count: int) -> None:
        for _ in range(count):
            self.world.deliver(node_id)

    @rule(node_id=NODE)
    def report(self, node_id: str) -> None:
        node = self.world.nodes[node_id]
        if node.session is not None and node.ready:
            node.report()

    @rule(node_id=NODE, salt=ANY_SALT, tier=st.sampled_from(TIERS), nbytes=st.integers(1, 1500))
    def store(self, node_id: str, salt: str, tier: Tier, nbytes: int) -> None:
        self.world.quotas.seen(salt, MIB, self.world.now)
        self.world.nodes[node_id].store(tier, salt, nbytes * MIB, self.world.now)

    @rule(node_id=NODE, nbytes=st.integers(1, 1500))
    def drain(self, node_id: str, nbytes: int) -> None:
        self.world.nodes[node_id].drain(nbytes * MIB)

    @rule(node_id=NODE)
    def lose_link(self, node_id: str) -> None:
        self.world.lose_link(node_id)

    @rule(node_id=NODE, unnoticed=st.booleans())
    def restart_node(self, node_id: str, unnoticed: bool) -> None:
        self.world.nodes[node_id].restart()
        if not unnoticed:
            self.world.quotas.unlinked(node_id, self.world.now)

    @rule(node_id=NODE)
    def stop_node(self, node_id: str) -> None:
        self.world.stop(node_id)

    @rule()
    def flush(self) -> None:
        self.world.flush()

    @rule()
    def restart_master(self) -> None:
        self.world.start_master()

    @rule(seconds=st.sampled_from([0.25, 1.0, 1.0, 3.0, 35.0]))
    def tick(self, seconds: float) -> None:
        if self.world.now < 1500:  # long before anybody is long gone
            self.world.tick(seconds)

    @rule(seconds=st.integers(1, 4))
    def settle(self, seconds: int) -> None:
        if self.world.now < 1500:
            self.world.settle(seconds)

    @rule(salt=ANY_SALT, dram=LIMIT, ssd=LIMIT)
    def set_policy(self, salt: str, dram: int | None, ssd: int | None) -> None:
        self.world.set(m.TenantPolicy(salt, dram, ssd))
        self.policies_changed()

    @rule(salt=ANY_SALT)
    def remove_policy(self, salt: str) -> None:
        self.world.quotas.remove_policy(salt, self.world.now)
        self.world.flush()
        self.policies_changed()

    @rule(limit=LIMIT, deny=st.booleans())
    def set_fallback(self, limit: int | None, deny: bool) -> None:
        self.world.quotas.set_fallback(m.TenantPolicy("", limit, limit), deny, self.world.now)
        self.world.flush()
        self.policies_changed()

    @invariant()
    def no_more_out_than_the_limit(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.quotas.check()
        self.what_placement_goes_by()
        for (tier, salt), bound in self.bound.items():
            limit, out = self.limit(tier, salt), self.world.may_use(tier, salt)
            if limit is not None:
                assert out <= max(limit, bound), f"{salt} in {tier.name}: {out} of {limit} (or {bound})"
                self.bound[tier, salt] = max(limit, min(bound, out))

    def what_placement_goes_by(self) -> None:
        """Rooms are remembered from one step to the next, and are what they would be if they were not."""
        for salt in SALTS:
            rooms = self.world.quotas.rooms(salt)
            along = self.world.quotas.rooms_along(salt, NODE_IDS)
            assert (along is None) == (not self.world.quotas._of(salt, Tier.DRAM).limited)
            if along is not None:
                shares = [rooms[name].share if name in rooms else UNLIMITED for name in NODE_IDS]
                assert along.share.tolist() == shares

    def teardown(self) -> None:
        """Once all is well again, all of the limit is there."""
        if not hasattr(self, "world"):
            return
        for node_id in NODES:
            self.world.attach(node_id)
        self.world.settle(75)
        for tier in TIERS:
            for salt in SALTS:
                limit = self.limit(tier, salt)
                if limit is not None and self.world.quotas.tenant(salt) is not None:
                    out = sum(value or 0 for value in self.world.granted(salt, tier).values())
                    there = sum(node.capacity[tier] for node in self.world.nodes.values())
                    assert min(limit, there) * 0.9 - MIB <= out <= limit, (tier, salt, out, limit)


TestShares = Shares.TestCase
TestShares.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
