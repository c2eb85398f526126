"""The event log: bounded, numbered, and what happens again soon is counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.master.status.events import AGAIN_S, TEXT_CHARACTERS_MAX, Events, Happening, Severity
from kvstrata.master.status.wording import happening_of

_notes = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y", "z" * 1000]), st.floats(0, 40)), max_size=80
)


@given(_notes, st.integers(1, 8), st.integers(0, 90))
def test_any_log_is_bounded_ordered_and_loses_only_the_oldest(
    notes: list[tuple[str, str, float]], bound: int, since: int
) -> None:
    events, now = Events(bound), 0.0
    for kind, text, pause in notes:
        now += pause
        noted = events.note(Happening(kind, text), now)
        events.check()
        assert noted == events.since(0)[-1] and noted.seq == events.seq
    assert events.seq == len(notes)
    told = events.since(since)
    assert [event.seq for event in told] == [event.seq for event in events.since(0) if event.seq > since]
    if now <= AGAIN_S:  # nothing was too long ago to be counted
        kinds = {(kind, text) for kind, text, _ in notes}
        assert len(kinds) > bound or len(events.since(0)) == len(kinds)
        assert len(kinds) > bound or sum(event.times for event in events.since(0)) == len(notes)


def test_what_happens_again_soon_is_counted_and_later_is_another() -> None:
    events = Events()
    for at in (0.0, 1.0, 2.0, 2.5 + AGAIN_S):
        events.note(Happening("k", "text", Severity.WARNING, "n"), at)
    first, second = events.since(0)
    assert (first.times, first.first_at, first.at, first.seq) == (3, 0.0, 2.0, 3)
    assert (second.times, second.first_at, second.seq) == (1, 2.5 + AGAIN_S, 4)
    assert first.plain()["severity"] == "warning"


def test_another_text_or_node_is_another_event() -> None:
    events = Events()
    for happening in (Happening("k", "t", about="a"), Happening("k", "t", about="b"), Happening("k", "u", about="a")):
        events.note(happening, 0.0)
    assert [event.times for event in events.since(0)] == [1, 1, 1]


def test_texts_are_cut() -> None:
    events = Events()
    event = events.note(Happening("k", "x" * 5000, about="y" * 5000), 0.0)
    assert len(event.text) == len(event.about) == TEXT_CHARACTERS_MAX
    again = events.note(Happening("k", "x" * 5000, about="y" * 5000), 1.0)
    assert again.times == 2


def test_a_limit_leaves_the_newest() -> None:
    events = Events()
    for at in range(10):
        events.note(Happening("k", str(at)), float(at))
    assert [event.text for event in events.since(3, limit=2)] == ["8", "9"]
    assert events.since(10) == [] and events.oldest() == 1


def test_words_of_a_lost_node_and_one_that_said_goodbye() -> None:
    lost = {"node_id": "n1", "state": "offline", "was": "suspected", "reason": "silent for 10.0 s"}
    happening = happening_of("node state", lost)
    assert (happening.severity, happening.about) == (Severity.CRITICAL, "n1")
    assert "n1" in happening.text and "silent for 10.0 s" in happening.text
    left = happening_of("node state", {**lost, "reason": "detached: stopping"})
    assert left.severity is Severity.NOTICE


def test_values_from_outside_are_no_templates() -> None:
    happening = happening_of("snapshot asked for", {"node_id": "{command}", "reason": "{0.__class__} {nothing}"})
    assert "{command}" in happening.text and "{0.__class__} {nothing}" in happening.text
    assert happening_of("something new", {"node_id": "n", "count": 3}).text == "something new: count 3"


def test_a_wall_clock_that_is_set_back_begins_anew_or_takes_the_first_time_along() -> None:
    events = Events()
    for at in (5000.0, 4990.0, 1400.0, 2000.0, 2600.0):
        events.note(Happening("node.offline", "n1 is gone"), at)
        events.check()
    assert [(event.times, event.first_at, event.at) for event in events.since(0)] == [
        (2, 4990.0, 4990.0),
        (1, 1400.0, 1400.0),
        (1, 2000.0, 2000.0),
        (1, 2600.0, 2600.0),
    ]
