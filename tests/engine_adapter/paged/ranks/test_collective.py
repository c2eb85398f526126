"""All-reduce: exact sums in the order of ranks, the same bits everywhere, and an end of every wait."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.paged.model.rows import F32
from kvstrata.engine_adapter.paged.ranks.collective import SLOT_BYTES, RankGroup, SharedCollective
from kvstrata.proto.errors import Unavailable


@contextmanager
def ranks(size: int, wait_s: float = 20.0) -> Iterator[tuple[RankGroup, list[SharedCollective]]]:
    """All ranks in this process, each with descriptors of its own."""
    group = RankGroup(size)
    collectives = [
        SharedCollective(
            rank,
            size,
            os.dup(group.memory_fd),
            {other: os.dup(fd) for other, fd in group.peer_fds(rank).items()},
            wait_s=wait_s,
        )
        for rank in range(size)
    ]
    group.drop()
    try:
        yield group, collectives
    finally:
        for collective in collectives:
            collective.close()


def together(collectives: list[SharedCollective], work: Callable[[SharedCollective], F32]) -> list[F32]:
    with ThreadPoolExecutor(len(collectives)) as pool:
        return list(pool.map(work, collectives))


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 4),
    shapes=st.lists(
        st.sampled_from([(), (0, 3), (1,), (7, 5), (2, 16, 64), (SLOT_BYTES // 4 + 1,), (3, SLOT_BYTES // 4)]),
        max_size=4,
    ),
    seed=st.integers(0, 1 << 32),
)
def test_sums_in_the_order_of_ranks(size: int, shapes: list[tuple[int, ...]], seed: int) -> None:
    random = np.random.default_rng(seed)
    arrays = [[random.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(size)]
    expected = []
    for index in range(len(shapes)):
        total = arrays[0][index].copy()
        for rank in range(1, size):
            total = np.add(total, arrays[rank][index])
        expected.append(total)

    def work(collective: SharedCollective) -> list[F32]:
        return [collective.all_reduce(array) for array in arrays[collective.rank]]

    with ranks(size) as (group, collectives), ThreadPoolExecutor(size) as pool:
        results = list(pool.map(work, collectives))
        assert len(set(group.progress())) == 1
    for sums in results:
        for found, total in zip(sums, expected, strict=True):
            assert found.shape == total.shape and found.dtype == np.float32
            np.testing.assert_array_equal(found, total)


def test_a_fast_rank_does_not_overwrite_what_a_slow_one_reads() -> None:
    """Many operations one after the other, each with numbers of its own."""
    with ranks(3) as (_, collectives):

        def work(collective: SharedCollective) -> F32:
            sums = [collective.all_reduce(np.full(500, step + collective.rank, np.float32)) for step in range(300)]
            return np.stack(sums)

        for found in together(collectives, work):
            np.testing.assert_array_equal(found, np.broadcast_to(3 * np.arange(300.0)[:, None] + 3, (300, 500)))


def test_arrays_that_cannot_be_written_or_are_not_contiguous() -> None:
    with ranks(2) as (_, collectives):
        fixed = np.frombuffer(np.arange(12, dtype=np.float32).tobytes(), np.float32).reshape(3, 4)
        for array in (fixed, fixed.T):
            for found in together(collectives, lambda collective, array=array: collective.all_reduce(array)):
                np.testing.assert_array_equal(found, 2 * array)
        np.testing.assert_array_equal(fixed.reshape(-1), np.arange(12))


def test_a_rank_that_ended_is_named() -> None:
    with ranks(3) as (_, collectives):
        collectives[1].close()
        for rank in (0, 2):
            with pytest.raises(Unavailable, match="rank 1 is lost"):
                collectives[rank].all_reduce(np.ones(4, np.float32))


def test_a_rank_that_does_not_come_is_named() -> None:
    with ranks(2, wait_s=0.05) as (group, collectives):
        with pytest.raises(Unavailable, match=r"rank 1 did not come within 0\.05 s"):
            collectives[0].all_reduce(np.ones(4, np.float32))
        assert group.progress() == [1, 0]


def test_ranks_that_bring_other_sizes_do_not_add_them() -> None:
    with ranks(2, wait_s=5.0) as (_, collectives):

        def work(collective: SharedCollective) -> str:
            with pytest.raises(Unavailable) as raised:
                collective.all_reduce(np.ones(4 + collective.rank, np.float32))
            return str(raised.value)

        with ThreadPoolExecutor(2) as pool:
            messages = list(pool.map(work, collectives))
        assert "rank 1 is at operation 1 of 5 numbers" in messages[0]


def test_nothing_is_left_open() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with ranks(3) as (group, collectives):
        together(collectives, lambda collective: collective.all_reduce(np.ones(3, np.float32)))
        group.close()
        group.close()
    assert set(Path("/proc/self/fd").iterdir()) <= before
