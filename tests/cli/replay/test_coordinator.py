"""Real engine processes, over an address where no pool answers: all compute, and no request may fail for it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from kvstrata.cli.replay import ReplayOptions
from kvstrata.cli.replay.coordinator import Coordinator
from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.result import assemble, measured_hits
from kvstrata.cli.replay.schedule import Schedule, build_schedule
from kvstrata.cli.replay.simulator import private_caches
from kvstrata.cli.replay.traces import Request, Session, Trace
from kvstrata.proto.errors import Unavailable

OPTIONS = ReplayOptions(engines=2, block_tokens=64, private_tokens=640)


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    """Twelve requests of three sessions that share a prefix."""

    def session(number: int) -> Session:
        runs = [np.array([[0, 1], [10 * number + 2, 10 * number + 2 + turn]]) for turn in range(4)]
        return Session(f"{number}", tuple(Request(float(t), 64 * (3 + t) + 5, 1, run) for t, run in enumerate(runs)))

    return build_schedule(Trace("small", 64, False, tuple(map(session, range(3)))), OPTIONS, CostModel())


@pytest.fixture(scope="module")
def nowhere() -> Iterator[str]:
    """An address that refuses: bound, and never listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def coordinator(schedule: Schedule, nowhere: str) -> Iterator[Coordinator]:
    running = Coordinator(schedule, OPTIONS, nowhere, "test")
    pids = [engine.child.pid for engine in running._engines]
    yield running
    running.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_run_ends_early_when_it_is_told_that_it_is_enough(coordinator: Coordinator) -> None:
    seen: list[int] = []
    measured = coordinator.run(lambda done, _: seen.append(done), enough=lambda: len(seen) == 5)
    assert [outcome.index for outcome in measured.outcomes] == [0, 1, 2, 3, 4]


def test_without_a_pool_every_request_is_served_from_private_caches(
    schedule: Schedule, coordinator: Coordinator
) -> None:
    seen: list[tuple[int, int]] = []
    measured = coordinator.run(lambda done, of: seen.append((done, of)))
    assert seen == [(number, 12) for number in range(1, 13)]
    assert [outcome.error for outcome in measured.outcomes] == [""] * 12
    hits = measured_hits(schedule, measured.outcomes)
    expected = private_caches(schedule, OPTIONS.engines, OPTIONS.private_blocks)
    assert hits.private.tolist() == expected.private.tolist()
    result = assemble(OPTIONS, CostModel(), schedule, 100, measured, [])
    assert result.traffic.reasons["node_lost"] > 0
    assert "points from its simulator" in result.problems()[0]
    assert assemble(OPTIONS, CostModel(), schedule, 100, measured, ["the pool was killed"]).exit_code == 0


def test_an_engine_that_dies_is_reported_and_the_others_go_on(schedule: Schedule, coordinator: Coordinator) -> None:
    def kill_one(done: int, _of: int) -> None:
        if done == 6:
            os.kill(coordinator._engines[0].child.pid, signal.SIGKILL)

    measured = coordinator.run(kill_one)
    assert len(measured.outcomes) == 12
    assert sum(bool(outcome.error) for outcome in measured.outcomes) == 1
    assert len(measured.engines_lost) == 1
    assert "engine 0" in measured.engines_lost[0]
    result = assemble(OPTIONS, CostModel(), schedule, 100, measured, [])
    assert result.exit_code == 1
    assert "engine 0" in result.table()


def test_a_run_goes_on_to_its_end_when_no_engine_is_left(schedule: Schedule, coordinator: Coordinator) -> None:
    for engine in coordinator._engines:
        os.kill(engine.child.pid, signal.SIGKILL)
    measured = coordinator.run()
    assert all(outcome.error for outcome in measured.outcomes)
    assert measured.outcomes[-1].error == "no engine is left"


def test_an_engine_that_cannot_start_is_an_error_that_says_so(schedule: Schedule) -> None:
    with pytest.raises(Unavailable, match=r"engine 0 cannot use the pool at nonsense"):
        Coordinator(schedule, OPTIONS, "nonsense", "test")
