"""Blocks that several nodes have, and nodes that take none: others are tried, once each, within the call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvstrata.client import BlockStatus, Client, PoolNamespace, reading
from kvstrata.proto.errors import Corrupt, KVError, LeaseExpired, Unavailable
from tests.client.fake_pool import FakeMaster, FakeNode, packed, split

SIZE = 64
S = BlockStatus


@pytest.fixture
def nodes() -> dict[str, FakeNode]:
    return {name: FakeNode(name) for name in "abc"}


@dataclass
class Copies:
    """``count`` blocks with a copy on each of some nodes, and a place to load them to."""

    client: Client
    master: FakeMaster
    nodes: dict[str, FakeNode]
    on: Iterable[str] = "ab"
    count: int = 8
    into: np.ndarray = field(init=False)  # type: ignore[type-arg]

    def __post_init__(self) -> None:
        self.ns = self.client.namespace("model/r", block_bytes=SIZE, block_tokens=16)
        self.hashes = packed(self.count)
        self.data = np.random.default_rng(1).integers(1, 255, (self.count, SIZE), dtype=np.uint8)
        for name in self.on:
            self.nodes[name].put(self.ns, "", self.hashes, [row.tobytes() for row in self.data])
        self.master.learn()
        self.into = np.zeros((self.count, SIZE), np.uint8)
        self.target = self.client.register(self.into).rows(self.ns)
        self.client.lookup(self.ns, "", self.hashes)

    def load(self) -> list[int]:
        """The statuses; what is loaded has the right bytes."""
        self.into[:] = 0
        result = self.client.load(self.ns, "", self.hashes, self.target)
        assert (self.into[result.loaded] == self.data[result.loaded]).all()
        return result.status.tolist()


@pytest.mark.parametrize("error", [Unavailable("gone"), Corrupt("bits"), LeaseExpired("slow")])
def test_what_a_node_does_not_give_another_one_does(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode], error: KVError
) -> None:
    copies = Copies(client, master, nodes)
    nodes["a"].fails = error
    before = master.lookups
    assert copies.load() == [S.LOADED] * 8
    assert (len(nodes["a"].fetches), len(nodes["b"].fetches), master.lookups) == (1, 1, before + 1)
    assert copies.load() == [S.LOADED] * 8 and len(nodes["a"].fetches) == 1, "it is known where they are now"


@pytest.mark.parametrize("status", [S.MISSING, S.CORRUPT, S.READ_ERROR, S.LEASE_LOST, S.NO_ROOM, S.NODE_LOST, S.LATE])
def test_only_the_blocks_that_failed_are_asked_for_elsewhere(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode], status: BlockStatus
) -> None:
    copies = Copies(client, master, nodes)
    failing = split(copies.hashes)[2:5]
    nodes["a"].answers = dict.fromkeys(failing, status)
    assert copies.load() == [S.LOADED] * 8
    assert nodes["b"].calls[-1] == ("fetch", failing)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_slow_node_leaves_time_for_another(
    connect: Callable[..., Client], master: FakeMaster, nodes: dict[str, FakeNode], fresh: bool
) -> None:
    client = connect(master.address, transfer_deadline_ms=800)
    copies = Copies(client, master, nodes)
    if fresh:
        client._recent.forget(copies.ns, "", epoch=copies.ns.epoch)
    nodes["a"].slow = True
    started = time.monotonic()
    assert copies.load() == [S.LOADED] * 8
    assert time.monotonic() - started > 0.3, "half of the time was for the slow one"


def test_a_slow_node_that_alone_has_the_blocks_gets_all_the_time(
    connect: Callable[..., Client], master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    client = connect(master.address, transfer_deadline_ms=400)
    copies = Copies(client, master, nodes, "a")
    nodes["a"].slow = True
    started = time.monotonic()
    assert copies.load() == [S.LATE] * 8
    assert time.monotonic() - started > 0.39


def test_replicas_are_tried_until_none_is_left(client: Client, master: FakeMaster, nodes: dict[str, FakeNode]) -> None:
    copies = Copies(client, master, nodes, "abc")
    nodes["a"].fails = nodes["b"].fails = Unavailable("gone")
    assert copies.load() == [S.LOADED] * 8
    nodes["c"].answers = dict.fromkeys(split(copies.hashes), S.CORRUPT)
    for node in nodes.values():
        node.fetches.clear()
    before = master.lookups
    assert set(copies.load()) <= {S.CORRUPT, S.NODE_LOST}
    assert all(len(node.fetches) == 1 for node in nodes.values()), "all are asked, and nobody twice"
    assert master.lookups <= before + 4


def test_without_another_replica_nothing_is_asked_for_again(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    copies = Copies(client, master, nodes, "a")
    nodes["a"].fails = Unavailable("gone")
    before = master.lookups
    assert copies.load() == [S.NODE_LOST] * 8
    assert len(nodes["a"].fetches) == 1 and master.lookups == before + 1


def test_what_its_only_node_evicted_is_looked_up_once(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    copies = Copies(client, master, nodes, "a")
    nodes["a"].answers = dict.fromkeys(split(copies.hashes)[:2], S.MISSING)
    before = master.lookups
    assert copies.load() == [S.EVICTED] * 2 + [S.LOADED] * 6
    assert nodes["a"].fetches == [8, 2] and master.lookups == before + 1


def test_different_nodes_that_fail_different_blocks(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    copies = Copies(client, master, nodes, "abc")
    names = split(copies.hashes)
    nodes["a"].answers = dict.fromkeys(names[:4], S.CORRUPT)
    nodes["b"].answers = dict.fromkeys(names[1:2], S.READ_ERROR)
    assert copies.load() == [S.LOADED] * 8


def halves(client: Client, master: FakeMaster, nodes: dict[str, FakeNode], on: Iterable[str] = "ab") -> Copies:
    """Blocks that were located on ``a`` (the first four) and on ``b`` (the others); each has all of ``on``."""
    copies = Copies(client, master, nodes, on)
    for name in split(copies.hashes)[4:]:
        key = next(key for key in master.where if key[2] == name)
        master.also[key] = [other for other in (master.where[key], *master.also[key]) if other != "b"]
        master.where[key] = "b"
    client.lookup(copies.ns, "", copies.hashes)
    return copies


def test_a_node_that_failed_other_blocks_is_tried_for_these(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    copies = halves(client, master, nodes)
    names = split(copies.hashes)
    nodes["a"].answers = dict.fromkeys(names[:2], S.CORRUPT)
    nodes["b"].answers = dict.fromkeys(names[4:6], S.READ_ERROR)
    before = master.lookups
    assert copies.load() == [S.LOADED] * 8
    assert sorted(nodes["a"].calls) == [("fetch", names[:4]), ("fetch", names[4:6])]
    assert sorted(nodes["b"].calls) == [("fetch", names[:2]), ("fetch", names[4:])]
    assert [(list(asked.avoid), split(asked.hashes)) for asked in master.asked[-2:]] == [
        (["a"], names[:2]),
        (["b"], names[4:6]),
    ]
    assert master.lookups == before + 3
    nodes["a"].calls.clear()
    assert copies.load() == [S.LOADED] * 8 and master.lookups == before + 3, "it is known where they were had"


def test_blocks_without_another_replica_are_asked_for_once(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    copies = halves(client, master, nodes)
    names = split(copies.hashes)
    nodes["a"].answers = dict.fromkeys(names[:2], S.CORRUPT)
    nodes["b"].answers = dict.fromkeys(names[4:6], S.CORRUPT)
    master.also.clear()
    before = master.lookups
    assert copies.load() == ([S.CORRUPT] * 2 + [S.LOADED] * 2) * 2
    assert (len(nodes["a"].fetches), len(nodes["b"].fetches), master.lookups) == (1, 1, before + 1)


def test_what_nobody_has_any_more_is_asked_for_once(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    copies = Copies(client, master, nodes, "abc")
    names = split(copies.hashes)
    nodes["a"].answers = dict.fromkeys(names[:2], S.CORRUPT)
    del master.where[next(key for key in master.where if key[2] == names[0])]
    before = master.lookups
    assert copies.load() == [S.CORRUPT] + [S.LOADED] * 7
    assert (len(nodes["a"].fetches), len(nodes["b"].fetches), master.lookups) == (1, 1, before + 1)


def test_the_last_replica_may_be_on_a_node_that_was_lost(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    copies = halves(client, master, nodes)
    nodes["a"].answers = dict.fromkeys(split(copies.hashes)[:2], S.CORRUPT)
    nodes["b"].fails = Unavailable("gone")
    before = master.lookups
    assert copies.load() == [S.NODE_LOST] * 2 + [S.LOADED] * 6
    assert (len(nodes["a"].fetches), len(nodes["b"].fetches)) == (2, 2) and master.lookups <= before + 4


def test_a_master_that_is_gone_when_asked_again_costs_only_those_blocks(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = halves(client, master, nodes, "abc")
    names = split(copies.hashes)
    nodes["a"].answers = dict.fromkeys(names[:4], S.CORRUPT)
    nodes["b"].answers = dict.fromkeys(names[4:], S.CORRUPT)
    nodes["c"].answers = dict.fromkeys(names[:1], S.CORRUPT)
    ask = client._directory.lookup

    def once(namespace: PoolNamespace, salt: str, packed: bytes, *rest: Any, **more: Any) -> Any:
        if len(packed) < len(copies.hashes):
            raise Unavailable("gone")
        return ask(namespace, salt, packed, *rest, **more)

    monkeypatch.setattr(client._directory, "lookup", once)
    assert copies.load() == [S.CORRUPT] + [S.LOADED] * 7


@pytest.mark.parametrize("most", [1, reading.QUESTIONS_MAX])
@pytest.mark.parametrize("seed", range(12))
def test_a_block_is_loaded_whenever_one_of_its_replicas_can_be_read(
    client: Client,
    master: FakeMaster,
    nodes: dict[str, FakeNode],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    most: int,
) -> None:
    monkeypatch.setattr(reading, "QUESTIONS_MAX", most)
    rng = np.random.default_rng(seed)
    copies = Copies(client, master, nodes, "abc", count=12)
    names = split(copies.hashes)
    has = {name: list(rng.permutation(list(nodes))[: rng.integers(1, 4)]) for name in names}
    for key in list(master.where):
        master.where[key], *master.also[key] = has[key[2]]
        for other in set(nodes) - set(has[key[2]]):
            del nodes[other].blocks[key]
    for node in nodes.values():
        node.answers = {name: S.CORRUPT for name in names if rng.random() < 0.6}
    client.lookup(copies.ns, "", copies.hashes)
    readable = [any(name not in nodes[str(node)].answers for node in has[name]) for name in names]
    del master.asked[:]
    assert [status == S.LOADED for status in copies.load()] == readable
    fetched = [(node.node_id, name) for node in nodes.values() for _, call in node.calls for name in call]
    assert len(fetched) == len(set(fetched)), "no block is asked for twice at one node"
    rounds = "".join("R" if asked.hashes == copies.hashes else "q" for asked in master.asked).split("R")
    assert len(rounds) <= 1 + reading.ROUNDS_MAX and max(map(len, rounds)) <= most


def test_a_lookup_names_the_nodes_that_cannot_be_reached(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    copies = Copies(client, master, nodes)
    nodes["a"].fails = Unavailable("gone")
    assert copies.load() == [S.LOADED] * 8
    client.lookup(copies.ns, "", copies.hashes)
    assert list(master.asked[-1].avoid) == ["a"]
    before = len(nodes["a"].fetches), master.lookups
    assert copies.load() == [S.LOADED] * 8
    assert (len(nodes["a"].fetches), master.lookups) == before, "what the lookup said was of use"


def test_a_view_has_other_replicas_too(client: Client, master: FakeMaster, nodes: dict[str, FakeNode]) -> None:
    copies = Copies(client, master, nodes)
    gone = split(copies.hashes)[3]
    del nodes["a"].blocks[next(key for key in nodes["a"].blocks if key[2] == gone)]
    with client.view(copies.ns, "", copies.hashes) as view:
        assert view.valid() and all(
            block is not None and (block == row).all() for block, row in zip(view, copies.data, strict=True)
        )


# -------------------------------------------------------------------- stores


def stored(client: Client, ns: PoolNamespace, count: int = 8, first: int = 100) -> list[int]:
    data = np.full((count, SIZE), 7, np.uint8)
    return client.store(ns, "", packed(count, first), client.register(data).rows(ns)).status.tolist()


@pytest.fixture
def ns(client: Client) -> PoolNamespace:
    return client.namespace("model/w", block_bytes=SIZE, block_tokens=16)


def test_what_a_leaving_node_refuses_goes_to_another(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    master.place_at = ["a", "b"]
    nodes["a"].answers = dict.fromkeys(split(packed(8, 100)), S.REFUSED)
    assert stored(client, ns) == [S.STORED] * 8
    assert [list(place.avoid) for place in master.placed] == [[], ["a"]]
    assert nodes["b"].pushes[-1].hashes == packed(4, 100), "only what was refused is offered again"
    assert nodes["b"].pushes[-1].first_index == 0 and nodes["b"].pushes[0].parent == packed(1, 103)
    into = np.zeros((8, SIZE), np.uint8)
    loaded = client.load(ns, "", packed(8, 100), client.register(into).rows(ns))
    assert loaded.loaded.all() and not nodes["a"].fetches[1:], "the client knows where they went"


def test_a_store_is_placed_again_once(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    for node in nodes.values():
        node.answers = dict.fromkeys(split(packed(8, 100)), S.REFUSED)
    assert stored(client, ns) == [S.REFUSED] * 8
    assert len(master.placed) == 2


def test_a_full_node_is_no_reason_to_go_elsewhere(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    master.place_at = ["a", "b"]
    nodes["a"].answers = dict.fromkeys(split(packed(8, 100)), S.FULL)
    assert stored(client, ns) == [S.FULL] * 4 + [S.STORED] * 4
    assert len(master.placed) == 1


def test_a_node_that_is_known_to_be_lost_is_not_placed_on(
    connect: Callable[..., Client], master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    client = connect(master.address)
    ns = client.namespace("model/w", block_bytes=SIZE, block_tokens=16)
    master.place_at = ["a", "b"]
    nodes["a"].fails = Unavailable("gone")
    assert stored(client, ns) == [S.STORED] * 8
    assert stored(client, ns, first=200) == [S.STORED] * 8
    assert [list(place.avoid) for place in master.placed] == [[], ["a"], ["a"]]


def test_with_nowhere_else_to_go_the_first_answer_stands(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    master.place_at = ["a"]
    nodes["a"].fails = Unavailable("gone")
    assert stored(client, ns) == [S.NODE_LOST] * 8
    assert len(nodes["a"].fetches) == 1
