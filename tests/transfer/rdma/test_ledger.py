"""The ledger, case by case; see test_driver for all cases together. And the owner's pace."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.transfer.memory import HOST, Memory
from kvstrata.transfer.rdma.engine import JobState, Pieces
from kvstrata.transfer.rdma.ledger import POSTED_BYTES_PER_PEER, POSTED_PER_PEER, Ledger, Transfer
from kvstrata.transfer.rdma.pace import IDLE_S, STIR_S, STIRRED_S, Pace


def transfer(peer: str, *pieces: tuple[int, int], memory: Memory = HOST) -> Transfer:
    table = np.array(pieces, np.int64)
    return Transfer(peer, Pieces(table[:, 0], table[:, 1], memory), Pieces(table[:, 0], table[:, 1]))


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.meet("a")
    ledger.meet("b")
    return ledger


def test_memory_registered_while_a_transfer_waits_is_held_as_well(ledger: Ledger) -> None:
    """The agent takes any registration that a piece lies in, and only knows which when it is posted."""
    first = ledger.register(0, 100, HOST, None)
    waits = transfer("a", (0, 50), (60, 40))
    assert ledger.submit(waits) == ""
    second = ledger.register(50, 100, HOST, None)
    assert ledger.take() is waits and (first.users, second.users) == (1, 1)
    assert ledger.close(second).memory == () and ledger.close(first).memory == ()
    assert set(ledger.settle(waits).memory) == {first, second}
    assert ledger.take_out(first) and not ledger.take_out(first)
    ledger.check()


def test_memory_on_its_way_out_is_kept_when_a_transfer_is_posted_first(ledger: Ledger) -> None:
    going, staying = ledger.register(0, 100, HOST, None), ledger.register(0, 100, HOST, None)
    assert ledger.close(going).memory == (going,)
    posted = transfer("a", (0, 100))
    assert ledger.submit(posted) == "" and ledger.take() is posted
    assert not ledger.take_out(going)
    assert ledger.settle(posted).memory == (going,) and ledger.take_out(going)
    assert not ledger.take_out(staying)


@pytest.mark.parametrize(
    ("pieces", "memory"),
    [([(90, 20)], HOST), ([(0, 10), (100, 1)], HOST), ([(-1, 2)], HOST), ([(0, 10)], Memory("cuda", 0))],
)
def test_a_piece_that_is_not_registered_refuses_all(
    ledger: Ledger, pieces: list[tuple[int, int]], memory: Memory
) -> None:
    held = ledger.register(0, 100, HOST, None)
    assert "not registered" in ledger.submit(transfer("a", *pieces, memory=memory))
    assert held.users == 0 and ledger.unsettled == 0
    assert ledger.submit(transfer("a", (0, 100))) == ""
    ledger.close(held)
    assert "not registered" in ledger.submit(transfer("a", (0, 100)))
    ledger.check()


def test_a_peer_that_left_is_forgotten_with_its_last_transfer_unless_it_came_back(ledger: Ledger) -> None:
    ledger.register(0, 100, HOST, None)
    jobs = [transfer("a", (0, 10)) for _ in range(3)]
    for job in jobs:
        ledger.submit(job)
    assert [ledger.take(), ledger.take()] == jobs[:2]
    freed = ledger.leave("a")
    assert freed.settled == (jobs[2],) and freed.peer == "" and jobs[2].state is JobState.DROPPED
    assert "not known" in ledger.submit(transfer("a", (0, 10)))
    assert ledger.settle(jobs[0], "gone").peer == ""
    ledger.meet("a")
    assert ledger.submit(transfer("a", (0, 10))) == ""
    assert ledger.settle(jobs[1]).peer == "" and "a" in ledger.peers
    ledger.check()


def test_peers_take_turns_and_have_bounds_of_their_own(ledger: Ledger) -> None:
    ledger.register(0, 4 * POSTED_BYTES_PER_PEER, HOST, None)
    for _ in range(POSTED_PER_PEER + 2):
        ledger.submit(transfer("a", (0, 10)))
    big = [transfer("b", (0, POSTED_BYTES_PER_PEER + 1)) for _ in range(2)]
    for job in big:
        ledger.submit(job)
    order = []
    while (job := ledger.take()) is not None:
        order.append(job.peer)
    assert sorted(order[:2]) == ["a", "b"] and order.count("a") == POSTED_PER_PEER and order.count("b") == 1
    ledger.settle(big[0])
    assert ledger.take() is big[1]
    ledger.check()


def test_the_pace_follows_what_happens() -> None:
    pace = Pace(0.0)
    assert pace.nap_s(10.0, posted=False) == IDLE_S
    pace.stir(10.0)
    assert pace.nap_s(10.1, posted=False) == STIRRED_S
    assert pace.nap_s(10.1 + STIR_S, posted=False) == IDLE_S
    pace.active(20.0)
    assert pace.nap_s(20.0, posted=True) < STIRRED_S / 10
    naps = [pace.nap_s(20.0 + late, posted=True) for late in (0.0, 0.001, 0.01, 0.1, 1.0, 100.0)]
    assert naps == sorted(naps) and naps[-1] == IDLE_S
    assert all(nap <= max(2e-5, late / 10) for nap, late in zip(naps[1:4], (0.001, 0.01, 0.1), strict=True))


def test_others_are_answered_once_a_turn_at_most() -> None:
    pace = Pace(0.0)
    assert pace.progress_due(10.0) and not pace.progress_due(10.0 + IDLE_S / 4)
    assert pace.progress_due(10.0 + IDLE_S)
    pace.stir(11.0)
    assert pace.progress_due(11.0) and pace.progress_due(11.0 + STIRRED_S)
