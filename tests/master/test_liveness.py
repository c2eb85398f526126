"""When is a node alive."""

from __future__ import annotations

import pytest

from kvstrata.master.liveness import OFFLINE_S, SUSPECTED_S, NodeState, Pulse


def beaten(at: float, progress_age_s: float = 0.0, dying: bool = False) -> Pulse:
    pulse = Pulse.starting(0.0)
    pulse.beat(at, progress_age_s, dying=dying)
    return pulse


@pytest.mark.parametrize(
    "silence, state",
    [
        (0.0, NodeState.ACTIVE),
        (SUSPECTED_S - 0.01, NodeState.ACTIVE),
        (SUSPECTED_S, NodeState.SUSPECTED),
        (OFFLINE_S - 0.01, NodeState.SUSPECTED),
        (OFFLINE_S, NodeState.OFFLINE),
    ],
)
def test_silence(silence: float, state: NodeState) -> None:
    assert beaten(100.0).judge(100.0 + silence, synced=True) is state


def test_joining_until_synced_and_suspected_all_the_same() -> None:
    assert beaten(5.0).judge(5.0, synced=False) is NodeState.JOINING
    assert beaten(5.0).judge(5.0 + SUSPECTED_S, synced=False) is NodeState.SUSPECTED


def test_a_stuck_main_loop_stops_routing_and_never_means_offline() -> None:
    pulse = Pulse.starting(0.0)
    for second in range(1, 61):
        pulse.beat(float(second), progress_age_s=float(second), dying=False)
        state = pulse.judge(float(second), synced=True)
        assert state is (NodeState.ACTIVE if second < SUSPECTED_S else NodeState.SUSPECTED)
    pulse.beat(61.0, 0.0, dying=False)
    assert pulse.judge(61.0, synced=True) is NodeState.ACTIVE


def test_an_age_reported_late_does_not_undo_newer_progress() -> None:
    pulse = Pulse.starting(0.0)
    pulse.spoke(10.0)
    pulse.beat(10.5, progress_age_s=9.0, dying=False)
    assert pulse.progress_age_s(10.5) == pytest.approx(0.5)


def test_dying_is_offline_at_once_and_stays_so() -> None:
    pulse = beaten(1.0, dying=True)
    pulse.beat(1.1, 0.0, dying=False)
    assert pulse.judge(1.1, synced=True) is NodeState.OFFLINE


def test_without_its_stream_a_node_is_suspected_after_a_while() -> None:
    pulse = beaten(100.0)
    pulse.link_lost_at = 100.0
    pulse.beat(102.9, 0.0, dying=False)
    assert pulse.judge(102.9, synced=True) is NodeState.ACTIVE
    pulse.beat(103.0, 0.0, dying=False)
    assert pulse.judge(103.0, synced=True) is NodeState.SUSPECTED


def test_a_listener_that_stood_still_blames_no_one() -> None:
    pulse = beaten(100.0)
    pulse.forgive(160.0, 59.5)
    assert pulse.judge(160.0, synced=True) is NodeState.ACTIVE
    heard_meanwhile = beaten(159.9)
    heard_meanwhile.forgive(160.0, 59.5)
    assert heard_meanwhile.judge(160.0 + OFFLINE_S, synced=True) is NodeState.OFFLINE, "never into the future"


def test_every_doubt_has_its_words() -> None:
    assert beaten(5.0).doubt(6.0) == ""
    assert beaten(5.0).doubt(9.0) == "silent for 4.0 s"
    assert beaten(5.0, dying=True).doubt(5.0) == "its process died"
    assert "main loop has not moved for 4.5 s" in beaten(5.0, progress_age_s=9.0).doubt(4.5)
    cut = beaten(5.0)
    cut.link_lost_at = 5.0
    cut.spoke(8.5)
    assert cut.doubt(9.0) == "without a sync stream for 4.0 s"
