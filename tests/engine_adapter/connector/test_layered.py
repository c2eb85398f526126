"""Layered loads: what a forward pass waits for, how long, and what it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.connector import layered
from kvstrata.engine_adapter.connector.base import ConnectorMeta, JobKind
from kvstrata.engine_adapter.connector.layered import LayeredLoad, LayeredLoads, LayerRanges, layered_group
from kvstrata.engine_adapter.connector.layering import RETRY_DECISIONS, WAITED_MAX, LoadBeside
from kvstrata.engine_adapter.connector.layout import GroupLayout
from kvstrata.proto.status import BlockStatus
from tests.engine_adapter.connector.scripted_client import (
    FULL,
    STATE,
    WINDOW,
    Engine,
    ScriptedClient,
    job,
    layout,
    names,
    store,
)

ALL = np.ones(3, np.bool_)
LAYERS = GroupLayout(fingerprint="model/layers", block_tokens=4, layers=4)


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def engine(client: ScriptedClient) -> Iterator[Engine]:
    made = Engine(client, LAYERS, chunk_blocks=1)
    made.side._layered = LayeredLoads(stand_still_s=60)  # however busy the machine is
    yield made
    made.close()


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def stored(engine: Engine, count: int) -> list[bytes]:
    data = [bytes([row + 1]) * engine.layout.block_bytes(0) for row in range(count)]
    for row in range(count):
        engine.fill(row + 1, data[row])
    engine.store(store(1, names(count), list(range(1, count + 1))))
    assert engine.outcome(1).done == b"\1" * count
    return data


def load(job_id: int, count: int, first: int = 20) -> ConnectorMeta:
    wanted = job(job_id, JobKind.LOAD, names(count), list(range(first, first + count)))
    return ConnectorMeta(loads=[msgspec.structs.replace(wanted, layered=True)])


def test_a_layer_is_waited_for_until_its_pages_are_there(
    engine: Engine, client: ScriptedClient, aside: ThreadPoolExecutor
) -> None:
    """In one call, whatever a call's size: the first layers of all blocks come first."""
    data = stored(engine, 5)
    client.landing.shut()
    engine.side.start(load(2, 5))
    client.landing.came()
    first = aside.submit(engine.side.wait_layer, 0)
    assert not first.done()
    client.landing.open()
    assert first.result(10) and all(engine.side.wait_layer(layer) for layer in range(4))
    engine.side.forward_ended()
    output = engine.side.take_output()
    assert [(outcome.job_id, outcome.done) for outcome in output.outcomes] == [(2, b"\1" * 5)]
    assert output.waited_s > 0 and not output.layers_missed and engine.side.take_output().waited_s == 0
    assert [engine.read(block) for block in range(20, 25)] == data and len(client.loads) == 1


@pytest.mark.parametrize("takes_back", [True, False])
def test_a_block_that_does_not_come_is_told_of_at_the_end_of_the_step(
    engine: Engine, client: ScriptedClient, takes_back: bool
) -> None:
    stored(engine, 3)
    client.answers = {names(1, 1): BlockStatus.CORRUPT}
    client.takes_back = takes_back
    engine.side.start(load(2, 3))
    assert engine.side.wait_layer(0) in (takes_back, False)
    assert takes_back or not engine.side.wait_layer(3)
    engine.side.forward_ended()
    assert [outcome.done for outcome in engine.side.take_output().outcomes] == [b"\1\0\1"]


def test_a_step_stands_still_for_so_long_and_no_longer(engine: Engine, client: ScriptedClient) -> None:
    engine.side._layered = LayeredLoads(stand_still_s=0.05)
    stored(engine, 2)
    client.loading.shut()
    engine.side.start(load(2, 2))
    client.loading.came()
    assert [engine.side.wait_layer(layer) for layer in range(4)] == [False] * 4
    engine.side.forward_ended()
    output = engine.side.take_output()
    assert not output.outcomes and 0.05 <= output.waited_s < 5
    # The next step has nothing to do with it, and its outcome comes when it comes.
    assert engine.side.wait_layer(0)
    client.loading.open()
    assert engine.outcome(2).done == b"\1\1"


def test_a_layer_that_was_missed_is_told_of_though_the_load_ends_well_within_the_step(
    engine: Engine, client: ScriptedClient
) -> None:
    engine.side._layered = LayeredLoads(stand_still_s=0.05)
    stored(engine, 2)
    client.loading.shut()
    engine.side.start(load(2, 2))
    client.loading.came()
    assert not engine.side.wait_layer(0)
    client.loading.open()
    assert engine.side._layered._loads[0].wait_end(10)
    assert not engine.side.wait_layer(3), "what is computed is in vain"
    engine.side.forward_ended()
    output = engine.side.take_output()
    assert [outcome.done for outcome in output.outcomes] == [b"\1\1"] and output.layers_missed
    assert engine.side.wait_layer(0) and not engine.side.take_output().layers_missed


def test_a_range_that_failed_is_told_of_though_the_load_ends_well() -> None:
    loads = LayeredLoads(stand_still_s=10)
    one = LayeredLoad(LayerRanges.of([8, 16]))
    loads.add(one)
    one.landed(0, ALL)
    one.landed(1, ~ALL)
    one.end(loaded=True)
    assert not loads.wait_layer(1)
    loads.wait_ends()
    assert loads.take_missed() and not loads.take_missed()


@pytest.mark.parametrize("late", [0, 1])
def test_one_of_two_loads_is_missed_by_the_step(late: int) -> None:
    loads, pair = LayeredLoads(stand_still_s=0.01), [LayeredLoad(LayerRanges.of([8])) for _ in range(2)]
    for one in pair:
        loads.add(one)
    pair[1 - late].landed(0, ALL)
    assert not loads.wait_layer(0)
    for one in pair:
        one.end(loaded=True)
    loads.wait_ends()
    assert loads.take_missed()


