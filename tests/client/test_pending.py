"""Blocks whose one-sided transfer did not settle in time: their memory is nobody's until it has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from kvstrata.client import BlockStatus, Client, LoadResult
from kvstrata.client.fanout import Fanout
from kvstrata.client.transfers import TransferState
from kvstrata.proto.errors import FingerprintMismatch, ForbiddenSalt
from kvstrata.transfer.base import Push, Pushed
from tests.client.fake_pool import FakeMaster, FakeNode, FakePeer, packed, split
from tests.transfer.late_transfer import LateTransfer

SIZE = 64
S = BlockStatus


@pytest.fixture
def late(nodes: dict[str, FakeNode], master: FakeMaster) -> LateTransfer:
    """Both nodes have eight blocks; node a's answer for the first two is PENDING."""
    landing = LateTransfer()
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
    client: Client, nodes: dict[str, FakeNode], master: FakeMaster, late: LateTransfer
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
    client: Client, nodes: dict[str, FakeNode], master: FakeMaster, late: LateTransfer
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
    client: Client, nodes: dict[str, FakeNode], master: FakeMaster, late: LateTransfer
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


# -------------------------------------------------------------------- an error beside it: what is pending is told of


def halved(client: Client, nodes: dict[str, FakeNode], master: FakeMaster) -> Callable[[], LoadResult]:
    """Loads blocks of which the first four are known to be on node a, the others on node b."""
    into = stored(client, nodes, master)()
    ns = client.namespace("model/p", block_bytes=SIZE, block_tokens=16)
    first = split(packed(4), 16)
    master.where = {key: "a" if key[2] in first else "b" for key in master.where}
    client.lookup(ns, "", packed(8))
    rows = client.register(into).rows(ns)
    return lambda: client.load(ns, "", packed(8), rows)


def test_a_load_that_another_node_refuses_tells_what_is_pending(
    client: Client, nodes: dict[str, FakeNode], master: FakeMaster, late: LateTransfer
) -> None:
    load = halved(client, nodes, master)
    nodes["b"].fails = FingerprintMismatch("other weights")
    result = load()
    assert result.status.tolist() == [S.PENDING] * 2 + [S.LOADED] * 2 + [S.REFUSED] * 4
    assert not result.settled()
    late.over.set()
    assert result.settled()
    nodes["a"].answers.clear()
    nodes["a"].pending = ()
    with pytest.raises(FingerprintMismatch):
        load()


@pytest.mark.parametrize("error", [ForbiddenSalt("not yours"), ZeroDivisionError("a mistake")])
def test_a_load_whose_next_lookup_is_refused_tells_what_is_pending(
    client: Client,
    nodes: dict[str, FakeNode],
    master: FakeMaster,
    late: LateTransfer,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    load = halved(client, nodes, master)
    nodes["b"].answers = {split(packed(8), 16)[7]: S.CORRUPT}

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(client._directory, "lookup", refuse)
    result = load()
    assert result.status.tolist() == [S.PENDING] * 2 + [S.LOADED] * 5 + [S.CORRUPT]
    assert not result.settled()
    late.over.set()
    nodes["a"].answers.clear()
    nodes["a"].pending = ()
    with pytest.raises(type(error)):
        load()


def test_a_load_whose_listener_fails_tells_what_is_pending(
    client: Client, nodes: dict[str, FakeNode], master: FakeMaster, late: LateTransfer
) -> None:
    into = stored(client, nodes, master)()
    ns = client.namespace("model/p", block_bytes=SIZE, block_tokens=16)
    master.where = dict.fromkeys(master.where, "a")
    rows = client.register(into).rows(ns)

    def listen(part: int, mask: object) -> None:
        raise ZeroDivisionError("a mistake")

    result = client.load(ns, "", packed(8), rows, parts=(SIZE,), landed=listen)
    assert result.reasons == {"pending": 2, "loaded": 6} and not result.settled()
    late.over.set()
    nodes["a"].answers.clear()
    nodes["a"].pending = ()
    with pytest.raises(ZeroDivisionError):
        client.load(ns, "", packed(8), rows, parts=(SIZE,), landed=listen)


def test_a_store_that_another_node_refuses_tells_what_is_pending(
    client: Client, nodes: dict[str, FakeNode], master: FakeMaster, late: LateTransfer
) -> None:
    ns = client.namespace("model/p", block_bytes=SIZE, block_tokens=16)
    master.place_at = ["a", "b"]
    rows = client.register(np.zeros((8, SIZE), np.uint8)).rows(ns)
    nodes["b"].fails = FingerprintMismatch("other weights")
    result = client.store(ns, "", packed(8), rows)
    assert result.status.tolist() == [S.PENDING] * 2 + [S.STORED] * 2 + [S.REFUSED] * 4
    assert not result.settled()
    late.over.set()
    nodes["a"].answers.clear()
    nodes["a"].pending = ()
    with pytest.raises(FingerprintMismatch):
        client.store(ns, "", packed(8), rows)


def test_a_store_that_is_refused_in_a_later_turn_tells_what_is_pending(
    client: Client, nodes: dict[str, FakeNode], master: FakeMaster, late: LateTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns = client.namespace("model/p", block_bytes=SIZE, block_tokens=16)
    master.place_at = ["a"]
    rows = client.register(np.zeros((8, SIZE), np.uint8)).rows(ns)
    nodes["a"].durable = True
    nodes["a"].answers[split(packed(8), 16)[7]] = S.FULL
    push = FakePeer.push

    def once(peer: FakePeer, request: Push) -> Pushed:
        if nodes["a"].pushes:
            raise FingerprintMismatch("other weights")
        return push(peer, request)

    monkeypatch.setattr(FakePeer, "push", once)
    result = client.store(ns, "", packed(8), rows)
    assert result.status.tolist() == [S.PENDING] * 2 + [S.STORED] * 5 + [S.FULL]
    assert not result.settled()


def test_tasks_that_were_begun_have_ended_when_the_next_cannot_be() -> None:
    fanout, gate, ended = Fanout(threads=1), threading.Event(), threading.Event()
    fanout.run([lambda: None] * 2)
    assert fanout._pool is not None
    submit = fanout._pool.submit

    def once(task: Callable[[], None]) -> Future[None]:
        fanout._pool.submit = refuse  # type: ignore[union-attr,method-assign,assignment]
        return submit(task)

    def refuse(*_: object) -> None:
        gate.set()
        raise RuntimeError("no thread")

    def task() -> None:
        assert gate.wait(10)
        time.sleep(0.05)
        ended.set()

    fanout._pool.submit = once  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="no thread"):
        fanout.run([lambda: None, task, lambda: None])
    assert ended.is_set(), "it writes to its caller's memory"
    fanout.close()
