"""Reads into device memory over the ring: right bytes, overlap, and what is said while copies are late or fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.proto.errors import FingerprintMismatch, Unavailable
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Fetch, Fetched, Mask
from kvstrata.transfer.regions import BlockView, Region
from tests.transfer.gpu.staged_peer import LOADED, MISSING, World, content, names, space, staged
from tests.transfer.late_transfer import LateTransfer

SIZE = 1024
NS = space(SIZE)


@pytest.fixture
def world() -> Iterator[World]:
    with staged(chunk_bytes=2 * SIZE) as world:
        yield world


def filled(world: World, count: int) -> tuple[bytes, npt.NDArray[np.uint8], BlockView, npt.NDArray[np.uint8]]:
    """Packed hashes of ``count`` blocks that the node has, their bytes, rows on the device, and what is there."""
    keys = names(count)
    data = content(keys, SIZE)
    world.node.blocks = {key: row.tobytes() for key, row in zip(keys, data, strict=True)}
    array = world.device.empty((count, SIZE))
    return b"".join(keys), data, world.region(array).rows(NS), array.shadow


def statuses(fetched: Fetched) -> list[str]:
    return [BlockStatus(code).name for code in fetched.status.tolist()]


@settings(deadline=None)
@given(st.data())
def test_every_layout_gets_the_bytes_and_nothing_else_is_touched(data: st.DataObject) -> None:
    """Pieces of many sizes, shuffled, with gaps; blocks that are missing between others; chunks of few blocks."""
    count = data.draw(st.integers(1, 9), "blocks")
    sizes = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=5), "pieces")
    present = data.draw(st.lists(st.booleans(), min_size=count, max_size=count), "present")
    order = data.draw(st.permutations(range(count * len(sizes))), "order")
    cuts = data.draw(st.sets(st.integers(1, sum(sizes))), "parts")
    gap, rows = data.draw(st.integers(0, 3), "gap"), data.draw(st.integers(1, 4), "rows")
    total = sum(sizes)
    table, cursor = np.zeros((count * len(sizes), 2), np.int64), 0
    for place in order:
        table[place] = (cursor, sizes[place % len(sizes)])
        cursor += sizes[place % len(sizes)] + gap
    keys = names(count)
    rows_of = content(keys, total)
    with staged(chunk_bytes=rows * total) as world:
        array = world.device.empty(cursor)
        view = world.region(array).view(space(total), table.reshape(count, len(sizes), 2))
        world.node.blocks = {key: row.tobytes() for key, row, here in zip(keys, rows_of, present, strict=True) if here}
        told: list[int] = []
        parts = tuple(sorted(cuts | {total})) if cuts else ()

        def landed(part: int, mask: Mask) -> None:
            told.append(part)
            low, high = ([0, *parts])[part], parts[part]
            for i in np.flatnonzero(mask).tolist():
                assert held(array.shadow, view, i)[low:high] == rows_of[i].tobytes()[low:high]

        fetched = world.fetch(space(total), b"".join(keys), view, parts=parts, landed=landed if parts else None)
        assert fetched.status.tolist() == [LOADED if here else MISSING for here in present]
        assert fetched.bytes_moved == sum(present) * total
        assert told == list(range(len(parts)))
        for i, here in enumerate(present):
            assert held(array.shadow, view, i) == (rows_of[i].tobytes() if here else bytes(total))
        assert np.count_nonzero(array.shadow) == sum(present) * total
        world.check_quiet()


def held(shadow: npt.NDArray[np.uint8], view: BlockView, index: int) -> bytes:
    return b"".join(shadow[a : a + n].tobytes() for a, n in view.table[index].tolist())


def test_host_memory_goes_to_the_transport_as_it_is(world: World) -> None:
    keys = names(3)
    world.node.blocks = dict.fromkeys(keys, b"x" * SIZE)
    host = np.zeros(3 * SIZE, np.uint8)
    rows = Region(host, host).rows(NS)
    assert world.fetch(NS, b"".join(keys), rows).status.tolist() == [LOADED] * 3
    assert world.node.fetches[0].blocks is rows
    assert not world.registered and not world.staging.health()


def test_one_scatter_a_chunk_whatever_the_number_of_pieces(world: World) -> None:
    hashes, _, rows, _ = filled(world, 4)
    split = np.stack([rows.table[:, 0], rows.table[:, 0]], axis=1)
    split[:, 0, 1] = 100
    split[:, 1] += (100, -100)
    world.fetch(NS, hashes, BlockView(rows.region, split, SIZE))
    assert world.device.runtime.launches == {"gather": 0, "scatter": 2}
    assert world.device.runtime.pieces["scatter"] == 2, "neighbours are one piece"


def test_the_next_chunk_is_fetched_while_one_is_scattered_and_two_are_used(world: World) -> None:
    hashes, data, rows, shadow = filled(world, 8)
    begun = [threading.Event() for _ in range(5)]
    world.node.entered = lambda turn: begun[turn].set()
    with ThreadPoolExecutor(1) as pool:
        with world.device.runtime.hold("scatter"):
            future = pool.submit(world.fetch, NS, hashes, rows)
            assert begun[2].wait(10), "the second fetch does not wait for the first scatter"
            assert not begun[3].wait(0.2), "the third waits for a chunk"
            assert world.ring.health()["in_use"] == 2
            assert not future.done() and not shadow.any()
        assert future.result(10).status.tolist() == [LOADED] * 8
    assert (shadow == data).all()
    world.check_quiet()


def test_a_device_that_is_late_leaves_blocks_pending_until_it_is_not(world: World) -> None:
    hashes, data, rows, shadow = filled(world, 3)
    with world.device.runtime.hold("scatter"):
        fetched = world.fetch(NS, hashes, rows, deadline=time.monotonic() + 0.2)
        assert statuses(fetched) == ["PENDING"] * 3
        assert fetched.bytes_moved == 0
        assert not any(one.settled() for one in fetched.pending)
        assert not fetched.pending[0].wait(time.monotonic() + 0.05)
        health = world.ring.health()
        assert (health["held"], health["in_use"], health["free"]) == (2, 0, 0)
    assert all(one.wait(time.monotonic() + 10) for one in fetched.pending)
    assert (shadow == data).all()
    assert world.fetch(NS, hashes, rows).status.tolist() == [LOADED] * 3
    assert len(world.registered) == 2, "what had settled was used again"
    world.check_quiet()


def test_what_a_transport_may_still_write_is_the_chunk_and_not_the_callers_memory(world: World) -> None:
    hashes, _, rows, _ = filled(world, 2)
    late, gate = names(2)[1], LateTransfer()
    world.node.blocks.pop(late)
    world.node.statuses, world.node.pending = {late: BlockStatus.PENDING}, (gate,)
    fetched = world.fetch(NS, hashes, rows)
    assert statuses(fetched) == ["LOADED", "LATE"] and fetched.pending == ()
    assert world.ring.health()["held"] == 1
    first = world.registered[0]
    world.node.pending = ()
    assert world.fetch(NS, hashes, rows).status[0] == LOADED
    assert world.node.fetches[1].blocks.region is not first, "a chunk that may be written to is not used"
    gate.over.set()
    world.fetch(NS, hashes, rows)
    assert world.ring.health()["held"] == 0
    world.check_quiet()


def test_chunks_that_are_held_have_a_bound(world: World) -> None:
    hashes, _, rows, _ = filled(world, 1)
    gate = LateTransfer()
    world.node.pending = (gate,)
    found = [statuses(world.fetch(NS, hashes, rows, deadline=time.monotonic() + 0.2))[0] for _ in range(8)]
    assert found == ["LOADED"] * 6 + ["LATE"] * 2, "4 chunks and 2 more"
    gate.over.set()
    world.node.pending = ()
    assert world.fetch(NS, hashes, rows).status.tolist() == [LOADED]
    assert world.ring.health()["held"] == 0 and len(world.registered) == 4, "no more stay than there were"


def test_a_device_that_fails_costs_the_blocks_and_shows(world: World) -> None:
    hashes, data, rows, shadow = filled(world, 6)
    world.device.runtime.fail_next("an illegal memory access was encountered")
    fetched = world.fetch(NS, hashes, rows)
    assert "LOADED" not in statuses(fetched)[:2] and set(statuses(fetched)) <= {"REFUSED", "LOADED"}
    assert world.staging.problems() == ["device cuda:0: cuda:0: an illegal memory access was encountered"]
    assert world.ring.health()["lost"] == 1
    again = world.fetch(NS, hashes, rows)
    assert again.status.tolist() == [LOADED] * 6 and (shadow == data).all()
    assert world.staging.problems() == []


def test_a_read_that_scattered_nothing_says_nothing_of_the_device(world: World) -> None:
    hashes, _, rows, _ = filled(world, 2)
    world.device.runtime.fail_next()
    world.fetch(NS, hashes, rows)
    assert world.fetch(NS, b"".join(names(2, "other")), rows).status.tolist() == [MISSING] * 2
    with world.device.runtime.hold("scatter"):
        late = world.fetch(NS, hashes, rows, deadline=time.monotonic() + 0.1)
        assert statuses(late) == ["PENDING"] * 2
        assert "illegal memory access" in world.staging.problems()[0]
    assert world.fetch(NS, hashes, rows).status.tolist() == [LOADED] * 2
    assert world.staging.problems() == []


def test_of_a_chunk_that_was_scattered_in_part_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole makes two scatters of one chunk; the second is not taken."""
    with staged(chunk_bytes=3 * SIZE) as world:
        hashes, data, rows, shadow = filled(world, 3)
        del world.node.blocks[names(2)[1]]
        scatter, turns = world.device.runtime.scatter, [0]

        def once(*arguments: object) -> object:
            turns[0] += 1
            if turns[0] == 2:
                raise Unavailable("cuda:0: a copy could not be queued")
            return scatter(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(world.device.runtime, "scatter", once)
        assert statuses(world.fetch(NS, hashes, rows)) == ["REFUSED", "MISSING", "REFUSED"]
        assert (shadow[0] == data[0]).all() and not shadow[1:].any()
        world.check_quiet()


def test_a_device_that_goes_on_failing_is_given_up_and_nothing_is_raised(world: World) -> None:
    hashes, _, rows, _ = filled(world, 1)
    for _ in range(6):
        world.device.runtime.fail_next()
        assert statuses(world.fetch(NS, hashes, rows)) == ["REFUSED"]
    assert "start the process again" in world.staging.problems()[0]


def test_no_pinned_memory_is_the_devices_fault_and_not_the_nodes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(nbytes: int) -> None:
        raise Unavailable(f"no {nbytes} bytes of pinned memory")

    monkeypatch.setattr(world.device.runtime, "pinned", none)
    hashes, _, rows, _ = filled(world, 2)
    assert statuses(world.fetch(NS, hashes, rows)) == ["REFUSED"] * 2
    assert "pinned memory" in world.staging.problems()[0] and not world.node.fetches


def test_a_refusal_of_the_call_is_raised_when_no_copy_is_under_way(world: World) -> None:
    hashes, data, rows, shadow = filled(world, 6)

    def refuse(turn: int) -> None:
        if turn == 2:
            raise FingerprintMismatch("another epoch")

    world.node.entered = refuse
    with ThreadPoolExecutor(1) as pool:
        with world.device.runtime.hold("scatter"):
            future = pool.submit(world.fetch, NS, hashes, rows)
            world.device.runtime.wait_held("scatter")
            assert not future.done()
        with pytest.raises(FingerprintMismatch):
            future.result(10)
    assert (shadow[:2] == data[:2]).all() and not shadow[2:].any()
    world.check_quiet()


@pytest.mark.parametrize("error", [FingerprintMismatch("another epoch"), ZeroDivisionError("a mistake")])
def test_an_error_hides_no_copy_that_is_under_way(world: World, error: Exception) -> None:
    hashes, _, rows, _ = filled(world, 4)

    def fail(turn: int) -> None:
        if turn == 2:
            raise error

    world.node.entered = fail
    with world.device.runtime.hold("scatter"):
        late = world.fetch(NS, hashes, rows, deadline=time.monotonic() + 0.5)
        assert statuses(late) == ["PENDING"] * 2 + ["REFUSED"] * 2
        assert not any(one.settled() for one in late.pending)
    assert all(one.wait(time.monotonic() + 10) for one in late.pending)


def test_a_mistake_in_a_transport_leaves_no_chunk_behind(world: World) -> None:
    hashes, _, rows, _ = filled(world, 2)

    def fail(turn: int) -> None:
        raise ZeroDivisionError

    world.node.entered = fail
    with pytest.raises(ZeroDivisionError):
        world.fetch(NS, hashes, rows)
    world.check_quiet()


def test_a_mistake_in_who_is_told_of_ranges_leaves_no_chunk_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes, data, rows, shadow = filled(world, 2)
    fetch, answered = world.node.fetch, threading.Event()

    def answer(request: Fetch) -> Fetched:
        fetched = fetch(request)
        answered.set()
        return fetched

    def fail(part: int, mask: Mask) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(world.node, "fetch", answer)
    with ThreadPoolExecutor(1) as pool:
        with world.device.runtime.hold("scatter"):  # so that the first range is told of after the node's answer
            future = pool.submit(world.fetch, NS, hashes, rows, parts=(256, SIZE), landed=fail)
            assert answered.wait(10)
        with pytest.raises(ZeroDivisionError):
            future.result(10)
    assert (shadow == data).all(), "its scatters have ended"
    world.check_quiet()


def test_a_mistake_in_who_is_told_of_ranges_hides_no_copy_that_is_late(world: World) -> None:
    hashes, data, rows, shadow = filled(world, 2)

    def fail(part: int, mask: Mask) -> None:
        raise ZeroDivisionError

    with world.device.runtime.hold("scatter"):
        until = time.monotonic() + 0.2
        fetched = world.fetch(NS, hashes, rows, parts=(256, SIZE), landed=fail, deadline=until)
        assert statuses(fetched) == ["PENDING"] * 2
    assert all(one.wait(time.monotonic() + 10) for one in fetched.pending)
    assert (shadow == data).all()


def test_a_node_that_is_lost_is_not_asked_for_the_rest(world: World) -> None:
    hashes, _, rows, _ = filled(world, 8)
    keys = names(8)
    for key in keys[2:]:
        del world.node.blocks[key]
    world.node.statuses = dict.fromkeys(keys[2:], BlockStatus.NODE_LOST)
    assert statuses(world.fetch(NS, hashes, rows)) == ["LOADED"] * 2 + ["NODE_LOST"] * 6
    assert len(world.node.fetches) == 2


def test_a_scatter_comes_after_the_mark_that_its_blocks_carry_and_after_nothing_else(world: World) -> None:
    hashes, data, rows, shadow = filled(world, 2)
    engine = world.device.stream()
    with engine:
        engine.queue(lambda: shadow.fill(0))  # the last use of these blocks
        mark = world.device.runtime.mark()
        engine.queue(lambda: None)  # the next step, which nobody runs
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(world.fetch, NS, hashes, rows.coming_after(mark))
        with pytest.raises(TimeoutError):
            future.result(0.3)
        assert len(world.node.fetches) == 1, "the network does not wait for the device"
        assert not shadow.any()
        engine.run(2)
        assert future.result(10).status.tolist() == [LOADED] * 2
    assert (shadow == data).all()


def test_a_range_is_told_of_when_its_scatter_has_ended_and_before_the_next_has_come(world: World) -> None:
    hashes, data, rows, shadow = filled(world, 2)
    told: list[tuple[int, list[bool]]] = []
    third = threading.Event()

    def between(part: int) -> None:
        if part == 2:
            assert third.wait(10)

    world.node.between = between
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            world.fetch,
            NS,
            hashes,
            rows,
            parts=(256, 512, SIZE),
            landed=lambda k, mask: told.append((k, mask.tolist())),
        )
        deadline = time.monotonic() + 10
        while not (shadow[:, :512] == data[:, :512]).all():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert not shadow[:, 512:].any() and not future.done()
        assert [part for part, _ in told] in ([], [0], [0, 1])
        third.set()
        assert future.result(10).status.tolist() == [LOADED] * 2
    assert told == [(part, [True, True]) for part in range(3)]
    assert world.device.runtime.launches["scatter"] == 3, "one a range"


