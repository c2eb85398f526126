from __future__ import annotations

from kvstrata.cli.paged_replay.spans import Spans


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_request_is_timed_until_its_first_token() -> None:
    clock = Clock()
    spans = Spans(clock)
    spans.received("a", at=0.0)
    clock.now = 1.0
    spans.answered("a")  # never waited for: nothing
    spans.asked("a")
    clock.now = 1.5
    spans.asked("a")  # still waiting, since 1.0
    clock.now = 2.0
    spans.answered("a")
    spans.load_started("a")
    clock.now = 5.0
    spans.load_ended("a")
    spans.computed(["a", "unknown"], 4.0)
    clock.now = 10.0
    spans.first_token("a")
    spans.computed(["a"], 7.0)  # decoding
    spans.load_started("a")
    clock.now = 20.0
    spans.load_ended("a")
    span = spans.take("a")
    assert (span.lookup_s, span.load_s, span.compute_s, span.first_token_at) == (1.0, 3.0, 4.0, 10.0)
    assert not spans._spans
