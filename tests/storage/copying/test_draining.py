"""A node on its way out: it refuses, serves, offers what it has, and waits to be let go."""

from __future__ import annotations

import itertools
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.storage.copying import farewell, offers
from kvstrata.storage.copying.draining import DrainState
from kvstrata.storage.copying.farewell import Farewell
from kvstrata.storage.state import WriteAsk
from tests.storage.conftest import fill, key, keys
from tests.storage.copying.nodes import BLOCK_BYTES, MIB, NAMESPACE, CopyNode, MakeNode
from tests.waiting import until

COMMANDS = itertools.count(1)


class Line:
    """A master's end of an attachment: keeps what it is told; ``full``: takes nothing for now."""

    def __init__(self) -> None:
        self.over = False
        self.told: list[control.NodeMessage] = []
        self.full = False

    @property
    def waiting(self) -> int:
        return offers.AHEAD if self.full else 0

    def tell(self, message: control.NodeMessage) -> None:
        self.told.append(message)

    @property
    def offers(self) -> list[control.Offer]:
        return [message.offer for message in self.told if message.WhichOneof("body") == "offer"]

    @property
    def whole(self) -> bool:
        return bool(self.offers) and self.offers[-1].last

    def blocks(self) -> list[tuple[str, int, bytes]]:
        """(salt, tier, hash) in the order of the offers."""
        return [
            (part.salt, part.tier, part.hashes[start : start + 16])
            for offer in self.offers
            for part in offer.holdings
            for start in range(0, len(part.hashes), 16)
        ]


class Link:
    """What :class:`Farewell` sees of a master link."""

    def __init__(self, master: str, line: Line | None) -> None:
        self.master = master
        self._line = line

    def line(self) -> Line | None:
        return self._line

    def attach(self, line: Line | None) -> None:
        self._line = line


def drain(node: CopyNode, line: Line, command: int = 0, *, cancel: bool = False, budget_ms: int = 0) -> int:
    number = command or next(COMMANDS)
    node.node.drains.order(control.DrainCommand(command=number, budget_ms=budget_ms, cancel=cancel), line)
    return number


def test_everything_is_offered_once_the_hottest_first_and_memory_before_ssd(make: MakeNode) -> None:
    node = make(ssd=16 * MIB)
    node.store(range(100, 110))
    node.to_ssd(range(100, 110))
    node.store(range(10), "a")
    node.store(range(20, 30), "b")
    for _ in range(3):
        node.load(range(20, 24), "b")
    line = Line()
    command = drain(node, line)
    until(lambda: line.whole)
    found = line.blocks()
    assert len(found) == len(set(found)) == 30
    assert [tier for _, tier, _ in found] == [0] * 20 + [1] * 10
    of_b = [name for salt, _, name in found if salt == "b"]
    assert of_b[:4] == [key(n) for n in range(20, 24)], "what was read comes first"
    assert {salt for salt, _, _ in found[:20]} == {"a", "b"}
    assert all(offer.command == command and offer.bytes_total == 30 * BLOCK_BYTES for offer in line.offers)
    facts = node.node.report.health()["drain"]
    assert facts["state"] == "draining" and facts["bytes_offered"] == facts["bytes_total"] == 30 * BLOCK_BYTES


def test_new_blocks_are_refused_and_what_is_there_is_served(make: MakeNode) -> None:
    node, other = make(), make()
    node.store(range(4))
    other.store(range(50, 52))
    drain(node, Line())
    assert node.store(range(6)) == [BlockStatus.ALREADY_PRESENT] * 4 + [BlockStatus.REFUSED] * 2
    assert node.load(range(4)) == [BlockStatus.LOADED] * 4
    assert node.copy(other, range(50, 52)) == [BlockStatus.REFUSED] * 2
    assert other.copy(node, range(4)) == [BlockStatus.STORED] * 4
    drain(node, Line(), cancel=True)
    assert node.store(range(6)) == [BlockStatus.ALREADY_PRESENT] * 4 + [BlockStatus.STORED] * 2
    assert node.node.report.health()["drain"]["state"] == ""


def test_what_is_being_written_when_it_begins_is_offered_last(make: MakeNode) -> None:
    node = make()
    node.store(range(3))
    state, lock = node.node.state, node.node.lock
    writer = b"w" * 16
    with lock:
        handle = state.open_namespace(NAMESPACE)[0]
        ask = WriteAsk(handle, "", keys(range(3, 5)), key(2), 3, deadline_ms=5000)
        got = state.reserve(writer, ask, time.monotonic())
    assert got.reservation is not None
    line = Line()
    drain(node, line)
    until(lambda: len(line.blocks()) == 3)
    node.node.drains.wake()
    assert not line.whole
    for block in got.reservation.blocks:
        fill(block, 0)
    with lock:
        state.commit(writer, got.reservation.id, [1, 2], [1, 0], time.monotonic())
    until(lambda: line.whole)
    assert [name for _, _, name in line.blocks()] == [key(n) for n in range(4)], "the other write was given up"


