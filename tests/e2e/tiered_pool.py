"""A real pool of nodes with two tiers, what its daemons say over HTTP, and tenants that read and flood."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvstrata.client import Client
from kvstrata.client.client import PoolNamespace
from kvstrata.client.results import LoadResult, Lookup, StoreResult
from kvstrata.proto.errors import KVError
from tests.e2e.real_pool import ANY, Daemon, RealPool, keys, payload
from tests.waiting import until

BLOCK_BYTES = 32 << 10
#: What a block takes in memory, and on SSD with its header.
DRAM_SLOT = 32 << 10
SSD_SLOT = 36 << 10


class TieredPool(RealPool):
    """Nodes of ``dram`` and ``ssd`` each, written through unless ``more`` says otherwise."""

    def __init__(
        self, base: Path, nodes: int = 1, dram: str = "8MiB", ssd: str = "32MiB", more: tuple[str, ...] = ()
    ) -> None:
        self._where = ""
        self._ssd, self._more = ssd, more or ("--ssd-policy", "write-through")
        super().__init__(base, nodes, dram)

    @property
    def address(self) -> str:
        """The first master's, also while it is away: it comes back there."""
        self._where = self._where or str(self.daemons["master"].ready["channel"])
        return self._where

    def start_node(self, index: int) -> None:
        name = f"node{index}"
        self.daemons[name] = Daemon(
            "storage", "--master", self.address, "--listen", ANY, "--http", ANY,
            "--data", str(self._base / name), "--dram", self._dram, "--slab", "1MiB",
            "--ssd", f"{self._base / f'{name}-ssd'}={self._ssd}", *self._more,
            log=self._base / f"{name}.log",
        )  # fmt: skip

    def data_of(self, index: int) -> Path:
        return self._base / f"node{index}"

    def ssd_of(self, index: int) -> Path:
        return self._base / f"node{index}-ssd"

    def kill(self, name: str) -> None:
        self.daemons[name].signal(signal.SIGKILL)
        self.daemons[name].end()

    def restart_master(self) -> None:
        """Killed, and started where it was."""
        self.kill("master")
        self.start_master(self.address)
        assert self.daemons["master"].ready["channel"] == self.address

    def restart_node(self, index: int) -> None:
        self.kill(f"node{index}")
        self.start_node(index)
        _ = self.node(index).ready

    def health(self, index: int = 0) -> dict[str, Any]:
        return dict(json.loads(_get(self.node(index), "/healthz")))

    def tenants(self, index: int, *salts: str) -> list[dict[str, Any]]:
        """Bytes and shares of tenants on one node, at one moment."""
        asked = "&".join(f"salt={salt}" for salt in salts)
        return list(json.loads(_get(self.node(index), f"/tenants?{asked}"))["tenants"])

    def metrics(self, name: str) -> dict[tuple[str, str], float]:
        """(sample, its only label's value or "") -> value."""
        text = _get(self.daemons[name], "/metrics").decode()
        return {
            (sample.name, next(iter(sample.labels.values()), "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def _get(daemon: Daemon, path: str) -> bytes:
    try:
        with urllib.request.urlopen(f"http://{daemon.ready['http']}{path}", timeout=5) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return bytes(error.read())
    except http.client.HTTPException as error:  # it died while it answered
        raise ConnectionError(f"{daemon.ready['http']} broke off: {error}") from error


class Tenant:
    """One tenant of a pool, with a chain of blocks whose bytes it knows."""

    def __init__(self, client: Client, salt: str, count: int, group: str = "model/t", chain: str = "c") -> None:
        self.client, self.salt, self.count = client, salt, count
        self.ns: PoolNamespace = client.namespace(group, block_bytes=BLOCK_BYTES, block_tokens=16)
        self.hashes = keys(count, f"{salt}/{chain}")
        self.data = payload(self.hashes, salt, BLOCK_BYTES)

    def store(self) -> StoreResult:
        return self.client.store(self.ns, self.salt, self.hashes, self.client.register(self.data.copy()).rows(self.ns))

    def lookup(self, request: str = "") -> Lookup:
        return self.client.lookup(self.ns, self.salt, self.hashes, request=request)

    def load(self) -> LoadResult:
        """Whatever is loaded is right, or this raises."""
        into = np.zeros_like(self.data)
        got = self.client.load(self.ns, self.salt, self.hashes, self.client.register(into).rows(self.ns))
        assert (into[got.loaded] == self.data[got.loaded]).all(), "wrong bytes"
        return got

    def stored(self) -> Tenant:
        """All of it stored, and known to the master."""
        result = self.store()
        assert result.stored.all(), result.reasons
        until(lambda: self.lookup().hit_blocks == self.count)
        return self


@dataclass(slots=True)
class Flood:
    """What a flood has got through: blocks, and calls that stored some."""

    blocks: int = 0
    calls: int = 0

    def goes_on(self, calls: int = 20, seconds: float = 20.0) -> None:
        """Wait for so many more calls that stored something."""
        upto = self.calls + calls
        until(lambda: self.calls >= upto, seconds)


@contextmanager
def flooding(pool: RealPool, salts: tuple[str, ...], batch: int = 32, group: str = "model/t") -> Iterator[Flood]:
    """Blocks that nobody will ask for, stored as fast as a process of its own can, by tenants in turn."""
    command = [sys.executable, "-m", "tests.e2e.tiered_pool", pool.address, group, str(batch), *salts]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    flood = Flood()
    assert process.stdout is not None

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            flood.blocks += int(line)
            flood.calls += int(line) > 0

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        flood.goes_on(1)
        yield flood
        assert process.poll() is None, "the flood ended by itself"
    finally:
        process.kill()
        process.wait(10)
        follower.join()
        process.stdout.close()


def flood(address: str, group: str, batch: int, salts: list[str]) -> None:
    """Until killed: a line for each call, with the blocks that it stored."""
    with Client(address) as client:
        ns = client.namespace(group, block_bytes=BLOCK_BYTES, block_tokens=16)
        blocks = client.register(np.zeros(batch * BLOCK_BYTES, np.uint8)).rows(ns)
        rng = np.random.default_rng(1)
        while True:
            for salt in salts:
                try:
                    stored = int(client.store(ns, salt, rng.bytes(16 * batch), blocks).stored.sum())
                except KVError:
                    stored = 0
                print(stored, flush=True)
                if not stored:
                    time.sleep(0.01)


if __name__ == "__main__":
    flood(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
