"""Worker sides of several engines on one real pool: right bytes in the right blocks, whatever dies on the way."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import zmq

from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from kvstrata.engine_adapter.connector.base import ConnectorMeta, GroupBlocks, Job, JobKind, JobOutcome, PoolState
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout
from kvstrata.engine_adapter.connector.lookup_messages import LookupAnswer, LookupAsk
from kvstrata.engine_adapter.connector.worker_side import PoolWorkerSide, make_worker_side
from kvstrata.transfer.rdma.found import cma_problem, nixl_problem
from tests.e2e.real_pool import RealPool, keys, payload
from tests.waiting import until

WIDTH = 32
FULL = GroupLayout(fingerprint="model/full", block_tokens=16, layers=4)
FULL_OF_TWO = GroupLayout(fingerprint="model/full/tp2", block_tokens=16, layers=4)
WINDOW = GroupLayout(fingerprint="model/window", block_tokens=16, layers=3, window_tokens=64)
#: A call may take half a load's deadline, and a silent peer a little more; the rest is for a shared machine.
LOAD_DEADLINE_MS = 2000
BOUND_S = 5.0


def layout(*groups: GroupLayout, shard_count: int = 1, num_blocks: int = 700) -> PoolLayout:
    groups = groups or (FULL,)
    return PoolLayout(
        groups=groups,
        num_blocks=num_blocks,
        num_tensors=max(group.layers for group in groups),
        page_bytes=1024,
        parts=2,
        hash_block_tokens=16,
        hash_bytes=WIDTH,
        aligned_tokens=16,
        shard_count=shard_count,
    )


def scattered(count: int, seed: int, num_blocks: int = 700) -> list[int]:
    return [int(i) for i in 1 + np.random.default_rng(seed).permutation(num_blocks - 1)[:count]]


class Rank:
    """One worker side, its memory by blocks, and its outcomes."""

    def __init__(
        self, layout: PoolLayout, masters: str, rank: int = 0, endpoint: str = "", name: str = "test", **config: object
    ) -> None:
        options = {"masters": masters, "load_deadline_ms": LOAD_DEADLINE_MS, "verify": "always", **config}
        self.layout, self.rank = layout, rank
        self.side: PoolWorkerSide = make_worker_side(
            layout, msgspec.convert(options, PoolConfig), rank=rank, endpoint=endpoint, name=name
        )
        self._ids = 0
        self._outcomes: dict[int, JobOutcome] = {}

    def _at(self, block_ids: list[int], group: int) -> npt.NDArray[np.int64]:
        """Index of every byte of the blocks, i64[n, block_bytes]."""
        table = self.layout.descriptors(group)[block_ids]
        return (table[:, :, :1] + np.arange(table[0, 0, 1])).reshape(len(block_ids), -1)

    def fill(self, block_ids: list[int], rows: npt.NDArray[np.uint8], group: int = 0) -> None:
        self.side.memory[self._at(block_ids, group)] = rows

    def read(self, block_ids: list[int], group: int = 0) -> npt.NDArray[np.uint8]:
        return self.side.memory[self._at(block_ids, group)]

    def start(self, kind: JobKind, *groups: GroupBlocks, deadline_s: float = LOAD_DEADLINE_MS / 1e3) -> int:
        self._ids += 1
        job = Job(
            job_id=self._ids, kind=kind, request_id="r", cache_salt="", groups=list(groups), deadline_s=deadline_s
        )
        self.side.start(ConnectorMeta(loads=[job]) if kind is JobKind.LOAD else ConnectorMeta(stores=[job]))
        self.side.forward_ended()
        return self._ids

    def ended(self, job_id: int) -> JobOutcome:
        def there() -> bool:
            for outcome in self.side.take_output().outcomes:
                assert outcome.job_id not in self._outcomes, "a second outcome"
                self._outcomes[outcome.job_id] = outcome
            return job_id in self._outcomes

        until(there, 20)
        return self._outcomes[job_id]

    def run(self, kind: JobKind, *groups: GroupBlocks) -> JobOutcome:
        return self.ended(self.start(kind, *groups))

    def ready(self) -> bool:
        return self.side.take_output().pool is PoolState.READY


Engines = Callable[..., Rank]
NO_RAILS = nixl_problem() or cma_problem()
RAILS = () if NO_RAILS else ("--rdma", "cma")
CMA = pytest.param("rdma-cma", marks=pytest.mark.skipif(bool(NO_RAILS), reason=NO_RAILS))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    """One pool for the tests that break nothing; each has chains of its own."""
    pool = RealPool(tmp_path_factory.mktemp("pool"), options=RAILS)
    yield pool
    pool.end()


@pytest.fixture
def pool(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RealPool]:
    """A pool to break."""
    pool = RealPool(tmp_path, nodes=getattr(request, "param", 1), options=RAILS)
    yield pool
    pool.end()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engines]:
    breaks = "pool" in request.fixturenames
    pool: RealPool = request.getfixturevalue("pool" if breaks else "shared")
    ranks: list[Rank] = []

    def make(layout: PoolLayout, rank: int = 0, **options: object) -> Rank:
        ranks.append(Rank(layout, pool.address, rank, **options))  # type: ignore[arg-type]
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.side.close()
        rank.side.check()
        assert rank.side.health()["problems"] == [] and rank.side.health()["thread_failures"] == 0


def blocks(chain: str, block_ids: list[int], group: int = 0) -> GroupBlocks:
    return GroupBlocks(group=group, hashes=keys(len(block_ids), chain, WIDTH), block_ids=block_ids)


def bytes_of(part: GroupBlocks, plan: PoolLayout, rank: int = 0) -> npt.NDArray[np.uint8]:
    return payload(part.hashes, f"{part.group}/{rank}", plan.block_bytes(part.group), WIDTH)


def offer(writer: Rank, *parts: GroupBlocks) -> JobOutcome:
    for part in parts:
        writer.fill(part.block_ids, bytes_of(part, writer.layout, writer.rank), part.group)
    return writer.run(JobKind.STORE, *parts)


def share(writer: Rank, *parts: GroupBlocks) -> JobOutcome:
    """Store, and wait until the directory has heard of it."""
    outcome = offer(writer, *parts)
    for part in parts:
        count = len(part.block_ids)
        until(lambda part=part, count=count: _present(writer, part) == count)  # type: ignore[misc]
    return outcome


def _present(rank: Rank, part: GroupBlocks) -> int:
    found = rank.side._pool.lookup("", part.group, part.hashes)
    return int(found.present.sum()) if found is not None else 0


# -------------------------------------------------------------------- right bytes


@pytest.mark.parametrize("transport", ["shm", "tcp", CMA])
def test_two_engines_two_groups_scattered_blocks(engine: Engines, transport: str) -> None:
    plan = layout(FULL, WINDOW)
    writer, reader = engine(plan, transport=transport), engine(plan, transport=transport)
    assert writer.ready() and reader.ready()
    ids = scattered(140, 1)
    stored = share(writer, blocks(transport, ids[:120]), blocks(transport, ids[120:], 1))
    assert stored.reasons == {"stored": 140} and stored.done == b"\1" * 140
    to = scattered(140, 2)
    parts = blocks(transport, to[:120]), blocks(transport, to[120:], 1)
    job_id = reader.start(JobKind.LOAD, *parts)
    outcome = reader.ended(job_id)
    assert outcome.reasons == {"loaded": 140}
    assert outcome.bytes_moved == 120 * plan.block_bytes(0) + 20 * plan.block_bytes(1)
    assert all((reader.read(part.block_ids, part.group) == bytes_of(part, plan)).all() for part in parts)
    named = np.concatenate([reader._at(part.block_ids, part.group).ravel() for part in parts])
    rest = np.delete(reader.side.memory, named)
    assert not rest.any(), "nothing else was written"


def test_two_ranks_hold_a_shard_each_and_a_block_is_there_with_both(engine: Engines, tmp_path: Path) -> None:
    plan = layout(FULL_OF_TWO, shard_count=2)
    endpoint = f"ipc://{tmp_path}/lookups"
    zero, one = engine(plan, 0, endpoint=endpoint), engine(plan, 1)
    part = blocks("shards", scattered(20, 1))
    half = GroupBlocks(group=0, hashes=part.hashes[: 12 * WIDTH], block_ids=part.block_ids[:12])
    assert offer(zero, part).reasons == {"stored": 20} and offer(one, half).reasons == {"stored": 12}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(endpoint)

        def present() -> bytes:
            socket.send(msgspec.msgpack.encode(LookupAsk(lookup_id=1, cache_salt="", hashes=[part.hashes])))
            return msgspec.msgpack.decode(socket.recv(), type=LookupAnswer).present[0]

        until(lambda: present() == b"\1" * 12 + b"\0" * 8)
    for rank in (zero, one):
        into = GroupBlocks(group=0, hashes=half.hashes, block_ids=scattered(12, 3))
        assert rank.run(JobKind.LOAD, into).done == b"\1" * 12
        assert (rank.read(into.block_ids) == bytes_of(half, plan, rank.rank)).all()
    assert (zero.read(half.block_ids) != one.read(half.block_ids)).any(), "each has its own bytes"


def test_memory_is_the_engines_again_after_the_outcome(engine: Engines) -> None:
    plan = layout()
    writer, reader = engine(plan), engine(plan)
    ids = scattered(200, 1)
    share(writer, blocks("again", ids))
    for round_ in range(5):
        into = blocks("again", scattered(200, 10 + round_))
        assert reader.run(JobKind.LOAD, into).done == b"\1" * 200
        reader.side.memory[:] = 0xEE
        other = blocks("unknown", scattered(50, 50 + round_))
        assert reader.run(JobKind.LOAD, other).reasons == {"missing": 50}
        assert (reader.side.memory == 0xEE).all()
    # A store's source may be reused at once as well: what was stored is what was there.
    for round_ in range(5):
        part = blocks(f"reused/{round_}", ids)
        offer(writer, part)
        writer.side.memory[:] = 0xDD
        until(lambda part=part: reader.run(JobKind.LOAD, part).done == b"\1" * 200)  # type: ignore[misc]
        assert (reader.read(ids) == bytes_of(part, plan)).all()


def test_a_corrupt_block_is_not_loaded(engine: Engines) -> None:
    plan = layout()
    part = blocks("corrupt", scattered(100, 1))
    share(engine(plan), part)
    reader = engine(plan, transport="auto+faults:corrupt=0.1,seed=3")
    outcome = reader.run(JobKind.LOAD, part)
    good = np.frombuffer(outcome.done, np.bool_)
    assert outcome.reasons["corrupt"] > 0 and 0 < good.sum() < 100
    where = np.flatnonzero(good)
    assert (reader.read(part.block_ids)[where] == bytes_of(part, plan)[where]).all()
    assert reader.ready()


def test_the_same_name_with_another_layout_is_refused_and_said(
    engine: Engines, shared: RealPool, caplog: pytest.LogCaptureFixture
) -> None:
    lied_about = GroupLayout(fingerprint="model/lie", block_tokens=16, layers=4)
    with Client(shared.address) as client:
        client.namespace("model/lie", block_bytes=8192, block_tokens=16, hash_bytes=WIDTH)
    rank = engine(layout(lied_about))
    assert not rank.ready() and "block_bytes 4096 (known: 8192)" in caplog.text
    assert rank.run(JobKind.LOAD, blocks("lie", [1, 2])).reasons == {"absent": 2}


def test_a_slow_pool_costs_two_deadlines_and_then_nothing(engine: Engines) -> None:
    plan = layout()
    part = blocks("slow", scattered(16, 1))
    share(engine(plan), part)
    slow = engine(plan, transport="auto+faults:delay_ms=10000", load_deadline_ms=300)
    for _ in range(2):
        outcome = slow.run(JobKind.LOAD, part)
        assert not any(outcome.done) and outcome.seconds < BOUND_S
    until(lambda: not slow.ready())
    assert slow.run(JobKind.LOAD, part).reasons == {"absent": 16}


def test_a_pool_without_room_is_an_answer(engine: Engines) -> None:
    plan = layout()
    rank = engine(plan, transport="auto+faults:refuse=1")
    for i in range(5):
        assert rank.run(JobKind.STORE, blocks(f"full/{i}", scattered(30, i))).reasons == {"refused": 30}
    assert rank.ready()


def test_close_gives_everything_back(engine: Engines, shared: RealPool) -> None:
    rank = engine(layout(), name="closing")
    jobs = [rank.start(JobKind.STORE, blocks(f"close/{i}", scattered(60, i))) for i in range(20)]
    with AdminClient(shared.address) as admin:
        until(lambda: bool([row for row in admin.clients() if row.name == "closing/0"]))
        rank.side.close()
        outcomes = [rank.ended(job_id) for job_id in jobs]
        assert {reason for outcome in outcomes for reason in outcome.reasons} <= {"stored", "closed"}
        until(lambda: not [row for row in admin.clients() if row.name == "closing/0"])


# -------------------------------------------------------------------- what dies and comes back


@pytest.mark.parametrize("transport", ["tcp", CMA])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_lost_during_loads(engine: Engines, pool: RealPool, number: int, transport: str) -> None:
    """Loads run back to back while it goes: each ends in time, with right bytes where it says so."""
    plan = layout()
    part = blocks("c", scattered(600, 1))
    share(engine(plan), part)
    reader = engine(plan, transport=transport)
    right = bytes_of(part, plan)
    lost = 0
    for round_ in range(12):
        reader.side.memory[:] = 0
        job_id = reader.start(JobKind.LOAD, part)
        if round_ == 2:
            pool.node().signal(number)
        began = time.monotonic()
        outcome = reader.ended(job_id)
        assert time.monotonic() - began < BOUND_S
        where = np.flatnonzero(np.frombuffer(outcome.done, np.bool_))
        assert (reader.read(part.block_ids)[where] == right[where]).all()
        assert sum(outcome.reasons.values()) == 600
        lost += len(where) < 600
    assert lost >= 9
    if number == signal.SIGSTOP:
        pool.node().signal(signal.SIGCONT)
        until(lambda: reader.run(JobKind.LOAD, part).done == b"\1" * 600, 20)
        assert (reader.read(part.block_ids) == right).all()


def test_the_master_is_restarted_and_the_engine_is_not(engine: Engines, pool: RealPool) -> None:
    plan = layout()
    one, other = engine(plan), engine(plan)
    part = blocks("c", scattered(64, 1))
    assert share(one, part).reasons == {"stored": 64}
    address = pool.address
    pool.daemons["master"].signal(signal.SIGKILL)
    fresh = blocks("new", scattered(8, 2))
    until(lambda: other.run(JobKind.LOAD, fresh).reasons != {"missing": 8} and not other.ready())
    began = time.monotonic()
    for _ in range(20):  # nothing piles up, nothing waits
        assert other.run(JobKind.STORE, fresh).reasons == {"absent": 8}
    assert time.monotonic() - began < BOUND_S
    pool.start_master(address)
    until(other.ready, 20)
    until(lambda: other.run(JobKind.LOAD, part).done == b"\1" * 64, 20)
    assert (other.read(part.block_ids) == bytes_of(part, plan)).all()
    until(lambda: offer(other, fresh).done == b"\1" * 8, 20)


@pytest.mark.parametrize("pool", [0], indirect=True)
def test_the_pool_starts_after_the_engine(pool: RealPool, engine: Engines, tmp_path: Path) -> None:
    """It is not there when the engine starts, and when it comes it knows nothing of before."""
    plan = layout()
    address = pool.address
    for daemon in pool.daemons.values():
        daemon.signal(signal.SIGKILL)
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    early = engine(plan)
    part = blocks("c", scattered(64, 1))
    assert not early.ready() and early.run(JobKind.LOAD, part).reasons == {"absent": 64}
    pool.start_master(address)
    pool.start_node(1)
    until(early.ready, 20)
    until(lambda: offer(early, part).done == b"\1" * 64, 20)
    late = engine(plan)
    until(lambda: late.run(JobKind.LOAD, part).done == b"\1" * 64)
    assert (late.read(part.block_ids) == bytes_of(part, plan)).all()
