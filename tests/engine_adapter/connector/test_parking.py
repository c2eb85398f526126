"""Jobs whose calls gave one-sided transfers up: the engine's blocks stay held until nothing can touch them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvstrata.engine_adapter.connector import parking
from kvstrata.engine_adapter.connector.base import ConnectorMeta, JobKind
from kvstrata.engine_adapter.connector.pool import Pool
from kvstrata.proto.status import BlockStatus
from tests.engine_adapter.connector.scripted_client import Engine, ScriptedClient, job, load, names, store
from tests.transfer.late_transfer import LateTransfer
from tests.waiting import until

Start = Callable[..., Engine]


@pytest.fixture
def landing() -> LateTransfer:
    return LateTransfer()


@pytest.fixture
def client(landing: LateTransfer) -> ScriptedClient:
    """The second of any two blocks is late, and may still be written to, or read."""
    return ScriptedClient(answers={names(1): BlockStatus.LOADED, names(1, 1): BlockStatus.PENDING}, pending=(landing,))


@pytest.fixture
def engine(client: ScriptedClient) -> Iterator[Engine]:
    client.answers.pop(names(1))
    client.blocks[("model/full", 0, "", names(1))] = b"x" * 128
    engine = Engine(client)
    yield engine
    engine.close()


def parked(engine: Engine) -> int:
    return int(engine.side.health()["jobs_parked"])  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_job_is_over_when_its_memory_is_free(engine: Engine, landing: LateTransfer, kind: str) -> None:
    if kind == "load":
        engine.side.start(load(1, names(2), [3, 4]))
    else:
        engine.store(store(1, names(2), [3, 4]))
    until(lambda: parked(engine) == 1)
    assert engine.take() == []
    assert engine.side.health()["jobs_open"] == 1
    landing.over.set()
    outcome = engine.outcome(1)
    assert outcome.done == b"\1\0"
    assert outcome.reasons == {"loaded" if kind == "load" else "stored": 1, "pending": 1}
    assert parked(engine) == 0
    assert engine.side.stats()["jobs_parked"] == 0


def test_others_go_on_meanwhile(engine: Engine, landing: LateTransfer, client: ScriptedClient) -> None:
    engine.side.start(load(1, names(2), [3, 4]))
    until(lambda: parked(engine) == 1)
    client.pending = ()
    engine.side.start(load(2, names(1), [5]))
    assert engine.outcome(2).done == b"\1"
    assert [outcome.job_id for outcome in engine.outcomes] == [2]
    landing.over.set()
    engine.outcome(1)


def test_stores_that_went_as_one_all_wait(engine: Engine, landing: LateTransfer) -> None:
    one = job(1, JobKind.STORE, names(1), [3])
    two = job(2, JobKind.STORE, names(1, 1), [4], first_index=1, parent=names(1))
    engine.store(ConnectorMeta(stores=[one, two]))
    until(lambda: parked(engine) == 2)
    landing.over.set()
    assert engine.outcome(1).done == b"\1"
    assert engine.outcome(2).done == b"\0"


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_mistake_after_a_call_frees_no_memory(
    engine: Engine, landing: LateTransfer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(Pool, "_ended", fail)
    if kind == "load":
        engine.side.start(load(1, names(2), [3, 4]))
    else:
        engine.store(store(1, names(2), [3, 4]))
    until(lambda: parked(engine) == 1 or bool(engine.take()))
    assert parked(engine) == 1
    landing.over.set()
    assert engine.outcome(1).done == b"\0\0"


def test_weights_that_change_do_not_free_the_memory(
    engine: Engine, landing: LateTransfer, client: ScriptedClient
) -> None:
    client.loading.shut()
    engine.side.start(load(1, names(2), [3, 4]))
    client.loading.came()
    engine.side.start(ConnectorMeta(reset=True))
    client.loading.open()
    until(lambda: parked(engine) == 1)
    assert engine.take() == []
    landing.over.set()
    assert engine.outcome(1).done == b"\0\0"


def test_no_more_is_begun_while_much_of_the_engine_waits(engine: Engine, landing: LateTransfer) -> None:
    enough = engine.layout.num_blocks // parking.SHARE // 2 + 1
    for number in range(enough):
        engine.side.start(load(number, names(2), [2 * number + 1, 2 * number + 2]))
    until(lambda: parked(engine) == enough)
    engine.side.start(load(100, names(1), [60]))
    assert engine.outcome(100).reasons == {"shed": 1}
    landing.over.set()
    until(lambda: parked(engine) == 0)
    engine.side.start(load(101, names(1), [60]))
    assert engine.outcome(101).done == b"\1"


def test_what_waits_long_is_a_problem(engine: Engine, landing: LateTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "LONG_S", 0.0)
    engine.side.start(load(1, names(2), [3, 4]))
    until(lambda: parked(engine) == 1)
    assert "1 jobs keep their blocks" in str(engine.side.health()["problems"])
    landing.over.set()
    engine.outcome(1)
    assert engine.side.health()["problems"] == []


def test_closing_does_not_wait_for_ever(engine: Engine) -> None:
    engine.side.start(load(1, names(2), [3, 4]))
    until(lambda: parked(engine) == 1)
    started = time.monotonic()
    engine.side.close()
    assert time.monotonic() - started < 9
    assert engine.outcome(1).done == b"\1\0"
