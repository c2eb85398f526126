from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli.replay import payload as payload_module
from kvstrata.cli.replay.payload import PayloadStream

MASK = (1 << 64) - 1


def hashes_of(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.random.default_rng(7).integers(0, 256, (count, 16), dtype=np.uint8)


def splitmix64(state: int) -> int:
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & MASK
    return state ^ state >> 31


@pytest.mark.parametrize("chunk_words", [1, 3, 64, 1 << 13])
@pytest.mark.parametrize("block_bytes", [1, 7, 8, 9, 100, 2048])
def test_a_stream_does_not_depend_on_how_it_is_cut(
    block_bytes: int, chunk_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = np.empty((5, block_bytes), np.uint8), np.empty((5, block_bytes), np.uint8)
    PayloadStream(b"ns", block_bytes).fill(whole, "salt", hashes_of(5))
    monkeypatch.setattr(payload_module, "CHUNK_WORDS", chunk_words)
    PayloadStream(b"ns", block_bytes).fill(cut, "salt", hashes_of(5))
    assert (whole == cut).all()


def test_words_are_splitmix64_of_the_seed() -> None:
    stream, hashes, rows = PayloadStream(b"ns", 64), hashes_of(3), np.empty((3, 64), np.uint8)
    stream.fill(rows, "salt", hashes)
    seeds = stream._seeds("salt", hashes).tolist()
    for row, seed in zip(rows, seeds, strict=True):
        expected = [splitmix64((seed + (i + 1) * 0x9E3779B97F4A7C15) & MASK) for i in range(8)]
        assert row.view(np.uint64).tolist() == expected


@given(st.integers(0, 6), st.integers(0, 299), st.integers(1, 255))
def test_one_flipped_byte_is_one_wrong_byte(row: int, column: int, flip: int) -> None:
    stream, hashes, rows = PayloadStream(b"ns", 300), hashes_of(7), np.empty((7, 300), np.uint8)
    stream.fill(rows, "", hashes)
    assert stream.wrong_bytes(rows, "", hashes) == 0
    rows[row, column] ^= flip
    assert stream.wrong_bytes(rows, "", hashes) == 1


def test_another_key_is_other_bytes() -> None:
    hashes, rows = hashes_of(4), np.empty((4, 512), np.uint8)
    PayloadStream(b"ns", 512).fill(rows, "a", hashes)
    nearly_all = 0.9 * rows.size
    assert PayloadStream(b"ns", 512).wrong_bytes(rows, "b", hashes) > nearly_all
    assert PayloadStream(b"other", 512).wrong_bytes(rows, "a", hashes) > nearly_all
    assert PayloadStream(b"ns", 512).wrong_bytes(rows, "a", hashes[::-1].copy()) > nearly_all
    second_half = hashes.copy()
    second_half[:, 8:] ^= 1
    assert PayloadStream(b"ns", 512).wrong_bytes(rows, "a", second_half) > nearly_all


def test_shapes_are_held() -> None:
    with pytest.raises(ValueError, match="rows are"):
        PayloadStream(b"ns", 8).fill(np.empty((2, 9), np.uint8), "", hashes_of(2))
    with pytest.raises(ValueError, match="block_bytes"):
        PayloadStream(b"ns", 0)


def test_no_blocks_is_no_work() -> None:
    assert PayloadStream(b"ns", 8).wrong_bytes(np.empty((0, 8), np.uint8), "", hashes_of(0)) == 0
