"""Quotas on real processes: floors, limits and policies through kills, floods and restarts."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstrata.client import Client, Tier
from kvstrata.client.admin import AdminClient
from kvstrata.master.tenants.quotas import REBALANCE_S
from kvstrata.proto import control_pb2 as control
from tests.e2e.tiered_pool import DRAM_SLOT, SSD_SLOT, Tenant, TieredPool, flooding
from tests.waiting import until

NOISY = tuple(f"noisy-{number}" for number in range(6))
#: How long a lowered limit may take to be met: a share travels, blocks leave at the next turn of the node.
LOWERED_S = 5.0

Start = Callable[..., TieredPool]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    pools: list[TieredPool] = []

    def begin(**options: object) -> TieredPool:
        pools.append(TieredPool(tmp_path, **options))  # type: ignore[arg-type]
        return pools[-1]

    yield begin
    for pool in pools:
        pool.end()


def set_policy(pool: TieredPool, **policy: object) -> None:
    with AdminClient(pool.address) as admin:
        admin.set_tenant(control.TenantPolicy(**policy))  # type: ignore[arg-type]


def confirmed(pool: TieredPool, salt: str, **limits: int) -> None:
    """Wait until the shares of all nodes add up to these limits."""
    nodes = sum(name.startswith("node") for name in pool.daemons)

    def shares() -> dict[str, int]:
        rows = [pool.tenants(index, salt)[0] for index in range(nodes)]
        return {name: sum(int(row[name] or 0) for row in rows) for name in limits}

    until(lambda: shares() == limits)


def test_floors_hold_while_others_flood_and_the_node_and_the_master_are_killed(start: Start) -> None:
    pool = start()
    count = 96  # 3 MiB of the 8: more than an equal part of so many tenants
    set_policy(pool, salt="quiet", dram_floor=count * DRAM_SLOT, ssd_floor=count * SSD_SLOT)
    confirmed(pool, "quiet", dram_floor=count * DRAM_SLOT, ssd_floor=count * SSD_SLOT)
    with Client(pool.address, transfer_deadline_ms=10_000) as client:
        quiet = Tenant(client, "quiet", count).stored()

        def unharmed(flood_calls: int = 8) -> None:
            """All of it is read, into memory where it was not; after more flooding it is all there still."""
            until(lambda: quiet.load().loaded.all(), 20)
            flood.goes_on(flood_calls)
            got = quiet.load()
            assert got.loaded.all(), got.reasons
            assert (got.tiers == Tier.DRAM).all(), "others have taken what the floor guarantees"

        with flooding(pool, NOISY, batch=64) as flood:
            flood.goes_on(8)
            assert pool.health()["counts"]["evicted"] > 0, "the node is full"
            unharmed()
            pool.restart_node(0)
            found = pool.node().ready["ssd_blocks_found"]
            assert found >= count
            unharmed()
            pool.restart_master()
            unharmed()
            pool.kill("master")
            pool.restart_node(0)
            assert pool.tenants(0, "quiet")[0]["dram_floor"] == count * DRAM_SLOT, "it works by what it kept"
            pool.start_master(pool.address)
            unharmed()
        assert pool.health()["problems"] == []


@dataclass(slots=True)
class Sampler:
    """Looks at one tenant on all nodes, again and again; ``samples`` are (bytes, limits) a node, by time, and ``spans``
    when each round of looks began and ended."""

    pool: TieredPool
    salt: str
    nodes: int
    tier: str = "dram"
    samples: list[list[tuple[int, int]]] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def run(self) -> None:
        while not self.over.wait(0.005):
            began = time.monotonic()
            looks = [self._one(index) for index in range(self.nodes)]
            self.spans.append((began, time.monotonic()))
            self.samples.append(looks)

    def _one(self, index: int) -> tuple[int, int]:
        """Of a node that is away: memory is gone, what is on SSD is as it was."""
        try:
            if index not in self.left and "ready" in vars(self.pool.node(index)):  # else it starts: do not wait
                row = self.pool.tenants(index, self.salt)[0]
                limit = row[f"{self.tier}_limit"]
                return int(row[f"{self.tier}_bytes"]), -1 if limit is None else int(limit)
        except OSError:
            pass  # it went while it was asked
        return self.samples[-1][index] if self.tier == "ssd" and self.samples else (0, -1)

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self.run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()

    def totals(self, since: int = 0) -> list[int]:
        """Bytes on all nodes. A node is looked at after another: of two looks at it the lesser counts.

        That is no more than was there at one moment only while no share goes away and comes back between the two:
        looks that a busy machine has drawn out for as long as that takes say nothing.
        """
        rounds = zip(self.samples[since:], self.spans[since:], strict=False)
        pairs = [
            (one, other)
            for (one, (began, _)), (other, (_, ended)) in itertools.pairwise(rounds)
            if ended - began < REBALANCE_S
        ]
        return [sum(min(a[0], b[0]) for a, b in zip(one, other, strict=True)) for one, other in pairs]


def test_usage_is_never_above_the_limit_while_it_floods_and_shares_move(start: Start) -> None:
    pool = start(nodes=3, ssd="16MiB")
    limits = {"dram": 12 << 20, "ssd": 24 << 20}  # more than a node has, less than two have: two of three have it
    set_policy(pool, salt="capped", dram_limit=limits["dram"], ssd_limit=limits["ssd"])
    confirmed(pool, "capped", dram_limit=limits["dram"], ssd_limit=limits["ssd"])
    with (
        Sampler(pool, "capped", 3) as dram,
        Sampler(pool, "capped", 3, "ssd") as ssd,
        flooding(pool, ("capped",), batch=64) as flood,
    ):
        flood.goes_on(10)
        stopped = next(i for i in range(3) if dram.samples[-1][i][0])
        for number, how in ((stopped, signal.SIGTERM), ((stopped + 1) % 3, signal.SIGKILL)):
            if how == signal.SIGKILL:  # who leaves in order is looked at for as long as it answers
                dram.left.add(number)
            pool.node(number).signal(how)
            pool.node(number).process.wait(20)
            flood.goes_on(8, 30)
            if how == signal.SIGTERM:
                until(lambda gone=number: all(dram.samples[-1][i][0] for i in range(3) if i != gone), 40)
            pool.node(number).end()
            pool.start_node(number)
            assert pool.node(number).ready
            dram.left.discard(number)
            flood.goes_on(8, 30)
        pool.restart_master()
        flood.goes_on(8, 30)
        assert flood.blocks > limits["dram"] // DRAM_SLOT
    for sampler in (dram, ssd):
        totals = sampler.totals()
        assert len(totals) > 50 and max(totals) > limits[sampler.tier] * 3 // 4
        assert max(totals) <= limits[sampler.tier], sampler.tier
    users = [{i for i in range(3) if sample[i][0]} for sample in dram.samples]
    assert set().union(*users) == {0, 1, 2}, "the shares have not moved: this shows little"


def test_a_lowered_limit_is_met_in_time_and_nothing_rises_meanwhile(start: Start) -> None:
    pool = start(nodes=2, ssd="16MiB")
    before, after = 12 << 20, 2 << 20  # on both nodes, and then on one
    set_policy(pool, salt="capped", dram_limit=before)
    confirmed(pool, "capped", dram_limit=before)
    with flooding(pool, ("capped",), batch=64) as flood:
        flood.goes_on(10)
        with Sampler(pool, "capped", 2) as sampler:
            until(lambda: len(sampler.samples) > 10)
            began = time.monotonic()
            set_policy(pool, salt="capped", dram_limit=after)
            until(lambda: bool(sampler.samples) and sum(used for used, _ in sampler.samples[-1]) <= after, LOWERED_S)
            took, lowered = time.monotonic() - began, len(sampler.samples)
            flood.goes_on(8)
            until(lambda: bool(sampler.totals(lowered)), 30)
        assert took < LOWERED_S
    assert max(sampler.totals()) > after, "it had more"
    for node in range(2):
        _never_rises_above_its_share([sample[node] for sample in sampler.samples])
    met = next(i for i, sample in enumerate(sampler.samples) if sum(used for used, _ in sample) <= after)
    assert max(sampler.totals(met)) <= after, "it has risen again"


def _never_rises_above_its_share(looks: list[tuple[int, int]]) -> None:
    """(bytes, share) of one node, each pair of one moment: what is above the share only falls."""
    for (used, _), (then, share) in itertools.pairwise(looks):
        assert then <= max(used, share), (used, then, share)


def test_nothing_is_evicted_before_policies_are_loaded(start: Start) -> None:
    pool = start()
    count = 160  # 5 MiB
    with AdminClient(pool.address) as admin:
        admin.set_default(control.TenantPolicy(dram_limit=8 * DRAM_SLOT, ssd_limit=8 * SSD_SLOT))
    set_policy(pool, salt="large", ssd_limit=2 * count * SSD_SLOT)
    confirmed(pool, "large", ssd_limit=2 * count * SSD_SLOT)
    with Client(pool.address, transfer_deadline_ms=10_000) as client:
        large = Tenant(client, "large", count)
        other = Tenant(client, "by default", 8)
        assert large.store().durable.all() and other.store().durable.all()
        pool.kill("node0")
        (pool.data_of(0) / "policies.json").unlink()  # as on a node that never heard of any
        pool.daemons["master"].signal(signal.SIGSTOP)
        try:
            pool.start_node(0)
            assert pool.node().ready["ssd_blocks_found"] == count + 8
            time.sleep(0.5)  # of the node's own time: what it would evict, it would evict in its next turns
            counts = pool.health()["counts"]
            assert counts["evicted"] == counts["evicted_lowered"] == counts["evicted_quota"] == 0
            assert pool.tenants(0, "large")[0]["ssd_bytes"] == count * SSD_SLOT
            assert pool.tenants(0, "large")[0]["ssd_limit"] is None
        finally:
            pool.daemons["master"].signal(signal.SIGCONT)
        pool.restart_master()
        confirmed(pool, "large", ssd_limit=2 * count * SSD_SLOT)
        until(lambda: large.load().loaded.all())
        assert other.load().loaded.all()
        assert pool.tenants(0, "large")[0]["ssd_bytes"] == count * SSD_SLOT, "a default came before its policy"
