"""A gate against slow growth: what a call costs in frames, function calls and memory, counted, so that a busy machine
changes nothing.

The numbers were counted on CPython 3.11 and have a little room. A test that fails names the call and what it costs now.
If the work is worth its price, write the new number here and say in the commit what it buys; if not, take it back.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
import xxhash
from directory import filled
from per_call import Handlers, chain, commit, counted

from kvstrata.client import Client
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import Namespace
from kvstrata.proto.wire import Kind
from kvstrata.storage.serving.regions import RegionAsk
from tests.bench.counting import frames, function_calls, least_function_calls, memory_peak, slope
from tests.e2e.real_pool import RealPool
from tests.waiting import until

FEW: Final = 64
MANY: Final = 1024
BLOCK_BYTES: Final = 4096
HASH_BYTES: Final = 16
READY_S: Final = 20.0
#: Python versions and small changes differ by so much.
ROOM: Final = 1.05
TOO_MANY: Final = (
    "{what} costs {now:.4g} {unit}, and {bound:.4g} were written down: see the top of this file for what to do"
)

#: The ways to a node: reads by its shared index, by asking it on the same host, and over tcp.
INDEX: Final = "index"
#: Function calls of the calling thread: of a call of one block, and of each block more.
CLIENT_CALLS: Final = {
    (INDEX, "load"): (126, 0.2),
    ("shm", "lookup"): (128, 0.02),
    ("shm", "load"): (144, 0.2),
    ("shm", "store"): (248, 1.1),
    ("shm", "first store"): (332, 1.1),
    ("tcp", "lookup"): (128, 0.02),
    ("tcp", "load"): (223, 1.1),
    ("tcp", "store"): (352, 1.05),
    ("tcp", "first store"): (440, 1.05),
}
#: Frames that the calling thread sends: each is a system call, and a wait for its answer.
CLIENT_FRAMES: Final = {
    (INDEX, "load"): {},
    ("shm", "lookup"): {"LOOKUP": 1},
    ("shm", "load"): {"ACQUIRE": 1},
    ("shm", "store"): {"PULL": 1},
    ("shm", "first store"): {"PLACE": 1, "PULL": 1},
    ("tcp", "lookup"): {"LOOKUP": 1},
    ("tcp", "load"): {"ACQUIRE": 1},
    ("tcp", "store"): {"RESERVE": 1, "WRITE": 1},
    ("tcp", "first store"): {"PLACE": 1, "RESERVE": 1, "WRITE": 1},
}
#: Function calls of a node's handler: of a call of 64 blocks, and of each block more.
NODE_CALLS: Final = {"reserve": (190, 1.0), "commit": (143, 1.8), "acquire": (282, 3.85), "release": (23, 0.01)}
#: And of a small pull that commits at once: of one block, and of each block more.
PULL_CALLS: Final = (237, 6.85)
#: Function calls of a lookup in a master's directory, however many hashes it has.
LOOKUP_CALLS: Final = {"hits": 142, "misses": 231, "cut": 231}
#: A table has a secret of its own, and with it longest probes of its own: each step is a few calls for all hashes.
PROBING_ROOM: Final = 1.5
HELD: Final = 1 << 16
BYTES_A_BLOCK: Final = 200
#: Objects that Python keeps for a block that a node holds, what it has not told its master yet included.
OBJECTS_A_BLOCK: Final = 6.6


def bounded(what: str, now: float, written: float, unit: str, room: float = ROOM) -> None:
    bound = written * room
    assert now <= bound, TOO_MANY.format(what=what, now=now, bound=bound, unit=unit)


class Caller:
    """A client of one transport, with chains of its own."""

    def __init__(self, pool: RealPool, way: str) -> None:
        self._by_index = way == INDEX
        transport = "shm" if self._by_index else way
        self.client = Client(pool.address, transport=transport, transfer_deadline_ms=20_000)
        self._space = self.client.namespace("gate", block_bytes=BLOCK_BYTES, block_tokens=16, hash_bytes=HASH_BYTES)
        self._region = self.client.register(np.ones(MANY * BLOCK_BYTES, np.uint8))
        self._tenants = itertools.count()
        self._names = (hashlib.shake_128(f"{way}/{number}".encode()) for number in itertools.count())

    def chain(self, count: int) -> bytes:
        return next(self._names).digest(count * HASH_BYTES)

    def store(self, hashes: bytes, count: int) -> bool:
        return bool(self.client.store(self._space, "", hashes, self._view(count)).stored.all())

    def calls(self, op: str, count: int) -> Callable[[], Any]:
        """What does ``op`` with so many blocks; stores are of blocks that are new each time, the first ones of tenants
        that are: as every store of a pool of several nodes, they ask a master."""
        view = self._view(count)
        if op == "first store":
            return lambda: self.client.store(self._space, f"{next(self._tenants)}", self.chain(count), view)
        if op == "store":
            return lambda: self.client.store(self._space, "", self.chain(count), view)
        hashes = self.chain(count)
        assert self.store(hashes, count)
        until(lambda: self.client.lookup(self._space, "", hashes).hit_blocks == count, READY_S)
        if op == "lookup":
            return lambda: self.client.lookup(self._space, "", hashes)
        if self._by_index:
            until(lambda: self._read_by_index(hashes, view), READY_S)
        return lambda: self.client.load(self._space, "", hashes, view)

    def _read_by_index(self, hashes: bytes, view: Any) -> bool:
        """Whether a load of these asks for none of them."""
        before = self.client.health()["blocks_by_index"]
        self.client.load(self._space, "", hashes, view)
        return self.client.health()["blocks_by_index"] - before == len(hashes) // HASH_BYTES

    def _view(self, count: int) -> Any:
        table = np.stack([np.arange(count) * BLOCK_BYTES, np.full(count, BLOCK_BYTES)], axis=1)
        return self._region.view(self._space, table[:, None, :])


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Caller]]:
    """By way. Of two pools, one has a node that shares its index."""
    pools: list[RealPool] = []
    callers: dict[str, Caller] = {}
    try:
        for ways, options in (((INDEX,), ()), (("shm", "tcp"), ("--no-shared-index",))):
            pools.append(RealPool(tmp_path_factory.mktemp("gate"), nodes=1, dram="192MiB", options=options))
            for way in ways:
                caller = callers[way] = Caller(pools[-1], way)
                until(lambda caller=caller: caller.store(caller.chain(1), 1), READY_S)
        yield callers
    finally:
        for caller in callers.values():
            caller.client.close()
        for pool in pools:
            pool.end()


@pytest.mark.parametrize(("way", "op"), CLIENT_CALLS)
def test_function_calls_of_a_client(callers: dict[str, Caller], way: str, op: str) -> None:
    of_one, of_more = CLIENT_CALLS[way, op]
    one, few, many = (least_function_calls(callers[way].calls(op, count)) for count in (1, FEW, MANY))
    bounded(f"{op} of a block by {way}", one, of_one, "function calls")
    each = slope(few, many, FEW, MANY)
    bounded(f"each more block of a {op} by {way}", each, of_more + 0.05, "function calls")


@pytest.mark.parametrize(("way", "op"), CLIENT_FRAMES)
def test_frames_of_a_client(callers: dict[str, Caller], way: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, FEW):
        call = callers[way].calls(op, count)
        call()
        least: dict[str, int] | None = None
        for _ in range(3):  # a node that a busy machine kept silent is asked again: not what is counted
            with frames(monkeypatch) as sent:
                call()
            least = dict(sent) if least is None or sent.total() < sum(least.values()) else least
        wanted = CLIENT_FRAMES[way, op]
        assert least == wanted, f"{op} of {count} blocks by {way} sends {least}, not {wanted}: see the top of this file"


@pytest.mark.parametrize("way", [INDEX, "shm", "tcp"])
@pytest.mark.parametrize("op", ["load", "store"])
def test_bytes_are_copied_through_no_memory_of_their_own(callers: dict[str, Caller], way: str, op: str) -> None:
    call = callers[way].calls(op, MANY)
    call()
    peak = min(memory_peak(call) for _ in range(3))
    share = peak / (MANY * BLOCK_BYTES)
    assert share < 0.15, f"{op} by {way} took {peak} bytes beside the blocks' own: {share:.0%} of their bytes"


def test_function_calls_of_a_node() -> None:
    node, numbers = Handlers(), counted()
    for _ in range(16):
        node.store(chain(next(numbers), MANY), MANY)
    found = {count: node_calls(node, count, [chain(next(numbers), count) for _ in range(5)]) for count in (FEW, MANY)}
    node.state.check()
    node.state.arena.close()
    for op, (of_few, of_more) in NODE_CALLS.items():
        bounded(f"{op} of {FEW} blocks in a node", found[FEW][op], of_few, "function calls")
        each = slope(found[FEW][op], found[MANY][op], FEW, MANY)
        bounded(f"each more block of a node's {op}", each, of_more + 0.05, "function calls")


def node_calls(node: Handlers, count: int, chains: list[bytes]) -> dict[str, int]:
    """The least of each operation's calls."""
    took: dict[str, int] = {}

    def run(op: str, kind: int, messages: list[bytes]) -> list[bytes]:
        answers: list[bytes] = []
        took[op] = min(function_calls(lambda m=message: answers.append(node.call(kind, m))) for message in messages)
        return answers

    reserved = run("reserve", Kind.RESERVE, [node.reserve(hashes) for hashes in chains])
    numbers = [pb.ReserveOk.FromString(answer).reservation for answer in reserved]
    for number in numbers:
        node.written(number)
    run("commit", Kind.COMMIT, [commit(number, count) for number in numbers])
    leased = run("acquire", Kind.ACQUIRE, [node.acquire(hashes) for hashes in chains])
    leases = [array("Q", [pb.AcquireOk.FromString(answer).lease]).tobytes() for answer in leased]
    run("release", Kind.RELEASE, [pb.Release(leases=packed).SerializeToString() for packed in leases])
    return took


