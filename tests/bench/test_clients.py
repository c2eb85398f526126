"""What several clients at once are measured at: warm as rooflines are, but for those that have just begun."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import suite_clients
import suite_markdown
import transfer_pool
from cases import FIRST_LOADS, Case, Round
from rooflines import memcpy_round
from suite_clients import FIRST, HELD, TRANSPORTS, clients_pool
from suite_results import Results
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


class Started(FakeWorker):
    """``given``: what its main gets after the master's address; ``open``: until it is closed."""

    def __init__(self, main: object, master: str, *given: Any) -> None:
        super().__init__()
        self.given = given
        self.open = True

    def close(self) -> None:
        self.open = False


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """In the order in which they begin."""
    found: list[Started] = []

    def start(*given: Any) -> Started:
        found.append(Started(*given))
        return found[-1]

    class Opened:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Pool:
            return POOL

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(suite_clients, "Worker", start)
    monkeypatch.setattr(suite_clients, "pool", Opened)
    return found


def test_each_transports_first_loads_are_of_clients_that_have_loaded_nothing(started: list[Started]) -> None:
    group = suite_clients._first(POOL, 3)
    found = [case.name for turn in group.turns.values() for case in turn()]
    assert found == ["load 64 x 1 MiB, 3 clients, first loads"] * 2
    assert [one.given[1:] for one in started] == [(("shm",), False)] * 3 + [(("tcp",), False)] * 3
    assert [one.asked for one in started] == [
        *([("kvstrata-shm", "load", HELD)] for _ in range(3)),
        *([("kvstrata-tcp", "load", HELD)] for _ in range(3)),
    ]
    assert len({one.given[0] for one in started}) == 6, "whoever has another's name removes its blocks"
    assert not any(one.open for one in started)


def test_first_loads_that_are_repeated_are_of_other_clients(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that has missed comes again; its clients have loaded by then."""
    group, added, repeated = suite_clients._first(POOL, 2), list[str](), list[str]()
    monkeypatch.setattr(
        Started, "attempt", lambda self: "Missed: silent" if len(started) <= 2 else FakeWorker.attempt(self)
    )
    group.run(random.Random(1), lambda system, _: added.append(system), repeated.append)
    assert sorted(added) == ["kvstrata-shm", "kvstrata-tcp"] and len(repeated) == 1
    assert len(started) == 6 and all(len(one.asked) == 1 for one in started)
    assert not any(one.open for one in started)


@pytest.mark.parametrize("loads_first", [True, False])
def test_a_client_that_is_to_load_nothing_first_has_only_stored(
    monkeypatch: pytest.MonkeyPatch, loads_first: bool
) -> None:
    called: list[str] = []

    class Client:
        def __init__(self, *_: object, **__: object) -> None: ...

        def register(self, memory: Any) -> Any:
            return self

        def view(self, *_: object) -> None: ...

        def namespace(self, *_: object, **__: object) -> None: ...

        def health(self) -> dict[str, Any]:
            return {"nodes": []}

        def close(self) -> None: ...

        def store(self, *_: object) -> SimpleNamespace:
            called.append("store")
            return SimpleNamespace(reasons=["stored"])

        def load(self, *_: object) -> SimpleNamespace:
            called.append("load")
            way._got[:] = way._bytes
            return SimpleNamespace(reasons=["loaded"])

        def remove(self, *_: object) -> None: ...

    monkeypatch.setattr(transfer_pool, "Client", Client)
    way = transfer_pool.Way.__new__(transfer_pool.Way)
    way.__init__("one", "", "shm", nbytes=1 << 20, loads_first=loads_first)  # type: ignore[misc]
    assert "store" in called and ("load" in called) == loads_first
    way.close()


def test_first_loads_are_compared_to_warm_ones_or_to_nothing() -> None:
    results = Results()
    one = Round([0.5], 1 << 30, 0.1, {}, 1.0, 1.5)
    first, warm = (
        Case("clients", "load", 64, 1 << 20, f"{count}{note}")
        for count, note in (("8 clients", f", {FIRST_LOADS}"), ("8 clients", ""))
    )
    results.add("kvstrata-shm", {first: one})
    head, _, row = suite_markdown._clients(results).splitlines()
    assert "to warm ones" in head and row.split(" | ")[3] == "-"
    results.add("kvstrata-shm", {warm: one})
    head, _, *rows = suite_markdown._clients(results).splitlines()
    assert "to 8 clients |" in head and len(rows) == 2


@pytest.mark.parametrize(
    ("wanted", "names", "most"),
    [("clients", [FIRST, "clients 1", "clients 4"], 4), ("first", [FIRST], 0), ("clients 1", ["clients 1"], 1)],
)
def test_only_what_is_wanted_is_started(started: list[Started], wanted: str, names: list[str], most: int) -> None:
    with clients_pool(Scale(clients=(1, 4)), lambda name: wanted in name) as groups:
        assert [group.name for group in groups] == names
        assert [one.given[1:] for one in started] == [(TRANSPORTS, True)] * most
    assert not any(one.open for one in started)


def test_a_roofline_begins_when_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is there and warm: what another process waits for is no part of what it measures."""
    copied: list[int] = []
    copied_before: list[int] = []
    monkeypatch.setattr("rooflines.np.copyto", lambda *_: copied.append(1))
    one = memcpy_round(1 << 10, 4, hashed=False, calls=3, begin=lambda: copied_before.append(len(copied)))
    assert copied_before == [4] and len(copied) == 4 + 3 * 4 and len(one.seconds) == 3
