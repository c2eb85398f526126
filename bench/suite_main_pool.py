"""The cases of bench/run.py that one pool serves: blocks, paged layouts, lookups, latency beside a stream."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import BATCH, Case, Round, joined, measure
from rooflines import memcpy_round
from suite_rooflines import rooflines, turns_of
from suite_scale import Found, Group, Scale, Turn
from transfer_pool import HASH_BYTES, Missed, Pool, Way, pool
from transfer_shapes import Shape, Worker, serve

from kvstrata.client import Client

#: (system, transport, engine memory)
WAYS: Final = (
    ("kvstrata-shm", "shm", "private"),
    ("kvstrata-shm, allocated", "shm", "shared"),
    ("kvstrata-tcp", "tcp", "private"),
)
PIECE_BYTES: Final = 32 << 10
LAYERS: Final = 64
LOOKED_UP_BYTES: Final = 64
SETTLE_S: Final = 20.0
#: Until the stream is under way.
STREAM_LEAD_S: Final = 0.1
STREAM: Final = Shape("stream", BATCH, 1 << 20)
SMALL: Final = Shape("one", 1, 64 << 10)


@contextlib.contextmanager
def main_pool(scale: Scale, wanted: Callable[[str], bool]) -> Iterator[list[Group]]:
    """Groups whose name ``wanted`` likes; open until the end of the block."""
    shapes = _shapes(scale)
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(pool(scale.dram, "off"))
        plain = Worker(rooflines)
        stack.callback(plain.close)
        most = max(shape.nbytes for _, shape, _ in shapes)
        ways = {}
        for system, transport, memory in WAYS:
            ways[system] = Way(system, running.master, transport, memory, most, running.pids)
            stack.callback(ways[system].close)
        groups = []
        for kind, shape, note in shapes:
            name = _name(kind, shape, note)
            if wanted(name):
                calls = scale.calls(shape.nbytes)
                ours = {system: _moves(way, kind, shape, calls, note) for system, way in ways.items()}
                groups.append(Group(name, ours | turns_of(plain, kind, shape, calls, note)))
        if any(wanted(_lookup_name(count)) for count in scale.lookups):
            groups += _lookups(stack, running, plain, scale, wanted)
        if wanted("latency"):
            groups.append(_latency(stack, running, ways, scale))
        yield groups


def groups_of_main_pool(scale: Scale) -> list[str]:
    """Names of its groups."""
    moves = [_name(*one) for one in _shapes(scale)]
    return [*moves, *(_lookup_name(count) for count in scale.lookups), "latency"]


def _name(kind: str, shape: Shape, note: str) -> str:
    return Case(kind, "move", shape.blocks, shape.block_bytes, note).name


def _shapes(scale: Scale) -> list[tuple[str, Shape, str]]:
    plain = [("blocks", Shape("blocks", batch, size), "") for size in scale.sizes for batch in (1, BATCH)]
    count = scale.paged_blocks
    one = Shape("pages", count, PIECE_BYTES, scattered=True)
    layers = Shape("layers", count // LAYERS, PIECE_BYTES * LAYERS, LAYERS, scattered=True)
    return [*plain, ("paged", one, "scattered"), ("paged", layers, f"{LAYERS} pieces each, scattered")]


def _moves(way: Way, kind: str, shape: Shape, calls: int, note: str) -> Turn:
    def turn() -> Found:
        stored, loaded = way.rounds(shape, calls)
        return {
            Case(kind, "store", shape.blocks, shape.block_bytes, note): stored,
            Case(kind, "load", shape.blocks, shape.block_bytes, note): loaded,
        }

    return turn


# ---------------------------------------------------------------------- lookups


def _lookup_name(count: int) -> str:
    return Case("lookup", "lookup", count).name


def _lookups(
    stack: contextlib.ExitStack, running: Pool, plain: Worker, scale: Scale, wanted: Callable[[str], bool]
) -> list[Group]:
    asker = Asker(stack, running, max(scale.lookups))
    groups = []
    for count in scale.lookups:
        if wanted(_lookup_name(count)):
            calls = max(10, min(scale.calls_max, 200_000 // count))
            ours = partial(asker.turn, count, calls)
            groups.append(Group(_lookup_name(count), {"kvstrata": ours, "echo": partial(_echoes, plain, count, calls)}))
    return groups


def _echoes(plain: Worker, count: int, calls: int) -> Found:
    once = plain.round("echo", count, HASH_BYTES, calls)
    return {Case("lookup", "lookup", count, note=note): once for note in notes(count)}


def notes(count: int) -> tuple[str, ...]:
    return ("all hit", "all miss", "cut in the middle") if count > 1 else ("all hit", "all miss")


class Asker:
    """A client that looks up chains of which all, none, or the first half is in the pool."""

    def __init__(self, stack: contextlib.ExitStack, running: Pool, most: int) -> None:
        self._client = stack.enter_context(Client(running.master, transport="shm", transfer_deadline_ms=20_000))
        self._pids = running.pids
        self._most = most
        self._stored = False
        self._space = self._client.namespace(
            "bench/lookup", block_bytes=LOOKED_UP_BYTES, block_tokens=16, hash_bytes=HASH_BYTES
        )
        self._there, self._not_there = (hashlib.shake_128(word).digest(most * HASH_BYTES) for word in (b"a", b"b"))

    def _store(self) -> None:
        """With the first turn: what is stored before the bulk of the other cases might have to make room for it."""
        region = self._client.register(np.zeros(self._most * LOOKED_UP_BYTES, np.uint8))
        stored = self._client.store(self._space, "", self._there, region.rows(self._space))
        if not stored.stored.all():
            raise SystemExit(f"lookups: blocks were not stored: {stored.reasons}")
        until = time.monotonic() + SETTLE_S
        while self._hits(self._there) != self._most:
            if time.monotonic() > until:
                raise SystemExit(f"lookups: the directory did not learn of the blocks within {SETTLE_S:g} s")
            time.sleep(0.01)
        self._stored = True

    def turn(self, count: int, calls: int) -> Found:
        if not self._stored:
            self._store()
        there, gone = self._there[: count * HASH_BYTES], self._not_there[: count * HASH_BYTES]
        middle = count // 2 * HASH_BYTES
        asked = {
            "all hit": (there, count),
            "all miss": (gone, 0),
            "cut in the middle": (there[:middle] + gone[middle:], count // 2),
        }
        return {
            Case("lookup", "lookup", count, note=note): measure(
                [partial(self._ask, *asked[note])] * calls, 0, self._pids
            )
            for note in notes(count)
        }

    def _ask(self, hashes: bytes, hits: int) -> None:
        found = self._hits(hashes)
        if found != hits:
            raise Missed(f"a lookup found {found} blocks, not {hits}")

    def _hits(self, hashes: bytes) -> int:
        return self._client.lookup(self._space, "", hashes).hit_blocks


# ---------------------------------------------------------------------- latency beside a stream


def streaming(pipe: Connection, master: str) -> None:
    """The main of a :class:`transfer_shapes.Worker` that loads, or copies, until it is told to have ended."""
    way = Way("stream", master, "shm", nbytes=STREAM.nbytes)
    tcp = Way("stream-tcp", master, "tcp", nbytes=STREAM.nbytes)
    try:
        with way.held(STREAM, 2) as loads, tcp.held(STREAM, 2) as tcp_loads:
            calls = {"kvstrata-shm": loads, "kvstrata-tcp": tcp_loads, "memcpy": [_copies]}
            serve(pipe, {name: partial(_until, given) for name, given in calls.items()})
    finally:
        way.close()
        tcp.close()


def _copies() -> Round:
    return memcpy_round(STREAM.block_bytes, STREAM.blocks, hashed=False, calls=1)


def _until(calls: list[Callable[[], object]], until: float) -> Round:
    done: list[Round] = []
    while time.monotonic() < until:
        done.append(measure(calls, STREAM.nbytes * len(calls)))
    return joined(done, {})


def _latency(stack: contextlib.ExitStack, running: Pool, ways: dict[str, Way], scale: Scale) -> Group:
    streamer = Worker(streaming, running.master)
    stack.callback(streamer.close)
    case = Case("latency", "load", SMALL.blocks, SMALL.block_bytes, "beside a stream of 64 x 1 MiB")

    def beside(system: str, calls: list[Callable[[], Any]]) -> Found:
        until = time.monotonic() + scale.stream_s
        streamer.ask(system, until)
        time.sleep(STREAM_LEAD_S)
        done: list[Round] = []
        while time.monotonic() < until - STREAM_LEAD_S:
            done.append(measure(calls, SMALL.nbytes * len(calls)))
        streamer.answer()
        return {case: joined(done, {})}

    def ours(system: str) -> Found:
        with ways[system].held(SMALL, 8) as calls:
            return beside(system, calls)

    def copies() -> Found:
        source, target = (np.ones(SMALL.nbytes, np.uint8) for _ in range(2))
        return beside("memcpy", [partial(np.copyto, target, source)] * 8)

    systems = [system for system, _, memory in WAYS if memory == "private"]
    return Group("latency", {system: partial(ours, system) for system in systems} | {"memcpy": copies})
