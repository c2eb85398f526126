"""Memory of a device in calls that run in other threads: they come after what the caller's own stream has queued."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from kvstrata.client import Client, PoolNamespace
from kvstrata.client.aio import AsyncClient
from kvstrata.proto.errors import Unavailable
from kvstrata.transfer.base import Endpoint, Fetch, Push
from kvstrata.transfer.gpu.runtime import Event
from kvstrata.transfer.gpu.staging import StagedPeer, StagingOptions
from kvstrata.transfer.regions import BlockView
from tests.client.fake_pool import FakeChoice, FakeMaster, FakeNode, FakePeer, packed
from tests.transfer.gpu.fake_device import FakeArray, FakeDevice, FakeStream, fake_device

SIZE, COUNT = 64, 8  # placed in stripes of four: both nodes have some
BYTES = np.random.default_rng(0).integers(1, 256, (COUNT, SIZE), np.uint8)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The clients' peers are staged, as those of a real transport."""
    connect = FakeChoice.connect

    def staged(choice: FakeChoice, endpoint: Endpoint) -> StagedPeer:
        peer: FakePeer = connect(choice, endpoint)
        return StagedPeer(peer, choice.staging)

    monkeypatch.setattr(FakeChoice, "connect", staged)
    with fake_device() as device:
        yield device


@pytest.fixture
def client(device: FakeDevice, master: FakeMaster, connect: Callable[..., Client]) -> Iterator[Client]:
    with connect(master.address, transfer_deadline_ms=20_000) as client:
        yield client


class Kv:
    """Blocks on the device, which the engine's stream is yet to write."""

    def __init__(self, client: Client, device: FakeDevice, namespace: PoolNamespace) -> None:
        self.array: FakeArray = device.empty((COUNT, SIZE))
        self.blocks: BlockView = client.register(self.array).rows(namespace)
        self.engine: FakeStream = device.stream()

    @contextmanager
    def forward(self, rows: npt.NDArray[np.uint8] | int) -> Iterator[None]:
        """The engine's stream is current and has the writing of ``rows`` queued."""
        self.engine.queue(lambda: np.copyto(self.array.shadow, rows))
        with self.engine:
            yield


