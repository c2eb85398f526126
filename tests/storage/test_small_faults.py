"""Small faults of a node with two tiers: leases that lapse, probes, sizes of evictions, one device of two."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.proto.wire import Kind
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.eviction.setting import EvictionOrder
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.node import ORDERS, StorageNode
from kvstrata.storage.records import VISIBLE
from kvstrata.storage.ssd.faults import Faults
from kvstrata.storage.ssd.log import SsdLog
from kvstrata.storage.ssd.opening import DeviceConfig
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.transfer.base import Endpoint, Fetch, Peer, Push, Verify
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.regions import Region
from kvstrata.transfer.shm import ShmPeer, ShmTransport
from kvstrata.transfer.tcp import TcpTransport
from tests.waiting import until

from .conftest import key, keys, payload
from .tier_node import TierNode

BLOCK_BYTES = 64 << 10
NAMESPACE = Namespace("model", BLOCK_BYTES, 16)
LOADED = int(BlockStatus.LOADED)


# ---------------------------------------------------------------------- both tiers, by hand


@pytest.fixture(params=list(EvictionOrder), ids=lambda order: str(order.value))
def ordered(request: pytest.FixtureRequest) -> Iterator[TierNode]:
    """A node whose tiers evict by the order that ``--eviction`` names."""
    node = TierNode(slabs=10, extents=20, order=ORDERS[request.param])
    yield node
    node.check()
    node.arena.close()


def visible(inventory: Inventory, salt: str, numbers: range) -> list[int]:
    held = {block.hash for block in inventory.blocks() if block.shelf.salt == salt}
    return [number for number in numbers if key(number) in held]


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.SSD])
def test_of_a_hundred_blocks_stored_in_ten_calls_the_last_thirty_leave(ordered: TierNode, tier: Tier) -> None:
    """... and no other, when a quota takes 30 % of them away, in either tier, by whatever order."""
    node, chain = ordered, range(100)
    node.chain(chain, 10, salt="a")
    while node.demote():
        pass
    inventory = node.state.inventory if tier is Tier.DRAM else node.ssd
    slot = next(inventory.blocks()).slab.slot_bytes
    assert visible(inventory, "a", chain) == list(chain)
    node.share("a", **{tier.name.lower(): 70 * slot})
    for _ in range(10):
        node.now += 1.0
        node.state.expire(node.now)
    assert visible(inventory, "a", chain) == list(range(70)), "exactly the last 30"
    other = node.ssd if tier is Tier.DRAM else node.state.inventory
    assert visible(other, "a", chain) == list(chain), "the other tier has its own share"


def test_a_pass_on_ssd_frees_what_was_asked(ordered: TierNode) -> None:
    """However many blocks are on SSD only: room for seven costs seven."""
    node, turn = ordered, 0
    full = False
    while not full:
        node.store(range(1000 * turn, 1000 * turn + 20), salt="a")
        before = node.ssd.visible
        while node.demote():
            pass
        full, turn = node.ssd.visible == before, turn + 1
        assert turn < 100
    count, evicted = node.ssd.visible, node.state.counts.evicted
    dram = node.state.inventory.visible
    node.store(range(900_000, 900_007), salt="b")
    in_dram = dram + 7 - node.state.inventory.visible
    while node.demote():
        pass
    assert visible(node.ssd, "b", range(900_000, 900_007)) == list(range(900_000, 900_007))
    assert node.ssd.visible == count, "as many have left as have come"
    assert node.state.counts.evicted - evicted == in_dram + 7


def test_probes_of_what_is_on_ssd_do_not_starve_stores(ordered: TierNode) -> None:
    """95 % full, somebody reads every key in a loop, from both tiers: new stores succeed."""
    node = ordered
    count = int(node.capacity * 0.95)
    node.store(range(count), salt="a")
    while node.demote():
        pass
    stored = 0
    for turn in range(100):
        node.now += 10.0
        node.state.expire(node.now)
        node.read(range(turn % 7, count, 7), salt="a")
        stored += node.store([10_000 + turn], salt=f"t{turn % 7}") == [int(BlockStatus.STORED)]
    assert stored >= 99


# ---------------------------------------------------------------------- a node on real files


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., StorageNode]]:
    nodes: list[StorageNode] = []

    def make(devices: int = 1) -> StorageNode:
        ssd = tuple((tmp_path / f"ssd{index}", 16 << 20) for index in range(devices))
        config = StorageConfig(
            (),
            "127.0.0.1:0",
            "127.0.0.1:0",
            tmp_path / "node",
            8 << 20,
            slab_bytes=1 << 20,
            ssd=ssd,
            ssd_policy=SsdPolicy.WRITE_THROUGH,
        )
        nodes.append(StorageNode(config))
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop()


def endpoint(node: StorageNode) -> Endpoint:
    return Endpoint(node.identity.node_id, node.identity.incarnation, node.channel, str(node.unix_path), boot_id())


def rows(numbers: range, version: int = 0) -> np.ndarray:
    return np.frombuffer(bytearray(b"".join(payload(key(n), version, BLOCK_BYTES) for n in numbers)), np.uint8).reshape(
        -1, BLOCK_BYTES
    )


def push(peer: Peer, numbers: range, version: int = 0) -> list[bool]:
    view = Region(rows(numbers, version).reshape(-1), None).rows(NAMESPACE)
    done = peer.push(Push(NAMESPACE, "", keys(numbers), view, time.monotonic() + 10))
    assert set(done.status.tolist()) == {int(BlockStatus.STORED)}
    return [] if done.durable is None else done.durable.tolist()


def fetch(peer: Peer, numbers: range, verify: Verify = "never") -> tuple[list[int], np.ndarray]:
    into = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
    view = Region(into.reshape(-1), None).rows(NAMESPACE)
    got = peer.fetch(Fetch(NAMESPACE, "", keys(numbers), view, time.monotonic() + 10, verify=verify))
    return got.status.tolist(), into


def forget_memory(node: StorageNode) -> None:
    """As if other stores had taken the room."""
    with node.lock:
        for block in list(node.state.inventory.blocks()):
            node.state.inventory.withdraw(block, "evicted")


def garbage_everywhere(node: StorageNode, peer: Peer) -> None:
    """Everything that was in memory has left it, and other bytes are in each of its slots."""
    forget_memory(node)
    with node.lock:
        free = node.state.arena.bytes_total
    first = 50_000
    while free > 0:
        push(peer, range(first, first + 16), 9)
        first += 16
        free -= 16 * BLOCK_BYTES


@pytest.mark.parametrize("how", ["lapse", "bump"])
@pytest.mark.parametrize("source", ["dram", "ssd"])
@pytest.mark.parametrize("count", [1, 8], ids=["one", "batch"])
def test_a_lease_that_lapses_while_its_blocks_are_copied_gives_no_bytes(
    build: Callable[..., StorageNode], monkeypatch: pytest.MonkeyPatch, source: str, count: int, how: str
) -> None:
    """The node's clock runs ahead, so that it ends the lease that its reader still believes in; or the weights
    change, which no lease holds up: their bytes are as they were, and must not be given after the confirmation."""
    node = build()
    node.start()
    peer, writer = (ShmTransport(Identity.new()).connect(endpoint(node)) for _ in range(2))
    numbers = range(count)
    assert all(push(peer, numbers))
    if source == "ssd":
        forget_memory(node)
    assert fetch(peer, numbers)[0] == [LOADED] * count
    if source == "ssd":
        forget_memory(node)
    ensure, get = peer.slabs.ensure, peer.slabs.get
    lapsed: list[bool] = []
    done: list[control.CommandDone] = []

    def lapse() -> None:
        if not lapsed:
            lapsed.append(True)
            if how == "bump":
                node.commands.advance(control.NamespaceEpoch(group="model", epoch=1, command=1), done.append)
                until(lambda: bool(done))
                return
            with node.lock:
                node.state.leases.expire(time.monotonic() + 1000.0)
            garbage_everywhere(node, writer)

    def late_ensure(wanted):  # type: ignore[no-untyped-def]
        lapse()
        return ensure(wanted)

    def late_get(index):  # type: ignore[no-untyped-def]
        lapse()
        return get(index)

    monkeypatch.setattr(peer.slabs, "ensure", late_ensure)
    monkeypatch.setattr(peer.slabs, "get", late_get)
    status, _ = fetch(peer, numbers)
    assert lapsed
    assert status == [int(BlockStatus.LEASE_LOST)] * count
    for each in (peer, writer):
        each.close()


@pytest.mark.parametrize("source", ["dram", "ssd"])
def test_a_view_whose_lease_lapsed_says_so(build: Callable[..., StorageNode], source: str) -> None:
    node = build()
    node.start()
    peer, writer = (ShmTransport(Identity.new()).connect(endpoint(node)) for _ in range(2))
    assert isinstance(peer, ShmPeer)
    push(peer, range(4))
    if source == "ssd":
        forget_memory(node)
    lease = peer.view(NAMESPACE, "", keys(range(4)), time.monotonic() + 10)
    assert lease.valid() and all(
        array is not None and bytes(array) == payload(key(n), 0, BLOCK_BYTES) for n, array in enumerate(lease.arrays)
    )
    with node.lock:
        node.state.leases.expire(time.monotonic() + 1000.0)
    garbage_everywhere(node, writer)
    assert not lease.valid(), "other bytes are there now"
    lease.close()
    for each in (peer, writer):
        each.close()


def test_resurrection_on_a_real_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 on its way to the device; removed; version 2 stored; the device goes on; restarted: 2, and no 1."""
    faults = Faults()

    def opened(config: StorageConfig, node_id: str, *_: object) -> SsdLog:
        return SsdLog.open(
            [DeviceConfig(*device) for device in config.ssd], node_id=node_id, open_file=faults.open_file
        )

    monkeypatch.setattr("kvstrata.storage.node.open_store", opened)
    config = StorageConfig(
        (), "127.0.0.1:0", "127.0.0.1:0", tmp_path / "n", 8 << 20, slab_bytes=1 << 20, ssd=((tmp_path / "s", 16 << 20),)
    )
    node = StorageNode(config)
    try:
        node.start()
        peer = ShmTransport(Identity.new()).connect(endpoint(node))
        numbers = range(4)
        push(peer, numbers, 1)
        faults.stall()
        with node.lock:
            assert node.ssd is not None
            move = node.ssd.moves.demotions(1 << 20, time.monotonic(), everything=True)
        assert move is not None
        with node.lock:
            assert node.state.remove(NAMESPACE, "", keys(numbers), time.monotonic()) == 4
        push(peer, numbers, 2)
        faults.resume()
        node.ssd.movers.perform(move)
        status, into = fetch(peer, numbers, "always")
        assert status == [LOADED] * 4 and (into == rows(numbers, 2)).all()
        peer.close()
    finally:
        faults.resume()
        node.stop()  # writes what is only in memory
    again = StorageNode(config)
    try:
        assert again.start()["ssd_blocks_found"] == 4
        peer = TcpTransport(Identity.new()).connect(endpoint(again))
        status, into = fetch(peer, range(4), "always")
        assert status == [LOADED] * 4 and (into == rows(range(4), 2)).all(), "version 1 has come back"
        peer.close()
    finally:
        again.stop()


