"""The worker side on a scripted client: each job ends once, rightly, and nothing holds up the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.connector import worker_side, workers
from kvstrata.engine_adapter.connector.base import ConnectorMeta, GroupBlocks, Job, JobKind, PoolState
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.worker_side import make_worker_side
from kvstrata.proto.errors import (
    FingerprintMismatch,
    Forbidden,
    ForbiddenSalt,
    InvalidArgument,
    KVError,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)
from kvstrata.proto.status import BlockStatus
from tests.engine_adapter.connector.scripted_client import (
    FULL,
    STATE,
    WIDTH,
    WINDOW,
    Engine,
    ScriptedClient,
    job,
    layout,
    load,
    names,
    store,
)
from tests.waiting import until

Start = Callable[..., Engine]


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def start(client: ScriptedClient) -> Iterator[Start]:
    engines: list[Engine] = []

    def make(*groups: object, **options: object) -> Engine:
        engines.append(Engine(client, *groups, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def put(client: ScriptedClient, hashes: bytes, group: str = FULL.fingerprint, size: int = 128) -> None:
    for at in range(0, len(hashes), WIDTH):
        name = hashes[at : at + WIDTH]
        client.blocks[(group, 0, "", name)] = (name * (size // WIDTH + 1))[:size]


# -------------------------------------------------------------------- the plain way


def test_what_one_stores_the_other_loads_into_the_blocks_it_names(start: Start, client: ScriptedClient) -> None:
    writer, reader = start(), start()
    for block_id in (5, 3, 60):
        writer.fill(block_id, bytes([block_id]) * 128)
    writer.store(store(1, names(3), [5, 3, 60]))
    stored = writer.outcome(1)
    assert (stored.done, stored.reasons, stored.bytes_moved) == (b"\1\1\1", {"stored": 3}, 3 * 128)
    reader.side.start(load(7, names(3), [2, 63, 1]))
    loaded = reader.outcome(7)
    assert (loaded.kind, loaded.done, loaded.reasons) == (JobKind.LOAD, b"\1\1\1", {"loaded": 3})
    assert [reader.read(b)[:1] for b in (2, 63, 1)] == [b"\5", b"\3", b"\x3c"]
    assert {reader.read(b) for b in range(64) if b not in (1, 2, 63)} == {bytes(128)}, "only what was named"


def test_stores_wait_for_the_forward_pass_and_loads_do_not(start: Start, client: ScriptedClient) -> None:
    put(client, names(1))
    engine = start()
    both = ConnectorMeta(loads=load(1, names(1), [1]).loads, stores=store(2, names(1, 50), [2]).stores)
    engine.side.start(both)
    assert engine.outcome(1).done == b"\1"
    assert not client.stores and len(engine.take()) == 1
    engine.side.forward_ended()
    assert engine.outcome(2).done == b"\1"


def test_a_load_passes_stores_that_are_stuck(start: Start, client: ScriptedClient) -> None:
    put(client, names(1))
    engine = start()
    client.storing.shut()
    for i in range(5):
        engine.store(store(10 + i, names(1, 100 * i), [2 + i], request_id=f"r{i}"))
    client.storing.came()
    engine.side.start(load(1, names(1), [1]))
    assert engine.outcome(1).done == b"\1"
    assert len(engine.outcomes) == 1


def test_loads_given_together_run_side_by_side(
    start: Start, client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 1e6)  # no thread looks for work but when it is woken
    put(client, names(9))
    engine = start()
    client.loading.shut()
    loads = [job(i, JobKind.LOAD, names(1, i), [1 + i]) for i in range(9)]
    engine.side.start(ConnectorMeta(loads=loads))
    for _ in range(worker_side.LOAD_THREADS):
        client.loading.came()
    client.loading.open()
    assert all(engine.outcome(i).done == b"\1" for i in range(9))


def test_two_groups_are_loaded_in_the_order_of_their_tokens(start: Start, client: ScriptedClient) -> None:
    put(client, names(8))
    put(client, names(4, 100), WINDOW.fingerprint, 64)
    engine = start(FULL, WINDOW, chunk_blocks=2)
    groups = [
        GroupBlocks(group=0, hashes=names(8), block_ids=list(range(1, 9))),
        GroupBlocks(group=1, hashes=names(4, 100), block_ids=list(range(20, 24))),
    ]
    asked = Job(job_id=1, kind=JobKind.LOAD, request_id="r", cache_salt="", groups=groups, deadline_s=10.0)
    engine.side.start(ConnectorMeta(loads=[asked]))
    assert engine.outcome(1).done == b"\1" * 12 and engine.outcome(1).bytes_moved == 8 * 128 + 4 * 64
    # Full blocks have 4 tokens and come by two, window blocks have 8 and come by four.
    assert client.loads == [names(2), names(2, 2), names(2, 4), names(2, 6), names(4, 100)]
    assert engine.read(21, 1) == (names(1, 101) * 5)[:64]
    assert [engine.read(b) for b in range(1, 9)] == [names(1, i) * 8 for i in range(8)]


def test_stores_of_one_request_that_follow_each_other_become_one(start: Start, client: ScriptedClient) -> None:
    engine = start()
    client.storing.shut()
    for i in range(2):  # both threads are busy
        engine.store(store(90 + i, names(1, 900 + i), [60 + i], request_id=f"other{i}"))
        client.storing.came()
    engine.store(store(1, names(2), [1, 2]))
    engine.store(store(2, names(1, 700), [9], request_id="between"))
    engine.store(store(3, names(3, 2), [3, 4, 5], first_index=2, parent=names(1, 1)))
    engine.store(store(4, names(1, 6), [7], first_index=6, parent=names(1, 5)))  # one is missing before it
    client.answers[names(1, 3)] = BlockStatus.FULL
    client.storing.open()
    assert engine.outcome(1).done == b"\1\1"
    assert (engine.outcome(3).done, engine.outcome(3).reasons) == (b"\1\0\1", {"stored": 2, "full": 1})
    assert [engine.outcome(i).done for i in (2, 4)] == [b"\1", b"\1"]
    merged = [call for call in client.stores if call.hashes.startswith(names(1))]
    assert [(call.hashes, call.parent, call.first_index) for call in merged] == [(names(5), None, 0)]


def test_a_chain_in_pieces_names_the_parent_of_each(start: Start, client: ScriptedClient) -> None:
    engine = start(chunk_blocks=2)
    engine.store(store(1, names(5, 10), [1, 2, 3, 4, 5], first_index=10, parent=names(1, 9)))
    assert engine.outcome(1).done == b"\1" * 5
    assert [(c.hashes, c.parent, c.first_index) for c in client.stores] == [
        (names(2, 10), names(1, 9), 10),
        (names(2, 12), names(1, 11), 12),
        (names(1, 14), names(1, 13), 14),
    ]


# -------------------------------------------------------------------- parts of loads


def test_a_hole_ends_a_load_and_keeps_what_comes_before(start: Start, client: ScriptedClient) -> None:
    put(client, names(6))
    client.answers[names(1, 3)] = BlockStatus.CORRUPT
    engine = start(chunk_blocks=2)
    engine.side.start(load(1, names(6), [1, 2, 3, 4, 5, 6]))
    outcome = engine.outcome(1)
    assert outcome.done == b"\1\1\1\0\0\0" and outcome.reasons == {"loaded": 3, "corrupt": 1, "skipped": 2}
    assert len(client.loads) == 2


def test_no_call_begins_that_could_end_after_the_deadline(start: Start, client: ScriptedClient) -> None:
    put(client, names(6))
    engine = start(chunk_blocks=2)
    client.loading.shut()
    engine.side.start(load(1, names(6), [1, 2, 3, 4, 5, 6], deadline_s=10.0))
    client.loading.came()
    engine.clock.now += 5.1  # one call may take 5 s
    client.loading.open()
    outcome = engine.outcome(1)
    assert outcome.done == b"\1\1\0\0\0\0" and outcome.reasons == {"loaded": 2, "late": 4}
    assert outcome.seconds == pytest.approx(5.1)


def test_a_job_that_waited_too_long_is_late(start: Start, client: ScriptedClient) -> None:
    engine = start()
    client.storing.shut()
    for i in range(2):
        engine.store(store(90 + i, names(1, 900 + i), [60 + i], request_id=f"other{i}"))
        client.storing.came()
    engine.store(store(1, names(2), [1, 2]))
    engine.clock.now += 6
    engine.store(store(2, names(2, 2), [3, 4], first_index=2, parent=names(1, 1)))
    client.storing.open()
    assert engine.outcome(1).reasons == {"late": 2} and engine.outcome(2).reasons == {"stored": 2}


def test_a_store_is_not_late_for_a_long_forward_pass(start: Start, client: ScriptedClient) -> None:
    engine = start()
    engine.side.start(store(1, names(2), [1, 2]))
    engine.clock.now += 60
    engine.side.forward_ended()
    outcome = engine.outcome(1)
    assert outcome.reasons == {"stored": 2} and outcome.seconds < 1


def test_a_load_past_its_deadline_has_no_outcome_while_its_call_runs(start: Start, client: ScriptedClient) -> None:
    put(client, names(2))
    engine = start()
    client.loading.shut()
    engine.side.start(load(1, names(2), [1, 2], deadline_s=0.1))
    client.loading.came()
    engine.clock.now += 100
    assert not engine.take(), "its memory can still be written"
    client.loading.open()
    assert engine.outcome(1).done == b"\1\1"
    engine.fill(1, b"\xee" * 128)
    engine.close()
    assert engine.read(1) == b"\xee" * 128


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("hashes", "block_ids", "group"),
    [
        (names(2), [1, 64], 0),
        (names(2), [1, -1], 0),
        (names(2), [0, 1], 0),
        (names(2), [1], 0),
        (names(2), [3, 3], 0),
        (names(1), [1], 7),
        (names(1), [1], 1),
    ],
)
def test_a_job_that_cannot_be_carried_out(start: Start, hashes: bytes, block_ids: list[int], group: int) -> None:
    engine = start(FULL, STATE)
    engine.side.start(load(1, hashes, block_ids, group=group))
    assert engine.outcome(1).reasons == {"invalid": len(block_ids)}
    assert engine.outcome(1).done == bytes(len(block_ids)) and not engine.client.loads


def test_a_job_id_given_twice_is_one_job(start: Start, client: ScriptedClient) -> None:
    engine = start()
    engine.side.start(store(1, names(1), [1]))
    engine.side.start(store(1, names(1), [1]))
    engine.side.forward_ended()
    engine.outcome(1)
    engine.close()
    assert len(engine.outcomes) == 1 and engine.side.stats()["jobs_refused"] == 1


def test_stores_past_the_bound_are_shed_at_once(start: Start, client: ScriptedClient) -> None:
    engine = start(store_pending_blocks_max=4)
    client.storing.shut()
    for i in range(2):
        engine.store(store(90 + i, names(1, 900 + i), [60 + i], request_id=f"other{i}"))
        client.storing.came()
    engine.store(store(1, names(3), [1, 2, 3]))
    engine.store(store(2, names(2, 50), [4, 5]))
    assert engine.outcome(2).reasons == {"shed": 2}
    client.storing.open()
    assert engine.outcome(1).done == b"\1\1\1"


def test_another_tenant_is_refused_and_the_pool_goes_on(
    start: Start, client: ScriptedClient, caplog: pytest.LogCaptureFixture
) -> None:
    put(client, names(1))
    engine = start()
    client.fails = ForbiddenSalt("not yours")
    engine.side.start(load(1, names(1), [1]))
    assert engine.outcome(1).reasons == {"refused": 1}
    client.fails = None
    assert "not yours" in caplog.text and "absent" not in caplog.text
    engine.side.start(load(2, names(1), [1]))
    assert engine.outcome(2).done == b"\1"


@pytest.mark.parametrize(
    "refusal",
    [
        Unauthenticated("the ticket is not good here"),
        Forbidden("this needs the role client"),
        ForbiddenSalt("engine-a may not touch this namespace"),
    ],
    ids=lambda refusal: type(refusal).__name__,
)
def test_a_pool_that_does_not_let_the_engine_in_is_absent_says_so_once_and_is_found_when_it_does(
    start: Start, client: ScriptedClient, refusal: KVError, caplog: pytest.LogCaptureFixture
) -> None:
    client.refuses = refusal
    put(client, names(1))
    engine = start()
    assert engine.side.take_output().pool is PoolState.ABSENT
    engine.side.start(load(1, names(1), [1]))
    assert engine.outcome(1).reasons == {"absent": 1}
    for _ in range(3):
        engine.clock.now += 2
        until(lambda: str(refusal) in str(engine.side.health()["pool"]))
    assert caplog.text.count(str(refusal)) == 1
    client.refuses = None
    engine.clock.now += 2
    until(lambda: engine.side.take_output().pool is PoolState.READY)
    engine.side.start(load(2, names(1), [1]))
    assert engine.outcome(2).done == b"\1"


@pytest.mark.parametrize("refusal", [Unauthenticated("the ticket is not good here"), Forbidden("another role now")])
def test_an_engine_that_is_let_in_no_longer_serves_without_the_pool(
    start: Start, client: ScriptedClient, refusal: KVError
) -> None:
    engine = start()
    client.fails = refusal
    engine.side.start(load(1, names(1), [1]))
    assert engine.outcome(1).reasons == {"refused": 1}
    until(lambda: engine.side.take_output().pool is PoolState.ABSENT)
    assert str(refusal) in str(engine.side.health()["pool"])


def test_the_configuration_is_checked_at_the_start() -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        make_worker_side(layout(), PoolConfig())
    with pytest.raises(InvalidArgument, match="rank 1"):
        make_worker_side(layout(), PoolConfig(masters="127.0.0.1:1"), rank=1)


# -------------------------------------------------------------------- a pool that goes and comes


def test_without_a_master_jobs_end_at_once_and_it_is_found_when_it_comes(start: Start, client: ScriptedClient) -> None:
    client.reached = False
    put(client, names(1))
    engine = start()
    assert engine.side.take_output().pool is PoolState.ABSENT
    engine.side.start(load(1, names(2), [1, 2]))
    engine.store(store(2, names(1), [3]))
    assert engine.outcome(1).reasons == {"absent": 2} and engine.outcome(2).reasons == {"absent": 1}
    assert not client.loads and not client.stores
    client.reached = True
    engine.clock.now += 2
    until(lambda: engine.side.take_output().pool is PoolState.READY)
    engine.side.start(load(3, names(1), [1]))
    assert engine.outcome(3).done == b"\1"


def test_a_lost_pool_is_found_out_by_a_probe_and_asked_by_one_at_a_time(start: Start, client: ScriptedClient) -> None:
    engine = start(chunk_blocks=1)
    put(client, names(3))
    client.reached = False
    engine.side.start(load(1, names(3), [1, 2, 3]))
    assert engine.outcome(1).reasons == {"node_lost": 1, "absent": 2}
    until(lambda: engine.side.take_output().pool is PoolState.ABSENT)
    asked = client.lookups
    for step in range(4):  # 0.1, 0.2, 0.4, 0.8 s apart: not due before
        engine.clock.now += 0.1 * 2**step + 0.001
        until(lambda step=step: client.lookups == asked + step + 1)  # type: ignore[misc]
    client.reached = True
    engine.clock.now += 1.001
    until(lambda: engine.side.take_output().pool is PoolState.READY)


def test_what_waits_or_is_half_done_when_the_pool_goes_ends_at_once(start: Start, client: ScriptedClient) -> None:
    put(client, names(3))
    engine = start(chunk_blocks=1)
    client.loading.shut()
    client.storing.shut()
    for i in range(2):
        engine.store(store(90 + i, names(1, 900 + i), [60 + i], request_id=f"other{i}"))
        client.storing.came()
    engine.store(store(1, names(2, 30), [10, 11]))
    engine.side.start(load(2, names(3), [1, 2, 3]))
    client.loading.came()
    engine.side._pool._loop.stop()  # no probe finds the pool again meanwhile
    client.fails = FingerprintMismatch("known with another layout")
    engine.side._pool.lookup("", 0, names(1))  # somebody finds out
    assert engine.side.take_output().pool is PoolState.ABSENT
    engine.store(store(3, names(1, 40), [12]))
    assert engine.outcome(3).reasons == {"absent": 1}, "no thread is free, and none is needed"
    calls = len(client.stores)
    client.fails = None
    client.loading.open()
    client.storing.open()
    assert engine.outcome(2).reasons == {"loaded": 1, "absent": 2}
    assert engine.outcome(1).reasons == {"absent": 2} and len(client.stores) == calls


def test_one_lost_node_of_many_does_not_make_the_pool_absent(start: Start, client: ScriptedClient) -> None:
    engine = start()
    put(client, names(2))
    client.answers[names(1)] = BlockStatus.NODE_LOST
    engine.side.start(load(1, names(1), [1]))
    assert engine.outcome(1).reasons == {"node_lost": 1}
    engine.side.start(load(2, names(1, 1), [1]))
    assert engine.outcome(2).done == b"\1"
    assert engine.side.take_output().pool is PoolState.READY


def test_a_slow_pool_is_absent_until_its_data_comes_in_time(start: Start, client: ScriptedClient) -> None:
    engine = start()
    put(client, names(2))
    client.everything = BlockStatus.LATE
    for i in range(2):
        assert engine.side.take_output().pool is PoolState.READY
        engine.side.start(load(i, names(2), [1, 2]))
        assert engine.outcome(i).reasons == {"late": 2}
    assert engine.side.take_output().pool is PoolState.ABSENT
    asked = client.lookups
    engine.clock.now += 5
    until(lambda: client.lookups > asked)
    assert engine.side.take_output().pool is PoolState.ABSENT, "the directory answers, the data does not come"
    client.everything = None

    def ready() -> bool:
        engine.clock.now += 1.1
        return engine.side.take_output().pool is PoolState.READY

    until(ready)
    assert client.loads[-1] == names(1), "one block is enough to ask for"
    assert len(client.regions) - 1 == len(client.unregistered), "the probe's memory is given back"


@pytest.mark.parametrize("error", [FingerprintMismatch("block_bytes 128 (known: 256)"), VersionMismatch("9 and 1")])
def test_a_refused_engine_serves_without_the_pool_and_says_what_differs(
    start: Start, client: ScriptedClient, caplog: pytest.LogCaptureFixture, error: FingerprintMismatch
) -> None:
    client.refuses = error
    engine = start()
    assert engine.side.take_output().pool is PoolState.ABSENT
    assert str(error) in str(engine.side.health()["pool"]) and str(error) in caplog.text
    client.refuses = None
    engine.clock.now += 2
    until(lambda: engine.side.take_output().pool is PoolState.READY)
    client.fails = error
    engine.side.start(load(1, names(1), [1]))
    assert engine.outcome(1).reasons == {"refused": 1}
    assert engine.side.take_output().pool is PoolState.ABSENT


def test_a_client_that_cannot_be_made_yet_is_made_later(start: Start, client: ScriptedClient) -> None:
    tries = [VersionMismatch("old master"), Unavailable("nobody")]

    def connect() -> ScriptedClient:
        if tries:
            raise tries.pop()
        return client

    put(client, names(1))
    engine = start(connect=connect)
    memory = engine.side.memory
    assert memory.nbytes == engine.layout.memory_bytes and not memory.any()
    engine.side.start(load(1, names(1), [1]))
    assert engine.outcome(1).reasons == {"absent": 1}

    def ready() -> bool:
        engine.clock.now += 1.1
        return engine.side.take_output().pool is PoolState.READY

    until(ready)
    assert engine.side.memory is memory
    engine.side.start(load(2, names(1), [1]))
    assert engine.outcome(2).done == b"\1" and engine.read(1) == names(1) * 8


# -------------------------------------------------------------------- mistakes and ends


def test_a_mistake_in_a_thread_ends_its_job_and_shows_in_health(start: Start, client: ScriptedClient) -> None:
    put(client, names(1))
    engine = start()
    client.fails = RuntimeError("a bug")
    engine.side.start(load(1, names(1), [1]))
    engine.store(store(2, names(1), [1]))
    assert engine.outcome(1).reasons == {"error": 1} and engine.outcome(2).reasons == {"error": 1}
    until(lambda: engine.side.health()["thread_failures"] == 2)
    client.fails = None
    engine.side.start(load(3, names(1), [1]))
    assert engine.outcome(3).done == b"\1"


def test_a_thread_that_stands_still_shows_in_health(start: Start, client: ScriptedClient) -> None:
    engine = start(load_deadline_ms=1)
    assert engine.side.health()["healthy"]
    for part in (engine.side._load_workers, engine.side._store_workers):
        for loop in part._loops:
            loop.bound_s = -1.0
    problems = engine.side.health()["problems"]
    assert len(problems) == 6  # type: ignore[arg-type]
    until(lambda: engine.side.take_output().problems == problems)


def test_a_waker_that_raises_loses_no_outcome(start: Start, client: ScriptedClient) -> None:
    engine = start()

    def broken() -> None:
        raise RuntimeError("a bug of the engine")

    engine.side.set_waker(broken)
    engine.store(store(1, names(1), [1]))
    until(lambda: len(engine.take()) == 1)
    assert engine.side.health()["thread_failures"] == 0


def test_close_ends_every_job_once_and_gives_the_memory_back(start: Start, client: ScriptedClient) -> None:
    put(client, names(7))
    engine = start(chunk_blocks=1)
    client.loading.shut()
    client.storing.shut()
    for i in range(6):
        engine.side.start(load(i, names(2, i), [1 + i, 40 + i]))
        engine.store(store(10 + i, names(1, 50 + i), [10 + i], request_id=f"r{i}"))
    engine.side.start(store(20, names(1, 90), [30]))  # its forward pass never ends
    for _ in range(4):
        client.loading.came()
    for _ in range(2):
        client.storing.came()
    closing = threading.Thread(target=engine.side.close)
    closing.start()
    until(lambda: len(engine.take()) == 2 + 4 + 1)  # those that wait end at once, those under way by themselves
    client.loading.open()
    client.storing.open()
    closing.join(10)
    assert not closing.is_alive() and client.closed and client.unregistered == client.regions[:1]
    assert sorted(outcome.job_id for outcome in engine.take()) == [*range(6), *range(10, 16), 20]
    begun = [outcome for outcome in engine.take() if outcome.kind is JobKind.LOAD and outcome.bytes_moved]
    assert len(begun) == 4 and all(outcome.reasons == {"loaded": 1, "closed": 1} for outcome in begun)
    engine.side.start(load(99, names(1), [1]))
    assert engine.outcome(99).reasons == {"closed": 1}
    engine.side.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kvstrata-connector")]


def test_close_is_bounded_when_a_call_never_ends(start: Start, client: ScriptedClient, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("kvstrata.engine_adapter.connector.worker_side.CLOSE_GRACE_S", 0.1)
    engine = start(load_deadline_ms=2)
    client.loading.shut()
    engine.side.start(load(1, names(1), [1]))
    client.loading.came()
    engine.side.close()
    assert engine.outcome(1).reasons == {"closed": 1}
    client.loading.open()
    until(lambda: engine.side.stats().get("outcomes_refused") == 1)
    assert len(engine.take()) == 1, "its late end is not a second outcome"


def test_stats_count_every_block_by_its_reason(start: Start, client: ScriptedClient) -> None:
    put(client, names(2))
    engine = start()
    engine.side.start(load(1, names(3), [1, 2, 3]))
    engine.outcome(1)
    engine.store(store(2, names(3), [1, 2, 3]))
    engine.outcome(2)
    stats = engine.side.stats()
    assert (stats["load_blocks_loaded"], stats["load_blocks_missing"], stats["load_blocks"]) == (2, 1, 3)
    assert (stats["load_bytes"], stats["store_bytes"], stats["store_jobs"], stats["jobs_open"]) == (256, 384, 1, 0)


_STATUS = st.sampled_from(
    [BlockStatus.LOADED, BlockStatus.MISSING, BlockStatus.NODE_LOST, BlockStatus.LATE, BlockStatus.CORRUPT]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    jobs=st.lists(
        st.tuples(st.booleans(), st.lists(_STATUS, min_size=0, max_size=6), st.sampled_from(["a", "b"])), max_size=12
    ),
    chunk_blocks=st.integers(1, 4),
    close_after=st.integers(0, 12),
)
def test_any_jobs_and_any_answers_give_one_true_outcome_each(
    jobs: list[tuple[bool, list[BlockStatus], str]], chunk_blocks: int, close_after: int
) -> None:
    client = ScriptedClient()
    engine = Engine(client, chunk_blocks=chunk_blocks)
    at, blocks_of = 0, {}
    for job_id, (is_load, answers, request_id) in enumerate(jobs):
        hashes = names(len(answers), 100 * job_id)
        ids = [1 + (at + i) % 63 for i in range(len(answers))]
        at += len(answers)
        for i, answer in enumerate(answers):
            name = hashes[i * WIDTH : (i + 1) * WIDTH]
            put(client, name)
            stored = BlockStatus.STORED if answer is BlockStatus.LOADED else BlockStatus.FULL
            client.answers[name] = answer if is_load else stored
        blocks_of[job_id] = (is_load, answers)
        make = load if is_load else store
        engine.side.start(make(job_id, hashes, ids, request_id=request_id))
        engine.side.forward_ended()
        if job_id == close_after:
            engine.side.close()
    for job_id, (is_load, answers) in blocks_of.items():
        outcome = engine.outcome(job_id)
        assert len(outcome.done) == len(answers) == sum(outcome.reasons.values())
        good = bytes(answer is BlockStatus.LOADED for answer in answers)
        tried = len(answers) if not is_load else len(outcome.done.rstrip(b"\0"))
        if is_load or set(outcome.reasons) <= {"stored", "full"}:  # others may make the pool absent half-way
            assert outcome.done[:tried] == good[:tried], "done says what the pool said"
        assert all(done <= there for done, there in zip(outcome.done, good, strict=True))
    engine.close()
    assert len(engine.outcomes) == len(jobs)


# -------------------------------------------------------------------- new weights

RESET = ConnectorMeta(reset=True)


def ready(engine: Engine) -> bool:
    return engine.side.take_output().pool is PoolState.READY


def test_after_a_reset_stores_and_loads_are_of_the_pools_epoch_of_then(start: Start, client: ScriptedClient) -> None:
    put(client, names(1))
    engine = start()
    client.epoch = 1
    engine.store(store(1, names(1, 50), [1]))
    assert engine.outcome(1).reasons == {"refused": 1}
    engine.side.start(RESET)
    until(lambda: ready(engine))
    engine.store(store(2, names(1, 50), [1]))
    engine.side.start(load(3, names(1), [2]))
    assert engine.outcome(2).done == engine.outcome(3).done == b"\1"
    assert [call.epoch for call in client.stores] == [0, 1]


def test_what_was_computed_with_older_weights_never_goes_to_the_new_epoch(start: Start, client: ScriptedClient) -> None:
    engine = start(chunk_blocks=1)
    client.storing.shut()
    for number in range(worker_side.STORE_THREADS):  # each in its first call of two, of older weights
        engine.store(store(10 + number, names(2, 10 * number), [1, 2], request_id=f"r{number}"))
        client.storing.came()
    engine.store(store(20, names(1, 50), [3], request_id="waits"))
    engine.side.start(store(30, names(1, 60), [4], request_id="not written"))
    client.epoch = 1
    engine.side.start(RESET)
    until(lambda: ready(engine))
    engine.store(store(40, names(1, 70), [5], request_id="new"))
    client.storing.open()
    for job_id, blocks in ((10, 2), (11, 2), (20, 1), (30, 1)):
        assert engine.outcome(job_id).done == bytes(blocks), job_id
    assert engine.outcome(20).reasons == engine.outcome(30).reasons == {"stale": 1}
    assert engine.outcome(40).done == b"\1"
    assert [name for _, _, _, name in client.blocks] == [names(1, 70)]


def test_a_store_of_new_weights_does_not_continue_one_of_older(start: Start, client: ScriptedClient) -> None:
    engine = start()
    client.storing.shut()
    for number in range(worker_side.STORE_THREADS):
        engine.store(store(10 + number, names(1, 10 * number), [1], request_id=f"r{number}"))
        client.storing.came()
    engine.store(store(1, names(1, 50), [1]))
    engine.side.start(RESET)
    until(lambda: ready(engine))
    engine.store(store(2, names(1, 51), [2], first_index=1, parent=names(1, 50)))
    client.storing.open()
    assert (engine.outcome(1).done, engine.outcome(2).done) == (b"\0", b"\1")


def test_a_load_that_a_reset_finds_half_done_brings_nothing(start: Start, client: ScriptedClient) -> None:
    put(client, names(2))
    engine = start(chunk_blocks=1)
    client.loading.shut()
    engine.side.start(load(1, names(2), [1, 2]))
    client.loading.came()
    engine.side.start(RESET)
    until(lambda: ready(engine))
    client.loading.open()
    assert engine.outcome(1).done == b"\0\0" and engine.outcome(1).reasons == {"stale": 2}
    assert len(client.loads) == 1, "its second call would have been of the new weights"


def test_a_namespace_that_is_being_opened_during_a_reset_is_opened_again(start: Start, client: ScriptedClient) -> None:
    client.reached = False
    engine = start()
    client.opening.shut()
    client.reached = True
    engine.clock.now += 2
    while client.opening.entered.acquire(blocking=False):
        pass
    client.opening.came()  # it has learned epoch 0, and stands in the call
    client.epoch = 1
    engine.side.start(RESET)
    client.opening.open()

    def ready_later() -> bool:
        engine.clock.now += 2  # past any pause between probes
        return ready(engine)

    until(ready_later)
    engine.store(store(1, names(1), [1]))
    assert engine.outcome(1).done == b"\1" and client.stores[-1].epoch == 1


def test_weights_of_the_past_are_told_once_and_the_pool_stays(
    start: Start, client: ScriptedClient, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    client.epoch = 1
    for number in range(3):
        engine.store(store(number, names(1, number), [1]))
        assert engine.outcome(number).reasons == {"refused": 1}
        assert ready(engine) and engine.side.take_output().superseded
    assert caplog.text.count("takes no blocks of this engine") == 1
    engine.side.start(RESET)
    assert not engine.side.take_output().superseded


def test_a_store_that_a_reset_finds_in_its_call_counts_as_not_done(start: Start, client: ScriptedClient) -> None:
    engine = start()
    client.storing.shut()
    engine.store(store(1, names(1), [1]))
    client.storing.came()
    engine.side.start(RESET)
    until(lambda: ready(engine))
    client.storing.open()
    assert engine.outcome(1).done == b"\0" and engine.outcome(1).reasons == {"aborted": 1}
