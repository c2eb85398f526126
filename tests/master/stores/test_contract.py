"""What every state store does, and that both do the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from kvstrata.master.stores.base import Deposed, LeaderRecord, StateStore
from kvstrata.master.stores.redis import RedisStore
from kvstrata.master.stores.redis_url import parse_redis_url
from kvstrata.master.stores.sqlite import SqliteStore
from kvstrata.proto.keys import Namespace
from tests.master.stores.conftest import Opener
from tests.redis_server import RedisServer

NS = Namespace("g/é", block_bytes=4096, block_tokens=16, hash_bytes=32, shard=3, shard_count=4)
GROUP = SaveGroup(Namespace("g/é", 4096, 16, 32, 0, 4), 3)
STONE = SaveTombstone(1 << 40, NS, "salt\0é", bytes(range(64)), ("a", "b"))
POLICY = TenantPolicy("t\0é", dram_limit=1 << 50, ssd_limit=None, dram_floor=1 << 20)
FALLBACK = SaveFallback(TenantPolicy("", 0, None), deny=True)
GRANTS = SaveGrants("n1", (Share("", None, 0), Share("t\0é", 5, None, 1, 0)), Share("", 3, None))
SCOPES = (
    SaveScope(11, "g/é", "t\0é", erase=True, epoch=None, waiting=("a",)),
    SaveScope(12, "g/é", None, erase=False, epoch=4, waiting=("b", "c")),
)
REPLICAS = (SaveReplicas("", "t", 3), SaveReplicas("", None, 2), SaveReplicas("g/é", None, 4))
NODES = (SaveNode("n1", 1 << 50, 0, gone=False, draining=True), SaveNode("n2", 5, 6, gone=True))
EVERYTHING: tuple[Save, ...] = (
    *NODES, GROUP, STONE, SavePolicy("t\0é", POLICY), FALLBACK, GRANTS, *SCOPES, *REPLICAS,
)  # fmt: skip
ALL_SAVED = Saved(
    nodes=NODES,
    groups=(GROUP,),
    tombstones=(STONE,),
    last_command=1 << 40,
    policies=(POLICY,),
    fallback=FALLBACK,
    grants=(GRANTS,),
    scopes=SCOPES,
    replicas=REPLICAS,
    revision=1,
)
A, B = LeaderRecord("a", 0, "10.0.0.1:7400", "10.0.0.1:7401", "10.0.0.1:7402"), LeaderRecord("b")
LONG_MS = 60_000


def test_a_new_store_is_empty_and_whose_it_is_stays(opener: Opener) -> None:
    store = opener()
    assert store.load() == Saved() and store.revision() == 0
    assert store.cluster_id() and opener().cluster_id() == store.cluster_id()
    assert store.leader() is None and store.masters() == []


def test_what_is_saved_is_loaded_by_whoever_opens_it_again(opener: Opener) -> None:
    opener().save(EVERYTHING)
    again = opener()
    assert again.load() == ALL_SAVED
    assert again.revision() == 1


def test_a_row_is_replaced_and_an_empty_one_deleted(opener: Opener) -> None:
    store = opener()
    store.save(EVERYTHING)
    changed = SaveNode("n1", 7, 8, gone=False)
    gone = [
        changed, dataclasses.replace(NODES[1], removed=True), dataclasses.replace(STONE, waiting=()),
        SavePolicy("t\0é", None), SaveGrants("n1", ()), *(dataclasses.replace(one, waiting=()) for one in SCOPES),
        *(dataclasses.replace(one, count=0) for one in REPLICAS),
    ]  # fmt: skip
    store.save(gone)
    left = Saved(nodes=(changed,), groups=(GROUP,), last_command=1 << 40, fallback=FALLBACK, revision=2)
    assert store.load() == left
    store.save(gone)  # once more is no error
    assert store.load() == dataclasses.replace(left, revision=3)


def test_numbers_of_commands_are_never_given_twice(opener: Opener) -> None:
    store = opener()
    store.save([GROUP, STONE, dataclasses.replace(STONE, waiting=()), SCOPES[0]])
    assert store.load().last_command == 1 << 40
    store.save([dataclasses.replace(STONE, command=(1 << 52) + 1, waiting=())])
    assert store.load().last_command == (1 << 52) + 1


def test_the_revision_grows_with_each_save(opener: Opener) -> None:
    store, other = opener(), opener()
    seen = [store.revision()]
    for node in (*NODES, NODES[0]):
        store.save([node])
        assert other.load().revision == other.revision()
        seen.append(other.revision())
    assert seen == sorted(set(seen))


def test_one_leads_until_it_resigns_and_each_lead_has_a_greater_epoch(opener: Opener) -> None:
    store = opener()
    led = store.campaign(A, LONG_MS)
    assert led == dataclasses.replace(A, epoch=1)
    assert store.campaign(B, LONG_MS) == led == store.leader(), "the lease is taken"
    assert store.campaign(A, LONG_MS) == led, "a lease renewed keeps its epoch"
    store.resign(B)
    assert store.leader() == led, "only who has it gives it up"
    store.resign(A)
    assert store.leader() is None
    assert store.campaign(B, LONG_MS) == dataclasses.replace(B, epoch=2)
    assert store.load().leader_epoch == 2


def test_an_epoch_is_greater_than_any_that_the_candidate_has_heard_of(opener: Opener) -> None:
    store = opener()
    assert store.campaign(dataclasses.replace(A, epoch=1 << 50), LONG_MS).epoch == (1 << 50) + 1
    store.resign(A)
    assert store.campaign(dataclasses.replace(B, epoch=7), LONG_MS).epoch == (1 << 50) + 2


def test_a_deposed_leader_writes_nothing(opener: Opener) -> None:
    store = opener()
    old = store.campaign(A, LONG_MS).epoch
    store.save([NODES[0]], old)
    store.resign(A)
    new = store.campaign(B, LONG_MS).epoch
    before = store.load()
    with pytest.raises(Deposed, match=f"epoch {new}"):
        store.save([NODES[1], SavePolicy("t", POLICY), STONE], old)
    assert store.load() == before
    store.save([NODES[1]], new)
    store.save([GROUP])  # not fenced
    assert store.load().nodes == NODES


def test_a_write_of_a_greater_epoch_is_taken_and_remembered(opener: Opener) -> None:
    """The store has been emptied, or is an old copy: who leads by what the nodes say writes it again."""
    store = opener()
    store.save([NODES[0]], 9)
    assert store.load().leader_epoch == 9
    with pytest.raises(Deposed):
        store.save([NODES[1]], 8)
    assert store.campaign(B, LONG_MS).epoch == 10


def test_who_leads_is_among_the_masters(opener: Opener) -> None:
    store = opener()
    store.announce(A, LONG_MS)
    store.campaign(A, LONG_MS)
    assert store.masters() == [dataclasses.replace(A, epoch=1)]


# ------------------------------------------------------------------ both do the same

NAMES = st.sampled_from(["", "a", "b/é", "c\0", "\U0001f600"])
SOME = NAMES.filter(bool)
AMOUNT = st.none() | st.integers(0, 1 << 62)
FLOOR = st.integers(0, 1 << 62)
COMMANDS = st.integers(8, 11) | st.integers(1 << 32, (1 << 32) + 2)
WAITING = st.lists(SOME, max_size=2, unique=True).map(tuple)
POLICIES = st.builds(TenantPolicy, NAMES, AMOUNT, AMOUNT, FLOOR, FLOOR)
SHARES = st.lists(st.builds(Share, NAMES, AMOUNT, AMOUNT, FLOOR, FLOOR), max_size=3, unique_by=lambda one: one.salt)
#: Removals are of namespaces that are there: as the master writes them.
GROUPS = [Namespace(name, 4096, 16, 32, 0, 4) for name in ("g", "h/é")]
SAVES: st.SearchStrategy[Save] = st.one_of(
    st.builds(SaveNode, SOME, FLOOR, FLOOR, st.booleans(), st.booleans(), st.booleans()),
    st.builds(SaveGroup, st.sampled_from(GROUPS), st.integers(0, 9)),
    st.builds(
        SaveTombstone,
        COMMANDS,
        st.builds(lambda ns, shard: dataclasses.replace(ns, shard=shard), st.sampled_from(GROUPS), st.integers(0, 3)),
        NAMES,
        st.binary(min_size=32, max_size=32),
        WAITING,
    ),
    st.builds(lambda salt, policy: SavePolicy(salt, policy and dataclasses.replace(policy, salt=salt)), NAMES,
              st.none() | POLICIES),
    st.builds(lambda policy, deny: SaveFallback(dataclasses.replace(policy, salt=""), deny), POLICIES, st.booleans()),
    st.builds(
        lambda node, shares, fallback: SaveGrants(node, tuple(shares), fallback),
        SOME, SHARES, st.none() | st.builds(Share, st.just(""), AMOUNT, AMOUNT, FLOOR, FLOOR),
    ),
    st.builds(SaveScope, COMMANDS, SOME, st.none() | NAMES, st.booleans(), st.none() | st.integers(0, 9), WAITING),
    st.builds(SaveReplicas, NAMES, st.none() | NAMES, st.integers(0, 4)),
)  # fmt: skip


@pytest.fixture(scope="module")
def redis_store(shared_redis: RedisServer) -> Iterator[RedisStore]:
    store = RedisStore(parse_redis_url(f"{shared_redis.url}?cluster=model"))
    yield store
    store.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.tuples(st.lists(SAVES, max_size=8), st.integers(0, 3)), max_size=6))
def test_the_same_saves_give_the_same_in_both(
    redis_store: RedisStore, shared_redis: RedisServer, batches: list[tuple[list[Save], int]]
) -> None:
    shared_redis.empty()
    sqlite = SqliteStore(None)
    stores: tuple[StateStore, ...] = (sqlite, redis_store)
    for store in stores:
        store.save([SaveGroup(ns, 0) for ns in GROUPS])
    for batch, epoch in batches:
        assert len({_outcome(store, batch, epoch) for store in stores}) == 1
        assert sqlite.load() == redis_store.load()
        assert sqlite.revision() == redis_store.revision()
    sqlite.close()


def _outcome(store: StateStore, batch: list[Save], epoch: int) -> str:
    try:
        store.save(batch, epoch)
    except Deposed:
        return "deposed"
    return "taken"
