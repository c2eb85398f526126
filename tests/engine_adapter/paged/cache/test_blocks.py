"""The free queue against a list, the hash index against a dict of sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.paged.cache.blocks import FreeQueue, HashIndex, KVCacheBlock


def blocks(count: int) -> list[KVCacheBlock]:
    return [KVCacheBlock(block_id) for block_id in range(count)]


def test_blocks_leave_from_the_front_and_from_the_middle() -> None:
    a, b, c, d = made = blocks(4)
    queue = FreeQueue(made)
    queue.remove(b)
    assert queue.popleft() is a
    queue.append(b)
    assert [*queue] == [c, d, b] and len(queue) == 3
    queue.check()


def test_an_empty_queue_says_so() -> None:
    queue = FreeQueue()
    with pytest.raises(IndexError):
        queue.popleft()
    assert len(queue) == 0 and not [*queue]
    queue.check()


def test_a_block_is_in_once_and_leaves_once() -> None:
    (block,) = blocks(1)
    queue = FreeQueue([block])
    with pytest.raises(AssertionError):
        queue.append(block)
    queue.remove(block)
    with pytest.raises(AssertionError):
        queue.remove(block)


@given(st.lists(st.tuples(st.sampled_from(["pop", "remove", "append"]), st.integers(0, 7)), max_size=60))
def test_the_queue_is_a_list(steps: list[tuple[str, int]]) -> None:
    made = blocks(8)
    queue, model = FreeQueue(made[:4]), made[:4]
    for step, number in steps:
        block = made[number]
        if step == "pop" and model:
            assert queue.popleft() is model.pop(0)
        elif step == "remove" and block in model:
            queue.remove(block)
            model.remove(block)
        elif step == "append" and block not in model:
            queue.append(block)
            model.append(block)
        queue.check()
        assert [*queue] == model and len(queue) == len(model)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 5)), max_size=60))
def test_the_index_keeps_every_copy(steps: list[tuple[bool, int, int]]) -> None:
    made, index = blocks(6), HashIndex()
    model: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for add, name, number in steps:
        key = (bytes([name]), 0)
        if add and not any(number in copies for copies in model.values()):
            index.add(key, made[number])
            model[name].add(number)
        elif not add and number in model[name]:
            model[name].remove(number)
            assert index.remove(key, made[number]) is (not model[name])
        for other, copies in model.items():
            found = index.get((bytes([other]), 0))
            assert (found is None) == (not copies) and (found is None or found.block_id in copies)
            assert ((bytes([other]), 0) in index) == bool(copies)
            assert index.get((bytes([other]), 1)) is None, "another group"
        assert len(index) == sum(map(bool, model.values()))
        assert sorted(block.block_id for _, block in index.items()) == sorted(set().union(*model.values()))
