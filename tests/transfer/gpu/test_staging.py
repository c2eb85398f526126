"""Which way device memory takes, and the ring: bounded, shared, kept from whoever could still touch its chunks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstrata.proto.errors import Busy, Closed, Unavailable
from kvstrata.proto.status import BlockStatus, HintKind
from kvstrata.transfer.base import Fetch, Fetched, Named, Push, Pushed
from kvstrata.transfer.gpu.layouts import cut, packed, runs
from kvstrata.transfer.gpu.ring import Chunk, Ring
from kvstrata.transfer.gpu.staging import StagedPeer, Staging, StagingOptions
from kvstrata.transfer.memory import Memory
from kvstrata.transfer.regions import BlockView, Region
from tests.transfer.gpu.fake_device import fake_device
from tests.transfer.gpu.staged_peer import CUDA, DictPeer, World, content, names, space, staged
from tests.transfer.late_transfer import LateTransfer

LARGE = 512 << 10
NS = space(LARGE)


class Direct(DictPeer):
    """Reaches device memory while ``way`` is there; what it is given of it, it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.way = True
        self.breaks = False
        self.direct = 0

    def reaches_memory(self, region: Region) -> bool:
        return self.way

    def fetch(self, request: Fetch) -> Fetched:
        if request.blocks.region.memory.on_host:
            return super().fetch(request)
        self._go()
        return Fetched(np.full(len(request.blocks), BlockStatus.LOADED, np.uint8), np.zeros(len(request.blocks)))  # type: ignore[arg-type]

    def push(self, request: Push) -> Pushed:
        if request.blocks.region.memory.on_host:
            return super().push(request)
        self._go()
        return Pushed(np.full(len(request.blocks), BlockStatus.STORED, np.uint8))

    def _go(self) -> None:
        if self.breaks:
            raise Unavailable("the way is lost")
        self.direct += 1


@pytest.fixture
def world() -> Iterator[World]:
    with staged(chunk_bytes=LARGE) as world:
        node = Direct()
        yield World(world.device, node, StagedPeer(node, world.staging), world.staging, world.registered)


def moved(world: World, blocks: BlockView, **more: object) -> tuple[int, int]:
    """Calls that went directly, and chunks that were staged, for a load and a store of all blocks."""
    assert isinstance(world.node, Direct)
    keys = names(len(blocks))
    world.node.blocks = dict(zip(keys, (row.tobytes() for row in content(keys, blocks.block_bytes)), strict=True))
    before = world.node.direct, len(world.node.fetches) + len(world.node.pushes)
    fetched = world.fetch(space(blocks.block_bytes), b"".join(keys), blocks, **more)
    assert set(fetched.status.tolist()) == {BlockStatus.LOADED}
    pushed = world.push(space(blocks.block_bytes), b"".join(keys), blocks)
    assert set(pushed.status.tolist()) == {BlockStatus.STORED}
    return world.node.direct - before[0], len(world.node.fetches) + len(world.node.pushes) - before[1]


