"""A client process under load: asks for chains of blocks, checks every byte, stores what is missing, keeps a trace.

Run as ``python -m tests.chaos.player MASTERS TRACE --seed N ...``. A line of the trace is one request, written
when it has ended: when it began and what it took (monotonic seconds), what became of its blocks, and the
addresses of the peers whose channel it used. SIGTERM ends it after the request under way, SIGUSR1 makes it
rest without leaving.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvstrata.client import Client, LoadResult, Transfer
from kvstrata.proto.errors import KVError, Refused
from kvstrata.transfer.channel import Channel
from kvstrata.transfer.connection import Connection
from tests.e2e.real_pool import keys, payload

BLOCK_BYTES = 4096
CHAIN_BLOCKS = 24
#: Every call's deadline; and past how much more a call counts as stuck.
DEADLINE_MS = 2000
#: Chains whose payload is kept, so that the load is the pool's and not the generator's.
CHAINS_KEPT = 256


class Touched:
    """The peers that the calls of the request under way have used, by address; the keeper's own are left out."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()

    def watch(self) -> None:
        """From now on, for every channel of this process."""
        checkout = Channel._checkout

        def recorded(channel: Channel, deadline: float) -> tuple[Connection, bool]:
            if "keeper" not in threading.current_thread().name:
                self.addresses.add(channel.addresses[-1])
            return checkout(channel, deadline)

        Channel._checkout = recorded  # type: ignore[method-assign]

    def taken(self) -> list[str]:
        addresses, self.addresses = self.addresses, set()
        return sorted(addresses)


class Player:
    """One request after the other, over a population of chains that all players share."""

    def __init__(self, client: Client, seed: int, chains: int, aborts: float = 0.0) -> None:
        self._client = client
        self._ns = client.namespace("model/chaos", block_bytes=BLOCK_BYTES, block_tokens=16)
        self._into = client.register(np.zeros((CHAIN_BLOCKS, BLOCK_BYTES), np.uint8))
        self._dropped = client.register(np.zeros((CHAIN_BLOCKS, BLOCK_BYTES), np.uint8))
        self._dropping: Transfer[LoadResult] | None = None
        self._out = client.allocate(CHAIN_BLOCKS * BLOCK_BYTES)
        self._rng = np.random.default_rng(seed)
        self._chains, self._aborts = chains, aborts
        self._known: dict[int, tuple[bytes, np.ndarray[Any, Any]]] = {}

    def request(self) -> dict[str, int]:
        """Look up, load, check; store what did not come. Counts of blocks."""
        chain = min(int(self._rng.zipf(1.3)) - 1, self._chains - 1)
        hashes, data = self._chain(chain)
        into = self._into.bytes.reshape(data.shape)
        found = self._client.lookup(self._ns, "", hashes)
        if self._rng.random() < self._aborts and (self._dropping is None or self._dropping.done()):
            # An engine that drops the request while it loads; the memory stays out of use until that has ended.
            with contextlib.suppress(Refused), self._client.view(self._ns, "", hashes):  # a view needs shared memory
                self._dropping = self._client.load_async(self._ns, "", hashes, self._dropped.rows(self._ns))
            return {"aborted": 1}
        loaded = self._client.load(self._ns, "", hashes, self._into.rows(self._ns)).loaded
        wrong = int((into[loaded] != data[loaded]).any(axis=1).sum())
        counts = {"loaded": int(loaded.sum()), "wrong": wrong, "unanswered": int(not found.answered)}
        if loaded.all():
            return counts
        missing = np.flatnonzero(~loaded)
        out = self._out.bytes.reshape(data.shape)
        out[:] = data
        first = int(missing[0])
        stored = self._client.store(
            self._ns, "", hashes[first * 16 :], self._out.rows(self._ns)[first:],
            parent=hashes[(first - 1) * 16 : first * 16] if first else None, first_index=first,
        )  # fmt: skip
        return {**counts, "missed": len(missing), "stored": int(stored.stored.sum())}

    def _chain(self, chain: int) -> tuple[bytes, np.ndarray[Any, Any]]:
        known = self._known.get(chain)
        if known is None:
            hashes = keys(CHAIN_BLOCKS, f"chaos/{chain}")
            known = self._known[chain] = hashes, payload(hashes, "", BLOCK_BYTES)
            if len(self._known) > CHAINS_KEPT:
                self._known.pop(next(iter(self._known)))
        return known


def play(masters: str, trace: Path, seed: int, chains: int, transport: str, aborts: float, pause_s: float) -> None:
    stop = threading.Event()
    quiet = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    signal.signal(signal.SIGUSR1, lambda number, frame: quiet.set())
    touched = Touched()
    touched.watch()
    with (
        trace.open("a", buffering=1) as lines,
        Client(masters, transport=transport, verify="always", transfer_deadline_ms=DEADLINE_MS) as client,
    ):
        player = Player(client, seed, chains, aborts)
        touched.taken()
        while not stop.is_set():
            if quiet.is_set():
                stop.wait(0.1)
                continue
            began = time.monotonic()
            try:
                row: dict[str, Any] = dict(player.request())
            except KVError as error:
                row = {"failed": 1, "error": f"{type(error).__name__}: {error}"}
            row |= {"began": began, "seconds": time.monotonic() - began, "touched": touched.taken()}
            lines.write(json.dumps(row) + "\n")
            if pause_s:
                stop.wait(pause_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("masters")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chains", type=int, default=200)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--aborts", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    play(args.masters, args.trace, args.seed, args.chains, args.transport, args.aborts, args.pause)


if __name__ == "__main__":
    main()