def test_a_range_that_the_device_has_not_is_not_told_of(world: World) -> None:
    hashes, _, rows, _ = filled(world, 4)
    told: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        with world.device.runtime.hold("scatter"):
            future = pool.submit(
                world.fetch, NS, hashes, rows, parts=(256, SIZE), landed=lambda k, mask: told.append(int(mask.sum()))
            )
            deadline = time.monotonic() + 10
            while len(world.node.fetches) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            assert not told
        assert future.result(10).status.tolist() == [LOADED] * 4
    assert told == [4, 4]


def test_what_no_range_told_of_comes_with_the_answer(world: World) -> None:
    hashes, data, rows, shadow = filled(world, 2)
    world.node.untold = {names(2)[1]}
    masks: list[list[bool]] = []
    fetched = world.fetch(NS, hashes, rows, parts=(256, SIZE), landed=lambda k, mask: masks.append(mask.tolist()))
    assert fetched.status.tolist() == [LOADED] * 2 and (shadow == data).all()
    assert len(masks) == 2


def test_a_transport_that_tells_of_ranges_does_not_wait_for_the_device(world: World) -> None:
    hashes, data, rows, shadow = filled(world, 4)
    reached = threading.Event()
    world.node.between = lambda part: reached.set() if part == 2 else None
    with ThreadPoolExecutor(1) as pool:
        with world.device.runtime.hold("scatter"):
            future = pool.submit(world.fetch, NS, hashes, rows, parts=(256, 512, SIZE), landed=lambda k, mask: None)
            assert reached.wait(10)
        assert future.result(10).status.tolist() == [LOADED] * 4
    assert (shadow == data).all()


