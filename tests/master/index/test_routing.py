"""Who is best: engines by their own caches, then by what the pool has near to them, then by load."""

from __future__ import annotations

import random
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.master import messages as m
from kvstrata.master.hub import Hub
from kvstrata.master.index.engine_events import EngineEvents, EngineState
from kvstrata.master.index.engine_index import EngineIndex
from kvstrata.master.index.routing import Host, Routing
from kvstrata.master.index.services import hosts_of
from kvstrata.master.stores.opening import open_store
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import Namespace
from kvstrata.transfer.kv_events.events import BlockStored
from kvstrata.transfer.sessions import Session

NS = Namespace("model", block_bytes=1 << 20, block_tokens=16, hash_bytes=32)


def packed(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(32, "big") for number in numbers)


class Engines:
    """Engines whose events have been read."""

    def __init__(self) -> None:
        self.index = EngineIndex()
        self.names: list[str] = []
        self.gone: set[str] = set()

    def has(self, name: str, *numbers: int) -> None:
        self.index.add(name)
        self.names.append(name)
        self.index.apply(name, [BlockStored([packed(n) for n in numbers], None, [], 16, None, "GPU", None)])

    def states(self, tails: list[int], names: Collection[str]) -> list[EngineState]:
        index = self.index
        return [
            EngineState(name, name not in self.gone, 0.0, index.blocks(name), index.prefix(name, tails))
            for name in self.names
            if not names or name in names
        ]

    def problems(self) -> list[str]:
        return []


class Pool:
    def __init__(self) -> None:
        self.hub = Hub(open_store(None, None, None), random.Random(1), 0.0, clock=lambda: 1.0)
        self.engines = Engines()
        self.hosts = {"near": "host a", "far": "host b"}

    def node(self, name: str, boot_id: str, *holdings: m.Holding) -> None:
        facts = m.NodeFacts(name, 1, channel="h:1", boot_id=boot_id, host=boot_id, dram_bytes=1 << 30)
        session, _ = self.hub.attach(m.Attach(facts))
        self.hub.handle(m.SnapshotPart(session, 0, holdings, True, True))

    def route(self, *numbers: int, **more: Any) -> control.RouteAnswer:
        def hosts_of(names: Collection[str]) -> dict[str, Host]:
            return {name: Host(host, host) for name, host in self.hosts.items() if name in names}

        routing = Routing(self.hub, cast(EngineEvents, self.engines), hosts_of)
        spec = more.pop("spec", NS.to_spec())
        return routing.route(control.RouteQuery(spec=spec, hashes=packed(*numbers), **more))


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_own_blocks_then_near_ones_then_far_ones(pool: Pool) -> None:
    pool.node("n", "host a", m.Holding(NS, "", 0, packed(*range(8)), 0))
    pool.engines.has("near")
    pool.engines.has("far")
    pool.engines.has("own", *range(7))
    pool.engines.has("other", 100)
    answer = pool.route(*range(10))
    assert [row.name for row in answer.engines] == ["own", "near", "far", "other"]
    own, near, far, other = answer.engines
    assert (own.own_blocks, own.gpu_blocks, own.pool_blocks, own.near_blocks) == (7, 7, 1, 0)
    assert (near.own_blocks, near.pool_blocks, near.near_blocks, near.host) == (0, 8, 8, "host a")
    assert (far.pool_blocks, far.near_blocks) == (other.pool_blocks, other.near_blocks) == (8, 0)
    assert answer.asked == 10 and answer.pool_blocks == 8 and own.score == 7.5 and near.score == 6 and far.score == 4


def test_load_and_death_count(pool: Pool) -> None:
    pool.engines.has("a", *range(6))
    pool.engines.has("b", *range(4))
    assert [row.name for row in pool.route(*range(8)).engines] == ["a", "b"]
    assert [row.name for row in pool.route(*range(8), loads={"a": 1.0}).engines] == ["b", "a"]
    pool.engines.gone.add("a")
    answer = pool.route(*range(8))
    assert [(row.name, row.state) for row in answer.engines] == [("b", "live"), ("a", "cannot be reached")]
    assert [row.name for row in pool.route(1, engines=["a"]).engines] == ["a"]


