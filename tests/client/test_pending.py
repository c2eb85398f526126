"""Blocks whose one-sided transfer did not settle in time: their memory is nobody's until it has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvstrata.client import BlockStatus, Client
from kvstrata.client.transfers import TransferState
from tests.client.fake_pool import FakeMaster, FakeNode, packed, split

SIZE = 64
S = BlockStatus


class Transfer:
    """A landing that settles when it is told to."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def settled(self) -> bool:
        return self.over.is_set()

    def wait(self, deadline: float) -> bool:
        return self.over.wait(max(0.0, deadline - time.monotonic()))


@pytest.fixture
def late(nodes: dict[str, FakeNode], master: FakeMaster) -> Transfer:
    """Both nodes have eight blocks; node a's answer for the first two is PENDING."""
    landing = Transfer()
    nodes["a"].answers = dict.fromkeys(split(packed(8), 16)[:2], S.PENDING)
    nodes["a"].pending = (landing,)
    return landing


def stored(client: Client, nodes: dict[str, FakeNode], master: FakeMaster) -> Callable[[], np.ndarray]:  # type: ignore[type-arg]
    ns = client.namespace("model/p", block_bytes=SIZE, block_tokens=16)
    for node in nodes.values():
        node.put(ns, "", packed(8), [bytes([i]) * SIZE for i in range(8)])
    master.learn()
    return lambda: np.zeros((8, SIZE), np.uint8)


def test_a_pending_block_is_asked_of_nobody_else(
    client: Client, nodes: dict[str, FakeNode], master: FakeMaster, late: Transfer
) -> None:
    into = stored(client, nodes, master)()
    ns = client.namespace("model/p", block_bytes=SIZE, block_tokens=16)
    client.lookup(ns, "", packed(8))
    master.also = {key: ["b"] for key in master.where}
    master.where = dict.fromkeys(master.where, "a")
    nodes["a"].answers |= {split(packed(8), 16)[7]: S.CORRUPT}
    client._recent.forget(ns, "", epoch=ns.epoch)
    result = client.load(ns, "", packed(8), client.register(into).rows(ns))
    assert result.status.tolist() == [S.PENDING] * 2 + [S.LOADED] * 6
    assert result.reasons == {"pending": 2, "loaded": 6}
    assert not result.loaded[:2].any()
    asked = [name for kind, names in nodes["b"].calls for name in names if kind == "fetch"]
    assert split(packed(8), 16)[7] in asked, "what failed for good is had of another replica"
    assert not set(asked) & set(split(packed(8), 16)[:2]), "it would be written to twice"
    assert not result.settled()
    assert not result.settled(time.monotonic() + 0.01)
    late.over.set()
    assert result.settled()


def test_a_transfer_is_pending_until_its_memory_is_free(
    client: Client, nodes: dict[str, FakeNode], master: FakeMaster, late: Transfer
) -> None:
    into = stored(client, nodes, master)()
    ns = client.namespace("model/p", block_bytes=SIZE, block_tokens=16)
    master.where = dict.fromkeys(master.where, "a")
    transfer = client.load_async(ns, "", packed(8), client.register(into).rows(ns))
    assert transfer.result().reasons == {"pending": 2, "loaded": 6}, "what came can be used at once"
    assert transfer.state is TransferState.PENDING
    assert not transfer.done()
    assert not transfer.wait(time.monotonic() + 0.01)
    late.over.set()
    assert transfer.wait()
    assert transfer.state is TransferState.DONE


def test_a_store_that_is_still_being_read_says_so(
    client: Client, nodes: dict[str, FakeNode], master: FakeMaster, late: Transfer
) -> None:
    ns = client.namespace("model/p", block_bytes=SIZE, block_tokens=16)
    master.place_at = ["a"]
    rows = client.register(np.zeros((8, SIZE), np.uint8)).rows(ns)
    result = client.store(ns, "", packed(8), rows)
    assert result.reasons == {"pending": 2, "stored": 6}
    assert not result.stored[:2].any()
    assert not result.settled()
    late.over.set()
    assert result.settled()


def test_what_has_nothing_pending_has_settled(client: Client, nodes: dict[str, FakeNode], master: FakeMaster) -> None:
    into = stored(client, nodes, master)()
    ns = client.namespace("model/p", block_bytes=SIZE, block_tokens=16)
    rows = client.register(into).rows(ns)
    assert client.load(ns, "", packed(8), rows).settled()
    assert client.store(ns, "", packed(8), rows).settled()
    assert client.prefetch(ns, "", packed(8)).wait() is not None