def test_a_load_that_cannot_tell_of_its_layers_is_missed(client: ScriptedClient) -> None:
    several = Engine(client, FULL, WINDOW)
    several.side.start(load(2, 2))
    assert not several.side.wait_layer(0) and several.side.take_output().layers_missed
    several.close()


def test_jobs_that_never_begin_hold_nobody_up(engine: Engine) -> None:
    meta = load(2, 3)
    bad = load(3, 3, first=62)
    engine.side.start(ConnectorMeta(loads=[*bad.loads, *meta.loads]))
    assert not engine.side.wait_layer(3)
    engine.side.forward_ended()
    output = engine.side.take_output()
    assert sorted(outcome.job_id for outcome in output.outcomes) == [2, 3] and output.waited_s < 30


def test_a_step_without_layered_loads_waits_for_nothing(engine: Engine, client: ScriptedClient) -> None:
    stored(engine, 2)
    client.loading.shut()
    plain = job(2, JobKind.LOAD, names(2), [30, 31])
    engine.side.start(ConnectorMeta(loads=[plain]))
    assert engine.side.wait_layer(0)
    engine.side.forward_ended()
    assert engine.side.take_output().waited_s < 0.1
    client.loading.open()
    engine.outcome(2)


# -------------------------------------------------------------------- ranges


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 20))
def test_ranges_cover_the_block_and_hold_their_layers(sizes: list[int], most: int) -> None:
    ends = np.cumsum(sizes).tolist()
    found = LayerRanges.of(ends, most)
    assert list(found.ends) == sorted(set(found.ends)) and found.ends[-1] == ends[-1] and len(found.ends) <= most
    for layer, end in enumerate(ends):
        part = found.of_layer[layer]
        assert found.ends[part] >= end and (part == 0 or found.ends[part - 1] < end)


def test_layers_that_share_pages_come_together() -> None:
    assert LayerRanges.of([8, 16, 8, 24]) == LayerRanges((8, 16, 24), (0, 1, 0, 2))


@pytest.mark.parametrize(
    ("groups", "expected"), [((FULL,), 0), ((WINDOW,), 0), ((FULL, WINDOW), None), ((STATE,), None)]
)
def test_which_layouts_load_by_layer(groups: tuple[GroupLayout, ...], expected: int | None) -> None:
    assert layered_group(layout(*groups)) == expected


def test_a_wait_is_over_when_the_load_fails(aside: ThreadPoolExecutor) -> None:
    one = LayeredLoad(LayerRanges.of([8, 16]))
    waiting = aside.submit(one.wait_layer, 1, 10.0)
    one.landed(0, ALL)
    assert not waiting.done() and one.wait_layer(0, 0.0)
    one.landed(1, ALL & np.array([True, False, True]))
    assert waiting.result(5) is False and not one.wait_layer(0, 0.0), "what is known to fail needs no more waiting"
    ended = aside.submit(one.wait_end, 10.0)
    one.end(loaded=False)
    assert ended.result(5)


def test_a_wait_uses_up_what_the_step_may_wait() -> None:
    loads = LayeredLoads(stand_still_s=0.1)
    loads.add(LayeredLoad(LayerRanges.of([8])))
    started = time.monotonic()
    assert not loads.wait_layer(0) and not loads.wait_layer(0)
    loads.wait_ends()
    assert time.monotonic() - started < 5 and loads.take_waited_s() >= 0.1
    assert layered.STAND_STILL_S <= 1.0


# -------------------------------------------------------------------- whether


def always() -> LoadBeside:
    return LoadBeside("auto")


@pytest.mark.parametrize(
    ("load_s", "compute_s", "load_yield", "chosen"),
    [
        (0.01, 0.1, 1.0, True),
        (0.1, 0.1, 1.0, True),
        (0.2, 0.1, 1.0, False),  # others in the step would stand still
        (0.0, 0.1, 1.0, False),  # nothing was measured
        (0.01, 0.0, 1.0, False),
        (0.01, 0.1, 0.9, False),  # what fails costs more than what works brings
        (0.05, 0.1, 0.9, True),
        (0.1, 0.1, 0.4, False),
    ],
)
def test_a_load_runs_beside_the_step_where_that_pays(
    load_s: float, compute_s: float, load_yield: float, chosen: bool
) -> None:
    assert always().choose(load_s, compute_s, load_yield) is chosen


def test_what_is_waited_for_all_the_time_is_loaded_first_but_for_a_try_now_and_then() -> None:
    policy = always()
    policy.ended(0.1, 0.1)
    assert policy.waited_share == 1.0 > WAITED_MAX
    chosen = [policy.choose(0.05, 0.1, 1.0) for _ in range(3 * RETRY_DECISIONS)]
    assert sum(chosen) == 3 and not chosen[0]
    for _ in range(20):
        policy.ended(0.1, 0.0)
    policy.check()
    assert policy.choose(0.05, 0.1, 1.0)


@pytest.mark.parametrize(("way", "chosen"), [("always", True), ("never", False)])
def test_configuration_decides_whatever_was_measured(way: str, chosen: bool) -> None:
    policy = LoadBeside(way)  # type: ignore[arg-type]
    assert policy.choose(0.0, 0.0, 0.0) is policy.choose(9.0, 0.1, 1.0) is chosen


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(-1, 20)), max_size=20))
def test_the_share_stays_a_share(ends: list[tuple[float, float]]) -> None:
    policy = always()
    for load_s, waited_s in ends:
        policy.ended(load_s, waited_s)
        policy.choose(0.1, 0.2, 1.0)
        policy.check()
