"""What one call costs in CPU time, by blocks in it: ``python bench/per_call.py [--rounds N] [--json FILE]``.

``node`` runs the channel's handlers of a storage node in this process, from a frame's message to its answer's,
without sockets. ``whole`` asks a pool of real processes through a client: CPU of the calling thread ("client"), of all
threads of the node ("node*") and of the master, and the median by the clock ("clock"). Blocks are small, so that next
to nothing is copied. Figures are the median of the rounds and the least of them; CPU time, since the machine may be
doing other work.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

sys.path.insert(0, str(Path(__file__).parent))
from per_call_pool import whole

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import Namespace
from kvstrata.proto.wire import Kind
from kvstrata.storage.arena import dram_arena
from kvstrata.storage.eviction.segmented_order import SegmentedOrder
from kvstrata.storage.serving.reads import ReadHandlers
from kvstrata.storage.serving.regions import RegionBook
from kvstrata.storage.serving.writes import WriteHandlers
from kvstrata.storage.state import NodeState
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.security.rights import EVERYTHING
from kvstrata.transfer.server import Handler

BLOCK_BYTES: Final = 64
HASH_BYTES: Final = 16
DRAM_BYTES: Final = 8 << 20
SLAB_BYTES: Final = 256 << 10
#: Blocks that are there before anything is measured: what eviction samples of a small pool costs more a block.
HELD: Final = 64 << 10
COUNTS: Final = (1, 64, 1024)
#: Calls of one kind that are timed together.
CALLS: Final = {1: 400, 64: 40, 1024: 8}
DEADLINE_MS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of CPU of one call with ``blocks`` blocks: the median of the rounds, and the least."""

    where: str
    op: str
    blocks: int
    call_us: float
    least_us: float

    @property
    def block_us(self) -> float:
        return self.call_us / self.blocks


class Handlers:
    """A node without sockets: frames in, answers out."""

    def __init__(self) -> None:
        self.state = NodeState(dram_arena(DRAM_BYTES, SLAB_BYTES), order=SegmentedOrder)
        self.handle = self.state.open_namespace(Namespace("bench", BLOCK_BYTES, 16, HASH_BYTES))[0]
        lock = threading.Lock()
        reads = ReadHandlers(self.state, lock, time.monotonic)
        self.regions = RegionBook()
        writes = WriteHandlers(self.state, lock, self.regions, lambda: None, time.monotonic)
        self._handlers: dict[int, Handler] = {**reads.handlers(), **writes.handlers()}
        owner = SimpleNamespace(key=b"s" * 16, hello=pb.Hello())
        self._connection = cast(Any, SimpleNamespace(owner=owner, local=True, rights=EVERYTHING))

    def call(self, kind: int, message: bytes) -> bytes:
        reply = self._handlers[kind](self._connection, Frame(kind, 1, message, 0))
        return reply.message if reply is not None else b""

    def reserve(self, hashes: bytes) -> bytes:
        return pb.Reserve(ns=self.handle, hashes=hashes, deadline_ms=DEADLINE_MS).SerializeToString()

    def acquire(self, hashes: bytes) -> bytes:
        return pb.Acquire(ns=self.handle, hashes=hashes, deadline_ms=DEADLINE_MS).SerializeToString()

    def fill(self, count: int, numbers: Iterator[int]) -> None:
        """Until nothing is free, in calls of ``count`` blocks."""
        arena = self.state.arena
        while arena.free_slabs or any(slab.free for slab in arena.slabs if slab.slot_bytes):
            self.store(chain(next(numbers), count), count)
            self.state.deltas.close_batch()

    def store(self, hashes: bytes, count: int) -> None:
        number = pb.ReserveOk.FromString(self.call(Kind.RESERVE, self.reserve(hashes))).reservation
        self.call(Kind.COMMIT, commit(number, self.written(number)))

    def written(self, number: int) -> int:
        """As if a reservation's bytes had come; how many blocks it has."""
        reservation = self.state.reservations.find(b"s" * 16, number)
        assert reservation is not None
        reservation.arrived = BLOCK_BYTES
        return len(reservation.blocks)