def test_offers_wait_for_a_line_that_takes_nothing_and_end_with_it(make: MakeNode) -> None:
    node = make()
    node.store(range(5))
    line, other = Line(), Line()
    line.full = True
    command = drain(node, line)
    before = node.node.loops.ages_s()["drain"]
    until(lambda: node.node.loops.ages_s()["drain"] < before or before < 0.05)
    assert not line.told
    line.over = True
    drain(node, other, command)  # a new attachment: everything again
    until(lambda: other.whole)
    assert len(other.blocks()) == 5 and not line.told


def test_large_inventories_are_offered_in_parts(make: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "OFFER_HASHES", 50)
    node = make()
    namespace = Namespace("small", 512, 16)
    node.store(range(1000), namespace=namespace)
    line = Line()
    drain(node, line)
    until(lambda: line.whole)
    assert len(line.offers) == 21 and len(line.blocks()) == 1000
    assert [name for _, _, name in line.blocks()] == [key(n) for n in range(1000)], "prefixes first"


def test_offers_that_fail_show_in_health(make: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make()
    node.store(range(2))

    def broken(*args: object) -> None:
        raise RuntimeError("no order")

    monkeypatch.setattr(offers, "by_worth", broken)
    line = Line()
    drain(node, line)
    until(lambda: any("no order" in problem for problem in node.node.report.problems()))
    monkeypatch.undo()
    drain(node, line, cancel=True)
    until(lambda: not node.node.report.problems())


def readiness(node: CopyNode) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{node.node.http}/readyz", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_leaving_node_is_not_ready_and_metrics_show_it(make: MakeNode) -> None:
    node, other = make(), make()
    other.store(range(3))
    node.copy(other, range(3))
    assert readiness(node) == (200, "ready\n")
    command = drain(node, Line())
    assert readiness(node) == (503, "draining\n")
    node.node.drains.over(control.Drained(command=command))
    assert readiness(node) == (503, "drained\n")
    with urllib.request.urlopen(f"http://{node.node.http}/metrics", timeout=5) as answer:
        metrics = answer.read().decode()
    assert "kvstrata_node_draining 1.0" in metrics
    assert 'kvstrata_node_copy_blocks_total{outcome="taken"} 3.0' in metrics
    assert f"kvstrata_node_copy_taken_bytes_total {3 * BLOCK_BYTES / 1}" in metrics


# ---------------------------------------------------------------- until it may stop


@pytest.fixture
def waiting(make: MakeNode) -> Iterator[tuple[CopyNode, Link, Line, Farewell]]:
    node, line = make(), Line()
    link = Link("m", line)
    yield node, link, line, Farewell(node.node.state, node.node.lock, node.node.drains, [link])


def in_thread(bye: Farewell, budget_s: float, hurry: threading.Event) -> tuple[threading.Thread, list[bool]]:
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(bye.wait(budget_s, hurry.is_set)))
    thread.start()
    return thread, done


def test_a_node_that_stops_asks_and_waits_until_it_is_drained(waiting: tuple[CopyNode, Link, Line, Farewell]) -> None:
    node, _, line, bye = waiting
    node.store(range(3))
    thread, done = in_thread(bye, 30.0, threading.Event())
    until(lambda: bool(line.told))
    assert 25_000 < line.told[0].leaving.budget_ms <= 30_000
    command = drain(node, line)
    until(lambda: line.whole)
    assert not done and node.load(range(3)) == [BlockStatus.LOADED] * 3
    node.node.drains.over(control.Drained(command=command + 1000))  # another drain's
    assert node.node.state.draining.state is DrainState.DRAINING
    node.node.drains.over(control.Drained(command=command))
    thread.join(5)
    assert done == [True]


def test_a_new_attachment_is_asked_again(waiting: tuple[CopyNode, Link, Line, Farewell]) -> None:
    """A new leader knows nothing of what another was asked."""
    node, link, line, bye = waiting
    hurry = threading.Event()
    thread, done = in_thread(bye, 30.0, hurry)
    until(lambda: bool(line.told))
    drain(node, line)
    link.attach(None)
    again = Line()
    link.attach(again)
    until(lambda: bool(again.told))
    assert len([m for m in again.told if m.WhichOneof("body") == "leaving"]) == 1
    hurry.set()
    thread.join(5)
    assert done == [False]


def test_the_wait_is_bounded(waiting: tuple[CopyNode, Link, Line, Farewell], monkeypatch: pytest.MonkeyPatch) -> None:
    node, _, line, bye = waiting
    begun = time.monotonic()
    assert not bye.wait(0.3)
    assert 0.3 <= time.monotonic() - begun < 2.0
    monkeypatch.setattr(farewell, "TAKEN_UP_S", 0.3)
    begun = time.monotonic()
    assert not bye.wait(60.0), "nobody took it up"
    assert time.monotonic() - begun < 5.0
    drain(node, line)
    begun = time.monotonic()
    assert not bye.wait(1.0)
    assert time.monotonic() - begun >= 1.0, "one that was taken up has its whole time"


def test_tiers_of_an_offer_are_those_of_the_blocks(make: MakeNode) -> None:
    node = make(ssd=16 * MIB)
    node.store(range(4))
    until(lambda: node.present(range(4), Tier.SSD) == [0, 1, 2, 3])
    line = Line()
    drain(node, line)
    until(lambda: line.whole)
    assert line.blocks() == [("", 0, key(n)) for n in range(4)], "one in both tiers is offered once"
