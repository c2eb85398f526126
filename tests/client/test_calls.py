"""The client's calls over a fake pool: who is asked, what comes back, what each status means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstrata.client import NO_TIER, BlockStatus, Client, PoolNamespace
from kvstrata.proto.errors import (
    Closed,
    Corrupt,
    FingerprintMismatch,
    ForbiddenSalt,
    InvalidArgument,
    ProtocolError,
    QuotaExceeded,
    Unavailable,
)
from tests.client.fake_pool import FakeMaster, FakeNode, packed, split
from tests.waiting import until

SIZE = 64
S = BlockStatus


@pytest.fixture
def ns(client: Client) -> PoolNamespace:
    return client.namespace("model/a", block_bytes=SIZE, block_tokens=16)


def rows_of(count: int, first: int = 0) -> np.ndarray:
    return np.random.default_rng(first).integers(1, 255, (count, SIZE), dtype=np.uint8)


class Target:
    def __init__(self, client: Client, ns: PoolNamespace, count: int) -> None:
        self.array = np.zeros((count, SIZE), np.uint8)
        self.blocks = client.register(self.array).rows(ns)


def test_what_was_stored_is_loaded_and_looked_up(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    data = rows_of(10)
    result = client.store(ns, "t", packed(10), client.register(data).rows(ns))
    assert result.stored.all() and result.reasons == {"stored": 10}
    assert {len(node.blocks) for node in nodes.values()} == {4, 6}, "striped over both nodes"
    master.learn()
    found = client.lookup(ns, "t", packed(12))
    assert found.hit_blocks == 10 and found.answered and found.reasons == {"present": 10, "missing": 2}
    assert found.present.tolist() == [True] * 10 + [False] * 2
    assert found.tiers.tolist() == [0] * 10 + [NO_TIER] * 2
    target = Target(client, ns, 12)
    loaded = client.load(ns, "t", packed(12), target.blocks)
    assert loaded.loaded.tolist() == [True] * 10 + [False] * 2 and loaded.hit_blocks == 10
    assert loaded.reasons == {"loaded": 10, "missing": 2} and loaded.by_tier() == {"dram": 10}
    assert (target.array[:10] == data).all() and loaded.bytes_moved == 10 * SIZE
    assert client.exists(ns, "t", packed(3, 9)).tolist() == [True, False, False]
    assert client.lookup(ns, "u", packed(10)).hit_blocks == 0, "another salt is another tenant"


def test_own_stores_are_found_before_the_directory_learns(client: Client, ns: PoolNamespace) -> None:
    data, target = rows_of(6), None
    client.store(ns, "", packed(6), client.register(data).rows(ns))
    target = Target(client, ns, 4)
    assert client.load(ns, "", packed(4, 1), target.blocks).loaded.all()
    assert (target.array == data[1:5]).all()


def test_a_load_after_a_lookup_asks_no_master(client: Client, ns: PoolNamespace, master: FakeMaster) -> None:
    client.store(ns, "", packed(9), client.register(rows_of(9)).rows(ns))
    master.learn()
    client.lookup(ns, "", packed(9))
    before = master.lookups
    assert client.load(ns, "", packed(9), Target(client, ns, 9).blocks).loaded.all()
    assert client.load(ns, "", packed(1, 5), Target(client, ns, 1).blocks).loaded.all()
    assert master.lookups == before and not master.reports


def test_a_sole_local_node_is_asked_first(client: Client, master: FakeMaster, nodes: dict[str, FakeNode]) -> None:
    nodes["b"].local = False
    ns = client.namespace("model/b", block_bytes=SIZE, block_tokens=16)
    data = rows_of(3)
    nodes["a"].put(ns, "s", packed(2), [row.tobytes() for row in data[:2]])
    nodes["b"].put(ns, "s", packed(1, 2), [data[2].tobytes()])
    master.learn()
    client.lookup(ns, "other", packed(1))  # nobody has it: no node is known yet
    master.place_at = ["a"]
    client.store(ns, "other", packed(1), client.register(rows_of(1)).rows(ns))
    before = master.lookups
    target = Target(client, ns, 2)
    assert client.load(ns, "s", packed(2), target.blocks).loaded.all() and master.lookups == before
    assert (target.array == data[:2]).all()
    target = Target(client, ns, 3)
    result = client.load(ns, "s", packed(3), target.blocks)
    assert result.loaded.all() and master.lookups == before + 1, "what the guess missed is looked up"
    assert (target.array == data).all() and not master.reports, "a wrong guess is no news to the directory"
    nowhere = client.load(ns, "nobody", packed(1), Target(client, ns, 1).blocks)
    assert nowhere.reasons == {"missing": 1}, "nobody had named the node: it was not evicted there"


def test_an_evicted_block_is_reported_and_tried_once_more(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    data = rows_of(8)
    client.store(ns, "", packed(8), client.register(data).rows(ns))
    master.learn()
    client.lookup(ns, "", packed(8))
    gone, moved = split(packed(8))[1], split(packed(8))[2]
    key = next(k for k in nodes["a"].blocks if k[2] == moved)
    nodes["b"].blocks[key] = nodes["a"].blocks.pop(key)
    del nodes["a"].blocks[next(k for k in nodes["a"].blocks if k[2] == gone)]
    master.learn()
    target = Target(client, ns, 8)
    result = client.load(ns, "", packed(8), target.blocks)
    assert result.status.tolist() == [S.LOADED, S.EVICTED] + [S.LOADED] * 6, client.health()["problems"]
    assert (target.array[[0, 2, 3, 4, 5, 6, 7]] == data[[0, 2, 3, 4, 5, 6, 7]]).all(), "a hole stops nothing"
    until(lambda: len(master.reports) == 1)
    report = master.reports[0]
    assert report.hashes == gone + moved and report.node_id == "a" and report.delta_seq == 77
    assert report.status == S.EVICTED and not report.at_store
    assert result.tiers.tolist() == [0, NO_TIER] + [0] * 6


def test_a_refused_block_is_reported_so_that_nobody_waits_for_it(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    refused, denied = split(packed(8))[3], split(packed(8))[5]
    for node in nodes.values():
        node.answers.update({refused: S.FULL, denied: S.QUOTA})
    result = client.store(ns, "", packed(8), client.register(rows_of(8)).rows(ns))
    assert result.status.tolist() == [S.STORED] * 3 + [S.FULL, S.STORED, S.QUOTA] + [S.STORED] * 2
    until(lambda: len(master.reports) == 2)
    told = {(report.hashes, report.status, report.delta_seq, report.at_store) for report in master.reports}
    assert told == {(refused, S.FULL, 0, True), (denied, S.QUOTA, 0, True)}


def test_a_stale_directory_costs_one_more_try_and_no_more(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    nodes["a"].put(ns, "", packed(1), [b"x" * SIZE])
    master.learn()
    nodes["a"].blocks.clear()
    client.lookup(ns, "", packed(1))
    before = master.lookups
    result = client.load(ns, "", packed(1), Target(client, ns, 1).blocks)
    assert result.reasons == {"evicted": 1} and master.lookups == before + 1
    assert len(nodes["a"].fetches) == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Unavailable("gone"), S.NODE_LOST),
        (ProtocolError("nonsense"), S.REFUSED),
        (Corrupt("bits"), S.CORRUPT),
    ],
)
def test_a_failing_node_costs_its_own_blocks_only(
    client: Client,
    ns: PoolNamespace,
    master: FakeMaster,
    nodes: dict[str, FakeNode],
    error: Unavailable,
    status: BlockStatus,
) -> None:
    data = rows_of(8)
    client.store(ns, "", packed(8), client.register(data).rows(ns))
    master.learn()
    nodes["b"].fails = error
    target = Target(client, ns, 8)
    result = client.load(ns, "", packed(8), target.blocks)
    assert result.status.tolist() == [S.LOADED] * 4 + [status] * 4
    assert (target.array[:4] == data[:4]).all()
    stored = client.store(ns, "", packed(8, 100), client.register(data).rows(ns)).stored
    assert stored[:4].all() and stored[4:].all() == (status != S.CORRUPT), "what a lost node did not take, another did"


@pytest.mark.parametrize("error", [ForbiddenSalt("not yours"), FingerprintMismatch("epoch"), InvalidArgument("size")])
def test_a_refusal_of_the_call_is_raised(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode], error: ForbiddenSalt
) -> None:
    client.store(ns, "", packed(8), client.register(rows_of(8)).rows(ns))
    nodes["b"].fails = error
    with pytest.raises(type(error)):
        client.load(ns, "", packed(8), Target(client, ns, 8).blocks)
    with pytest.raises(type(error)):
        client.store(ns, "", packed(8), client.register(rows_of(8)).rows(ns))


def test_not_yet_is_told_apart(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    nodes["a"].put(ns, "", packed(1), [b"x" * SIZE])
    master.learn()
    master.not_yet = True
    found = client.lookup(ns, "", packed(3))
    assert found.hit_blocks is None and found.reasons == {"present": 1, "not_yet": 2}
    assert client.load(ns, "", packed(3), Target(client, ns, 3).blocks).reasons == {"loaded": 1, "not_yet": 2}


def test_shards_are_anded_by_the_master(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    nodes["a"].put(ns, "", packed(3), [b"x" * SIZE] * 3)
    master.learn()
    master.present = np.array([True, False, True])
    found = client.lookup(ns, "", packed(3))
    assert (found.hit_blocks, found.shard_hit_blocks) == (1, 3) and found.present.tolist() == [True, False, True]


# -------------------------------------------------------------------- stores


def test_stores_carry_their_place_in_the_chain(
    client: Client, ns: PoolNamespace, nodes: dict[str, FakeNode], master: FakeMaster
) -> None:
    parent = b"p" * 16
    client.store(ns, "", packed(10), client.register(rows_of(10)).rows(ns), parent=parent, first_index=5)
    pushes = sorted((p for n in nodes.values() for p in n.pushes), key=lambda p: p.first_index)
    assert [(p.first_index, len(p.blocks)) for p in pushes] == [(5, 4), (9, 4), (13, 2)]
    names = split(packed(10))
    assert [p.parent for p in pushes] == [parent, names[3], names[7]]
    assert {p.epoch for p in pushes} == {3}
    assert [p.hashes for p in pushes] == [packed(4), packed(4, 4), packed(2, 8)]


def test_what_is_there_is_pushed_and_what_is_in_flight_is_not(
    client: Client, ns: PoolNamespace, nodes: dict[str, FakeNode], master: FakeMaster
) -> None:
    blocks = client.register(rows_of(4)).rows(ns)
    client.store(ns, "", packed(2), blocks[:2])
    master.learn()
    master.in_flight = {split(packed(4))[3]}
    result = client.store(ns, "", packed(4), blocks)
    assert result.status.tolist() == [S.ALREADY_PRESENT, S.ALREADY_PRESENT, S.STORED, S.IN_FLIGHT]
    assert result.stored.tolist() == [True, True, True, False]
    assert len(nodes["a"].pushes[-1].blocks) == 3


def test_what_this_client_stored_is_not_in_another_writers_flight(
    client: Client, ns: PoolNamespace, master: FakeMaster
) -> None:
    blocks = client.register(rows_of(4)).rows(ns)
    client.store(ns, "", packed(4), blocks)
    master.in_flight = set(split(packed(4)))  # the directory has not heard of the commit
    assert client.store(ns, "", packed(4), blocks).reasons == {"already_present": 4}
    assert client.store(ns, "u", packed(4), blocks).reasons == {"in_flight": 4}


def test_only_what_this_client_holds_is_taken_for_present(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    blocks = client.register(rows_of(4)).rows(ns)
    mine, theirs = split(packed(4))[0], split(packed(4))[2]
    master.in_flight = {theirs}
    assert client.store(ns, "", packed(4), blocks).status.tolist() == [S.STORED, S.STORED, S.IN_FLIGHT, S.STORED]
    master.in_flight = {mine, theirs}
    again = client.store(ns, "", packed(4), blocks)
    assert again.status.tolist() == [S.ALREADY_PRESENT, S.ALREADY_PRESENT, S.IN_FLIGHT, S.ALREADY_PRESENT]
    assert not any(theirs == key[2] for node in nodes.values() for key in node.blocks)


def test_nowhere_is_full_or_lost(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    blocks = client.register(rows_of(2)).rows(ns)
    master.place_at = []
    assert client.store(ns, "", packed(2), blocks).reasons == {"node_lost": 2}, "no node is known at all"
    master.place_at = ["a"]
    client.store(ns, "", packed(2), blocks)
    master.place_at = []
    assert client.store(ns, "", packed(2, 50), blocks).reasons == {"full": 2}


def test_quota_is_a_status(client: Client, ns: PoolNamespace, nodes: dict[str, FakeNode]) -> None:
    nodes["a"].fails = QuotaExceeded("t is full")
    nodes["b"].answers = {split(packed(8))[4]: S.QUOTA}
    result = client.store(ns, "", packed(8), client.register(rows_of(8)).rows(ns))
    assert result.reasons == {"quota": 5, "stored": 3}


def test_remove_goes_through_the_master(client: Client, ns: PoolNamespace, master: FakeMaster) -> None:
    client.store(ns, "", packed(3), client.register(rows_of(3)).rows(ns))
    master.learn()
    master.unreached = ["n9"]
    result = client.remove(ns, "", packed(4))
    assert (result.removed, result.unreached, result.complete) == (3, ("n9",), False)
    master.unreached = []
    assert client.remove(ns, "", packed(1)).complete


def test_calls_longer_than_a_message_are_split(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.client.plan.HASHES_MAX", 7)
    monkeypatch.setattr("kvstrata.client.directory.HASHES_MAX", 7)
    data = rows_of(40)
    master.stripe = 20
    assert client.store(ns, "", packed(40), client.register(data).rows(ns)).stored.all()
    assert max(len(push.blocks) for node in nodes.values() for push in node.pushes) == 7
    firsts = sorted(push.first_index for node in nodes.values() for push in node.pushes)
    assert firsts == sorted(set(firsts)) and firsts[0] == 0
    master.learn()
    found = client.lookup(ns, "", packed(45))
    assert found.hit_blocks == 40 and found.present.sum() == 40 and master.lookups == 7
    target = Target(client, ns, 40)
    assert client.load(ns, "", packed(40), target.blocks).loaded.all() and (target.array == data).all()
    assert max(count for node in nodes.values() for count in node.fetches) == 7


# -------------------------------------------------------------------- layouts, views, prefetch


def test_blocks_in_pieces(client: Client, ns: PoolNamespace) -> None:
    memory = np.random.default_rng(1).integers(0, 255, 4 * SIZE, dtype=np.uint8)
    half = SIZE // 2
    offsets = [[[i * half, half], [2 * SIZE + i * half, half]] for i in (3, 0, 2, 1)]
    source = client.register(memory)
    client.store(ns, "", packed(4), source.view(ns, offsets))
    into = np.zeros_like(memory)
    target = client.register(into)
    assert client.load(ns, "", packed(4), target.view(ns, offsets)).loaded.all()
    assert (into == memory).all()


def test_views_and_their_holes(
    client: Client, ns: PoolNamespace, nodes: dict[str, FakeNode], master: FakeMaster
) -> None:
    data = rows_of(8)
    client.store(ns, "", packed(8), client.register(data).rows(ns))
    del nodes["a"].blocks[next(iter(nodes["a"].blocks))]
    master.learn()
    with client.view(ns, "", packed(8)) as view:
        assert len(view) == 8 and view.valid() and client.health()["views_open"] == 1
        missing = [i for i, block in enumerate(view) if block is None]
        assert len(missing) == 1
        for i, block in enumerate(view):
            assert block is None or (block == data[i]).all()
    assert not view.valid() and view[1] is None


def test_prefetch_locates_and_touches(
    client: Client, ns: PoolNamespace, nodes: dict[str, FakeNode], master: FakeMaster
) -> None:
    client.store(ns, "", packed(4), client.register(rows_of(4)).rows(ns))
    master.learn()
    prefetch = client.prefetch(ns, "", packed(5))
    found = prefetch.wait()
    assert found is not None and found.hit_blocks == 4 and prefetch.done() and not prefetch.cancel()
    assert nodes["a"].touched == 1


# -------------------------------------------------------------------- mistakes


def test_mistakes_raise_before_anything_is_sent(
    client: Client, ns: PoolNamespace, nodes: dict[str, FakeNode], master: FakeMaster, connect: Callable[..., Client]
) -> None:
    region = client.register(np.zeros((4, SIZE), np.uint8))
    blocks = region.rows(ns)
    other = client.namespace("other", block_bytes=2 * SIZE, block_tokens=16)
    frozen = np.zeros((4, SIZE), np.uint8)
    frozen.flags.writeable = False
    read_only = client.register(frozen).rows(ns)
    for call in (
        lambda: client.load(ns, "", packed(3), blocks),
        lambda: client.load(ns, "", packed(4)[:-1], blocks),
        lambda: client.load(ns, "", [b"short"] * 4, blocks),
        lambda: client.load(ns, "", np.zeros((4, 16), np.int32), blocks),  # type: ignore[arg-type]
        lambda: client.load(ns, "x" * 129, packed(4), blocks),
        lambda: client.load(ns, "\ud800", packed(4), blocks),
        lambda: client.namespace("\ud800", block_bytes=1, block_tokens=1),
        lambda: client.load(ns, 7, packed(4), blocks),  # type: ignore[arg-type]
        lambda: client.load(other, "", packed(4), blocks),
        lambda: client.load("ns", "", packed(4), blocks),  # type: ignore[arg-type]
        lambda: client.load(ns, "", packed(4), np.zeros(4 * SIZE)),  # type: ignore[arg-type]
        lambda: client.load(ns, "", packed(4), read_only),
        lambda: client.load_async(ns, "", packed(3), blocks),
        lambda: client.store(ns, "", packed(4), blocks, parent=b"short"),
        lambda: client.store(ns, "", packed(4), blocks, first_index=-1),
        lambda: client.store_async(ns, "", packed(4), blocks, first_index=1 << 32),
        lambda: client.register(np.zeros((4, 4))[:, ::2]),
        lambda: client.allocate(0),
        lambda: client.namespace("", block_bytes=1, block_tokens=1),
        lambda: client.namespace("g", block_bytes=1, block_tokens=1, hash_bytes=15),
    ):
        with pytest.raises(InvalidArgument):
            call()
    with pytest.raises(FingerprintMismatch):
        client.namespace("model/a", block_bytes=SIZE + 1, block_tokens=16)
    client.unregister(region)
    with pytest.raises(Closed, match="unregistered"):
        client.load(ns, "", packed(4), blocks)
    client.unregister(region)
    with pytest.raises(InvalidArgument, match="another client"):
        connect(master.address).unregister(client.register(bytearray(5)))
    assert not any(node.fetches for node in nodes.values())


@pytest.mark.parametrize("address", ["", "nohost", "h:p", "h:1,,g:2", "h:99999", ",".join(["h:1"] * 17)])
def test_a_wrong_address_is_named(address: str) -> None:
    with pytest.raises(InvalidArgument):
        Client(address)


@pytest.mark.parametrize("options", [{"transport": "pigeon"}, {"verify": "maybe"}, {"transfer_deadline_ms": 0}])
def test_wrong_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Client("127.0.0.1:1", **options)  # type: ignore[arg-type]


def test_hashes_in_every_spelling(client: Client, ns: PoolNamespace) -> None:
    blocks = client.register(rows_of(3)).rows(ns)
    client.store(ns, "", packed(3), blocks)
    array = np.frombuffer(packed(3), np.uint8).reshape(3, 16)
    for spelling in (packed(3), bytearray(packed(3)), memoryview(packed(3)), split(packed(3)), array):
        assert client.load(ns, "", spelling, Target(client, ns, 3).blocks).loaded.all()


def test_nothing_asked_is_nothing_done(client: Client, ns: PoolNamespace) -> None:
    blocks = client.register(rows_of(1)).rows(ns)[:0]
    assert len(client.load(ns, "", b"", blocks).loaded) == 0 == len(client.store(ns, "", b"", blocks).stored)
    assert client.lookup(ns, "", b"").hit_blocks == 0 and client.remove(ns, "", b"").removed == 0
    with client.view(ns, "", b"") as view:
        assert len(view) == 0


def test_health_counts_add_up(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    client.store(ns, "", packed(6), client.register(rows_of(6)).rows(ns))
    master.learn()
    client.load(ns, "", packed(8), Target(client, ns, 8).blocks)
    health = client.health()
    load = health["blocks"]["load"]  # type: ignore[index]
    assert load["asked"] == 8 == load["loaded"] + load["missing"]
    assert health["healthy"] and {node["node_id"] for node in health["nodes"]} == {"a", "b"}  # type: ignore[attr-defined]
    nodes["a"].fails = Unavailable("gone")
    assert any("node a" in problem for problem in client.health()["problems"])  # type: ignore[attr-defined]