def commit(number: int, count: int) -> bytes:
    return pb.Commit(reservation=number, checksums=array("Q", range(count)).tobytes()).SerializeToString()


def chain(number: int, count: int) -> bytes:
    """Packed hashes of one chain."""
    return hashlib.shake_128(number.to_bytes(8, "little")).digest(count * HASH_BYTES)


def timed(calls: list[Callable[[], bytes]]) -> tuple[float, list[bytes]]:
    """(microseconds of this thread's CPU a call, what they answered)."""
    gc.collect()
    began = time.thread_time_ns()
    answers = [call() for call in calls]
    return (time.thread_time_ns() - began) / 1e3 / len(calls), answers


def one_round(count: int, numbers: Iterator[int]) -> dict[str, float]:
    node, calls = Handlers(), CALLS[count]
    for _ in range(HELD // 1024):
        node.store(chain(next(numbers), 1024), 1024)
    chains = [chain(next(numbers), count) for _ in range(calls)]
    took = {}

    def run(op: str, kind: int, messages: list[bytes]) -> list[bytes]:
        took[op], answers = timed([lambda message=message: node.call(kind, message) for message in messages])
        return answers

    def reservations(answers: list[bytes]) -> list[int]:
        return [pb.ReserveOk.FromString(answer).reservation for answer in answers]

    granted = reservations(run("reserve", Kind.RESERVE, [node.reserve(hashes) for hashes in chains]))
    for number in granted:
        node.written(number)
    run("commit", Kind.COMMIT, [commit(number, count) for number in granted])
    leases = run("acquire", Kind.ACQUIRE, [node.acquire(hashes) for hashes in chains])
    numbers_of = [pb.AcquireOk.FromString(answer).lease for answer in leases]
    run("release", Kind.RELEASE, [pb.Release(leases=array("Q", [n]).tobytes()).SerializeToString() for n in numbers_of])
    run("reserve again", Kind.RESERVE, [node.reserve(hashes) for hashes in chains])
    node.fill(1024, numbers)
    fresh = [chain(next(numbers), count) for _ in range(calls)]
    granted = reservations(run("reserve, full", Kind.RESERVE, [node.reserve(hashes) for hashes in fresh]))
    run("abort", Kind.ABORT, [pb.Abort(reservation=number).SerializeToString() for number in granted])
    node.state.check()
    node.state.arena.close()
    return took


def counted() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def costs(where: str, rounds: list[tuple[int, dict[str, float]]]) -> list[Cost]:
    found: dict[tuple[str, int], list[float]] = {}
    for count, took in rounds:
        for op, us in took.items():
            found.setdefault((op, count), []).append(us)
    return [Cost(where, op, count, statistics.median(us), min(us)) for (op, count), us in found.items()]


def say(all_costs: list[Cost]) -> None:
    print(f"{'where':<8}{'op':<16}{'blocks':>7}{'us a call':>12}{'us a block':>12}{'least us':>12}")
    for cost in all_costs:
        print(
            f"{cost.where:<8}{cost.op:<16}{cost.blocks:>7}{cost.call_us:>12.1f}"
            f"{cost.block_us:>12.3f}{cost.least_us:>12.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("node", "whole"), default=None)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    numbers, found = counted(), []
    if given.only != "whole":
        rounds = [(count, one_round(count, numbers)) for _ in range(given.rounds) for count in COUNTS]
        found += costs("node", rounds)
    if given.only != "node":
        for where, took in whole(given.rounds, COUNTS, given.transport).items():
            found += costs("node*" if where == "node" else where, took)
    say(found)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(cost) for cost in found], indent=1))


if __name__ == "__main__":
    main()
