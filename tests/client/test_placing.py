"""Stores of a pool of one node: what is asked of a master, what is not, and what it is told afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest

from kvstrata.client import Client
from kvstrata.client.directory import Directory
from kvstrata.client.locations import Placed
from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.placing import TELL_AFTER_S, TENANTS_MAX, UNTOLD_MAX, Placer
from kvstrata.proto.errors import FingerprintMismatch, KVError, Unavailable
from kvstrata.proto.status import BlockStatus, PlaceState
from kvstrata.transfer.base import Endpoint
from tests.client.fake_pool import FakeMaster, FakeNode, packed
from tests.waiting import until

NODE = Endpoint("a", 1, "h:1")
STANDS_S = 1.0
SIZE = 64


class Asked:
    """A directory that says where one node is, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes, bytes]] = []
        self.node, self.stands_s = NODE, STANDS_S
        self.fails: KVError | None = None
        self.epoch: int | None = 0
        self.meanwhile: Callable[[], object] | None = None  #: what happens before the next answer is there

    def place(
        self,
        namespace: PoolNamespace,
        salt: str,
        hashes: bytes,
        boot_id: str,
        deadline: float,
        avoid: Sequence[Endpoint],
        unasked: bytes,
    ) -> Placed:
        self.calls.append((salt, hashes, unasked))
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        if self.fails is not None:
            raise self.fails
        if self.epoch is not None:
            namespace.pin.learn(self.epoch)
        count = len(hashes) // namespace.hash_bytes
        return Placed(np.ones(count, np.uint16), np.zeros(count, np.uint8), (self.node,), stands_s=self.stands_s)


