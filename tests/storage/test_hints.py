"""What a tenant says of its blocks' future: on the channel and in both tiers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import FingerprintMismatch, InvalidArgument
from kvstrata.proto.keys import HASHES_MAX, Namespace
from kvstrata.proto.status import Departure, HintKind, Tier
from kvstrata.proto.wire import Kind
from kvstrata.storage.masters.commands import Commands
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
    assert hint(node, range(5), HintKind.KEEP) == 5, "a block in both tiers is one"
    for tier in node.state.tiers():
        kept = [block.hash for block in tier.blocks() if block.keep is not None]
        assert sorted(kept) == sorted(key(n) for n in range(5))
    assert node.state.counts.hints == 5
    assert hint(node, range(3, 8), HintKind.FORGET) == 2


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


def departures(node: OrderedNode) -> dict[int, Departure]:
    """Why blocks left DRAM, by number."""
    node.state.deltas.close_batch()
    runs = [run for batch in node.state.deltas.after(0) or [] for run in batch.runs]
    gone = [run for run in runs if not run.added and run.tier == Tier.DRAM]
    numbers = {key(n): n for n in range(2000)}
    return {numbers[run.hashes[i : i + 16]]: run.why for run in gone for i in range(0, len(run.hashes), 16)}


def test_what_left_by_a_hint_says_so_and_what_was_used_since_does_not(node: OrderedNode) -> None:
    node.store(range(15), salt="a")
    node.store(range(15, 30), salt="a")
    hint(node, range(11, 15), HintKind.DROP)
    assert node.state.orphaned(node.namespace, "a", keys(range(26, 30)), 0, node.now) == 4
    node.acquire([11, 26], salt="a")
    node.now += 10.0
    node.state.expire(node.now)
    flood(node)
    why = departures(node)
    assert {n for n, each in why.items() if each == Departure.HINT} == {12, 13, 14}
    assert {n for n, each in why.items() if each == Departure.ORPHAN} == {27, 28, 29}
    assert why[11] == why[26] == Departure.ROOM
    assert node.state.counts.orphaned == 4


def test_orphans_leave_first_but_not_what_is_kept_nor_of_other_weights(node: OrderedNode) -> None:
    node.store(range(30), salt="a")
    hint(node, range(24, 26), HintKind.KEEP)
    assert node.state.orphaned(node.namespace, "a", keys(range(24, 30)), 1, node.now) == 0, "of another epoch"
    assert node.state.orphaned(Namespace("other", 4096, 16), "a", keys([24]), 0, node.now) == 0
    assert node.state.orphaned(node.namespace, "a", keys(range(24, 30)), 0, node.now) == 4
    node.check()
    node.store(range(100, 100 + node.capacity - 30 + 4), salt="b")
    assert node.present(range(30), "a") == list(range(26))


def test_a_masters_word_on_orphans_is_taken_or_passed_over(node: OrderedNode) -> None:
    node.store(range(30), salt="a")
    commands = Commands(node.state, threading.Lock(), clock=lambda: node.now)
    spec = node.namespace.to_spec()
    commands.orphaned(control.Orphaned(spec=spec, salt="a", hashes=keys(range(4))))
    commands.orphaned(control.Orphaned(spec=spec, salt="a", hashes=b"odd"))
    commands.orphaned(control.Orphaned(salt="a", hashes=keys(range(4))))
    assert node.state.counts.orphaned == 4