def test_of_two_devices_one_fails_and_the_other_serves(
    build: Callable[..., StorageNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Faults(tmp_path / "ssd0")

    def opened(config: StorageConfig, node_id: str, *_: object) -> SsdLog:
        return SsdLog.open([DeviceConfig(*device) for device in config.ssd], node_id=node_id, open_file=bad.open_file)

    monkeypatch.setattr("kvstrata.storage.node.open_store", opened)
    node = build(devices=2)
    node.start()
    peer = TcpTransport(Identity.new()).connect(endpoint(node))
    parts = [range(first, first + 16) for first in range(0, 192, 16)]
    for part in parts:
        assert all(push(peer, part))
    with node.lock:
        assert node.state.ssd is not None
        on = {device: {b.hash for b in node.state.ssd.blocks() if b.slab.device == device} for device in (0, 1)}
    assert on[0] and on[1], "both are used"
    forget_memory(node)
    bad.read_errno = bad.write_errno = errno.EIO
    for part in sorted(parts, key=lambda part: -sum(key(number) in on[0] for number in part))[:3]:
        assert LOADED not in fetch(peer, part)[0]
    health = node.report.health
    until(lambda: any(str(tmp_path / "ssd0") in problem for problem in health()["problems"]))
    assert not health()["healthy"]
    assert [device["state"] for device in health()["devices"]] == ["failed", "serving"]
    until(lambda: node.state.ssd is not None and node.state.ssd.visible == len(on[1]))
    for part in parts:
        status, into = fetch(peer, part)
        for row, (number, code) in enumerate(zip(part, status, strict=True)):
            assert (code == LOADED) == (key(number) in on[1]), "the sound device serves all it has, and only that"
            assert code != LOADED or bytes(into[row]) == payload(key(number), 0, BLOCK_BYTES)
    assert all(push(peer, range(1000, 1016))), "what is stored from now on is durable on the other one"
    with node.lock:
        readable = {block.slab.device for block in node.state.ssd.blocks() if block.state == VISIBLE}
        assert readable == {1}, "what read wrong only rests in quarantine"
        node.state.check()
    peer.close()


def test_a_client_that_knows_nothing_of_epochs_or_tiers_still_works(build: Callable[..., StorageNode]) -> None:
    """Messages as they were before: no epoch, no request, no hints; until the weights change."""
    node = build()
    node.start()
    wire = Connection.open(node.channel, Identity.new(), silence_s=5.0)
    peer = TcpTransport(Identity.new()).connect(endpoint(node))
    push(peer, range(3))
    forget_memory(node)
    opened = wire.call(Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=NAMESPACE.to_spec()).SerializeToString())
    handle = expect(pb.NamespaceHandle, opened, Kind.NAMESPACE_HANDLE).handle
    old = pb.Acquire(ns=handle, hashes=keys(range(3)), deadline_ms=5000).SerializeToString()
    answer = expect(pb.AcquireOk, wire.call(Kind.ACQUIRE, old), Kind.ACQUIRE_OK)
    assert list(answer.status) == [LOADED] * 3
    with node.lock:
        node.state.set_epoch("model", 1, time.monotonic())
    answer = expect(pb.AcquireOk, wire.call(Kind.ACQUIRE, old), Kind.ACQUIRE_OK)
    assert LOADED not in answer.status, "old weights for one who cannot tell"
    wire.close()
    peer.close()
