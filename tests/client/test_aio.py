"""The async face: the same results, many calls at once, and cancellation that waits for the memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvstrata.client import BlockStatus, Client
from kvstrata.client.aio import AsyncClient
from kvstrata.proto.errors import Closed, InvalidArgument
from tests.client.fake_pool import FakeMaster, FakeNode, packed, split
from tests.transfer.late_transfer import LateTransfer

SIZE = 64


@pytest.fixture
def make(connect: Callable[..., Client], master: FakeMaster) -> Callable[[], AsyncClient]:
    return lambda: AsyncClient(master.address)


def test_every_call_is_there(make: Callable[[], AsyncClient], master: FakeMaster) -> None:
    async def main() -> None:
        async with make() as client:
            ns = await client.namespace("g", block_bytes=SIZE, block_tokens=16)
            data, into = np.full((8, SIZE), 5, np.uint8), np.zeros((8, SIZE), np.uint8)
            source, target = client.register(data), client.register(into)
            assert (await client.store(ns, "", packed(8), source.rows(ns))).stored.all()
            master.learn()
            assert (await client.lookup(ns, "", packed(8))).hit_blocks == 8
            assert (await client.lookup(ns, "", packed(1), request="r")).hit_blocks == 1
            assert master.asked[-1].request == "r"
            assert (await client.exists(ns, "", packed(9))).sum() == 8
            assert [await client.keep(ns, "", packed(8), 5), await client.forget(ns, "", packed(8))] == [8, 8]
            assert await client.drop(ns, "", packed(2)) == 2
            found = await client.prefetch(ns, "", packed(8))
            assert found is not None and found.hit_blocks == 8
            assert (await client.load(ns, "", packed(8), target.rows(ns))).loaded.all() and (into == 5).all()
            async with client.view(ns, "", packed(8)) as view:
                assert all(block is not None and (block == 5).all() for block in view)
            assert (await client.remove(ns, "", packed(8))).removed == 8
            with pytest.raises(InvalidArgument):
                await client.load(ns, "", packed(7), target.rows(ns))
            many = await asyncio.gather(*(client.lookup(ns, "", packed(2, i)) for i in range(64)))
            assert all(found.answered for found in many)
            await client.unregister(source)
            assert client.health()["healthy"]
        await client.close()
        with pytest.raises(Closed):
            await client.lookup(ns, "", packed(1))

    asyncio.run(main())


def test_a_cancelled_load_ends_before_the_cancellation(
    make: Callable[[], AsyncClient], nodes: dict[str, FakeNode]
) -> None:
    async def main() -> None:
        async with make() as client:
            ns = await client.namespace("g", block_bytes=SIZE, block_tokens=16)
            blocks = client.register(np.zeros((2, SIZE), np.uint8)).rows(ns)
            await client.store(ns, "", packed(2), blocks)
            nodes["a"].hold = threading.Event()
            task = asyncio.create_task(client.load(ns, "", packed(2), blocks))
            while not nodes["a"].fetches or nodes["a"].fetches[-1] == 0:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done(), "the node may still write to the memory"
            nodes["a"].hold.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_a_cancelled_load_has_settled_before_the_cancellation(
    make: Callable[[], AsyncClient], nodes: dict[str, FakeNode]
) -> None:
    async def main() -> None:
        async with make() as client:
            ns = await client.namespace("g", block_bytes=SIZE, block_tokens=16)
            blocks = client.register(np.zeros((2, SIZE), np.uint8)).rows(ns)
            await client.store(ns, "", packed(2), blocks)
            late = LateTransfer()
            node = nodes["a"]
            node.answers, node.pending = dict.fromkeys(split(packed(2)), BlockStatus.PENDING), (late,)
            node.hold = threading.Event()
            task = asyncio.create_task(client.load(ns, "", packed(2), blocks))
            while not node.fetches or node.fetches[-1] == 0:
                await asyncio.sleep(0.001)
            task.cancel()
            node.hold.set()
            await asyncio.wait([task], timeout=0.3)
            assert not task.done(), "its memory may still be written to"
            late.over.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
