"""Waiting jobs against a plain list; chunks against every row they must name."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.connector.base import GroupBlocks, JobKind
from kvstrata.engine_adapter.connector.chunks import chunks_of
from kvstrata.engine_adapter.connector.job_queue import JobQueue, continues
from kvstrata.engine_adapter.connector.outbox import OpenJob
from tests.engine_adapter.connector.scripted_client import FULL, WIDTH, WINDOW, job, layout, names

BLOCKS_MAX, JOBS_MAX = 12, 5


def opened(job_id: int, request: str, first: int, count: int) -> OpenJob:
    parent = names(1, first - 1) if first else b""
    made = job(
        job_id,
        JobKind.STORE,
        names(count, first),
        list(range(1, count + 1)),
        request_id=request,
        first_index=first,
        parent=parent,
    )
    return OpenJob(made, 0.0, 1.0)


_OFFER = st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 5))
_STEPS = st.lists(st.one_of(_OFFER, st.just("take"), st.just("chain")), max_size=40)


@given(_STEPS)
def test_it_is_a_bounded_list_and_chains_are_taken_whole(steps: list[tuple[str, int, int] | str]) -> None:
    queue, model = JobQueue(BLOCKS_MAX, JOBS_MAX), list[OpenJob]()
    for number, step in enumerate(steps):
        if step == "take":
            assert queue.take() is (model.pop(0) if model else None)
        elif step == "chain":
            chain = queue.take_chain(WIDTH)
            assert bool(chain) == bool(model)
            assert chain[:1] == model[:1]
            for before, after in pairwise(chain):
                assert continues(before.job, after.job, WIDTH)
            model = [waiting for waiting in model if waiting not in chain]
            assert not chain or not any(continues(chain[-1].job, waiting.job, WIDTH) for waiting in model[:1]), (
                "the next one would have followed"
            )
        else:
            assert isinstance(step, tuple)
            made = opened(number, *step)
            fits = len(model) < JOBS_MAX and sum(len(w.status) for w in model) + len(made.status) <= BLOCKS_MAX
            assert queue.offer(made) == fits
            if fits:
                model.append(made)
        queue.check()
        assert len(queue) == len(model)
    assert queue.drain() == model and not queue.offer(opened(999, "a", 0, 1))


def test_only_the_same_chain_is_continued() -> None:
    first = opened(1, "r", 0, 2).job
    assert continues(first, opened(2, "r", 2, 1).job, WIDTH)
    assert not continues(first, opened(2, "other", 2, 1).job, WIDTH)
    assert not continues(first, opened(2, "r", 3, 1).job, WIDTH)
    reused = job(2, JobKind.STORE, names(1, 2), [1], request_id="r", first_index=2, parent=names(1, 77))
    assert not continues(first, reused, WIDTH), "the id came back with another prompt"
    retried = msgspec.structs.replace(opened(2, "r", 2, 1).job, trace="another")
    assert not continues(first, retried, WIDTH), "the id came back in another trace"


@given(full=st.integers(0, 20), window=st.integers(0, 10), first=st.integers(0, 5), chunk_bytes=st.integers(1, 1000))
def test_chunks_name_every_row_once_and_leave_out_tails(full: int, window: int, first: int, chunk_bytes: int) -> None:
    plan = layout(FULL, WINDOW)
    groups = [
        GroupBlocks(group=0, hashes=names(full), block_ids=list(range(1, 1 + full)), first_index=2 * first),
        GroupBlocks(group=1, hashes=names(window), block_ids=list(range(30, 30 + window)), first_index=first),
    ]
    chunks = chunks_of(groups, plan, chunk_bytes)
    rows = [offset for chunk in chunks for offset in range(chunk.offset, chunk.offset + chunk.stop - chunk.start)]
    assert sorted(rows) == list(range(full + window))
    ends = [(c.blocks.first_index + c.stop) * plan.groups[c.column].block_tokens for c in chunks]
    assert ends == sorted(ends)
    for chunk in chunks:
        assert chunk.blocks is groups[chunk.column] and chunk.offset == chunk.start + (full if chunk.column else 0)
        size = plan.block_bytes(chunk.column)
        assert chunk.stop - chunk.start == 1 or (chunk.stop - chunk.start) * size <= chunk_bytes
        assert len(chunk.hashes(WIDTH)) == WIDTH * (chunk.stop - chunk.start)
