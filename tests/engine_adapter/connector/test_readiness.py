"""Readiness: when the pool counts as absent, and when it is asked again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.connector.base import PoolState
from kvstrata.engine_adapter.connector.readiness import BACKOFF_MAX_S, LATE_CALLS_MAX, Readiness, Verdict


def ready() -> Readiness:
    readiness = Readiness()
    assert readiness.claim_probe(0.0)
    readiness.probed("", 0.0)
    return readiness


def test_it_is_absent_until_a_probe_was_answered() -> None:
    readiness = Readiness()
    assert readiness.state is PoolState.ABSENT and readiness.claim_probe(0.0)
    assert not readiness.claim_probe(0.0), "one at a time"
    readiness.probed("nobody", 0.0)
    assert readiness.state is PoolState.ABSENT and readiness.reason == "nobody"


def test_probes_come_ever_more_slowly_up_to_a_second() -> None:
    readiness, now, waits = Readiness(), 0.0, []
    for _ in range(7):
        assert readiness.claim_probe(now)
        readiness.probed("nobody", now)
        waited = 0
        while not readiness.claim_probe(now + waited / 100):
            waited += 1
        readiness.probed("nobody", now)  # the claim above, given back as of now: it backs off again
        waits.append(waited / 100)
        now += 10.0
    assert waits == [0.1, 0.4, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_lost_call_is_only_suspicious() -> None:
    readiness = ready()
    assert not readiness.claim_probe(5.0), "nobody asks a pool that is well"
    assert readiness.call_ended(Verdict.LOST, "lost", 5.0)
    assert readiness.state is PoolState.READY and readiness.claim_probe(5.0)
    readiness.probed("no master", 5.0)
    assert readiness.state is PoolState.ABSENT


def test_late_calls_in_a_row_need_late_data_to_come() -> None:
    readiness = ready()
    for _ in range(LATE_CALLS_MAX - 1):
        assert not readiness.call_ended(Verdict.LATE, "late", 1.0)
    assert not readiness.call_ended(Verdict.ANSWERED, "", 1.0)
    for _ in range(LATE_CALLS_MAX - 1):
        assert not readiness.call_ended(Verdict.LATE, "late", 1.0)
    assert readiness.state is PoolState.READY and not readiness.data_late
    assert readiness.call_ended(Verdict.LATE, "late", 1.0)
    assert readiness.state is PoolState.ABSENT and readiness.data_late


_EVENTS = st.lists(
    st.one_of(st.sampled_from(list(Verdict)), st.just("claim"), st.sampled_from(["ok", "bad"]), st.floats(0.0, 3.0))
)


@given(_EVENTS)
def test_whatever_happens_it_can_become_ready_again(events: list[Verdict | str | float]) -> None:
    readiness, now, claimed = Readiness(), 0.0, False
    for event in events:
        if isinstance(event, Verdict):
            before = readiness.state
            readiness.call_ended(event, "a reason", now)
            if event in (Verdict.ANSWERED, Verdict.LOST):
                assert readiness.state is before
        elif isinstance(event, float):
            now += event
        elif event == "claim":
            claimed = readiness.claim_probe(now) or claimed
        elif claimed:
            readiness.probed("" if event == "ok" else "nobody", now)
            claimed = False
        readiness.check()
    if readiness.state is PoolState.ABSENT:
        assert claimed or readiness.claim_probe(now + BACKOFF_MAX_S)
        readiness.probed("", now)
        assert readiness.state is PoolState.READY
        readiness.check()