def test_large_pieces_go_directly_and_small_ones_are_staged(world: World) -> None:
    region = world.region(world.device.empty(LARGE))
    assert moved(world, region.rows(NS)) == (2, 0)
    halves = np.array([[[0, LARGE // 2], [LARGE // 2, LARGE // 2]]])
    assert moved(world, region.view(NS, halves)) == (2, 0), "256 KiB a piece are large"
    small = np.array([[[i * LARGE // 4, LARGE // 4] for i in range(4)]])
    assert moved(world, region.view(NS, small)) == (0, 2)


def test_what_is_to_be_verified_is_staged(world: World) -> None:
    rows = world.region(world.device.empty(LARGE)).rows(NS)
    assert moved(world, rows, verify="always") == (1, 1), "the store only went directly"


def test_without_a_way_it_is_staged(world: World) -> None:
    assert isinstance(world.node, Direct)
    rows = world.region(world.device.empty(LARGE)).rows(NS)
    world.node.way = False
    assert moved(world, rows) == (0, 2)
    world.node.way, world.node.breaks = True, True
    assert moved(world, rows) == (0, 2), "the way was lost on the way"


def test_a_direct_transfer_waits_for_the_mark_as_no_transport_does(world: World) -> None:
    assert isinstance(world.node, Direct)
    engine = world.device.stream()
    mark = engine.record()
    rows = world.region(world.device.empty(LARGE)).rows(NS).coming_after(mark)
    hashes = b"".join(names(1))
    late = world.fetch(NS, hashes, rows, deadline=time.monotonic() + 0.05)
    assert late.status.tolist() == [BlockStatus.LATE] and world.node.direct == 0
    assert world.push(NS, hashes, rows, deadline=time.monotonic() + 0.05).status.tolist() == [BlockStatus.LATE]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(world.fetch, NS, hashes, rows)
        engine.run()
        assert future.result(10).status.tolist() == [BlockStatus.LOADED]
    assert world.node.direct == 1


def test_all_else_is_the_inner_peers(world: World) -> None:
    peer, node = world.peer, world.node
    assert (peer.transport, peer.endpoint, peer.reachable()) == (node.transport, node.endpoint, True)
    named = Named(NS, "", b"".join(names(2)), time.monotonic() + 1)
    assert peer.prefetch(named).tolist() == [BlockStatus.LOADED] * 2
    assert peer.hint(named, HintKind.KEEP, 1.0) == 3
    peer.upkeep()
    peer.close()


def test_a_device_that_is_out_of_reach_costs_the_blocks_only() -> None:
    def none(memory: Memory) -> None:
        raise Unavailable(f"{memory.spelled()} needs cupy: pip install 'kvstrata[gpu]'")

    staging = Staging(lambda _: None, lambda _: None, runtime_of=none)  # type: ignore[arg-type, return-value]
    peer = StagedPeer(DictPeer(), staging)
    rows = Region.on_device(CUDA, 4096, LARGE, None).rows(NS)
    until = time.monotonic() + 1
    fetched = peer.fetch(Fetch(NS, "", b"h" * 16, rows, until))
    pushed = peer.push(Push(NS, "", b"h" * 16, rows, until))
    assert fetched.status.tolist() == pushed.status.tolist() == [BlockStatus.REFUSED]
    with pytest.raises(Unavailable, match="cupy"):
        staging.ring(CUDA)


# ---------------------------------------------------------------------- the ring


@pytest.fixture
def ring() -> Iterator[Ring]:
    with fake_device(1 << 16) as device:
        ring = Ring(device.runtime, lambda _: None, lambda _: None, chunk_bytes=4096, chunks=2, held_max=1)
        yield ring
        ring.close()


def soon() -> float:
    return time.monotonic() + 0.05


def test_who_waits_for_a_chunk_gets_the_next_that_is_given_back(ring: Ring) -> None:
    first, _ = ring.take(1, soon()), ring.take(1, soon())
    assert ring.try_take(1) is None
    with pytest.raises(Busy, match="all 2 staging chunks of cuda:0 are in use"):
        ring.take(1, soon())
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ring.take, 1, time.monotonic() + 10)
        ring.give_back(first)
        assert future.result(10) is first


def test_who_waits_gets_a_chunk_that_settles_meanwhile(ring: Ring) -> None:
    gates = [LateTransfer() for _ in range(3)]
    for gate in gates:
        ring.give_back(ring.take(1, soon()), (gate,))
    with pytest.raises(Busy):
        ring.take(1, soon())
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ring.take, 1, time.monotonic() + 10)
        gates[1].over.set()
        assert isinstance(future.result(10), Chunk)


def test_a_chunk_is_kept_from_callers_until_all_that_may_touch_it_has_settled(ring: Ring) -> None:
    chunk, gates = ring.take(1, soon()), [LateTransfer(), LateTransfer()]
    ring.give_back(chunk, gates)
    for gate in gates:
        other = ring.take(1, soon())
        assert other is not chunk
        ring.give_back(other)
        gate.over.set()
    assert chunk in (ring.take(1, soon()), ring.take(1, soon()))


def test_its_memory_is_what_a_node_on_this_host_can_map(ring: Ring) -> None:
    chunk = ring.take(10_000, soon())
    assert chunk.region.memfd >= 0 and chunk.region.nbytes == 10_000
    assert chunk.region.bytes.ctypes.data == chunk.pinned.bytes.ctypes.data
    ring.give_back(chunk)
    assert ring.take(4096, soon()) is chunk


def test_a_chunk_that_is_too_small_is_replaced(ring: Ring) -> None:
    small = ring.take(1, soon())
    ring.give_back(small)
    large = ring.take(8192, soon())
    assert large.nbytes == 8192 and small.region.closed
    ring.give_back(large)


def test_after_close_nothing_is_given_and_what_comes_back_goes(ring: Ring) -> None:
    in_use, free = ring.take(1, soon()), ring.take(1, soon())
    ring.give_back(free)
    ring.close()
    assert free.region.closed and not in_use.region.closed
    ring.give_back(in_use)
    assert in_use.region.closed
    with pytest.raises(Closed):
        ring.take(1, soon())


def test_memory_that_is_touched_still_outlives_the_close(ring: Ring) -> None:
    chunk = ring.take(1, soon())
    gate = LateTransfer()
    ring.give_back(chunk, (gate,))
    ring.close()
    assert not chunk.region.closed
    chunk.region.bytes[:] = 1
    gate.over.set()


@settings(max_examples=60, stateful_step_count=30, deadline=None)
class RingMachine(RuleBasedStateMachine):
    """Whatever is taken, given back, held, settled and lost: no chunk is with two callers, and bounds hold."""

    def __init__(self) -> None:
        super().__init__()
        self._device = fake_device(1 << 16)
        self._alive: set[int] = set()
        self.ring = Ring(
            self._device.__enter__().runtime,
            lambda region: self._alive.add(region.id),
            lambda region: self._alive.remove(region.id),
            chunk_bytes=4096,
            chunks=3,
            held_max=2,
        )
        self.seen: dict[int, Chunk] = {}
        self.taken: list[Chunk] = []
        self.held: list[tuple[Chunk, LateTransfer]] = []
        self.lost = 0

    @rule(nbytes=st.sampled_from([1, 4096, 8192]))
    def take(self, nbytes: int) -> None:
        try:
            chunk = self.ring.try_take(nbytes)
        except Unavailable:
            assert self.lost >= 3
            return
        if chunk is None:
            assert len(self.taken) >= 3 or len(self.taken) + len(self.held) >= 5
            return
        assert chunk.nbytes >= nbytes and chunk.region.id in self._alive
        assert not any(chunk is other for other in self.taken)
        assert not any(chunk is other and not gate.settled() for other, gate in self.held)
        self.held = [(other, gate) for other, gate in self.held if not gate.settled()]
        self.taken.append(chunk)
        self.seen[chunk.region.id] = chunk

    @rule(data=st.data(), late=st.booleans())
    def give_back(self, data: st.DataObject, late: bool) -> None:
        if self.taken:
            chunk = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
            gate = LateTransfer()
            if late:
                self.held.append((chunk, gate))
            else:
                gate.over.set()
            self.ring.give_back(chunk, (gate,))

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if self.held:
            self.held[data.draw(st.integers(0, len(self.held) - 1))][1].over.set()

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.taken and self.lost < 3:
            self.ring.lose(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))))
            self.lost += 1

    @invariant()
    def bounded(self) -> None:
        health = self.ring.health()
        assert health["in_use"] == len(self.taken) <= 3
        assert health["lost"] == self.lost
        assert len(self._alive) <= 3 + 2 + 3
        assert self._alive == {i for i, chunk in self.seen.items() if not chunk.region.closed}
        for chunk, gate in self.held:
            assert gate.settled() or chunk.region.id in self._alive

    def teardown(self) -> None:
        for chunk in self.taken:
            self.ring.give_back(chunk)
        for _, gate in self.held:
            gate.over.set()
        self.ring.close()
        left = [chunk for chunk in self.seen.values() if not chunk.region.closed]
        assert len(left) == self.lost
        self._device.__exit__(None, None, None)


TestRing = RingMachine.TestCase


# ---------------------------------------------------------------------- layouts


def test_neighbours_are_one_piece_and_ranges_cut_pieces() -> None:
    region = Region(np.zeros(64, np.uint8), None)
    view = BlockView(region, np.array([[[0, 8], [8, 8]], [[16, 8], [40, 8]]]), 16)
    address, length = packed(view)
    assert (address - region.address).tolist() == [0, 40] and length.tolist() == [24, 8]
    part = cut(view, 6, 10)
    assert part.table.tolist() == [[[6, 2], [8, 2]], [[22, 2], [40, 2]]] and part.block_bytes == 4
    assert cut(view, 8, 16).table.tolist() == [[[8, 8]], [[40, 8]]]


def test_blocks_that_are_cut_in_pieces_otherwise_have_empty_ones() -> None:
    view = BlockView(Region(np.zeros(64, np.uint8), None), np.array([[[0, 8], [8, 8]], [[16, 12], [40, 4]]]), 16)
    assert cut(view, 8, 12).table[:, :, 1].tolist() == [[0, 4], [4, 0]]


def test_runs() -> None:
    assert list(runs(np.array([1, 1, 0, 1, 0, 0, 1], bool))) == [(0, 2), (3, 4), (6, 7)]
    assert not list(runs(np.zeros(3, bool)))


def test_a_thread_that_waits_does_not_keep_the_ring_from_closing(ring: Ring) -> None:
    for _ in range(2):
        ring.take(1, soon())
    failed = threading.Event()

    def wait() -> None:
        try:
            ring.take(1, time.monotonic() + 10)
        except Closed:
            failed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    ring.close()
    assert failed.wait(10)
    thread.join(10)


def test_options_reach_the_rings() -> None:
    with fake_device(1 << 16):
        staging = Staging(lambda _: None, lambda _: None, StagingOptions(chunk_bytes=123, chunks=1))
        assert staging.ring(CUDA).chunk_bytes == 123 and staging.ring(CUDA) is staging.ring(CUDA)
        assert list(staging.health()) == ["cuda:0"]
        staging.close()
        with pytest.raises(Closed):
            staging.ring(CUDA)