class Desk:
    """A placer with a clock that is turned by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.directory = Asked()
        self.placer = Placer(cast(Directory, self.directory), "host", lambda: self.now)
        self.ns = PoolNamespace("model/p", SIZE, 16)
        self.number = 0

    def place(self, count: int = 1, salt: str = "", avoid: Sequence[Endpoint] = ()) -> Placed:
        self.number += count
        try:
            return self.placer.place(self.ns, salt, packed(count, self.number), self.now + 1, avoid)
        finally:
            self.placer.check()

    def asked(self, *args: object, **more: object) -> bool:
        """Whether the directory hears of a placement before it is answered."""
        before = len(self.directory.calls)
        placed = self.place(*args, **more)  # type: ignore[arg-type]
        count = len(placed.codes)
        assert placed.nodes == (self.directory.node,)
        assert placed.codes.tolist() == [1] * count and placed.states.tolist() == [PlaceState.NEW] * count
        return len(self.directory.calls) > before


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_an_answer_stands_for_as_long_as_was_said_and_for_its_tenant(desk: Desk) -> None:
    assert desk.asked() and not desk.asked(3)
    assert desk.asked(salt="another") and not desk.asked(salt="another")
    desk.now += STANDS_S - 0.01
    assert not desk.asked()
    desk.now += 0.01
    assert desk.asked()


def test_where_an_answer_does_not_stand_each_placement_is_asked_for(desk: Desk) -> None:
    desk.directory.stands_s = 0.0
    assert [desk.asked() for _ in range(3)] == [True] * 3
    assert all(not unasked for _, _, unasked in desk.directory.calls)


def test_handles_of_another_weight_epoch_are_asked_for_anew(desk: Desk) -> None:
    assert desk.asked() and not desk.asked()
    desk.ns = PoolNamespace("model/p", SIZE, 16)
    desk.ns.pin.learn(7)
    assert desk.asked()


def test_who_avoids_the_node_asks_and_so_does_who_comes_next(desk: Desk) -> None:
    assert desk.asked() and not desk.asked()
    assert desk.asked(avoid=[NODE])
    assert desk.asked() and not desk.asked()


def test_what_was_not_asked_for_is_told_with_the_next_question(desk: Desk) -> None:
    desk.place()
    desk.place(2)
    desk.place()
    desk.now += STANDS_S
    desk.place()
    assert desk.directory.calls[-1] == ("", packed(1, 5), packed(2, 3) + packed(1, 4))
    desk.now += STANDS_S
    desk.place()
    assert desk.directory.calls[-1] == ("", packed(1, 6), b""), "once"


def test_what_waits_is_told_soon_and_the_answer_goes_on(desk: Desk) -> None:
    desk.place()
    desk.place(2)
    desk.now += TELL_AFTER_S * 0.9
    desk.place()
    desk.placer.upkeep()
    assert len(desk.directory.calls) == 1
    desk.directory.node = Endpoint("a", 2, "h:1")
    desk.now += TELL_AFTER_S * 0.2
    desk.placer.upkeep()
    assert desk.directory.calls[1:] == [("", b"", packed(2, 3) + packed(1, 4))]
    desk.now += STANDS_S - 0.01
    assert not desk.asked(), "it has stood since it was told, and names the node's new start"
    desk.placer.close()
    assert desk.directory.calls[2:] == [("", b"", packed(1, 5))]


def test_a_second_node_is_heard_of_when_a_master_is_told(desk: Desk) -> None:
    desk.place()
    desk.place()
    desk.now += TELL_AFTER_S
    desk.directory.stands_s = 0.0
    desk.placer.upkeep()
    assert desk.asked()


@pytest.mark.parametrize("error", [Unavailable("gone"), FingerprintMismatch("another epoch")])
def test_a_master_that_cannot_be_told_ends_the_answer_and_nothing_is_told_again(desk: Desk, error: KVError) -> None:
    desk.place()
    desk.place()
    desk.now += TELL_AFTER_S
    desk.directory.fails = error
    desk.placer.upkeep()
    desk.placer.upkeep()
    assert len(desk.directory.calls) == 2
    desk.directory.fails = None
    assert desk.asked()
    assert desk.directory.calls[-1][2] == b""


def test_what_waits_to_be_told_is_bounded(desk: Desk) -> None:
    desk.place()
    assert not desk.asked(UNTOLD_MAX - 1) and not desk.asked()
    assert desk.asked() and len(desk.directory.calls[-1][2]) == UNTOLD_MAX * 16
    assert desk.asked(UNTOLD_MAX + 1)


def test_tenants_past_the_bound_ask_and_nothing_of_the_others_is_left_untold(desk: Desk) -> None:
    for _ in range(4):
        for number in range(TENANTS_MAX + 1):
            desk.place(salt=f"t{number}")
    assert desk.asked(salt=f"t{TENANTS_MAX}") and not desk.asked(salt="t0")
    desk.placer.close()
    heard = b"".join(hashes + unasked for _, hashes, unasked in desk.directory.calls)
    assert sorted(heard[i : i + 16] for i in range(0, len(heard), 16)) == [
        packed(1, n) for n in range(1, desk.number + 1)
    ]
    desk.now += STANDS_S
    desk.placer.upkeep()
    assert desk.asked(salt="another") and not desk.asked(salt="another"), "who stores no more makes room"


def test_a_handle_learns_its_weight_epoch_before_it_uses_an_answer(desk: Desk) -> None:
    """Or it might store what older weights made under the epoch that it learns when the answer has run out."""
    assert desk.asked() and not desk.asked()
    desk.ns = PoolNamespace("model/p", SIZE, 16)  # opened while no master answered
    assert desk.asked() and desk.ns.pin.epoch == 0 and not desk.asked()
    desk.ns, desk.directory.epoch = PoolNamespace("model/p", SIZE, 16), None
    assert desk.asked() and desk.asked(), "nor is an answer kept for it"


def test_another_node_that_is_lost_is_no_matter(desk: Desk) -> None:
    gone = Endpoint("b", 1, "h:2")
    assert desk.asked(avoid=[gone]) and not desk.asked(avoid=[gone])
    assert not desk.asked(avoid=[Endpoint("a", 2, "h:1")]), "that is another start of it"


def test_an_older_answer_says_nothing_after_a_newer_one(desk: Desk) -> None:
    def lost() -> None:
        desk.now += 0.1
        desk.place(avoid=[NODE])

    desk.place()
    desk.now += STANDS_S
    desk.directory.meanwhile = lost
    desk.place()
    assert desk.asked(), "the node was lost while the question was under way"


def test_the_node_that_is_lost_takes_nothing_while_a_master_is_asked(desk: Desk) -> None:
    assert desk.asked() and not desk.asked()
    desk.directory.fails = Unavailable("gone")
    with pytest.raises(Unavailable):
        desk.place(avoid=[NODE])
    desk.directory.fails = None
    assert desk.asked()


# -------------------------------------------------------------------- of a client


class Pool:
    """A pool of one node, whose master says that its answers stand."""

    def __init__(self, connect: Callable[..., Client], master: FakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
        for bound in ("TELL_S", "CLOSE_S"):  # a busy machine may need longer
            monkeypatch.setattr(f"kvstrata.client.placing.{bound}", 20.0)
        del master.nodes["b"]
        master.place_at, master.stands_ms = ["a"], 60_000  # which a client cuts to STANDS_MAX_S
        self.client = connect(master.address)
        self.ns = self.client.namespace("model/p", block_bytes=SIZE, block_tokens=16)
        self.blocks = self.client.register(np.zeros((1, SIZE), np.uint8)).rows(self.ns)
        self.next = 0

    def store(self) -> BlockStatus:
        self.next += 1
        return BlockStatus(int(self.client.store(self.ns, "", packed(1, self.next), self.blocks).status[0]))


def test_a_clients_master_hears_of_each_block_once(
    connect: Callable[..., Client], master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(connect, master, monkeypatch)
    assert {pool.store() for _ in range(20)} == {BlockStatus.STORED}
    pool.client.close()
    until(lambda: sum(len(place.hashes + place.unasked) for place in master.placed) == 20 * 16)
    heard = b"".join(place.hashes + place.unasked for place in master.placed)
    assert sorted(heard[i : i + 16] for i in range(0, len(heard), 16)) == [packed(1, n) for n in range(1, 21)]
    assert sum(bool(place.hashes) for place in master.placed) < 20


def test_a_clients_keeper_tells(
    connect: Callable[..., Client], master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(connect, master, monkeypatch)
    until(lambda: pool.store() and any(place.unasked and not place.hashes for place in master.placed))


def test_what_the_one_node_refuses_is_asked_for(
    connect: Callable[..., Client],
    master: FakeMaster,
    nodes: dict[str, FakeNode],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(connect, master, monkeypatch)
    pool.store()
    nodes["a"].answers[packed(1, 2)] = BlockStatus.REFUSED
    assert pool.store() == BlockStatus.REFUSED
    assert packed(1, 2) in [place.hashes for place in master.placed], "perhaps there is another node by now"
    pool.store()
    assert packed(1, 3) in [place.hashes for place in master.placed]
