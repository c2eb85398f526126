"""What several clients at once are measured at: warm as rooflines are, but for those that have just begun."""

from __future__ import annotations

from typing import Any, cast

import pytest
import suite_clients
from cases import Round
from rooflines import memcpy_round
from suite_clients import FIRST, HELD, clients_pool
from suite_scale import Scale
from transfer_pool import Pool
from transfer_shapes import Worker

POOL = Pool("127.0.0.1:1", 1, "", 1)
Asked = tuple[str, str, int]


class FakeWorker:
    """Answers at once; ``asked`` has (system, op, calls)."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def ask(self, system: str, op: str, calls: int, at: float) -> None:
        self.asked.append((system, op, calls))

    def attempt(self) -> Round:
        return Round([0.5], 1 << 20, 0.1, {}, 1.0, 1.5)


def clients(count: int) -> tuple[list[FakeWorker], list[Worker]]:
    fakes = [FakeWorker() for _ in range(count)]
    return fakes, cast("list[Worker]", fakes)


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch:
        def __init__(self, pids: object) -> None: ...

        def seconds(self) -> dict[str, float]:
            return {}

    monkeypatch.setattr(suite_clients, "CpuWatch", Watch)


@pytest.mark.parametrize("system", ["kvstrata-shm", "kvstrata-tcp", "memcpy", "memcpy+xxh3"])
def test_what_is_measured_has_been_done_before_by_all_of_them(system: str) -> None:
    fakes, workers = clients(8)
    found = suite_clients._group(POOL, workers).turns[system]()
    for fake in fakes:
        loads = [calls for which, op, calls in fake.asked if op == "load"]
        assert loads == [HELD, 2] and {which for which, *_ in fake.asked} == {system}
        stores = [calls for _, op, calls in fake.asked if op == "store"]
        assert stores == ([2] if system.startswith("kvstrata") else [HELD, 2])
    assert {case.name for case in found} == {"store 64 x 1 MiB, 8 clients", "load 64 x 1 MiB, 8 clients"}


def test_first_loads_come_first_and_only_once() -> None:
    fakes, workers = clients(3)
    group = suite_clients._first(POOL, workers)
    assert [case.name for turn in group.turns.values() for case in turn()] == [
        "load 64 x 1 MiB, 3 clients, first loads"
    ] * 2
    for fake in fakes:
        assert fake.asked == [("kvstrata-shm", "load", HELD), ("kvstrata-tcp", "load", HELD)]


@pytest.mark.parametrize(
    ("wanted", "names", "most"),
    [("clients", [FIRST, "clients 1", "clients 4"], 4), ("first", [FIRST], 4), ("clients 1", ["clients 1"], 1)],
)
def test_only_what_is_wanted_is_started(
    monkeypatch: pytest.MonkeyPatch, wanted: str, names: list[str], most: int
) -> None:
    started: list[Any] = []

    class Started(FakeWorker):
        def __init__(self, *_: object) -> None:
            super().__init__()
            started.append(self)

        def close(self) -> None: ...

    class Opened:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Pool:
            return POOL

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(suite_clients, "Worker", Started)
    monkeypatch.setattr(suite_clients, "pool", Opened)
    with clients_pool(Scale(clients=(1, 4)), lambda name: wanted in name) as groups:
        assert [group.name for group in groups] == names
    assert len(started) == most


def test_a_roofline_begins_when_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is there and warm: what another process waits for is no part of what it measures."""
    copied: list[int] = []
    copied_before: list[int] = []
    monkeypatch.setattr("rooflines.np.copyto", lambda *_: copied.append(1))
    one = memcpy_round(1 << 10, 4, hashed=False, calls=3, begin=lambda: copied_before.append(len(copied)))
    assert copied_before == [4] and len(copied) == 4 + 3 * 4 and len(one.seconds) == 3
