"""kvstrata on the case table: a master and a node as real processes, a client here."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import Round, calls_for, measure

from kvstrata.client import Client, LoadResult, StoreResult


@contextmanager
def pool(dram: str = "4GiB") -> Iterator[str]:
    """``kvstrata dev`` with one node; yields the master's address."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as data:
        command = [sys.executable, "-m", "kvstrata.cli.app", "dev", "--nodes", "1", "--dram", dram, "--port-base", "0"]
        process = subprocess.Popen(
            [*command, "--data", data, "--log-format", "json"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("kvstrata dev did not start: its reason is above")
            yield json.loads(line)["master"]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(15)


class Bench:
    """One client against one pool. ``memory``: "numpy" (the node reads it by process_vm_readv) or
    "shared" (allocated by the client, so that the node maps it)."""

    def __init__(self, master: str, transport: str, memory: str = "numpy") -> None:
        self.client = Client(master, transport=transport, transfer_deadline_ms=20_000)
        self.memory = memory
        self._count = 0

    def _hashes(self, count: int) -> bytes:
        self._count += 1
        return b"".join(
            hashlib.blake2b(b"%d/%d" % (self._count, index), digest_size=16).digest() for index in range(count)
        )

    def data_rounds(self, block_bytes: int, batch: int) -> tuple[Round, Round]:
        """(store, load): every call stores or loads ``batch`` fresh blocks; bytes are compared after."""
        client = self.client
        namespace = client.namespace(f"bench/{block_bytes}", block_bytes=block_bytes, block_tokens=16)
        calls = calls_for(block_bytes, batch)
        source, target = self._region(batch * block_bytes), client.register(np.zeros(batch * block_bytes, np.uint8))
        source.bytes[:] = np.random.default_rng(2).integers(0, 256, batch * block_bytes, dtype=np.uint8)
        rows, into = source.rows(namespace), target.rows(namespace)
        keys = [self._hashes(batch) for _ in range(calls)]
        warm = self._hashes(batch)
        first = client.store(namespace, "", warm, rows)
        assert first.stored.all(), first.reasons
        assert client.load(namespace, "", warm, into).loaded.all()
        nbytes = calls * batch * block_bytes
        stored = measure([lambda k=k: _whole(client.store(namespace, "", k, rows)) for k in keys], nbytes)  # type: ignore[misc]
        loaded = measure([lambda k=k: _whole(client.load(namespace, "", k, into)) for k in keys], nbytes)  # type: ignore[misc]
        assert (target.bytes == source.bytes).all(), "wrong bytes"
        for k in [*keys, warm]:
            client.remove(namespace, "", k)
        client.unregister(source)
        client.unregister(target)
        return stored, loaded

    def lookup_round(self, count: int, calls: int = 20) -> Round:
        """Lookup of ``count`` hashes, all present."""
        client = self.client
        namespace = client.namespace("bench/lookup", block_bytes=64, block_tokens=16)
        hashes = self._hashes(count)
        region = client.register(np.zeros(count * 64, np.uint8))
        assert client.store(namespace, "", hashes, region.rows(namespace)).stored.all()
        self._settle(namespace, hashes, count)

        def call() -> None:
            assert client.lookup(namespace, "", hashes).hit_blocks == count

        taken = measure([call] * (calls if count > 100 else 300), 0)
        client.remove(namespace, "", hashes)
        client.unregister(region)
        return taken

    def _settle(self, namespace: object, hashes: bytes, count: int) -> None:
        import time

        deadline = time.monotonic() + 10
        while self.client.lookup(namespace, "", hashes).hit_blocks != count:  # type: ignore[arg-type]
            assert time.monotonic() < deadline, "the directory did not learn of the blocks"
            time.sleep(0.01)

    def _region(self, nbytes: int):  # type: ignore[no-untyped-def]
        if self.memory == "shared":
            return self.client.allocate(nbytes)
        return self.client.register(np.zeros(nbytes, np.uint8))

    def close(self) -> None:
        self.client.close()


def _whole(result: StoreResult | LoadResult) -> None:
    held = {"stored", "already_present", "loaded"}
    assert not set(result.reasons) - held, f"a block was not moved: {result.reasons}"
