"""Stores beside a step: what they wait for, for how long, and what becomes of those that are given up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.connector import layered_store
from kvstrata.engine_adapter.connector.base import ConnectorMeta
from kvstrata.engine_adapter.connector.layered import LayerRanges
from kvstrata.engine_adapter.connector.layered_store import LayeredStore
from kvstrata.engine_adapter.connector.layout import GroupLayout
from kvstrata.proto.status import BlockStatus
from tests.engine_adapter.connector.scripted_client import WINDOW, Engine, ScriptedClient, names, store
from tests.waiting import until

LAYERS = GroupLayout(fingerprint="model/layers", block_tokens=4, layers=4)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered_store, "BYTES_MIN", 0)


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def engine(client: ScriptedClient) -> Iterator[Engine]:
    made = Engine(client, LAYERS, chunk_blocks=1, layered_stores=True)
    yield made
    made.side.check()
    made.close()


def soon() -> float:
    return time.monotonic() + 10


# ---------------------------------------------------------------- how far a step has come


@given(ends=st.lists(st.integers(1, 6), min_size=1, max_size=12), most=st.integers(1, 6), data=st.data())
def test_a_range_is_written_when_its_layers_are_and_those_before_it(
    ends: list[int], most: int, data: st.DataObject
) -> None:
    """Layers may share pages, and come in any order of pages."""
    ranges = LayerRanges.of([8 * end for end in ends], most)
    one = LayeredStore(ranges, 10)
    for layer in range(len(ends)):
        before = [
            all(at < layer for at, its in enumerate(ranges.of_layer) if its <= k) for k in range(len(ranges.ends))
        ]
        assert [one._written(part) for part in range(len(ranges.ends))] == before
        one.layer_written(layer)
    assert all(one.written(part, soon()) for part in range(len(ranges.ends)))


def test_layers_that_end_no_range_wake_nobody() -> None:
    one = LayeredStore(LayerRanges.of([8, 16, 24, 32], 2), 10)
    assert [one.layer_written(layer) for layer in range(4)] == [False, True, False, True]


def test_what_takes_too_long_is_given_up_for_good() -> None:
    one = LayeredStore(LayerRanges.of([8, 16]), 0.02)
    one.layer_written(0)
    assert one.written(0, soon()) and not one.written(1, soon()) and one.given_up
    one.end()
    assert not one.written(0, soon()), "another node's part of the same store goes on"
    other = LayeredStore(LayerRanges.of([8, 16]), 60)
    assert not other.written(0, time.monotonic() + 0.02) and other.given_up


def test_giving_up_ends_a_wait() -> None:
    one = LayeredStore(LayerRanges.of([8, 16]), 60)
    with ThreadPoolExecutor(1) as aside:
        waiting = aside.submit(one.written, 0, soon())
        one.give_up()
        assert waiting.result(10) is False


# ---------------------------------------------------------------- a worker side


def test_a_store_begins_with_the_first_layers_and_ends_after_the_last(engine: Engine, client: ScriptedClient) -> None:
    """In one call, whatever a call's size; and what is written between is what is stored."""
    data = [bytes([row + 1]) * engine.layout.block_bytes(0) for row in range(3)]
    engine.side.start(store(1, names(3), [1, 2, 3]))
    assert not client.stores
    engine.side.layer_written(0)
    client.storing.came()
    for row in range(3):
        engine.fill(row + 1, data[row])
    assert not engine.take()
    for layer in (1, 2, 3):
        engine.side.layer_written(layer)
    assert engine.outcome(1).done == b"\1\1\1" and engine.outcome(1).layered
    engine.side.forward_ended()
    assert [call.parts for call in client.stores] == [tuple(engine.layout.layer_ends(0))]
    assert [client.blocks[(LAYERS.fingerprint, 0, "", names(1, row))] for row in range(3)] == data
    assert engine.side.stats()["stores_beside"] == 1 and engine.side.stats()["stores_beside_given_up"] == 0


def test_the_end_of_the_step_is_the_end_of_all_layers(engine: Engine, client: ScriptedClient) -> None:
    engine.side.start(store(1, names(2), [1, 2]))
    engine.side.layer_written(0)
    client.storing.came()
    engine.side.forward_ended()
    assert engine.outcome(1).done == b"\1\1"


def test_the_largest_of_a_step_begins_and_the_others_wait(engine: Engine, client: ScriptedClient) -> None:
    stores = [*store(1, names(1, 10), [1]).stores, *store(2, names(3), [2, 3, 4]).stores]
    engine.side.start(ConnectorMeta(stores=[*stores, *store(3, names(1, 20), [5]).stores]))
    for layer in range(4):
        engine.side.layer_written(layer)
    assert engine.outcome(2).done == b"\1\1\1" and len(client.stores) == 1
    engine.side.forward_ended()
    assert engine.outcome(1).done == engine.outcome(3).done == b"\1"
    assert [bool(call.parts) for call in client.stores] == [True, False, False]


