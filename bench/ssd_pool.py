"""How near reads from the SSD through a whole pool are to the device: ``python bench/ssd_pool.py [--json]``.

A real node with little DRAM and all blocks on SSD; each turn loads a random set of 1 MiB blocks that are in none of its
memory, through the client, against ``preadv`` with O_DIRECT of as many bytes at random places of the same file, by
threads. Turns alternate; medians over turns, and of the ratio of neighbouring turns.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np

from kvstrata.cli.replay.pool import OwnPool
from kvstrata.client import Client
from kvstrata.client.namespace import PoolNamespace

BLOCK_BYTES = 1 << 20
STORE_BLOCKS = 32
HASH_BYTES = 16


def hash_of(number: int) -> bytes:
    return number.to_bytes(8, "little") + b"ssd-pool"


def fill(client: Client, namespace: PoolNamespace, blocks: int) -> None:
    """Store blocks that are durable when this returns."""
    region = client.allocate(STORE_BLOCKS * BLOCK_BYTES)
    region.bytes[:] = np.random.default_rng(0).integers(0, 256, len(region.bytes), np.uint8)
    rows = region.rows(namespace)
    for start in range(0, blocks, STORE_BLOCKS):
        names = b"".join(hash_of(number) for number in range(start, start + STORE_BLOCKS))
        done = client.store(namespace, "", names, rows)
        assert done.durable.all(), done.reasons
    client.unregister(region)


def plain(path: Path, count: int, threads: int, rng: random.Random) -> float:
    """Seconds for ``count`` random reads of ``BLOCK_BYTES``."""
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    places = [rng.randrange(0, size // BLOCK_BYTES - 1) * BLOCK_BYTES for _ in range(count)]
    lock = threading.Lock()

    def work() -> None:
        buffer = mmap.mmap(-1, BLOCK_BYTES)
        while True:
            with lock:
                if not places:
                    return
                place = places.pop()
            assert os.preadv(fd, [buffer], place) == BLOCK_BYTES

    began = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - began
    os.close(fd)
    return took


def measure(transport: str, total: int, count: int, turns: int, threads: int, dram: int, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    blocks = total // BLOCK_BYTES // STORE_BLOCKS * STORE_BLOCKS
    pool = OwnPool(1, dram, node_ssd_bytes=total + total // 4, node_options=("--ssd-policy", "write-through"))
    try:
        with Client(pool.masters, transport=transport, transfer_deadline_ms=20_000) as client:
            namespace = client.namespace("bench/ssd-pool", block_bytes=BLOCK_BYTES, block_tokens=16)
            fill(client, namespace, blocks)
            region = client.allocate(count * BLOCK_BYTES)
            rows = region.rows(namespace)
            path = pool.ssd_path(0) / "extents"
            order = rng.sample(range(blocks), blocks)
            ours: list[float] = []
            theirs: list[float] = []
            warm_up = 2 * (dram // BLOCK_BYTES) // count  # until memory holds nothing but what was read by turns
            for turn in range(-warm_up, turns):
                # What was read longest ago, so that nothing is in DRAM: there is room for far less than a round of all.
                names = [order[(turn * count + step) % blocks] for step in range(count)]
                packed = b"".join(hash_of(number) for number in names)
                client.lookup(namespace, "", packed)
                began = time.perf_counter()
                loaded = client.load(namespace, "", packed, rows)
                took = time.perf_counter() - began
                assert loaded.loaded.all(), loaded.reasons
                if turn >= 0:
                    cold = loaded.by_tier().get("ssd", 0)
                    assert cold >= 0.9 * count, loaded.by_tier()
                    ours.append(took)
                    theirs.append(plain(path, cold, threads, rng))
    finally:
        pool.close()
    nbytes = count * BLOCK_BYTES
    return {
        "ours_gb_s": nbytes / statistics.median(ours) / 1e9,
        "plain_gb_s": nbytes / statistics.median(theirs) / 1e9,
        "ratio": statistics.median(plain_s / our_s for our_s, plain_s in zip(ours, theirs, strict=True)),
        "turns": turns,
        "blocks_a_turn": count,
        "threads": threads,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-mib", type=int, default=1536)
    parser.add_argument("--dram-mib", type=int, default=384)
    parser.add_argument("--blocks", type=int, default=64, help="blocks of a turn")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for transport in ("shm", "tcp"):
        report = measure(
            transport, given.total_mib << 20, given.blocks, given.turns, given.threads, given.dram_mib << 20, given.seed
        )
        if given.json:
            print(json.dumps({"transport": transport, **report}))
        else:
            print(transport, "  ".join(f"{name}={value:.3g}" for name, value in report.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
