"""How near the SSD log is to the device: ``python bench/ssd.py [--path DIR] [--gib N] [--json]``.

Random reads of 1 MiB through ``SsdLog.read`` against ``preadv`` with O_DIRECT into a buffer a thread, with the same
threads, and batched writes against ``pwritev`` of the same bytes, both flushed once a batch: by turns, medians
over rounds and of the ratio of each round. The page cache serves neither. Also how long a start scans.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.records import Block, NamespaceEntry, Shelf
from kvstrata.storage.ssd.base import HEADER_BYTES, SlotHeader
from kvstrata.storage.ssd.log import DeviceConfig, SsdLog

BLOCK_BYTES = 1 << 20
BATCH = 16
ROUNDS = 9
ROUND_BYTES = 256 << 20


class Filled:
    """A store full of blocks, and the same file opened for plain reads."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self.log = self._open()
        self.log.scan(lambda *_: None)
        namespace = Namespace("bench", BLOCK_BYTES, 16)
        self.shelf = Shelf(NamespaceEntry(1, namespace), "")
        self.payload = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8).tobytes()
        self.checksum = xxhash.xxh3_64_intdigest(self.payload)
        self.blocks: list[Block] = []
        while batch := self._admit(BATCH):
            self.write(batch)
            self.blocks += batch
        self.plain = os.open(folder / "extents", os.O_RDWR | os.O_DIRECT)

    def _open(self) -> SsdLog:
        return SsdLog.open([DeviceConfig(self.folder, self.nbytes)], node_id="bench")

    def _admit(self, count: int) -> list[Block]:
        blocks = []
        for extent, slot in self.log.arena.allocate(self.log.slot_bytes(BLOCK_BYTES), count):
            generation = self.log.arena.next_generation()
            block = Block(self.shelf, generation.to_bytes(16, "little"), extent, slot, generation, 0)
            block.checksum = self.checksum
            extent.blocks[slot] = block
            blocks.append(block)
        return blocks

    def write(self, blocks: list[Block]) -> None:
        namespace = self.shelf.entry.namespace
        items = [
            (b, SlotHeader(namespace, 0, "", b.hash, b.generation, b.checksum), memoryview(self.payload))
            for b in blocks
        ]
        assert all(self.log.write(items))

    def rescan(self) -> tuple[float, float]:
        """(seconds of one restart's scan, seconds for each TB of device)."""
        self.log.close()
        self.log = self._open()
        report = self.log.scan(lambda *_: None)
        assert report.blocks == len(self.blocks)
        return report.seconds, report.seconds / report.device_bytes * 1e12

    def close(self) -> None:
        os.close(self.plain)
        self.log.close()


def in_threads(count: int, work: Callable[[int], None]) -> float:
    """Seconds until all have ended."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def read_round(store: Filled, threads: int, seed: int, *, plain: bool) -> float:
    """GB/s of random reads, one block a call."""
    each = ROUND_BYTES // BLOCK_BYTES // threads

    def work(number: int) -> None:
        chosen = random.Random(seed * 1000 + number).sample(store.blocks, each)
        target = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        for block in chosen:
            if plain:
                assert os.preadv(store.plain, [target], block.offset + HEADER_BYTES) == BLOCK_BYTES
            else:
                assert store.log.read([block], [target]) == [BlockStatus.LOADED]

    return each * threads * BLOCK_BYTES / in_threads(threads, work) / 1e9


def write_round(store: Filled, seed: int, *, plain: bool) -> float:
    """GB/s of batches, each flushed once."""
    batches = ROUND_BYTES // BLOCK_BYTES // BATCH
    starts = [random.Random(seed * 1000 + n).randrange(len(store.blocks) // BATCH) * BATCH for n in range(batches)]
    source = memoryview(mmap.mmap(-1, BATCH * (BLOCK_BYTES + HEADER_BYTES)))
    began = time.perf_counter()
    for start in starts:
        batch = store.blocks[start : start + BATCH]
        if plain:
            length = sum(block.slab.slot_bytes for block in batch)
            written = os.pwritev(store.plain, [source[:length]], batch[0].offset)
            assert written == length
            os.fdatasync(store.plain)
        else:
            store.write(batch)
    return batches * BATCH * BLOCK_BYTES / (time.perf_counter() - began) / 1e9


def compare(run: Callable[[int, bool], float]) -> dict[str, float]:
    """Medians of both and of the rounds' ratios; who goes first changes from round to round."""
    ours, plains = [], []
    for number in range(ROUNDS):
        for plain in (number % 2 == 0, number % 2 == 1):
            (plains if plain else ours).append(run(number, plain))
    ratios = [a / b for a, b in zip(ours, plains, strict=True)]
    return {
        "ours_gb_s": round(statistics.median(ours), 3),
        "plain_gb_s": round(statistics.median(plains), 3),
        "ratio": round(statistics.median(ratios), 3),
        "worst_ratio": round(min(ratios), 3),
    }


def measure(path: Path, nbytes: int, thread_counts: list[int]) -> list[dict[str, object]]:
    folder = Path(tempfile.mkdtemp(prefix="kvstrata-bench-ssd-", dir=path))
    try:
        store = Filled(folder, nbytes)
        # Plain writes go over the same slots, so they come last.
        rows: list[dict[str, object]] = []
        for threads in thread_counts:
            figures = compare(lambda n, plain, threads=threads: read_round(store, threads, n, plain=plain))
            rows.append({"case": f"random 1 MiB reads, {threads} threads", **figures})
        seconds, a_tb = min(store.rescan() for _ in range(5))
        rows.append(
            {
                "case": f"scan of {len(store.blocks)} headers",
                "seconds": round(seconds, 3),
                "seconds_per_tb": round(a_tb, 1),
                "headers_per_second": round(len(store.blocks) / seconds),
            }
        )
        figures = compare(lambda n, plain: write_round(store, n, plain=plain))
        rows.append({"case": f"writes, {BATCH} x 1 MiB a flush", **figures})
        direct = store.log.devices()[0].direct
        store.close()
        return [*rows, {"case": "device", "direct": direct, "bytes": nbytes}]
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the device")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.path, int(arguments.gib * (1 << 30)), arguments.threads)
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
