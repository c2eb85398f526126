"""Ranks that hold several shards of a block: engines of other sizes load what they stored, and all must be there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.client.results import reasons_of
from kvstrata.engine_adapter.connector import worker_side
from kvstrata.engine_adapter.connector.base import ConnectorMeta, JobKind, PoolState
from kvstrata.engine_adapter.connector.layered import LayeredLoads
from kvstrata.engine_adapter.connector.layered_store import BYTES_MIN
from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout
from kvstrata.engine_adapter.connector.shards import LandedShards, worst
from kvstrata.proto.errors import InvalidArgument, Refused
from kvstrata.proto.status import HELD, BlockStatus
from tests.engine_adapter.connector.scripted_client import (
    FULL,
    WAIT_S,
    WIDTH,
    Engine,
    ScriptedClient,
    job,
    layout,
    load,
    names,
    store,
)
from tests.transfer.late_transfer import LateTransfer
from tests.waiting import until

SHARDS = 4
#: Of a shard: a head's 4 bytes in K and in V of 4 tokens, in each of 2 layers.
SHARD_PAGE = 32
Open = Callable[..., list[Engine]]


def plan(ranks: int, *groups: GroupLayout, shard_page: int = SHARD_PAGE) -> PoolLayout:
    each = SHARDS // ranks
    return layout(*groups, shard_count=SHARDS, shards_per_rank=each, page_bytes=shard_page * each)


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def opened(client: ScriptedClient) -> Iterator[Open]:
    """The ranks of an engine of a tensor-parallel size."""
    engines: list[Engine] = []

    def ranks(count: int, *groups: GroupLayout, shard_page: int = SHARD_PAGE, **options: object) -> list[Engine]:
        layout_ = plan(count, *groups, shard_page=shard_page)
        made = [Engine(client, plan=layout_, rank=rank, **options) for rank in range(count)]  # type: ignore[arg-type]
        engines.extend(made)
        return made

    yield ranks
    for engine in engines:
        engine.close()


def content(block: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """[layers * K/V, tokens, heads, 4] of a block, in the model's heads."""
    draw = np.random.default_rng(block)
    return draw.integers(0, 256, (4, 4, SHARDS, 4), np.uint8)


