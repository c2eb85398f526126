"""Stop strings: the same answer however the text is cut, and nothing of a stop string in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.serve.stops import StopMatcher

TEXT = st.text("ab ", max_size=30)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3)


def passed(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        matcher.check()
    return out + matcher.finish(), matcher.stopped


def expected(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Character by character, as plainly as it can be said."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


@given(TEXT, STOPS, st.data())
def test_however_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert passed(pieces, stops) == expected(text, stops)


@given(TEXT, STOPS)
def test_what_went_out_is_never_taken_back(text: str, stops: list[str]) -> None:
    """Text is passed on as soon as no stop string can begin in it."""
    matcher, out = StopMatcher(stops), ""
    for end in range(1, len(text) + 1):
        out += matcher.push(text[end - 1])
        final, stopped = expected(text[:end], stops)
        if stopped:
            assert out == final
            break
        assert text[:end].startswith(out)
        open_ends = [n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
        assert len(out) == end - max(open_ends, default=0)


@pytest.mark.parametrize(
    ("pieces", "stops", "out"),
    [
        (["ab", "c"], ["abcd"], "abc"),
        (["ab", "cd", "ef"], ["abcd"], ""),
        (["xab", "ab", "abc"], ["abc"], "xabab"),
        (["one\n", "\ntwo"], ["\n\n"], "one"),
        (["aaab"], ["ab", "b"], "aa"),
        (["anything"], [], "anything"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], out: str) -> None:
    assert passed(pieces, stops)[0] == out
