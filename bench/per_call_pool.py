"""The part of bench/per_call.py that asks a pool of real processes through a client."""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import cpu_ns
from transfer_pool import pool

from kvstrata.client import Client

BLOCK_BYTES: Final = 64
HASH_BYTES: Final = 16
CALLS: Final = {1: 300, 64: 60, 1024: 12}
START_S: Final = 20.0

Rounds = list[tuple[int, dict[str, float]]]


def whole(rounds: int, counts: Sequence[int], transport: str) -> dict[str, Rounds]:
    """By whose CPU it is ("client", "node", "master"), or "clock", p50: (blocks, operation -> microseconds a call)."""
    found: dict[str, Rounds] = {"client": [], "node": [], "master": [], "clock": []}
    with pool("256MiB", "off") as running:
        client = Client(running.master, transport=transport, transfer_deadline_ms=20_000)
        try:
            asker = _Asker(client, running.pids, max(counts))
            for turn in range(rounds + 1):
                for count in counts:
                    took = asker.one_round(count)
                    for where in found if turn else ():  # the first warms up
                        found[where].append((count, took[where]))
        finally:
            client.close()
    return found


class _Asker:
    def __init__(self, client: Client, pids: Mapping[str, int], blocks_max: int) -> None:
        self._client = client
        self._pids = pids
        self._number = 0
        self._space = client.namespace("per-call", block_bytes=BLOCK_BYTES, block_tokens=16, hash_bytes=HASH_BYTES)
        self._region = client.register(np.ones(BLOCK_BYTES * blocks_max, np.uint8))
        until = time.monotonic() + START_S
        while not client.store(self._space, "", self._chain(1), self._view(1)).stored.all():
            if time.monotonic() > until:
                raise SystemExit(f"the pool stores nothing: {client.health()['problems']}")

    def _chain(self, count: int) -> bytes:
        self._number += 1
        return hashlib.shake_128(self._number.to_bytes(8, "little")).digest(count * HASH_BYTES)

    def _view(self, count: int) -> Any:
        starts = np.arange(count) * BLOCK_BYTES
        table = np.stack([starts, np.full(count, BLOCK_BYTES)], axis=1)[:, None, :]
        return self._region.view(self._space, table)

    def one_round(self, count: int) -> dict[str, dict[str, float]]:
        client, space, view = self._client, self._space, self._view(count)
        chains = [self._chain(count) for _ in range(CALLS[count])]
        took: dict[str, dict[str, float]] = {where: {} for where in ("client", "clock", *self._pids)}

        def run(op: str, call: Callable[[bytes], object]) -> None:
            before = {role: cpu_ns(pid) for role, pid in self._pids.items()}
            began, clock = time.thread_time_ns(), [time.perf_counter_ns()]
            for hashes in chains:
                call(hashes)
                clock.append(time.perf_counter_ns())
            took["client"][op] = (time.thread_time_ns() - began) / 1e3 / len(chains)
            took["clock"][op] = statistics.median(np.diff(clock).tolist()) / 1e3
            for role, pid in self._pids.items():
                took[role][op] = (cpu_ns(pid) - before[role]) / 1e3 / len(chains)

        run("store", lambda hashes: client.store(space, "", hashes, view))
        run("lookup", lambda hashes: client.lookup(space, "", hashes))
        run("load", lambda hashes: client.load(space, "", hashes, view))
        for hashes in chains:
            client.remove(space, "", hashes)
        return took
