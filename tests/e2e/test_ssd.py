"""A node with an SSD tier on real files: more than DRAM is served, a kill loses nothing that was flushed."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.storage.ssd.faults import Faults
from kvstrata.storage.ssd.log import SsdLog
from kvstrata.storage.ssd.opening import DeviceConfig
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.transfer.base import Endpoint, Fetch, Fetched, Named, Push, Pushed
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.regions import Region
from kvstrata.transfer.shm import ShmTransport
from kvstrata.transfer.tcp import TcpTransport
from tests.waiting import until

from .real_pool import ANY, Daemon, keys, payload

BLOCK_BYTES = 128 << 10
NAMESPACE = Namespace("model", BLOCK_BYTES, 16)
#: 16 MiB of blocks, on nodes with 8 MiB of DRAM.
COUNT = 128
HASHES = keys(COUNT)
PAYLOAD = payload(HASHES, "", BLOCK_BYTES)
DEADLINE_S = 10.0

Ready = dict[str, Any]
LOADED = int(BlockStatus.LOADED)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    daemons: list[Daemon] = []

    def begin(*more: str) -> Daemon:
        where = ("--master", "127.0.0.1:1", "--listen", ANY, "--http", ANY, "--data", str(tmp_path / "node"))
        size = ("--dram", "8MiB", "--slab", "1MiB", "--ssd", f"{tmp_path / 'ssd'}=48MiB")
        daemons.append(Daemon("storage", *where, *size, *more, log=tmp_path / "log"))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        daemon.end()


def push(ready: Ready, first: int = 0, count: int = 8) -> Pushed:
    with_bytes = PAYLOAD[first : first + count].reshape(-1).copy()
    hashes = HASHES[first * 16 : (first + count) * 16]
    peer = ShmTransport(Identity.new()).connect(endpoint(ready))
    try:
        region = Region(with_bytes, None)
        return peer.push(Push(NAMESPACE, "", hashes, region.rows(NAMESPACE), time.monotonic() + DEADLINE_S))
    finally:
        peer.close()


def fetch(
    ready: Ready, transport: Callable[[Identity], Any] = ShmTransport, first: int = 0, count: int = 8
) -> tuple[Fetched, npt.NDArray[np.uint8]]:
    peer = transport(Identity.new()).connect(endpoint(ready))
    into = np.zeros((count, BLOCK_BYTES), np.uint8)
    hashes = HASHES[first * 16 : (first + count) * 16]
    try:
        rows = Region(into.reshape(-1), None).rows(NAMESPACE)
        return peer.fetch(Fetch(NAMESPACE, "", hashes, rows, time.monotonic() + DEADLINE_S)), into
    finally:
        peer.close()


def endpoint(ready: Ready) -> Endpoint:
    return Endpoint(ready["node_id"], ready["incarnation"], ready["channel"], ready["unix"], boot_id())


def health(ready: Ready) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{ready['http']}/healthz", timeout=5) as answer:
        return dict(json.loads(answer.read()))


def fill(ready: Ready) -> None:
    """Store all, no faster than the disk takes them."""
    for first in range(0, COUNT, 8):
        assert set(push(ready, first).status) == {BlockStatus.STORED}
        until(lambda: _dirty(ready) <= COUNT // 4)


def _dirty(ready: Ready) -> int:
    counts = health(ready)["counts"]
    return int(counts["stored"]) - int(counts["demoted"])


def statuses(ready: Ready, transport: Callable[[Identity], Any] = ShmTransport) -> list[int]:
    """Read everything, piece by piece; what is loaded is right."""
    found: list[int] = []
    for first in range(0, COUNT, 16):
        got, into = fetch(ready, transport, first, 16)
        for i, status in enumerate(got.status.tolist()):
            found.append(status)
            assert status != LOADED or np.array_equal(into[i], PAYLOAD[first + i]), f"wrong bytes in block {first + i}"
    return found


def test_more_than_dram_is_served_and_survives_a_kill(start: Callable[..., Daemon]) -> None:
    first = start("--ssd-policy", "write-through")
    ready = first.ready
    assert (ready["ssd_blocks_found"], ready["ssd_policy"]) == (0, "write-through")
    for block in range(0, COUNT, 8):
        assert all(push(ready, block).durable)
    assert statuses(ready) == [LOADED] * COUNT
    assert statuses(ready, TcpTransport) == [LOADED] * COUNT
    counts = health(ready)["counts"]
    assert counts["hits_ssd"] == counts["promoted"] > COUNT and counts["evicted_unwritten"] == 0
    assert set(fetch(ready, first=0)[0].tier) == {Tier.SSD}, "the last reads were of others"
    assert set(fetch(ready, first=0)[0].tier) == {Tier.DRAM}
    first.signal(signal.SIGKILL)

    second = start().ready
    assert second["channel"] != ready["channel"] and second["node_id"] == ready["node_id"]
    assert second["ssd_blocks_found"] == COUNT and second["ssd_scan_seconds"] >= 0
    assert statuses(second) == [LOADED] * COUNT
    assert health(second)["problems"] == []


def test_what_is_demoted_is_found_and_what_is_lost_is_counted(start: Callable[..., Daemon]) -> None:
    first = start()
    fill(first.ready)
    found = statuses(first.ready)
    counts = health(first.ready)["counts"]
    assert COUNT - found.count(LOADED) <= counts["evicted_unwritten"] <= COUNT // 4
    assert counts["demoted"] >= COUNT * 3 // 4
    first.signal(signal.SIGKILL)
    assert start().ready["ssd_blocks_found"] >= counts["demoted"]


# ---------------------------------------------------------------------- nodes in this process


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., StorageNode]]:
    nodes: list[StorageNode] = []

    def make(data: str = "node", policy: SsdPolicy = SsdPolicy.WRITE_THROUGH) -> StorageNode:
        devices = ((tmp_path / "ssd", 16 << 20),)
        config = StorageConfig(
            (), ANY, ANY, tmp_path / data, 8 << 20, slab_bytes=1 << 20, ssd=devices, ssd_policy=policy,
            scrub_rate=0,  # what a reader finds is looked at here, and not what was found before
        )  # fmt: skip
        nodes.append(StorageNode(config))
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop()


def test_a_clean_stop_writes_what_was_only_in_memory(build: Callable[..., StorageNode]) -> None:
    first = build(policy=SsdPolicy.DEMOTE)
    ready = first.start()
    push(ready)
    assert health(ready)["counts"]["demoted"] == 0
    first.stop()
    again = build(policy=SsdPolicy.OFF).start()
    assert again["ssd_blocks_found"] == 8
    got, into = fetch(again)
    assert set(got.status) == {LOADED} and np.array_equal(into, PAYLOAD[:8])
    assert not any(push(again, 8).durable)
    assert list(push(again, 4).durable) == [True] * 4 + [False] * 4, "what was there says so"
    assert health(again)["counts"]["demoted"] == 0


def test_flipped_bytes_are_misses_and_nothing_else(build: Callable[..., StorageNode], tmp_path: Path) -> None:
    first = build()
    push(first.start())
    first.stop()
    file = tmp_path / "ssd" / "extents"
    data = file.read_bytes()
    where = [data.index(PAYLOAD[i].tobytes()) + 1000 * i for i in (2, 5)]
    with file.open("r+b") as disk:
        for offset in where:
            disk.seek(offset)
            disk.write(bytes([data[offset] ^ 0x10]))
    again = build().start()
    for transport in (ShmTransport, TcpTransport):
        got, into = fetch(again, transport)
        expected = [LOADED if i not in (2, 5) else -1 for i in range(8)]
        assert [s if s == LOADED else -1 for s in got.status.tolist()] == expected
        assert all(np.array_equal(into[i], PAYLOAD[i]) for i in range(8) if expected[i] == LOADED)
    counts = health(again)["counts"]
    assert (counts["ssd_corrupt"], counts["misses_corrupt"]) == (2, 2)
    assert set(push(again).status) == {BlockStatus.ALREADY_PRESENT, BlockStatus.STORED}
    assert set(fetch(again)[0].status) == {LOADED}


def test_one_directory_for_two_nodes_is_refused(build: Callable[..., StorageNode]) -> None:
    build()
    with pytest.raises(ConfigError, match=str(os.getpid())):
        build(data="other")


# ---------------------------------------------------------------------- a device in trouble, in this process


@pytest.fixture
def faulty(build: Callable[..., StorageNode], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StorageNode, Faults]]:
    faults = Faults()

    def opened(config: StorageConfig, node_id: str, _: object) -> SsdLog:
        configs = [DeviceConfig(path, nbytes) for path, nbytes in config.ssd]
        return SsdLog.open(configs, node_id=node_id, open_file=faults.open_file)

    monkeypatch.setattr("kvstrata.storage.node.open_store", opened)
    yield build(), faults
    faults.resume()


def _forget_memory(node: StorageNode) -> None:
    """As if other stores had taken the room."""
    with node.lock:
        inventory = node.state.inventory
        for block in list(inventory.blocks()):
            inventory.withdraw(block, "evicted")


@pytest.mark.parametrize("trouble", [errno.ENOSPC, errno.EIO])
def test_a_device_that_takes_nothing(faulty: tuple[StorageNode, Faults], trouble: int) -> None:
    node, faults = faulty
    ready = node.start()
    assert list(push(ready).durable) == [True] * 8
    faults.write_errno = trouble
    done = push(ready, 8)
    assert set(done.status) == {BlockStatus.STORED} and not any(done.durable)
    assert set(fetch(ready, first=8)[0].status) == {LOADED}
    with node.lock:
        assert node.ssd is not None
        node.state.check()
        node.ssd.moves.check()


def test_a_device_that_gives_nothing_back_is_taken_out(faulty: tuple[StorageNode, Faults]) -> None:
    node, faults = faulty
    ready = node.start()
    push(ready, 0, 16)
    _forget_memory(node)
    faults.read_errno = errno.EIO
    got, _ = fetch(ready, first=0, count=16)
    assert LOADED not in got.status
    until(lambda: any(str(node.config.ssd[0][0]) in problem for problem in node.report.problems()))
    assert set(push(ready, 16).status) == {BlockStatus.STORED}, "the node lives on"
    assert set(fetch(ready, first=16)[0].status) == {LOADED}
    until(lambda: node.state.ssd is not None and node.state.ssd.visible == 0)
    with node.lock:
        assert node.ssd is not None
        node.state.check()
        node.ssd.moves.check()


def test_a_read_that_hangs_is_late_and_a_removed_block_does_not_come_back(faulty: tuple[StorageNode, Faults]) -> None:
    node, faults = faulty
    ready = node.start()
    push(ready)
    _forget_memory(node)
    faults.stall()
    peer = ShmTransport(Identity.new()).connect(endpoint(ready))
    into = np.zeros(8 * BLOCK_BYTES, np.uint8)
    began = time.monotonic()
    hashes = HASHES[: 8 * 16]
    rows = Region(into, None).rows(NAMESPACE)
    got = peer.fetch(Fetch(NAMESPACE, "", hashes, rows, time.monotonic() + 0.5))
    assert LOADED not in got.status and time.monotonic() - began < 3
    peer.close()
    with node.lock:
        assert node.state.remove(NAMESPACE, "", hashes[:16], time.monotonic()) == 1
    faults.resume()
    until(lambda: node.ssd is not None and not node.ssd.moves.moving)
    assert fetch(ready)[0].status.tolist() == [int(BlockStatus.MISSING)] + [LOADED] * 7


def test_a_size_that_the_disk_has_not_is_refused(tmp_path: Path) -> None:
    config = StorageConfig((), ANY, ANY, tmp_path / "n", 8 << 20, slab_bytes=1 << 20, ssd=((tmp_path / "s", 1 << 60),))
    with pytest.raises(ConfigError):
        StorageNode(config)
    StorageNode(StorageConfig((), ANY, ANY, tmp_path / "n", 8 << 20, slab_bytes=1 << 20)).stop()


def test_a_prefetch_is_answered_at_once_and_read_meanwhile(faulty: tuple[StorageNode, Faults]) -> None:
    node, faults = faulty
    ready = node.start()
    push(ready)
    _forget_memory(node)
    peer = TcpTransport(Identity.new()).connect(endpoint(ready))
    faults.stall()
    ask = Named(NAMESPACE, "", HASHES[: 9 * 16], time.monotonic() + DEADLINE_S)
    assert peer.prefetch(ask).tolist() == [int(BlockStatus.IN_FLIGHT)] * 8 + [int(BlockStatus.MISSING)]
    faults.resume()
    until(lambda: peer.prefetch(ask).tolist()[:8] == [LOADED] * 8)
    peer.close()
    got, into = fetch(ready)
    assert set(got.tier) == {Tier.DRAM} and np.array_equal(into, PAYLOAD[:8])