def test_function_calls_of_a_pull_in_a_node() -> None:
    node, numbers = Handlers(), counted()
    space = Namespace("pulls", BLOCK_BYTES, 16, HASH_BYTES)
    handle = node.state.open_namespace(space)[0]
    memory = np.ones(FEW * BLOCK_BYTES, np.uint8)
    pidfd = os.pidfd_open(os.getpid())
    asked = RegionAsk(1, int(memory.ctypes.data), memory.nbytes, os.getpid(), pidfd)
    assert node.regions.register(b"s" * 16, asked, -1) == "vm"
    os.close(pidfd)
    digest = xxhash.xxh3_64_intdigest(memory[:BLOCK_BYTES])

    def pull(count: int) -> Callable[[], Any]:
        table = np.stack([np.arange(count) * BLOCK_BYTES, np.full(count, BLOCK_BYTES)], axis=1)
        message = pb.Pull(
            reserve=pb.Reserve(ns=handle, hashes=chain(next(numbers), count), deadline_ms=20_000),
            region=1,
            descriptors=table.tobytes(),
            pieces=1,
            checksums=array("Q", [digest] * count).tobytes(),
        ).SerializeToString()
        return lambda: node.call(Kind.PULL, message)

    one, few = (min(function_calls(pull(count)) for _ in range(5)) for count in (1, FEW))
    assert node.state.counts.stored == 5 * (1 + FEW)
    node.state.check()
    node.state.arena.close()
    of_one, of_more = PULL_CALLS
    bounded("a pull of a block in a node", one, of_one, "function calls")
    bounded("each more block of a node's pull", slope(one, few, 1, FEW), of_more, "function calls")


