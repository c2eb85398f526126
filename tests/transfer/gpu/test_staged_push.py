"""Writes from device memory over the ring: right bytes, overlap, chains, and what is said while gathers are late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.proto.errors import FingerprintMismatch, Unavailable
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Pushed
from kvstrata.transfer.gpu.runtime import Event, Pinned
from kvstrata.transfer.regions import BlockView
from tests.transfer.gpu.staged_peer import World, content, names, space, staged
from tests.transfer.late_transfer import LateTransfer

SIZE = 1024
NS = space(SIZE)
STORED = int(BlockStatus.STORED)


@pytest.fixture
def world() -> Iterator[World]:
    with staged(chunk_bytes=2 * SIZE) as world:
        yield world


def filled(world: World, count: int) -> tuple[list[bytes], list[bytes], BlockView]:
    """Hashes and bytes of ``count`` blocks, and where they are on the device."""
    keys = names(count)
    data = content(keys, SIZE)
    return keys, [row.tobytes() for row in data], world.region(world.device.array(data)).rows(NS)


def statuses(pushed: Pushed) -> list[str]:
    return [BlockStatus(code).name for code in pushed.status.tolist()]


@settings(deadline=None)
@given(st.data())
def test_every_layout_is_packed_in_the_order_of_its_pieces(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9), "blocks")
    sizes = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=5), "pieces")
    order = data.draw(st.permutations(range(count * len(sizes))), "order")
    gap, rows = data.draw(st.integers(0, 3), "gap"), data.draw(st.integers(1, 4), "rows")
    total = sum(sizes)
    table, cursor = np.zeros((count * len(sizes), 2), np.int64), 0
    for place in order:
        table[place] = (cursor, sizes[place % len(sizes)])
        cursor += sizes[place % len(sizes)] + gap
    keys = names(count)
    with staged(chunk_bytes=rows * total) as world:
        array = world.device.array(np.random.default_rng(count).integers(0, 256, cursor, np.uint8))
        view = world.region(array).view(space(total), table.reshape(count, len(sizes), 2))
        pushed = world.push(space(total), b"".join(keys), view)
        assert pushed.status.tolist() == [STORED] * count and pushed.bytes_moved == count * total
        for i, key in enumerate(keys):
            expected = b"".join(array.shadow[a : a + n].tobytes() for a, n in view.table[i].tolist())
            assert world.node.blocks[key] == expected
        world.check_quiet()


def test_parts_continue_one_chain_and_say_what_is_durable(world: World) -> None:
    keys, rows, view = filled(world, 5)
    world.node.statuses = {keys[3]: BlockStatus.FULL}
    world.node.durable = {keys[0], keys[4]}
    pushed = world.push(NS, b"".join(keys), view, parent=b"p" * 16, first_index=7)
    assert statuses(pushed) == ["STORED"] * 3 + ["FULL", "STORED"]
    assert pushed.durable is not None and pushed.durable.tolist() == [True, False, False, False, True]
    assert [(push.parent, push.first_index) for push in world.node.pushes] == [
        (b"p" * 16, 7),
        (keys[1], 9),
        (keys[3], 11),
    ]
    assert [world.node.blocks[key] for key in keys[:3]] == rows[:3]
    assert world.device.runtime.launches == {"gather": 3, "scatter": 0}


def test_the_next_chunk_is_gathered_while_one_is_pushed(world: World) -> None:
    keys, rows, view = filled(world, 6)
    gathered_by_then: list[int] = []

    def entered(turn: int) -> None:
        deadline = time.monotonic() + 10
        while world.device.runtime.launches["gather"] < min(turn + 1, 3):
            assert time.monotonic() < deadline, "the next gather does not wait for this push"
            time.sleep(0.002)
        gathered_by_then.append(world.device.runtime.launches["gather"])

    world.node.entered = entered
    assert world.push(NS, b"".join(keys), view).status.tolist() == [STORED] * 6
    assert gathered_by_then == [2, 3, 3]
    assert [world.node.blocks[key] for key in keys] == rows
    world.check_quiet()


def test_nothing_is_pushed_before_its_gather_has_ended(world: World) -> None:
    keys, rows, view = filled(world, 2)
    with ThreadPoolExecutor(1) as pool:
        with world.device.runtime.hold("gather"):
            future = pool.submit(world.push, NS, b"".join(keys), view)
            world.device.runtime.wait_held("gather")
            assert not world.node.pushes
        assert future.result(10).status.tolist() == [STORED] * 2
    assert [world.node.blocks[key] for key in keys] == rows


def test_a_gather_that_is_late_is_pending_and_never_stored(world: World) -> None:
    keys, _, view = filled(world, 4)
    with world.device.runtime.hold("gather"):
        pushed = world.push(NS, b"".join(keys), view, deadline=time.monotonic() + 0.2)
        assert statuses(pushed) == ["PENDING"] * 4
        assert not any(one.settled() for one in pushed.pending)
        assert world.ring.health()["held"] == 2
    assert all(one.wait(time.monotonic() + 10) for one in pushed.pending)
    assert not world.node.pushes
    assert world.push(NS, b"".join(keys), view).status.tolist() == [STORED] * 4
    world.check_quiet()


def test_what_a_transport_may_still_read_is_the_chunk_and_not_the_callers_memory(world: World) -> None:
    keys, _, view = filled(world, 2)
    gate = LateTransfer()
    world.node.statuses, world.node.pending = {keys[1]: BlockStatus.PENDING}, (gate,)
    pushed = world.push(NS, b"".join(keys), view)
    assert statuses(pushed) == ["STORED", "LATE"] and pushed.pending == ()
    assert world.ring.health()["held"] == 1
    gate.over.set()
    world.node.pending = ()
    world.push(NS, b"".join(keys), view)
    world.check_quiet()


def test_a_device_that_fails_costs_the_blocks_and_shows(world: World) -> None:
    keys, _, view = filled(world, 2)
    world.device.runtime.fail_next()
    assert statuses(world.push(NS, b"".join(keys), view)) == ["REFUSED"] * 2
    assert not world.node.pushes
    assert "illegal memory access" in world.staging.problems()[0]
    assert world.push(NS, b"".join(keys), view).status.tolist() == [STORED] * 2
    assert world.staging.problems() == []


def test_what_no_gather_ended_of_says_nothing_of_the_device(world: World) -> None:
    keys, _, view = filled(world, 2)
    world.device.runtime.fail_next()
    world.push(NS, b"".join(keys), view)
    with world.device.runtime.hold("gather"):
        late = world.push(NS, b"".join(keys), view, deadline=time.monotonic() + 0.1)
        assert statuses(late) == ["PENDING"] * 2
        assert "illegal memory access" in world.staging.problems()[0]
    assert world.push(NS, b"".join(keys), view).status.tolist() == [STORED] * 2
    assert world.staging.problems() == []


def test_a_second_chunk_that_cannot_be_had_costs_its_own_blocks_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, rows, view = filled(world, 4)
    pinned = world.device.runtime.pinned

    def first_only(nbytes: int) -> Pinned:
        if world.registered:
            raise Unavailable(f"no {nbytes} bytes of pinned memory")
        return pinned(nbytes)

    with monkeypatch.context() as scarce:
        scarce.setattr(world.device.runtime, "pinned", first_only)
        for _ in range(5):  # once more than there may be chunks
            pushed = world.push(NS, b"".join(keys), view, deadline=time.monotonic() + 2)
            assert statuses(pushed) == ["STORED"] * 2 + ["REFUSED"] * 2
            world.check_quiet()
        assert "pinned memory" in world.staging.problems()[0]
    assert world.push(NS, b"".join(keys), view).status.tolist() == [STORED] * 4
    assert [world.node.blocks[key] for key in keys] == rows


def test_a_refusal_is_raised_and_the_gather_ahead_has_ended(world: World) -> None:
    keys, _, view = filled(world, 6)

    def refuse(turn: int) -> None:
        raise FingerprintMismatch("another epoch")

    world.node.entered = refuse
    with pytest.raises(FingerprintMismatch):
        world.push(NS, b"".join(keys), view)
    world.check_quiet()


@pytest.mark.parametrize("error", [FingerprintMismatch("another epoch"), ZeroDivisionError("a mistake")])
def test_an_error_hides_no_gather_that_is_under_way(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    keys, _, view = filled(world, 4)
    gather = world.device.runtime.gather
    begun: list[Event] = []

    def fail(turn: int) -> None:
        raise error

    with ExitStack() as held:

        def second_is_held(*args: Any) -> Event:
            if begun:
                assert begun[0].wait(10)
                held.enter_context(world.device.runtime.hold("gather"))
            begun.append(gather(*args))
            return begun[-1]

        monkeypatch.setattr(world.device.runtime, "gather", second_is_held)
        world.node.entered = fail
        late = world.push(NS, b"".join(keys), view, deadline=time.monotonic() + 0.5)
        assert statuses(late) == ["REFUSED"] * 2 + ["PENDING"] * 2
        assert not any(one.settled() for one in late.pending)
    assert all(one.wait(time.monotonic() + 10) for one in late.pending)


def test_a_gather_comes_after_the_mark_that_its_blocks_carry_and_after_nothing_else(world: World) -> None:
    keys, rows, view = filled(world, 2)
    fresh = content(names(2, "fresh"), SIZE)
    array = view.region.owner
    engine = world.device.stream()
    with engine:
        engine.queue(lambda: array.shadow.__setitem__(slice(None), fresh))  # type: ignore[attr-defined]  # forward pass
        mark = world.device.runtime.mark()
        engine.queue(lambda: None)  # the next step, which nobody runs
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(world.push, NS, b"".join(keys), view.coming_after(mark))
        with pytest.raises(TimeoutError):
            future.result(0.3)
        engine.run(2)
        assert future.result(10).status.tolist() == [STORED] * 2
    assert [world.node.blocks[key] for key in keys] == [row.tobytes() for row in fresh] != rows


def test_many_threads_share_few_chunks(world: World) -> None:
    with staged(chunk_bytes=SIZE, chunks=2) as world, ThreadPoolExecutor(8) as pool:
        keys, rows, view = filled(world, 6)
        calls = [pool.submit(world.push, NS, b"".join(keys), view) for _ in range(8)]
        assert all(call.result(30).status.tolist() == [STORED] * 6 for call in calls)
        assert [world.node.blocks[key] for key in keys] == rows
        assert len(world.registered) <= 2
        world.check_quiet()