def test_a_block_that_is_corrupt_after_its_ranges_came_is_not_loaded(world: World) -> None:
    hashes, _, rows, _ = filled(world, 2)
    world.node.statuses = {names(2)[1]: BlockStatus.CORRUPT}
    masks: list[list[bool]] = []
    fetched = world.fetch(NS, hashes, rows, parts=(256, SIZE), landed=lambda k, mask: masks.append(mask.tolist()))
    assert statuses(fetched) == ["LOADED", "CORRUPT"] and len(masks) == 2
    world.check_quiet()


def test_a_block_larger_than_a_chunk_gets_one_of_its_own(world: World) -> None:
    large = space(5 * SIZE)
    keys = names(3)
    data = content(keys, 5 * SIZE)
    world.node.blocks = {key: row.tobytes() for key, row in zip(keys, data, strict=True)}
    array = world.device.empty((3, 5 * SIZE))
    fetched = world.fetch(large, b"".join(keys), world.region(array).rows(large))
    assert fetched.status.tolist() == [LOADED] * 3 and (array.shadow == data).all()
    world.check_quiet()


def test_many_threads_share_few_chunks_without_waiting_for_each_other_for_ever() -> None:
    with staged(chunk_bytes=SIZE, chunks=2) as world:
        hashes, data, _, _ = filled(world, 6)
        arrays = [world.device.empty((6, SIZE)) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(world.fetch, NS, hashes, world.region(array).rows(NS)) for array in arrays]
            assert all(call.result(30).status.tolist() == [LOADED] * 6 for call in calls)
        assert all((array.shadow == data).all() for array in arrays)
        assert len(world.registered) <= 2
        world.check_quiet()