@pytest.mark.parametrize("which", LOOKUP_CALLS)
def test_function_calls_of_a_directory(which: str) -> None:
    directory, keys, *_ = filled(HELD, nodes=4, seed=0)
    absent = np.random.default_rng(1).integers(0, 2**64, size=(HELD, 2), dtype=np.uint64)
    asked = (
        np.concatenate([keys[:500], absent[:500], keys[500:]])
        if which == "cut"
        else keys
        if which == "hits"
        else absent
    )
    took = {
        count: least_function_calls(lambda count=count: directory.lookup(0, 0, 1, "tenant", asked[:count]))
        for count in (1_000, 10_000)
    }
    bounded(f"a lookup of 1,000 hashes, {which}", took[1_000], LOOKUP_CALLS[which], "function calls", PROBING_ROOM)
    each = slope(took[1_000], took[10_000], 1_000, 10_000)
    bounded(f"each more hash of a lookup, {which}", each, 0.02, "function calls")
    assert directory.nbytes / HELD <= BYTES_A_BLOCK, f"{directory.nbytes / HELD} bytes a block in the directory"


def test_objects_that_a_node_keeps_for_a_block() -> None:
    node, numbers = Handlers(), counted()
    chains = [chain(next(numbers), MANY) for _ in range(32)]
    for hashes in chains[:8]:
        node.store(hashes, MANY)
    gc.collect()
    before = sys.getallocatedblocks()
    for hashes in chains[8:]:
        node.store(hashes, MANY)
    gc.collect()
    kept = (sys.getallocatedblocks() - before) / (24 * MANY)
    node.state.arena.close()
    bounded("a block that a node holds", kept, OBJECTS_A_BLOCK, "objects")


def test_what_counts_function_calls() -> None:
    def work(times: int) -> Callable[[], None]:
        return lambda: [abs(-1) for _ in range(times)] and None

    few, many = function_calls(work(10)), function_calls(work(110))
    assert slope(few, many, 10, 110) == 1


def test_what_measures_memory() -> None:
    assert memory_peak(lambda: bytes(1 << 20)) >= 1 << 20
    assert memory_peak(lambda: time.monotonic()) < 1 << 14
