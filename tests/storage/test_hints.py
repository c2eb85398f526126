"""What a tenant says of its blocks' future: on the channel and in both tiers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import FingerprintMismatch, InvalidArgument
from kvstrata.proto.keys import HASHES_MAX, Namespace
from kvstrata.proto.status import HintKind
from kvstrata.proto.wire import Kind
from kvstrata.storage.node import StorageNode
from kvstrata.storage.state import HINT_MAX_S
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity

from .conftest import key, keys
from .ordered_node import OrderedNode


@pytest.fixture
def node() -> Iterator[OrderedNode]:
    one = OrderedNode()
    yield one
    one.close()


def hint(
    node: OrderedNode, numbers: range | list[int], kind: HintKind, ttl_s: float = 60.0, salt: str = "a", epoch: int = 0
) -> int:
    changed = node.state.hint(node.handle, salt, keys(numbers), epoch, kind, ttl_s, node.now)
    node.check()
    return changed


def flood(node: OrderedNode, salt: str = "a") -> None:
    """As many blocks of the same tenant as the node holds, one a call."""
    for number in range(1000, 1000 + node.capacity):
        node.store([number], salt=salt)


def test_a_kept_prefix_survives_its_own_tenants_pressure_until_its_time_is_over(node: OrderedNode) -> None:
    node.chain(range(8), 4, salt="a")
    assert hint(node, range(8), HintKind.KEEP, ttl_s=30.0) == 4, "half of what it has, at most"
    node.store(range(100, 120), salt="a")
    assert hint(node, range(8), HintKind.KEEP, ttl_s=30.0) == 8
    flood(node)
    assert node.present(range(8), "a") == list(range(8))
    node.now += 31.0
    node.state.expire(node.now)
    flood(node)
    assert node.present(range(8), "a") == []


def test_forgetting_ends_a_keep_and_dropped_blocks_leave_first(node: OrderedNode) -> None:
    node.store(range(30), salt="a")
    assert hint(node, range(8), HintKind.KEEP) == 8
    assert hint(node, range(8), HintKind.FORGET) == 8
    assert hint(node, range(20, 30), HintKind.DROP) == 10
    missing = node.capacity - 30
    node.store(range(100, 100 + missing + 10), salt="a")
    assert node.present(range(30), "a") == list(range(20)), "those it may spare, and no others"


def test_hints_work_in_both_tiers(node: OrderedNode) -> None:
    node.store(range(30), salt="a")
    node.demote()
    assert hint(node, range(5), HintKind.KEEP) == 10, "copies count where they are"
    assert node.state.counts.hints == 10


def test_hints_of_other_weights_or_tenants_change_nothing(node: OrderedNode) -> None:
    node.store(range(30), salt="a")
    assert hint(node, range(5), HintKind.DROP, epoch=3) == 0
    assert hint(node, range(5), HintKind.DROP, salt="b") == 0
    node.bump(3)
    assert hint(node, range(5), HintKind.DROP, epoch=3) == 0


def test_no_hint_lasts_longer_than_a_day(node: OrderedNode) -> None:
    node.store(range(60), salt="a")
    assert hint(node, range(4), HintKind.KEEP, ttl_s=1e9) == 4
    node.now += HINT_MAX_S + 1
    node.state.expire(node.now)
    flood(node)
    assert node.present(range(4), "a") == []


def test_bad_hints_are_refused(node: OrderedNode) -> None:
    with pytest.raises(InvalidArgument, match="multiple"):
        node.state.hint(node.handle, "", b"odd", 0, HintKind.KEEP, 1.0, node.now)
    with pytest.raises(InvalidArgument, match="at most"):
        node.state.hint(node.handle, "", key(1) * (HASHES_MAX + 1), 0, HintKind.KEEP, 1.0, node.now)
    with pytest.raises(FingerprintMismatch):
        node.state.hint(99, "", key(1), 0, HintKind.KEEP, 1.0, node.now)


def test_the_channel_takes_hints(running: StorageNode) -> None:
    connection = Connection.open(running.channel, Identity.new())
    try:
        opening = pb.OpenNamespace(spec=Namespace("model", 4096, 16).to_spec()).SerializeToString()
        opened = connection.call(Kind.OPEN_NAMESPACE, opening)
        handle = expect(pb.NamespaceHandle, opened, Kind.NAMESPACE_HANDLE).handle
        ask = pb.Hint(ns=handle, hashes=keys([1]), kind=HintKind.KEEP, ttl_ms=1000)
        answer = connection.call(Kind.HINT, ask.SerializeToString())
        assert expect(pb.HintOk, answer, Kind.HINT_OK).blocks == 0
        ask.kind = 9
        with pytest.raises(InvalidArgument, match=r"hint kind 9.*1 keep, 2 forget, 3 drop"):
            connection.call(Kind.HINT, ask.SerializeToString())
    finally:
        connection.close()
