"""Copies of many pieces: whatever their layout, every byte lands where it should and no other byte changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.transfer import copier
from kvstrata.transfer.copier import ALONE_MAX, SPLIT_BYTES, SecondCore, copy
from kvstrata.transfer.grids import Grid


def pieces_of(
    blocks: int, pieces: int, size: int, pad: int, seed: int, jitter: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets of a paged target (piece-major, ``pad`` unused bytes a piece), of a dense source, and lengths."""
    draw = np.random.default_rng(seed)
    slots = draw.permutation(2 * blocks)[:blocks]
    target = (np.arange(pieces)[None, :] * 2 * blocks + slots[:, None]) * (size + pad)
    source = np.arange(blocks * pieces).reshape(blocks, pieces) * size
    if jitter and pieces > 1:
        target[blocks // 2, pieces // 2] += pad // 2
    return target.ravel(), source[draw.permutation(blocks)].ravel(), np.full(blocks * pieces, size)


@given(
    blocks=st.integers(1, 9),
    pieces=st.integers(1, 9),
    size=st.integers(1, 40),
    pad=st.integers(0, 9),
    seed=st.integers(0, 1 << 16),
    jitter=st.booleans(),
)
def test_every_layout_is_copied_exactly(blocks: int, pieces: int, size: int, pad: int, seed: int, jitter: bool) -> None:
    target, source, length = pieces_of(blocks, pieces, size, pad, seed, jitter)
    origin = np.random.default_rng(seed + 1).integers(0, 256, blocks * pieces * size, np.uint8)
    memory = np.zeros(2 * blocks * pieces * (size + pad) + pad, np.uint8)
    expected = memory.copy()
    for to, start in zip(target, source, strict=True):
        expected[to : to + size] = origin[start : start + size]
    copy(target + memory.ctypes.data, source + origin.ctypes.data, length)
    assert np.array_equal(memory, expected)


def test_big_grids_are_split_and_whole() -> None:
    blocks, pieces, size = 65, 16, 8192
    assert blocks * pieces * size > SPLIT_BYTES
    target, source, length = pieces_of(blocks, pieces, size, 64, 3, False)
    origin = np.random.default_rng(1).integers(0, 256, blocks * pieces * size, np.uint8)
    memory = np.zeros(2 * blocks * pieces * (size + 64), np.uint8)
    copy(target + memory.ctypes.data, source + origin.ctypes.data, length)
    for to, start in zip(target, source, strict=True):
        assert np.array_equal(memory[to : to + size], origin[start : start + size])
    assert np.count_nonzero(memory.reshape(-1, size + 64)[:, size:]) == 0


def test_a_paged_layout_is_a_grid_and_what_is_none_is_not() -> None:
    target, source, length = pieces_of(8, 6, 32, 8, 0, False)
    grid = Grid.found_in(target, source, length)
    assert grid is not None and (grid.pieces, len(grid.target)) == (6, 8)
    first, second = grid.halves()
    assert len(first.target) + len(second.target) == 8
    target, source, length = pieces_of(8, 6, 32, 8, 0, True)
    assert Grid.found_in(target, source, length) is None
    assert Grid.found_in(target, source, np.arange(1, 49)) is None
    assert Grid.found_in(-target, source, length) is None


def test_no_byte_lands_after_a_copy_has_raised() -> None:
    """One half fails while the other still copies: the memory is the caller's again only when both have ended."""
    began, may_end, landed = threading.Event(), threading.Event(), []

    def fails() -> None:
        assert began.wait(10)
        threading.Timer(0.05, may_end.set).start()
        raise MemoryError

    def copies() -> None:
        began.set()
        assert may_end.wait(10)
        landed.append(True)

    with pytest.raises(MemoryError):
        copier._copy_both(fails, copies)
    assert landed


def attempts(core: SecondCore, copies: int, worked_s: float) -> list[bool]:
    """Of so many copies, each of one second: which were split, if two threads then work so many seconds in it."""
    split = []
    for _ in range(copies):
        split.append(core.free())
        if split[-1]:
            core.tried(worked_s, 1.0)
    return split


def test_a_second_thread_is_used_while_it_has_a_core_and_rarely_while_it_has_none() -> None:
    core = SecondCore()
    assert all(attempts(core, 10, 1.9))
    split = attempts(core, 100, 1.0)  # two threads took turns on one core
    assert [i for i, both in enumerate(split) if both] == [0, 2, 6, 14, 30, 46, 62, 78, 94]
    assert attempts(core, ALONE_MAX + 1, 1.9).count(True) >= 1
    assert all(attempts(core, 10, 1.9)), "it is used again at once when there is a core"


def test_a_process_that_may_use_one_core_never_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert not any(attempts(SecondCore(), 10, 1.9))


@pytest.mark.parametrize("layout", ["one run", "grid"])
def test_a_big_copy_asks_for_a_second_core_and_says_how_it_went(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    core, submitted = SecondCore(), []
    told: list[tuple[float, float]] = []
    monkeypatch.setattr(copier, "_second_core", core)
    monkeypatch.setattr(core, "tried", lambda *what: told.append(what))
    submit = copier._submit

    def counted(work: Callable[[], float]) -> Future[float]:
        submitted.append(work)
        return submit(work)

    monkeypatch.setattr(copier, "_submit", counted)
    size = 8192 if layout == "grid" else SPLIT_BYTES // 64
    target, source, length = pieces_of(64, SPLIT_BYTES // 64 // size, size, 64, 3, False)
    origin = np.random.default_rng(1).integers(0, 256, SPLIT_BYTES, np.uint8)
    memory = np.zeros(int(target.max()) + size, np.uint8)
    for free in (False, True):
        monkeypatch.setattr(core, "free", lambda free=free: free)
        memory[:] = 0
        copy(target + memory.ctypes.data, source + origin.ctypes.data, length)
        for to, start in zip(target, source, strict=True):
            assert np.array_equal(memory[to : to + size], origin[start : start + size])
        assert len(submitted) == len(told) == int(free)
    assert told[0][0] >= 0 and told[0][1] > 0


class Never(Future[float]):
    """Work that nobody begins."""

    def result(self, timeout: float | None = None) -> float:
        raise AssertionError("it was waited for")


def test_what_the_second_thread_does_not_come_to_the_caller_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its core is wanted by others, or its pool is at other copies: nobody waits for it."""
    never, told, done = Never(), list[tuple[float, float]](), []
    core = SecondCore()
    monkeypatch.setattr(core, "tried", lambda *what: told.append(what))
    monkeypatch.setattr(copier, "_second_core", core)
    monkeypatch.setattr(copier, "_submit", lambda work: never)
    copier._copy_both(lambda: done.append("mine"), lambda: done.append("others"))
    assert done == ["mine", "others"] and never.cancelled()
    worked_s, took_s = told[0]
    assert worked_s < copier.AT_ONCE * took_s, "it counts as one in vain"

    def fails() -> None:
        raise MemoryError

    never = Never()
    with pytest.raises(MemoryError):
        copier._copy_both(fails, lambda: done.append("late"))
    assert never.cancelled() and "late" not in done
