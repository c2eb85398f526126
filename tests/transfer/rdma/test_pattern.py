"""Patterns show every way in which a piece can arrive wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.rdma.pattern import mismatch, pattern

seeds = st.integers(0, (1 << 64) - 1)


@given(seeds, st.integers(0, 200))
def test_a_pattern_is_its_own(seed: int, words: int) -> None:
    assert mismatch(pattern(seed, words * 8), seed) == ""
    assert pattern(seed, words * 8).nbytes == words * 8


def test_a_pattern_is_the_same_everywhere() -> None:
    """Both ends compute it: these bytes are wire format."""
    assert pattern(7, 24).tobytes().hex() == "daa4a66bf4a88229596f70d97cf633da00419f632e29f96c"


@given(seeds, st.integers(0, 799), st.integers(1, 255))
def test_a_changed_byte_shows(seed: int, at: int, flip: int) -> None:
    found = pattern(seed, 800).copy()
    found[at] ^= flip
    assert f"1 of 800 bytes are not what was sent: at {at} " in mismatch(found, seed)


@given(seeds, st.integers(1, 99))
def test_shifted_swapped_and_missing_pieces_show(seed: int, words: int) -> None:
    whole = pattern(seed, 800)
    assert mismatch(np.roll(whole, 8 * words), seed)
    swapped = np.concatenate((whole[8 * words :], whole[: 8 * words]))
    assert mismatch(swapped, seed)
    for fill in (0, 255):
        missing = whole.copy()
        missing[8 * words : 8 * words + 8] = fill
        assert mismatch(missing, seed)


@given(seeds, seeds)
def test_seeds_differ_in_every_word(one: int, two: int) -> None:
    same = pattern(one, 800).view(np.uint64) == pattern(two, 800).view(np.uint64)
    assert same.all() if one == two else not same.any()


def test_words_differ_from_each_other() -> None:
    assert len(np.unique(pattern(3, 1 << 20).view(np.uint64))) == 1 << 17


@pytest.mark.parametrize("nbytes", [-8, 4, 12])
def test_a_size_that_is_no_number_of_words_is_refused(nbytes: int) -> None:
    with pytest.raises(InvalidArgument):
        pattern(1, nbytes)
