"""The store on a real Redis: several masters on it, emptied, full, read-only, written by something else."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from kvstrata.master.journal import PENDING_MAX
from kvstrata.master.messages import (
    Save,
    SaveGrants,
    SaveGroup,
    SaveNode,
    SavePolicy,
    SaveTombstone,
    Share,
    TenantPolicy,
)
from kvstrata.master.saved import Saved
from kvstrata.master.stores import redis as redis_store
from kvstrata.master.stores.base import Deposed, LeaderRecord
from kvstrata.master.stores.redis import RedisStore
from kvstrata.master.stores.redis_rows import FORMAT
from kvstrata.master.stores.redis_url import parse_redis_url
from kvstrata.proto.errors import ConfigError, Unavailable
from kvstrata.proto.keys import Namespace
from tests.redis_server import RedisServer, until

NS = Namespace("g", 4096, 16, 32, 0, 1)
NODE = SaveNode("n1", 1, 2, gone=False)
A, B = LeaderRecord("a"), LeaderRecord("b")
LONG_MS = 60_000

Open = Callable[..., RedisStore]
_NAMES = count()


@pytest.fixture
def name() -> str:
    return f"own-{next(_NAMES)}"


@pytest.fixture
def store_on() -> Iterator[Open]:
    """Opens stores on a server, all closed at the end; ``query`` is what stands behind the ``?``."""
    opened: list[RedisStore] = []

    def on(server: RedisServer, query: str = "", cluster_id: str | None = None, wait_s: float = 0.0) -> RedisStore:
        address = parse_redis_url(server.url + (f"?{query}" if query else ""))
        opened.append(RedisStore(address, cluster_id, wait_s))
        return opened[-1]

    yield on
    for store in opened:
        store.close()


# ------------------------------------------------------------------ whose it is


def test_the_store_of_another_cluster_is_refused(shared_redis: RedisServer, store_on: Open, name: str) -> None:
    assert store_on(shared_redis, f"cluster={name}", "one").cluster_id() == "one"
    with pytest.raises(ConfigError, match="belongs to cluster one, not two"):
        store_on(shared_redis, f"cluster={name}", "two")


def test_clusters_share_a_redis_by_name(shared_redis: RedisServer, store_on: Open, name: str) -> None:
    one, two = (store_on(shared_redis, f"cluster={name}-{which}") for which in "12")
    one.save([NODE])
    one.campaign(A, LONG_MS)
    one.announce(A, LONG_MS)
    assert two.load() == Saved() and two.leader() is None and two.masters() == []
    assert one.cluster_id() != two.cluster_id()
    with shared_redis.client() as client:
        keys = list(client.scan_iter(f"*{name}*"))
    assert keys and all(key.startswith(b"kvstrata:{" + name.encode()) for key in keys)


def test_masters_that_start_together_have_one_cluster_id(shared_redis: RedisServer, name: str) -> None:
    ids: list[str] = []
    ready = threading.Barrier(8)

    def start() -> None:
        ready.wait(10)
        store = RedisStore(parse_redis_url(f"{shared_redis.url}?cluster={name}"))
        ids.append(store.cluster_id())
        store.close()

    _together(start, 8)
    assert len(ids) == 8 and len(set(ids)) == 1


def test_a_newer_format_is_refused_and_left_alone(shared_redis: RedisServer, store_on: Open, name: str) -> None:
    store = store_on(shared_redis, f"cluster={name}")
    store.save([NODE])
    facts = f"kvstrata:{{{name}}}:facts"
    with shared_redis.client() as client:
        client.hset(facts, "format", FORMAT + 1)
        before = client.hgetall(facts)
        with pytest.raises(ConfigError, match=f"format {FORMAT + 1}, this build knows {FORMAT}"):
            started = time.monotonic()
            store_on(shared_redis, f"cluster={name}", wait_s=30.0)
        assert time.monotonic() - started < 15, "waiting would not help"
        calls: tuple[Callable[[], object], ...] = (
            store.load, store.revision, lambda: store.save([NODE]), lambda: store.campaign(A, LONG_MS),
            lambda: store.announce(A, LONG_MS), lambda: store.resign(A),
        )  # fmt: skip
        for call in calls:  # an upgraded store under a master that runs
            with pytest.raises(Unavailable, match="newer kvstrata"):
                call()
        assert client.hgetall(facts) == before


def test_an_older_format_is_upgraded_once(
    shared_redis: RedisServer, store_on: Open, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_on(shared_redis, f"cluster={name}").save([NODE])
    step = f"""
    if redis.call('HGET', KEYS[1], 'format') == '{FORMAT}' then
      redis.call('HINCRBY', KEYS[1], 'revision', 10)
      redis.call('HSET', KEYS[1], 'format', '{FORMAT + 1}')
    end
    return {{'ok'}}
    """
    monkeypatch.setattr(redis_store, "FORMAT", FORMAT + 1)
    monkeypatch.setattr(redis_store, "UPGRADES", {FORMAT: step})
    for _ in range(2):
        upgraded = store_on(shared_redis, f"cluster={name}").load()
        assert upgraded.nodes == (NODE,) and upgraded.revision == 11


def test_rows_that_make_no_sense_are_an_error_with_advice(shared_redis: RedisServer, store_on: Open, name: str) -> None:
    store = store_on(shared_redis, f"cluster={name}")
    prefix = f"kvstrata:{{{name}}}:"
    stone = b'{"group":"none","shard":0,"salt":"","hashes":"","waiting":["a"]}'
    wrong = (("nodes", "n", b"{}"), ("groups", "g", b"\xff"), ("tombstones", "1", stone), ("scopes", "x", b"{}"))
    with shared_redis.client() as client:
        for hash_name, field, value in wrong:
            client.hset(prefix + hash_name, field, value)
            with pytest.raises(ConfigError, match=r"cannot be read: .*restore a copy"):
                store.load()
            client.delete(prefix + hash_name)
        store.save([NODE])
        row = client.hget(prefix + "nodes", "n1")
        client.hset(prefix + "nodes", "n1", row[:-1] + b',"of_a_later_build":[1]}')
        assert store.load().nodes == (NODE,)
        client.set(prefix + "policies", "not a hash")
        with pytest.raises(Unavailable, match="WRONGTYPE"):
            store.load()


def test_without_the_redis_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstrata\[redis\]'"):
        RedisStore(parse_redis_url("redis://127.0.0.1:1"))


# ------------------------------------------------------------------ who leads


def test_a_lease_that_is_not_renewed_ends_and_the_next_epoch_is_greater(
    shared_redis: RedisServer, store_on: Open, name: str
) -> None:
    one, two = store_on(shared_redis, f"cluster={name}"), store_on(shared_redis, f"cluster={name}")
    assert one.campaign(A, 300).epoch == 1
    assert two.campaign(B, 300).master_id == "a"
    until(lambda: two.campaign(B, LONG_MS).master_id == "b")
    led = two.leader()
    assert led is not None and led.epoch == 2
    assert one.campaign(A, LONG_MS) == led, "it hears who leads now"
    with pytest.raises(Deposed):
        one.save([NODE], 1)


def test_of_many_candidates_one_leads(shared_redis: RedisServer, name: str) -> None:
    heard: list[LeaderRecord] = []
    ready = threading.Barrier(8)

    def run(number: int) -> None:
        store = RedisStore(parse_redis_url(f"{shared_redis.url}?cluster={name}"))
        ready.wait(10)
        for _ in range(20):
            heard.append(store.campaign(LeaderRecord(f"m{number}", number), LONG_MS))
        store.close()

    _together(run, 8)
    assert len(heard) == 160 and len(set(heard)) == 1


def test_two_leaders_of_one_epoch_are_told_apart(shared_redis: RedisServer, store_on: Open, name: str) -> None:
    """An emptied store gave an epoch again: the one that has it there is the one that writes there."""
    one, two = store_on(shared_redis, f"cluster={name}"), store_on(shared_redis, f"cluster={name}")
    assert one.campaign(A, LONG_MS).epoch == 1
    with shared_redis.client() as client:
        client.delete(*client.scan_iter(f"kvstrata:{{{name}}}:*"))
    assert two.campaign(B, LONG_MS).epoch == 1
    with pytest.raises(Deposed):
        one.save([NODE], 1)
    two.save([NODE], 1)


def test_a_lease_older_than_a_write_of_a_greater_epoch_is_taken_anew(
    shared_redis: RedisServer, store_on: Open, name: str
) -> None:
    one, two = store_on(shared_redis, f"cluster={name}"), store_on(shared_redis, f"cluster={name}")
    one.campaign(A, LONG_MS)
    two.save([NODE], 5)
    assert one.campaign(A, LONG_MS).epoch == 6


def test_masters_are_those_that_announced_themselves_lately(
    shared_redis: RedisServer, store_on: Open, name: str
) -> None:
    store = store_on(shared_redis, f"cluster={name}")
    a = LeaderRecord("a", 7, "10.0.0.1:1", "10.0.0.1:2", "[::1]:3")
    store.announce(a, LONG_MS)
    store.announce(B, 200)
    assert store.masters() == [dataclasses.replace(a, epoch=0), B], "nobody leads"
    store.campaign(dataclasses.replace(a, epoch=7), LONG_MS)
    assert store.masters() == [dataclasses.replace(a, epoch=8), B]
    until(lambda: store.masters() == [dataclasses.replace(a, epoch=8)])
    store.announce(a, LONG_MS)
    with shared_redis.client() as client:
        assert client.hlen(f"kvstrata:{{{name}}}:masters") == 1, "who is gone is forgotten"


# ------------------------------------------------------------------ emptied


def test_an_emptied_store_is_seen_and_can_be_filled_again(redis_server: RedisServer, store_on: Open) -> None:
    store, standby = store_on(redis_server), store_on(redis_server)
    epoch = store.campaign(A, LONG_MS).epoch
    store.save([SaveGroup(NS, 1), NODE], epoch)
    store.save([SavePolicy("t", TenantPolicy("t", 5))], epoch)
    before = standby.load()
    redis_server.empty()
    assert store.revision() == standby.revision() == 0 < before.revision
    assert standby.load() == Saved() and standby.leader() is None
    store.save([*before.nodes, *before.groups, SavePolicy("t", before.policies[0])], epoch)
    again = standby.load()
    assert dataclasses.replace(again, revision=before.revision) == before, "also the epoch"
    assert store.campaign(A, LONG_MS).epoch == epoch + 1, "epochs do not repeat"
    assert store_on(redis_server).cluster_id() == store.cluster_id()


@pytest.mark.parametrize("what", ["save", "campaign", "announce"])
def test_whatever_is_written_first_says_whose_the_store_is(
    redis_server: RedisServer, store_on: Open, what: str
) -> None:
    store = store_on(redis_server)
    redis_server.empty()
    writes: dict[str, Callable[[], object]] = {
        "save": lambda: store.save([NODE]),
        "campaign": lambda: store.campaign(A, LONG_MS),
        "announce": lambda: store.announce(A, LONG_MS),
    }
    writes[what]()
    assert store_on(redis_server).cluster_id() == store.cluster_id()


def test_policy_goes_before_a_new_master_that_found_the_store_empty(redis_server: RedisServer, store_on: Open) -> None:
    old = store_on(redis_server)
    old.save([NODE])
    redis_server.empty()
    new = store_on(redis_server)
    assert new.cluster_id() != old.cluster_id()
    new.announce(B, LONG_MS)
    assert new.campaign(B, LONG_MS).master_id == "b"
    assert old.revision() == 0
    assert old.campaign(A, LONG_MS).master_id == "a" and [one.master_id for one in old.masters()] == []
    old.save([NODE])
    assert store_on(redis_server).cluster_id() == old.cluster_id()
    with pytest.raises(Unavailable, match="start the masters again"):
        new.save([NODE])
    with pytest.raises(Unavailable, match="start the masters again"):
        new.load()


def test_a_store_that_another_cluster_has_taken_and_used_is_its(redis_server: RedisServer, store_on: Open) -> None:
    old = store_on(redis_server)
    old.save([NODE])
    redis_server.empty()
    new = store_on(redis_server)
    new.save([SaveNode("theirs", 1, 1, gone=False)])
    calls: tuple[Callable[[], object], ...] = (
        old.load, old.revision, lambda: old.save([NODE]), lambda: old.campaign(A, LONG_MS)
    )  # fmt: skip
    for call in calls:
        with pytest.raises(Unavailable, match=f"belongs to cluster {new.cluster_id()} now"):
            call()
    assert [node.node_id for node in new.load().nodes] == ["theirs"]


# ------------------------------------------------------------------ much, full, read-only


def test_as_much_as_a_journal_holds_is_one_script(shared_redis: RedisServer, store_on: Open, name: str) -> None:
    assert redis_store.SCRIPT_ROWS >= PENDING_MAX
    store = store_on(shared_redis, f"cluster={name}")
    shares = tuple(Share(f"tenant-{number:05}", number, None, 1, 0) for number in range(16_000))
    stones = [SaveTombstone(number, NS, "t", bytes(32 * 8), ("a", "b")) for number in range(1, 10_001)]
    rest = PENDING_MAX - 10_002
    policies = [SavePolicy(f"t{number:05}", TenantPolicy(f"t{number:05}", number)) for number in range(rest)]
    store.save([SaveGroup(NS, 0), SaveGrants("n1", shares), *stones, *policies])
    saved = store.load()
    assert saved.revision == 1, "in one step"
    assert saved.tombstones == tuple(stones) and saved.last_command == 10_000
    assert saved.grants == (SaveGrants("n1", shares),) and len(saved.policies) == rest


def test_more_goes_in_several_steps_in_order(
    shared_redis: RedisServer, store_on: Open, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "SCRIPT_ROWS", 3)
    store = store_on(shared_redis, f"cluster={name}")
    writes: list[Save] = [SaveGroup(NS, 0), *(SaveNode(f"n{number}", number, 0, gone=False) for number in range(6))]
    writes.insert(2, SaveTombstone(9, NS, "", bytes(32), ("a",)))
    store.save([*writes, SaveNode("n0", 9, 9, gone=True)])
    saved = store.load()
    assert saved.revision == 3 and saved.last_command == 9 and len(saved.nodes) == 6
    assert saved.nodes[0] == SaveNode("n0", 9, 9, gone=True)
    monkeypatch.setattr(redis_store, "SCRIPT_BYTES", 1)
    store.save(writes)
    assert store.load().revision == 3 + len(writes)


def test_a_full_redis_refuses_a_save_whole_and_takes_it_later(redis_server: RedisServer, store_on: Open) -> None:
    store = store_on(redis_server)
    store.save([NODE, SaveNode("n2", 1, 1, gone=False)])
    before = store.load()
    change = [dataclasses.replace(NODE, removed=True), SaveNode("n3", 1, 1, gone=False)]
    with redis_server.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(Unavailable, match=r"used memory > 'maxmemory'\.?$"):
            store.save(change)
        with pytest.raises(Unavailable, match=r"used memory > 'maxmemory'\.?$"):
            store.campaign(A, LONG_MS)
        client.script_flush()
        assert store.load() == before, "not even the row that was to go is gone"
        assert store.revision() == before.revision and store.leader() is None and store.masters() == []
        client.config_set("maxmemory", 0)
    store.save(change)
    assert [node.node_id for node in store.load().nodes] == ["n2", "n3"]


def test_a_redis_that_takes_no_writes_refuses_a_save_whole(redis_server: RedisServer, store_on: Open) -> None:
    store = store_on(redis_server)
    store.save([NODE])
    before = store.load()
    with redis_server.client() as client:
        client.replicaof("127.0.0.1", "1")
        with pytest.raises(Unavailable, match="read only replica"):
            store.save([dataclasses.replace(NODE, removed=True)])
        assert store.load() == before
        client.replicaof("NO", "ONE")
    store.save([dataclasses.replace(NODE, removed=True)])
    assert store.load().nodes == ()


def test_a_save_waits_for_the_replicas_that_it_must_have(
    redis_server: RedisServer, store_on: Open, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = store_on(redis_server, "replicas=1")
    with pytest.raises(Unavailable, match="0 replicas have the write, 1 must"):
        store.save([NODE])
    options = (f"replicaof 127.0.0.1 {redis_server.port}", "repl-diskless-sync-delay 0")
    with RedisServer(tmp_path_factory.mktemp("replica"), *options) as replica, replica.client() as client:
        until(lambda: client.info("replication")["master_link_status"] == "up")
        for number in range(20):
            node = SaveNode(f"n{number}", number, 0, gone=False)
            until(lambda node=node: _saved(store, node))  # a busy machine may take its time
            assert client.hexists("kvstrata:{main}:nodes", node.node_id), "there when the save returns"


def _saved(store: RedisStore, node: SaveNode) -> bool:
    try:
        store.save([node])
    except Unavailable as error:
        assert "0 replicas have the write" in str(error)
        return False
    return True


def test_scripts_are_sent_again_to_a_redis_that_forgot_them(redis_server: RedisServer, store_on: Open) -> None:
    store = store_on(redis_server)
    store.save([NODE])
    with redis_server.client() as client:
        client.script_flush()
    store.save([NODE])
    assert store.revision() == 2


def test_settings_with_which_redis_forgets_are_warned_of(
    tmp_path_factory: pytest.TempPathFactory, store_on: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(redis_store.log, "warning", lambda event, **fields: said.append(fields["advice"]))
    options = ("maxmemory 100mb", "maxmemory-policy allkeys-lru")
    with RedisServer(tmp_path_factory.mktemp("forgets"), *options) as server:
        store_on(server)
    assert said == ["set appendonly yes", "set maxmemory-policy noeviction"]
    said.clear()
    options = ("maxmemory 100mb", "maxmemory-policy noeviction", "appendonly yes")
    with RedisServer(tmp_path_factory.mktemp("keeps"), *options) as server:
        store_on(server)
    assert said == []


def _together(work: Callable[..., None], threads: int) -> None:
    """Errors in a thread fail the test by themselves."""
    takes_number = work.__code__.co_argcount == 1  # type: ignore[attr-defined]
    running = [threading.Thread(target=work, args=(n,) if takes_number else ()) for n in range(threads)]
    for each in running:
        each.start()
    deadline = time.monotonic() + 30
    for each in running:
        each.join(max(0.0, deadline - time.monotonic()))
        assert not each.is_alive()