def others_first(monkeypatch: pytest.MonkeyPatch, device: FakeDevice, kind: str) -> None:
    """The caller's own copy is queued when that of another thread has been: copies of one kind run in turn."""
    copy, queued = getattr(device.runtime, kind), threading.Event()

    def in_turn(*arguments: object) -> Event:
        if threading.current_thread().name.startswith("kvstrata-node"):
            event: Event = copy(*arguments)
            queued.set()
            return event
        assert queued.wait(10)
        return copy(*arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(device.runtime, kind, in_turn)


def opened(client: Client) -> PoolNamespace:
    return client.namespace("g", block_bytes=SIZE, block_tokens=16)


def at_nodes(nodes: dict[str, FakeNode]) -> dict[bytes, bytes]:
    return {key[2]: data for node in nodes.values() for key, data in node.blocks.items()}


def expected() -> dict[bytes, bytes]:
    return {packed(1, i): BYTES[i].tobytes() for i in range(COUNT)}


def test_a_store_in_the_background(client: Client, device: FakeDevice, nodes: dict[str, FakeNode]) -> None:
    ns = opened(client)
    kv = Kv(client, device, ns)
    with kv.forward(BYTES):
        transfer = client.store_async(ns, "", packed(COUNT), kv.blocks)
        kv.engine.queue(lambda: None)
    assert not transfer.wait(time.monotonic() + 0.2)
    kv.engine.run(2)  # the forward pass and the mark, and not what came after the call
    assert transfer.result().stored.all()
    assert at_nodes(nodes) == expected()
    assert all(node.blocks for node in nodes.values())


def test_a_store_to_several_nodes_at_once(
    client: Client, device: FakeDevice, nodes: dict[str, FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    others_first(monkeypatch, device, "gather")
    ns = opened(client)
    kv = Kv(client, device, ns)

    def store() -> bool:
        with kv.forward(BYTES):
            return bool(client.store(ns, "", packed(COUNT), kv.blocks).stored.all())

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(store)
        with pytest.raises(TimeoutError):
            future.result(0.2)
        kv.engine.run()
        assert future.result(10)
    assert at_nodes(nodes) == expected()
    assert all(node.blocks for node in nodes.values())


def test_a_load_in_the_background(client: Client, device: FakeDevice, master: FakeMaster) -> None:
    ns = opened(client)
    assert client.store(ns, "", packed(COUNT), client.register(BYTES).rows(ns)).stored.all()
    master.learn()
    kv = Kv(client, device, ns)
    with kv.forward(7):  # the last use of these blocks
        transfer = client.load_async(ns, "", packed(COUNT), kv.blocks)
    assert not transfer.wait(time.monotonic() + 0.2)
    kv.engine.run()
    assert transfer.result().loaded.all()
    assert (kv.array.shadow == BYTES).all()


def test_a_load_from_several_nodes_at_once(
    client: Client, device: FakeDevice, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_first(monkeypatch, device, "scatter")
    ns = opened(client)
    assert client.store(ns, "", packed(COUNT), client.register(BYTES).rows(ns)).stored.all()
    master.learn()
    kv = Kv(client, device, ns)

    def load() -> bool:
        with kv.forward(7):
            return bool(client.load(ns, "", packed(COUNT), kv.blocks).loaded.all())

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(load)
        with pytest.raises(TimeoutError):
            future.result(0.2)
        kv.engine.run()
        assert future.result(10)
    assert (kv.array.shadow == BYTES).all()


def test_a_store_and_a_load_of_asyncio(
    device: FakeDevice, master: FakeMaster, nodes: dict[str, FakeNode], connect: Callable[..., Client]
) -> None:
    async def main() -> None:
        async with AsyncClient(master.address, transfer_deadline_ms=20_000) as client:
            ns = await client.namespace("g", block_bytes=SIZE, block_tokens=16)
            kv = Kv(client.sync, device, ns)
            with kv.forward(BYTES):
                storing = asyncio.ensure_future(client.store(ns, "", packed(COUNT), kv.blocks))
                assert not (await asyncio.wait([storing], timeout=0.2))[0]
            kv.engine.run()
            assert (await storing).stored.all() and at_nodes(nodes) == expected()
            master.learn()
            with kv.forward(7):
                loading = asyncio.ensure_future(client.load(ns, "", packed(COUNT), kv.blocks))
                assert not (await asyncio.wait([loading], timeout=0.2))[0]
            kv.engine.run()
            assert (await loading).loaded.all() and (kv.array.shadow == BYTES).all()

    asyncio.run(main())


def test_a_mark_that_the_blocks_carry_is_the_one(client: Client, device: FakeDevice) -> None:
    ns = opened(client)
    kv = Kv(client, device, ns)
    mark = device.runtime.mark()
    with kv.forward(BYTES):
        assert client.store_async(ns, "", packed(COUNT), kv.blocks.coming_after(mark)).result().stored.all()


def test_a_stream_that_cannot_be_marked_costs_the_blocks_and_shows(
    client: Client, device: FakeDevice, nodes: dict[str, FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    ns = opened(client)
    kv = Kv(client, device, ns)

    def fail() -> Event:
        raise Unavailable("cuda:0: cannot mark the current stream")

    with monkeypatch.context() as broken:
        broken.setattr(device.runtime, "mark", fail)
        transfer = client.store_async(ns, "", packed(COUNT), kv.blocks)
        assert set(transfer.result().reasons) == {"refused"}
        assert set(client.load(ns, "", packed(COUNT), kv.blocks).reasons) <= {"refused", "missing"}
    assert not at_nodes(nodes)
    assert "cannot mark" in str(client.health()["problems"])
    assert client.store(ns, "", packed(COUNT), kv.blocks).stored.all()
    assert "cannot mark" not in str(client.health()["problems"])


def test_memory_that_is_staged_is_named_to_no_transport_and_moves_by_way_of_the_host(
    client: Client, device: FakeDevice, nodes: dict[str, FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transports reach what they are told of, as rails do."""
    told: set[int] = set()
    direct: list[int] = []
    monkeypatch.setattr(FakeChoice, "register", lambda _, region: told.add(region.id))
    monkeypatch.setattr(FakePeer, "reaches_memory", lambda _, region: region.id in told, raising=False)
    monkeypatch.setattr(client._choice.staging, "options", StagingOptions(direct_bytes=1))
    for name in ("push", "fetch"):
        monkeypatch.setattr(FakePeer, name, counting(direct, getattr(FakePeer, name)))
    ns = opened(client)
    rows = client.register(device.array(BYTES), staged=True).rows(ns)
    assert client.store(ns, "", packed(COUNT), rows).stored.all() and at_nodes(nodes) == expected()
    into = device.empty((COUNT, SIZE))
    back = client.register(into, staged=True)
    assert client.load(ns, "", packed(COUNT), back.rows(ns)).loaded.all()
    assert (into.shadow == BYTES).all() and not direct
    client.unregister(back)
    plain = client.register(device.array(BYTES)).rows(ns)
    assert plain.region.id in told and rows.region.id not in told
    client.store(ns, "", packed(COUNT, 100), plain)
    assert set(direct) == {plain.region.id}, "without it these go directly"


def counting(direct: list[int], call: Callable[..., object]) -> Callable[..., object]:
    """``direct`` gets the regions of a device that the transport itself is asked to move."""

    def counted(peer: FakePeer, request: Fetch | Push) -> object:
        region = request.blocks.region
        if region.memory.on_host:
            return call(peer, request)
        direct.append(region.id)
        raise Unavailable("no rails here")

    return counted
