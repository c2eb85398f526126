"""Stores of blocks that are still being written: what nodes are asked to wait for, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstrata.client import BlockStatus, Client, PoolNamespace
from kvstrata.proto.errors import InvalidArgument
from tests.client.fake_pool import FakeMaster, FakeNode, packed, split
from tests.client.test_replicas import nodes
from tests.transfer.gpu.fake_device import fake_device

__all__ = ["nodes"]
SIZE, COUNT = 64, 8
ENDS = (16, 32, 64)
Written = Callable[[int, float], bool]


@pytest.fixture
def namespace(client: Client) -> PoolNamespace:
    return client.namespace("m/ranges", block_bytes=SIZE, block_tokens=16)


def always(part: int, deadline: float) -> bool:
    return True


def test_every_node_of_a_call_waits_for_the_ranges(
    client: Client, namespace: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    source = client.register(np.arange(SIZE * COUNT, dtype=np.uint8)).rows(namespace)
    result = client.store(namespace, "", packed(COUNT), source, parts=ENDS, written=always)
    assert result.stored.all()
    pushes = [push for node in nodes.values() for push in node.pushes]
    assert len(pushes) > 1 and all(push.parts == ENDS and push.written is always for push in pushes)


def test_what_is_placed_once_more_waits_too(
    client: Client, namespace: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    master.place_at = ["a", "b"]
    nodes["a"].answers = dict.fromkeys(split(packed(COUNT)), BlockStatus.REFUSED)
    source = client.register(np.zeros(SIZE * COUNT, np.uint8)).rows(namespace)
    assert client.store(namespace, "", packed(COUNT), source, parts=ENDS, written=always).stored.all()
    assert len(nodes["b"].pushes) == 2 and all(push.written is always for push in nodes["b"].pushes)


def test_whole_stores_wait_for_nothing(
    client: Client, namespace: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    source = client.register(np.zeros(SIZE * COUNT, np.uint8)).rows(namespace)
    assert client.store(namespace, "", packed(COUNT), source).stored.all()
    assert all(push.written is None and not push.parts for node in nodes.values() for push in node.pushes)


@pytest.mark.parametrize(
    ("parts", "written"), [((64,), None), ((), always), ((32,), always), ((32, 32, 64), always), ((0, 64), always)]
)
def test_ranges_that_are_no_partition_are_refused(
    client: Client,
    namespace: PoolNamespace,
    nodes: dict[str, FakeNode],
    parts: tuple[int, ...],
    written: Written | None,
) -> None:
    source = client.register(np.zeros(SIZE * COUNT, np.uint8)).rows(namespace)
    with pytest.raises(InvalidArgument, match="parts"):
        client.store(namespace, "", packed(COUNT), source, parts=parts, written=written)
    assert not any(node.pushes for node in nodes.values())


def test_memory_of_a_device_is_stored_when_it_is_written(
    client: Client, namespace: PoolNamespace, nodes: dict[str, FakeNode]
) -> None:
    with fake_device() as device:
        source = client.register(device.empty((COUNT, SIZE))).rows(namespace)
        with pytest.raises(InvalidArgument, match="host memory"):
            client.store(namespace, "", packed(COUNT), source, parts=ENDS, written=always)