def test_nodes_by_tier_and_shards_together(pool: Pool) -> None:
    halves = [Namespace("model", 1 << 20, 16, 32, shard, 2) for shard in (0, 1)]
    pool.node(
        "n0",
        "x",
        m.Holding(halves[0], "", 0, packed(0, 1), 0),
        m.Holding(halves[0], "", 1, packed(1, 2, 3), 0),
        m.Holding(halves[1], "", 0, packed(0, 1, 2), 0),
    )
    pool.node("n1", "y", m.Holding(halves[0], "", 0, packed(0), 0))
    answer = pool.route(*range(5), spec=halves[0].to_spec())
    assert answer.pool_blocks == 3, "the other shard ends there"
    assert [(row.node_id, row.prefix_blocks, row.dram_blocks, row.ssd_blocks) for row in answer.nodes] == [
        ("n0", 4, 2, 2),
        ("n1", 1, 1, 0),
    ]


def test_what_is_unknown_has_nothing_and_what_is_wrong_is_refused(pool: Pool) -> None:
    assert (pool.route(1).pool_blocks, pool.route().asked) == (0, 0)
    with pytest.raises(InvalidArgument, match="multiple"):
        Routing(pool.hub, None, lambda names: {}).route(control.RouteQuery(spec=NS.to_spec(), hashes=b"x"))
    for load in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidArgument, match="from 0 to 1"):
            pool.route(1, loads={"a": load})
    without = Routing(pool.hub, None, lambda names: {}).route(control.RouteQuery(spec=NS.to_spec()))
    assert "--engine-events" in without.problem and not without.engines


def test_an_engine_is_where_its_client_or_a_client_of_its_rank_is() -> None:
    def session(name: str, host: str) -> Session:
        return cast(Session, SimpleNamespace(hello=SimpleNamespace(name=name, host=host, boot_id=host)))

    named = {"vllm:0@r1": "a", "vllm": "b", "vllm2": "c", "other/0": "d", "": "e"}
    sessions = {bytes([number]): session(*each) for number, each in enumerate(named.items())}
    assert hosts_of({"vllm", "vllm2", "other", "gone", "vll"}, sessions) == {
        "vllm": Host("a", "a"),
        "vllm2": Host("c", "c"),
        "other": Host("d", "d"),
    }
    assert hosts_of({"vllm:0"}, sessions) == {"vllm:0": Host("a", "a")}


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(1, 40))
def test_nodes_and_hosts_are_counted_as_block_by_block(seed: int, blocks: int) -> None:
    pool, rng = Pool(), random.Random(seed)
    pool.engines.has("near")
    holds: dict[str, tuple[set[int], set[int]]] = {}
    for number in range(4):
        dram, ssd = ({n for n in range(blocks) if rng.random() < rng.choice([0.3, 0.95])} for _ in range(2))
        holds[f"n{number}"] = dram, ssd
        tiers = [m.Holding(NS, "", tier, packed(*sorted(has)), 0) for tier, has in enumerate((dram, ssd)) if has]
        pool.node(f"n{number}", f"host {'ab'[number % 2]}", *tiers)
    answer = pool.route(*range(blocks))
    prefix = {
        name: next((n for n in range(blocks) if n not in dram | ssd), blocks) for name, (dram, ssd) in holds.items()
    }
    assert {row.node_id: (row.prefix_blocks, row.dram_blocks, row.ssd_blocks) for row in answer.nodes} == {
        name: (prefix[name], len(dram), len(ssd - dram)) for name, (dram, ssd) in holds.items() if dram | ssd
    }
    (engine,) = answer.engines
    near = set().union(*holds["n0"], *holds["n2"])
    assert engine.near_blocks == len(near & set(range(engine.pool_blocks)))
