"""Reads and writes mixed on a node that is 90 % full, and reads from its SSD."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import BATCH, Case, CpuWatch, Round, joined, measure
from rooflines import memcpy_round
from ssd_pool import BLOCK_BYTES, fill, hash_of, plain
from suite_scale import Found, Group, Scale
from transfer_pool import HASH_BYTES, Missed, Pool, pool
from transfer_shapes import engine_memory, random_bytes

from kvstrata.cli.replay.pool import OwnPool
from kvstrata.client import Client

FULL: Final = 0.9
BLOCKS: Final = 16
MIXED_BYTES: Final = 256 << 10
LOADS_A_STORE: Final = 3
NOTE: Final = "90 % full"
FILL_S: Final = 30.0
PLAIN_THREADS: Final = 8


@contextlib.contextmanager
def mixed_pool(scale: Scale, wanted: Callable[[str], bool]) -> Iterator[list[Group]]:
    """Three loads a store; what is stored pushes nothing out, as the oldest is removed meanwhile, untimed."""
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(pool(f"{scale.mixed_bytes >> 20}MiB", "off"))
        held: deque[bytes] = deque()
        turns: dict[str, Callable[[], Found]] = {}
        for transport in ("shm", "tcp"):
            mixer = Mixer(running, transport, held)
            stack.callback(mixer.close)
            mixer.fill(int(FULL * scale.mixed_bytes / (BLOCKS * MIXED_BYTES)))
            turns[f"kvstrata-{transport}"] = partial(mixer.turn, scale.mixed_calls)
        turns["memcpy"] = partial(_copies, scale.mixed_calls, False)
        turns["memcpy+xxh3"] = partial(_copies, scale.mixed_calls, True)
        yield [Group("mixed", turns)]


def _copies(calls: int, hashed: bool) -> Found:
    return {
        Case("mixed", op, BLOCKS, MIXED_BYTES, NOTE): memcpy_round(MIXED_BYTES, BLOCKS, hashed=hashed, calls=calls)
        for op in ("load", "store")
    }


class Mixer:
    """One client. ``held``: the chains that are in the pool, the oldest first; all mixers of a pool share it."""

    def __init__(self, running: Pool, transport: str, held: deque[bytes]) -> None:
        self._client = Client(running.master, transport=transport, transfer_deadline_ms=20_000)
        self._pids = running.pids
        self._held = held
        self._random = random.Random(transport)
        self._count = itertools.count()
        nbytes = BLOCKS * MIXED_BYTES
        source, target = engine_memory(nbytes), engine_memory(nbytes)
        source[:] = random_bytes(nbytes)
        self._space = self._client.namespace(
            "bench/mixed", block_bytes=MIXED_BYTES, block_tokens=16, hash_bytes=HASH_BYTES
        )
        self._source, self._target = (self._client.register(memory).rows(self._space) for memory in (source, target))

    def fill(self, chains: int) -> None:
        until = time.monotonic() + FILL_S
        while len(self._held) < chains:
            try:
                self._store()
            except Missed as error:
                if time.monotonic() > until:
                    raise SystemExit(f"the node of the mixed case was not filled: {error}") from error

    def turn(self, calls: int) -> Found:
        nbytes = BLOCKS * MIXED_BYTES
        watch = CpuWatch(self._pids)
        stores, loads = [], []
        for _ in range(calls):
            stores.append(measure([self._store], nbytes))
            wanted = self._random.sample(list(self._held), LOADS_A_STORE)
            loads.append(measure([partial(self._load, chain) for chain in wanted], nbytes * LOADS_A_STORE))
            self._client.remove(self._space, "", self._held.popleft())
        others = watch.seconds()
        return {
            Case("mixed", "store", BLOCKS, MIXED_BYTES, NOTE): _shared(stores, others, 1 / (1 + LOADS_A_STORE)),
            Case("mixed", "load", BLOCKS, MIXED_BYTES, NOTE): _shared(
                loads, others, LOADS_A_STORE / (1 + LOADS_A_STORE)
            ),
        }

    def _store(self) -> None:
        chain = self._random.randbytes(BLOCKS * HASH_BYTES)
        done = self._client.store(self._space, "", chain, self._source)
        if not done.stored.all():
            raise Missed(f"blocks were not stored: {done.reasons}")
        self._held.append(chain)

    def _load(self, chain: bytes) -> None:
        done = self._client.load(self._space, "", chain, self._target)
        if not done.loaded.all():
            raise Missed(f"blocks were not loaded: {done.reasons}")

    def close(self) -> None:
        self._client.close()


def _shared(rounds: list[Round], others: dict[str, float], share: float) -> Round:
    """``others``: of loads and stores together, since they cannot be told apart: each has its share by bytes."""
    return joined(rounds, {role: cpu * share for role, cpu in others.items()})


@contextlib.contextmanager
def ssd_pool(scale: Scale, wanted: Callable[[str], bool]) -> Iterator[list[Group]]:
    """Random blocks that are on SSD alone, beside ``preadv`` with O_DIRECT and threads at the same file."""
    blocks = scale.ssd_bytes // BLOCK_BYTES // BATCH * BATCH
    dram = scale.ssd_bytes // 3
    options = ("--ssd-policy", "write-through")
    with contextlib.ExitStack() as stack:
        running = OwnPool(1, dram, node_ssd_bytes=scale.ssd_bytes * 5 // 4, node_options=options)
        stack.callback(running.close)
        pids = {"node": running.nodes[0].pid}
        order = random.Random(0).sample(range(blocks), blocks)
        turns: dict[str, Callable[[], Found]] = {}
        filled = False
        for transport in ("shm", "tcp"):
            client = stack.enter_context(Client(running.masters, transport=transport, transfer_deadline_ms=20_000))
            reader = ColdReader(client, order, pids, running.ssd_path(0) / "extents")
            if not filled:
                filled = True
                fill(client, reader.space, blocks)
                for _ in range(2 * dram // BLOCK_BYTES // BATCH):  # until memory holds nothing but what was read last
                    reader.load()
            turns[f"kvstrata-{transport}"] = partial(reader.turn, scale.ssd_turns)
        turns["preadv"] = partial(reader.plain, scale.ssd_turns)
        yield [Group("ssd", turns)]


class ColdReader:
    """Loads what was read longest ago, so that nothing of it is in memory: there is room for far less than all."""

    CASE: Final = Case("ssd", "load", BATCH, BLOCK_BYTES, "from SSD")

    def __init__(self, client: Client, order: list[int], pids: dict[str, int], path: Path) -> None:
        self._client = client
        self._order = order
        self._pids = pids
        self._path = path
        self._random = random.Random(1)
        self.space = client.namespace("bench/ssd-pool", block_bytes=BLOCK_BYTES, block_tokens=16)
        self._rows = client.register(engine_memory(BATCH * BLOCK_BYTES)).rows(self.space)

    def load(self) -> int:
        """How many blocks came from SSD."""
        names = self._order[:BATCH]
        self._order[:] = self._order[BATCH:] + names
        packed = b"".join(hash_of(number) for number in names)
        self._client.lookup(self.space, "", packed)
        loaded = self._client.load(self.space, "", packed, self._rows)
        if not loaded.loaded.all():
            raise Missed(f"blocks were not loaded: {loaded.reasons}")
        return int(loaded.by_tier().get("ssd", 0))

    def turn(self, calls: int) -> Found:
        taken: list[int] = []
        one = measure([lambda: taken.append(self.load())] * calls, calls * BATCH * BLOCK_BYTES, self._pids)
        if sum(taken) < 0.9 * calls * BATCH:
            raise Missed(f"only {sum(taken)} of {calls * BATCH} blocks came from SSD")
        return {self.CASE: one}

    def plain(self, calls: int) -> Found:
        own, began = time.process_time(), time.monotonic()
        seconds = [plain(self._path, BATCH, PLAIN_THREADS, self._random) for _ in range(calls)]
        cpu, ended = time.process_time() - own, time.monotonic()
        return {self.CASE: Round(seconds, calls * BATCH * BLOCK_BYTES, cpu, {}, began, ended)}
