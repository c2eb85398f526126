"""Ranges of a load that are told as they land: merged over nodes and replicas, in order, and never of bytes that a
later try replaces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.client import BlockStatus, Client
from kvstrata.client.counters import Counters
from kvstrata.client.landed_ranges import LandedRanges
from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.proto.keys import Namespace
from kvstrata.transfer.base import Endpoint, Fetch, Fetched, Mask
from kvstrata.transfer.regions import Region
from tests.client.fake_pool import FakeMaster, FakeNode, packed, split
from tests.client.test_replicas import Copies, nodes

__all__ = ["nodes"]
S = BlockStatus
LOADED = int(S.LOADED)
ENDS = (16, 32, 64)

Told = list[tuple[int, list[bool]]]


def load(copies: Copies) -> tuple[Told, list[int]]:
    told: Told = []
    result = copies.client.load(
        copies.ns, "", copies.hashes, copies.target, parts=ENDS, landed=lambda k, mask: told.append((k, mask.tolist()))
    )
    assert [k for k, _ in told] == list(range(len(ENDS)))
    return told, result.status.tolist()


def test_all_ranges_are_told_once_and_in_order(client: Client, master: FakeMaster, nodes: dict[str, FakeNode]) -> None:
    told, status = load(Copies(client, master, nodes))
    assert status == [S.LOADED] * 8 and all(all(mask) for _, mask in told)


def test_what_is_nowhere_is_not_told_of_and_holds_nothing_up(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    copies = Copies(client, master, nodes, on="a")
    nodes["a"].answers = dict.fromkeys(split(copies.hashes)[2:4], S.MISSING)
    told, status = load(copies)
    assert [code == S.LOADED for code in status] == [i not in (2, 3) for i in range(8)]
    assert all(mask == [code == S.LOADED for code in status] for _, mask in told)


def test_another_replica_stands_in_for_what_was_not_told_yet(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    copies = Copies(client, master, nodes)
    nodes["a"].fails = Unavailable("gone")
    told, status = load(copies)
    assert status == [S.LOADED] * 8 and all(all(mask) for _, mask in told)


class TellingPeer:
    """A node that says that ranges are in place, and takes blocks back at the end."""

    transport = "telling"

    def __init__(self, told: list[list[bool]], status: list[int]) -> None:
        self.endpoint = Endpoint("t", 1, "127.0.0.1:1")
        self._told, self._status = told, status

    def fetch(self, request: Fetch) -> Fetched:
        assert request.landed is not None and request.parts == ENDS
        for part, mask in enumerate(self._told):
            request.landed(part, np.array(mask))
        return Fetched(np.array(self._status, np.uint8), np.zeros(len(self._status), np.uint8))


def asked(count: int) -> Fetch:
    namespace = Namespace(group="g", block_bytes=64, block_tokens=16)
    memory = np.zeros(count * 64, np.uint8)
    return Fetch(namespace, "", packed(count), Region(memory, memory).rows(namespace), 0.0)


def test_what_was_told_of_and_taken_back_is_not_made_good_by_another_replica() -> None:
    """Whoever heard of it may have read the first one's bytes."""
    told: Told = []
    landing = LandedRanges(2, ENDS, lambda k, mask: told.append((k, mask.tolist())))
    both = [[True, True]] * 2
    landing.fetch(TellingPeer(both, [LOADED, int(S.CORRUPT)]), asked(2), None, Counters())  # type: ignore[arg-type]
    assert landing.over.tolist() == [False, True]
    landing.finish(np.array([LOADED, S.CORRUPT], np.uint8))
    assert told == [(0, [True, True]), (1, [True, True]), (2, [True, False])]


def test_what_nobody_heard_of_may_be_tried_again() -> None:
    told: Told = []
    landing = LandedRanges(2, ENDS, lambda k, mask: told.append((k, mask.tolist())))
    first, second = np.array([0]), np.array([1])
    landing.fetch(TellingPeer([[True]], [int(S.CORRUPT)]), asked(1), first, Counters())  # type: ignore[arg-type]
    assert not landing.over.any() and not told
    landing.fetch(TellingPeer([[True]] * 3, [LOADED]), asked(1), second, Counters())  # type: ignore[arg-type]
    assert not told
    landing.fetch(TellingPeer([[True]] * 3, [LOADED]), asked(1), first, Counters())  # type: ignore[arg-type]
    assert told == [(k, [True, True]) for k in range(3)]


@settings(deadline=None)
@given(st.data())
def test_a_block_that_is_loaded_was_in_place_whenever_it_was_told_of(data: st.DataObject) -> None:
    """Attempts in any order, on any positions: told masks only lose blocks, and those that are lost stay lost."""
    count = data.draw(st.integers(1, 4))
    told: Told = []
    landing = LandedRanges(count, ENDS, lambda k, mask: told.append((k, mask.tolist())))
    status = np.full(count, S.MISSING, np.uint8)
    for _ in range(data.draw(st.integers(1, 4))):
        open_now = np.flatnonzero((status != LOADED) & ~landing.over)
        if not len(open_now):
            break
        where = np.array(sorted(data.draw(st.sets(st.sampled_from(open_now.tolist()), min_size=1))))
        masks = [[data.draw(st.booleans()) for _ in where] for _ in range(data.draw(st.integers(0, 3)))]
        ends = [data.draw(st.sampled_from([LOADED, int(S.CORRUPT), int(S.NODE_LOST)])) for _ in where]
        landing.fetch(TellingPeer(masks, ends), asked(len(where)), where, Counters())  # type: ignore[arg-type]
        status[where] = ends
    landing.finish(status)
    assert [k for k, _ in told] == list(range(len(ENDS)))
    loaded = status == LOADED
    for _, mask in told:
        assert (np.array(mask) >= loaded).all(), "a loaded block was told of in no range or not in all"
    assert told[-1][1] == loaded.tolist() or not loaded.all()


@pytest.mark.parametrize(
    ("parts", "landed"), [((64,), None), ((), print), ((32,), print), ((32, 32, 64), print), ((0, 64), print)]
)
def test_ranges_that_are_no_partition_are_refused(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode], parts: tuple[int, ...], landed: object
) -> None:
    copies = Copies(client, master, nodes)
    with pytest.raises(InvalidArgument, match="parts"):
        client.load(copies.ns, "", copies.hashes, copies.target, parts=parts, landed=landed)  # type: ignore[arg-type]
    assert not any(node.fetches for node in nodes.values())


def test_a_load_of_ranges_over_several_nodes_is_told_when_the_last_one_has_it(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    copies = Copies(client, master, nodes, on="a", count=4)
    other = packed(4, 4)
    nodes["b"].put(copies.ns, "", other, [bytes([9]) * 64] * 4)
    master.learn()
    into = np.zeros((8, 64), np.uint8)
    seen: list[int] = []

    def landed(part: int, mask: Mask) -> None:
        assert mask.all()
        seen.append(int(np.count_nonzero(into.any(axis=1))))

    result = client.load(
        copies.ns, "", copies.hashes + other, client.register(into).rows(copies.ns), parts=ENDS, landed=landed
    )
    assert result.loaded.all() and seen == [8] * 3