@pytest.mark.parametrize(("bound", "off"), [("BYTES_MIN", 1), ("BYTES_MAX", -1)])
def test_small_and_huge_stores_wait(
    engine: Engine, client: ScriptedClient, monkeypatch: pytest.MonkeyPatch, bound: str, off: int
) -> None:
    monkeypatch.setattr(layered_store, bound, 2 * engine.layout.block_bytes(0) + off)
    engine.side.start(store(1, names(2), [1, 2]))
    for layer in range(4):
        engine.side.layer_written(layer)
    engine.side.forward_ended()
    assert engine.outcome(1).done == b"\1\1" and not any(call.parts for call in client.stores)


@pytest.mark.parametrize("step_ended", [False, True])
def test_a_store_that_a_step_keeps_for_too_long_is_made_after_it(
    engine: Engine, client: ScriptedClient, step_ended: bool
) -> None:
    assert engine.side._beside is not None
    engine.side._beside._wait_s = 0.02
    engine.side.start(store(1, names(2), [1, 2]))
    client.storing.shut()
    engine.side.layer_written(0)
    client.storing.came()
    if step_ended:  # it gives up when the step has ended, so that nobody else makes it
        assert engine.side._beside._begun is not None and engine.side._beside._begun.writing is not None
        engine.side._beside._begun.writing.give_up()
        engine.side.forward_ended()
        client.storing.open()
    else:
        client.storing.open()
        until(lambda: engine.side.stats()["stores_beside_given_up"] == 1)
        assert not engine.take()
        engine.side.forward_ended()
    assert engine.outcome(1).done == b"\1\1" and not engine.outcome(1).layered
    assert [bool(call.parts) for call in client.stores] == [True, False, False], "a call a block, as any store here"


def test_giving_up_and_the_end_of_the_step_come_at_once(engine: Engine, client: ScriptedClient) -> None:
    """Whoever is first: the job ends once, and its blocks are stored."""
    assert engine.side._beside is not None
    engine.side._beside._wait_s = 0.0
    for number in range(1, 101):
        engine.side.start(store(number, names(1, number), [1 + number % 60]))
        engine.side.layer_written(0)
        client.storing.came()
        engine.side.forward_ended()
        assert engine.outcome(number).done == b"\1"
        until(lambda: engine.side._beside._begun is None)
        while client.storing.entered.acquire(blocking=False):
            pass
    assert engine.side.stats()["stores_beside"] == 100
    assert sorted(outcome.job_id for outcome in engine.take()) == list(range(1, 101))


def test_a_store_under_way_is_no_hindrance_to_the_next_step(engine: Engine, client: ScriptedClient) -> None:
    client.storing.shut()
    engine.side.start(store(1, names(2), [1, 2]))
    engine.side.layer_written(0)
    client.storing.came()
    engine.side.forward_ended()
    engine.side.start(store(2, names(1, 10), [3]))
    for layer in range(4):
        engine.side.layer_written(layer)
    engine.side.forward_ended()
    client.storing.open()
    assert engine.outcome(1).done == b"\1\1" and engine.outcome(2).done == b"\1"
    assert engine.side.stats()["stores_beside"] == 1


def test_what_the_pool_says_of_it_is_its_outcome(engine: Engine, client: ScriptedClient) -> None:
    client.answers = {names(1, 1): BlockStatus.FULL}
    engine.side.start(store(1, names(3), [1, 2, 3]))
    for layer in range(4):
        engine.side.layer_written(layer)
    assert engine.outcome(1).done == b"\1\0\1"
    engine.side.forward_ended()
    assert len(client.stores) == 1


@pytest.mark.parametrize("begun", [False, True])
def test_closing_ends_a_store_whose_step_never_ends(client: ScriptedClient, begun: bool) -> None:
    engine = Engine(client, LAYERS, layered_stores=True, load_deadline_ms=60_000)
    engine.side.start(store(1, names(2), [1, 2]))
    if begun:
        engine.side.layer_written(0)
        client.storing.came()
    started = time.monotonic()
    engine.side.close()
    assert time.monotonic() - started < 5, "it waited for a layer"
    assert engine.outcome(1).done == b"\0\0"
    engine.side.layer_written(1)


def test_groups_that_do_not_come_by_layer_are_stored_after_the_step(client: ScriptedClient) -> None:
    engine = Engine(client, LAYERS, WINDOW, layered_stores=True)
    engine.side.start(store(1, names(2), [1, 2]))
    for layer in range(4):
        engine.side.layer_written(layer)
    assert not client.stores
    engine.side.forward_ended()
    assert engine.outcome(1).done == b"\1\1"
    engine.close()