def of_rank(block: int, rank: int, ranks: int) -> bytes:
    return content(block)[:, :, rank * SHARDS // ranks : (rank + 1) * SHARDS // ranks].tobytes()


def stored(ranks: list[Engine], count: int, job_id: int = 1) -> None:
    for rank, engine in enumerate(ranks):
        for row in range(count):
            engine.fill(row + 1, of_rank(row, rank, len(ranks)))
        engine.store(store(job_id, names(count), list(range(1, count + 1))))
        assert engine.outcome(job_id).done == b"\1" * count


@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_what_an_engine_stored_engines_of_other_sizes_load(opened: Open, writers: int, readers: int) -> None:
    stored(opened(writers), 5)
    for rank, engine in enumerate(opened(readers)):
        engine.side.start(load(7, names(5), [30, 21, 12, 40, 33]))
        outcome = engine.outcome(7)
        assert (outcome.done, outcome.reasons) == (b"\1" * 5, {"loaded": 5})
        assert outcome.bytes_moved == 5 * SHARDS // readers * 2 * SHARD_PAGE
        for row, block in enumerate([30, 21, 12, 40, 33]):
            assert engine.read(block) == of_rank(row, rank, readers)


def test_a_rank_beyond_the_shards_is_refused(client: ScriptedClient) -> None:
    with pytest.raises(InvalidArgument, match="4 shards, 2 a rank"):
        Engine(client, plan=plan(2), rank=2)


@pytest.mark.parametrize(
    "status", [BlockStatus.MISSING, BlockStatus.CORRUPT, BlockStatus.LATE, BlockStatus.NODE_LOST, BlockStatus.REFUSED]
)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_block_of_which_one_shard_does_not_come_is_not_loaded(
    opened: Open, client: ScriptedClient, shard: int, status: BlockStatus
) -> None:
    stored(opened(4), 5)
    client.of_shard[shard, names(1, first=2)] = status
    (reader,) = opened(1)
    reader.side.start(load(7, names(5), [10, 11, 12, 13, 14]))
    outcome = reader.outcome(7)
    assert outcome.done == b"\1\1\0\1\1" and outcome.reasons == {"loaded": 4, status.name.lower(): 1}


def test_a_block_of_which_one_shard_is_refused_is_not_stored(opened: Open, client: ScriptedClient) -> None:
    (writer,) = opened(1)
    client.of_shard[3, names(1, first=1)] = BlockStatus.FULL
    client.of_shard[2, names(1)] = BlockStatus.ALREADY_PRESENT
    writer.store(store(1, names(3), [1, 2, 3]))
    outcome = writer.outcome(1)
    assert outcome.done == b"\1\0\1" and outcome.reasons == {"stored": 2, "full": 1}


def test_a_job_is_open_while_a_transfer_of_any_shard_may_touch_its_memory(opened: Open, client: ScriptedClient) -> None:
    stored(opened(4), 2)
    (reader,) = opened(1)
    landing = LateTransfer()
    client.pending, client.of_shard[1, names(1)] = (landing,), BlockStatus.PENDING
    reader.side.start(load(7, names(2), [10, 11]))
    until(lambda: reader.side.health()["jobs_parked"] == 1)
    assert reader.take() == []
    landing.over.set()
    assert reader.outcome(7).reasons == {"pending": 1, "loaded": 1}


def test_all_shards_are_asked_for_at_once(opened: Open, client: ScriptedClient) -> None:
    stored(opened(4), 2)
    (reader,) = opened(1)
    client.loads.clear()
    client.loading.shut()
    reader.side.start(load(7, names(2), [10, 11]))
    for _ in range(SHARDS):
        client.loading.came()
    client.loading.open()
    assert reader.outcome(7).done == b"\1\1" and len(client.loads) == SHARDS


def test_no_call_waits_for_another_s_threads_however_many_load_and_store(
    opened: Open, client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_side, "LOAD_THREADS", 7)
    monkeypatch.setattr(worker_side, "STORE_THREADS", 5)
    stored(opened(4), 1)
    (engine,) = opened(1)
    client.loading.shut()
    client.storing.shut()
    for index in range(7):
        engine.side.start(load(10 + index, names(1), [10 + index]))
    for index in range(5):
        engine.store(store(20 + index, names(1, first=5 + index), [20 + index]))
    for gate, calls in ((client.loading, 7), (client.storing, 5 + 1)):  # and what each rank stored before
        for _ in range(calls * SHARDS):
            gate.came()
    client.loading.open()
    client.storing.open()
    assert {engine.outcome(job_id).done for job_id in (*range(10, 17), *range(20, 25))} == {b"\1"}


def test_an_error_of_one_shard_ends_the_job_when_the_others_have_ended(opened: Open, client: ScriptedClient) -> None:
    stored(opened(4), 2)
    (reader,) = opened(1)
    whole, landing = client.load, LateTransfer()

    def failing(namespace, *rest, **more):  # type: ignore[no-untyped-def]
        if namespace.shard == 0:
            raise Refused("no")
        return whole(namespace, *rest, **more)

    client.pending, client.load = (landing,), failing  # type: ignore[method-assign]
    client.loading.shut()
    reader.side.start(load(7, names(2), [10, 11]))
    for _ in range(SHARDS - 1):
        client.loading.came()
    assert reader.take() == []
    client.loading.open()
    until(lambda: reader.side.health()["jobs_parked"] == 1)
    landing.over.set()
    outcome = reader.outcome(7)
    assert (outcome.done, outcome.reasons) == (b"\0\0", {"refused": 2})
    assert reader.side.take_output().pool is PoolState.READY


def test_late_shards_make_a_pool_absent_until_all_come_in_time(opened: Open, client: ScriptedClient) -> None:
    stored(opened(4), 2)
    (reader,) = opened(1)
    for block in range(2):
        client.of_shard[2, names(1, first=block)] = BlockStatus.LATE
    for job_id in (7, 8):
        reader.side.start(load(job_id, names(2), [10, 11]))
        assert reader.outcome(job_id).reasons == {"late": 2}
    assert reader.side.take_output().pool is PoolState.ABSENT

    def probed() -> bool:
        reader.clock.now += 10
        return len(client.loads) >= 3 * SHARDS

    until(probed)  # the probe asks for a block again, and one shard is late still
    assert reader.side.take_output().pool is PoolState.ABSENT
    client.of_shard.clear()

    def ready() -> bool:
        reader.clock.now += 10
        return reader.side.take_output().pool is PoolState.READY

    until(ready)


def test_shards_are_of_one_weight_epoch_though_another_begins_while_they_are_opened(
    opened: Open, client: ScriptedClient
) -> None:
    whole = client.namespace

    def bumping(group, **named):  # type: ignore[no-untyped-def]
        made = whole(group, **named)
        client.epoch += named["shard"] == 1
        return made

    client.namespace = bumping  # type: ignore[method-assign]
    (writer,) = opened(1)
    assert client.epoch == 1
    writer.store(store(1, names(2), [1, 2]))
    assert writer.outcome(1).done == b"\0\0"
    assert not client.blocks, "shards of old weights, under the new epoch"
    assert writer.side.take_output().superseded


def test_prefetches_are_for_every_shard_of_the_rank(opened: Open, client: ScriptedClient) -> None:
    (reader,) = opened(1)
    reader.side._pool.prefetch("", 0, names(2))
    assert client.prefetched == [names(2)] * SHARDS


# -------------------------------------------------------------------- by layer


def test_a_layer_is_in_place_when_every_shard_of_it_is(opened: Open, client: ScriptedClient) -> None:
    stored(opened(2), 3)
    (reader,) = opened(1)
    reader.side._layered = LayeredLoads(stand_still_s=60)
    client.landing.shut()
    wanted = job(7, JobKind.LOAD, names(3), [10, 11, 12])
    reader.side.start(ConnectorMeta(loads=[msgspec.structs.replace(wanted, layered=True)]))
    for _ in range(SHARDS):
        client.landing.came()
    seen: list[bool] = []
    waiting = threading.Thread(target=lambda: seen.append(reader.side.wait_layer(0)))
    waiting.start()
    client.landing.open()
    waiting.join(WAIT_S)
    assert seen == [True]
    assert reader.side.wait_layer(1)
    assert [reader.read(block) for block in (10, 11, 12)] == [of_rank(row, 0, 1) for row in range(3)]
    reader.side.forward_ended()
    assert reader.outcome(7).done == b"\1" * 3


def test_a_layer_of_which_a_shard_does_not_come_is_missed(opened: Open, client: ScriptedClient) -> None:
    stored(opened(2), 3)
    (reader,) = opened(1)
    reader.side._layered = LayeredLoads(stand_still_s=60)
    client.of_shard[2, names(1)] = BlockStatus.CORRUPT
    wanted = job(7, JobKind.LOAD, names(3), [10, 11, 12])
    reader.side.start(ConnectorMeta(loads=[msgspec.structs.replace(wanted, layered=True)]))
    assert not reader.side.wait_layer(0)
    reader.side.forward_ended()
    assert reader.side.take_output().layers_missed


def test_a_store_beside_the_step_stores_every_shard(opened: Open, client: ScriptedClient) -> None:
    page = BYTES_MIN // (2 * SHARDS)  # one block is worth it
    (writer,) = opened(1, shard_page=page, layered_stores=True)
    client.storing.shut()
    whole = np.random.default_rng(0).integers(0, 256, writer.layout.block_bytes(0), np.uint8).tobytes()
    writer.fill(1, whole)
    writer.side.start(store(1, names(1), [1]))
    writer.side.layer_written(0)
    for _ in range(SHARDS):
        client.storing.came()
    client.storing.open()
    writer.side.layer_written(1)
    writer.side.forward_ended()
    outcome = writer.outcome(1)
    assert outcome.done == b"\1" and outcome.layered
    assert sorted(shard for _, shard, _, _ in client.blocks) == list(range(SHARDS))
    assert {call.parts for call in client.stores} == {(page, 2 * page)}
    ranks = opened(4, shard_page=page)
    pieces = np.frombuffer(whole, np.uint8).reshape(4, 4, SHARDS, -1)  # pages, tokens, heads
    for rank, engine in enumerate(ranks):
        engine.side.start(load(7, names(1), [5]))
        assert engine.outcome(7).done == b"\1" and engine.read(5) == pieces[:, :, rank].tobytes()


# -------------------------------------------------------------------- what all shards together are

codes = st.lists(st.sampled_from([status for status in BlockStatus if status]), min_size=1, max_size=5)


@given(codes)
def test_a_block_is_what_its_worst_shard_is(shards: list[BlockStatus]) -> None:
    (found,) = worst([np.array([status], np.uint8) for status in shards]).tolist()
    assert found in shards
    assert (found in HELD) == all(status in HELD for status in shards)
    assert (found == BlockStatus.PENDING) == (BlockStatus.PENDING in shards)
    assert (found == BlockStatus.ALREADY_PRESENT) == ({*shards} == {BlockStatus.ALREADY_PRESENT})


def test_rows_are_looked_at_one_by_one() -> None:
    first = np.array([BlockStatus.LOADED, BlockStatus.MISSING, BlockStatus.LOADED], np.uint8)
    other = np.array([BlockStatus.LOADED, BlockStatus.LOADED, BlockStatus.LATE], np.uint8)
    assert reasons_of(worst([first, other])) == {"loaded": 1, "missing": 1, "late": 1}
    assert worst([first]) is first


@given(st.permutations([(shard, part) for shard in range(3) for part in range(4)]), st.data())
def test_ranges_are_told_in_order_once_each(order: list[tuple[int, int]], data: st.DataObject) -> None:
    told: list[tuple[int, list[bool]]] = []
    landed = LandedShards(3, lambda part, mask: told.append((part, mask.tolist())))
    masks = {
        (shard, part): np.array(data.draw(st.lists(st.booleans(), min_size=2, max_size=2)))
        for shard in range(3)
        for part in range(4)
    }
    at = dict.fromkeys(range(3), 0)
    for shard, _ in order:  # each shard's own are in order
        landed.landed(at[shard], masks[shard, at[shard]])
        at[shard] += 1
    assert [part for part, _ in told] == list(range(4))
    for part, mask in told:
        assert mask == np.logical_and.reduce([masks[shard, part] for shard in range(3)]).tolist()


def test_the_layout_says_who_holds_what() -> None:
    two = plan(2)
    assert (two.shard_count, two.shards_per_rank, two.distinct_ranks, two.ranks) == (4, 2, 2, 2)
    assert [list(two.shards(rank)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert two.block_bytes(0) == 2 * two.shard_bytes(0) == FULL.layers * two.page_bytes
    assert two.layer_ends(0) == (SHARD_PAGE, 2 * SHARD_PAGE)
    alike = msgspec.structs.replace(layout(shard_count=2), replicas=2)
    assert (alike.distinct_ranks, alike.ranks) == (2, 4)
    assert len(names(1)) == WIDTH
