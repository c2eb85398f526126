"""One answer: text, counts and the reason, for any cut of any tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.paged.outputs import RequestOutput
from kvstrata.engine_adapter.paged.text.tokenizer import ByteTokenizer, Detokenizer
from kvstrata.engine_adapter.serve.choice import Choice

EOS = ByteTokenizer.EOS


def output(tokens: list[int], reason: str | None = None, **more: int) -> RequestOutput:
    return RequestOutput(request_id="r", new_token_ids=tokens, finish_reason=reason, num_prompt_tokens=9, **more)


def choice(*stops: str) -> Choice:
    return Choice(Detokenizer(ByteTokenizer()), stops)


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=3), max_size=2), st.data())
def test_any_text_in_any_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    """The deltas of a cut answer join to what one output gives, with the same count."""
    tokens = ByteTokenizer().encode(text)
    whole, cut = choice(*stops), choice(*stops)
    once = whole.push(output(tokens, "length"))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    joined = ""
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        delta = cut.push(output(tokens[start:end]))
        assert "�" not in delta.text or "�" in text
        joined += delta.text
        cut.check()
    joined += cut.push(output([], "length")).text
    cut.check()
    assert joined == once.text
    assert (cut.finish_reason, cut.num_output_tokens) == (whole.finish_reason, whole.num_output_tokens)


def test_a_stop_string_that_never_came_is_text() -> None:
    growing = choice("abc")
    assert growing.push(output(list(b"xab"))).text == "x"
    last = growing.push(output([EOS], "stop"))
    assert (last.text, last.finish_reason, growing.stopped_early) == ("ab", "stop", False)


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    cut = choice()
    assert cut.push(output([0xC3])).text == ""
    assert cut.push(output([0xC3], "length")).text == "��"


def test_nothing_comes_after_the_finish() -> None:
    done = choice("b")
    assert done.push(output(list(b"ab"))).finish_reason == "stop" and done.stopped_early
    late = done.push(output(list(b"cd"), "length"))
    assert (late.text, late.finish_reason) == ("", None)
    assert (done.finish_reason, done.num_output_tokens) == ("stop", 2)


def test_eos_in_the_middle_is_not_the_end() -> None:
    """With ``ignore_eos`` the engine goes on past it."""
    going = Choice(Detokenizer(ByteTokenizer()), ())
    assert going.push(output([*b"a", EOS, *b"b"], "length")).text == "ab"
    assert going.num_output_tokens == 3


def test_the_engines_counts_are_kept() -> None:
    counted = choice()
    counted.push(output([65], "length", num_local_cached_tokens=3, num_external_cached_tokens=5))
    assert (counted.num_prompt_tokens, counted.num_local_cached_tokens, counted.num_external_cached_tokens) == (9, 3, 5)
