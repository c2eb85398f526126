"""Several masters: lookups at any, changes at the one that leads, whoever that is now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstrata.client import Client, PoolNamespace
from kvstrata.client.masters import NAMED_MAX, leader_in
from tests.client.fake_pool import FakeMaster, FakeNode, packed
from tests.waiting import until

SIZE = 64
Connect = Callable[..., Client]


@pytest.fixture
def three(nodes: dict[str, FakeNode]) -> Iterator[list[FakeMaster]]:
    masters = [FakeMaster(nodes) for _ in range(3)]
    yield masters
    for master in masters:
        master.stop()


def lead(masters: list[FakeMaster], leader: FakeMaster | None, epoch: int) -> None:
    for master in masters:
        master.leads = master is leader
        master.leader = "" if leader is None or leader is master else leader.address
        master.leader_epoch = epoch


def all_of(masters: list[FakeMaster]) -> str:
    return ",".join(master.address for master in masters)


class Pool:
    """A client of some masters, and what each of them was asked to place."""

    def __init__(self, connect: Connect, masters: list[FakeMaster], addresses: str = "", **options: object) -> None:
        self.masters = masters
        self.client = connect(addresses or all_of(masters), **options)
        self.ns: PoolNamespace = self.client.namespace("model/l", block_bytes=SIZE, block_tokens=16)
        self.blocks = self.client.register(np.zeros((1, SIZE), np.uint8)).rows(self.ns)
        self.next = 0

    def store(self) -> bool:
        self.next += 1
        return bool(self.client.store(self.ns, "", packed(1, self.next), self.blocks).stored.all())

    def placed(self) -> list[int]:
        return [len(master.placed) for master in self.masters]


def test_changes_go_to_the_leader_that_a_hello_names(connect: Connect, three: list[FakeMaster]) -> None:
    lead(three, three[2], 5)
    pool = Pool(connect, three)
    assert pool.store() and pool.placed() == [0, 0, 1]
    assert [master.refusals for master in three] == [0, 0, 0], "nobody else was asked"
    pool.client.lookup(pool.ns, "", packed(1))
    assert [master.lookups for master in three] == [1, 0, 0], "a lookup needs no leader"
    assert pool.client.remove(pool.ns, "", packed(1)).answered
    shown = pool.client.health()["masters"]
    assert [(m["serving"], m["leads"]) for m in shown] == [(True, False), (False, False), (False, True)]  # type: ignore[attr-defined]


def test_a_master_that_no_longer_leads_says_who_does(connect: Connect, three: list[FakeMaster]) -> None:
    lead(three, three[0], 5)
    pool = Pool(connect, three)
    assert pool.store() and pool.placed() == [1, 0, 0]
    lead(three, three[2], 6)
    assert pool.store() and pool.placed() == [1, 0, 1]
    assert [master.refusals for master in three] == [1, 0, 0], "the one that is named is asked next"
    assert pool.store() and pool.placed() == [1, 0, 2], "it is asked at once from now on"


def test_a_leader_that_nobody_configured_is_found(connect: Connect, three: list[FakeMaster]) -> None:
    lead(three, three[2], 5)
    pool = Pool(connect, three, three[0].address)
    assert pool.store() and pool.placed() == [0, 0, 1]
    assert [m["address"] for m in pool.client.health()["masters"]] == [three[0].address, three[2].address]  # type: ignore[attr-defined]


def test_a_leader_that_nobody_configured_and_no_hello_named_is_followed(
    connect: Connect, three: list[FakeMaster]
) -> None:
    lead(three, None, 5)
    pool = Pool(connect, three, three[0].address)
    lead(three, three[2], 6)
    assert pool.store() and pool.placed() == [0, 0, 1]


def test_the_leader_dies_and_another_is_elected(connect: Connect, three: list[FakeMaster]) -> None:
    lead(three, three[0], 5)
    pool = Pool(connect, three)
    assert pool.store()
    three[0].stop()
    started = time.monotonic()
    pool.store()  # those who are left name the dead one still: not stored, or by whom it was not
    pool.client.lookup(pool.ns, "", packed(1))
    assert pool.client.lookup(pool.ns, "", packed(1)).answered
    assert time.monotonic() - started < 1.5
    lead(three[1:], three[2], 6)
    assert pool.store() and pool.placed()[2] == 1


def test_without_a_leader_changes_are_not_answered_and_nobody_waits(
    connect: Connect, three: list[FakeMaster], nodes: dict[str, FakeNode]
) -> None:
    lead(three, None, 5)
    pool = Pool(connect, three)
    started = time.monotonic()
    assert not pool.client.remove(pool.ns, "", packed(1)).answered
    assert not pool.store(), "two nodes are on this host: nobody says which"
    assert time.monotonic() - started < 1.0
    assert pool.client.lookup(pool.ns, "", packed(1)).answered


def test_masters_that_name_each_other_are_asked_once_each(connect: Connect, three: list[FakeMaster]) -> None:
    for master, other in zip(three, [*three[1:], three[0]], strict=True):
        master.leads, master.leader = False, other.address
    pool = Pool(connect, three)
    assert not pool.client.remove(pool.ns, "", packed(1)).answered
    assert [master.refusals for master in three] == [1, 1, 1]


def test_an_older_hello_does_not_undo_a_newer_one(connect: Connect, three: list[FakeMaster]) -> None:
    lead(three, three[1], 6)
    three[2].leads, three[2].leader, three[2].leader_epoch = True, "", 5  # deposed, and it does not know yet
    pool = Pool(connect, three)
    masters = pool.client._directory.masters
    until(lambda: all(master.heard_at for master in masters))
    assert masters.writer.address == three[1].address
    assert pool.store() and pool.placed() == [0, 1, 0]


def test_a_leader_without_an_address_is_passed_over(connect: Connect, three: list[FakeMaster]) -> None:
    three[0].leads, three[0].leader = False, "nonsense"
    pool = Pool(connect, three[:2])
    assert pool.store() and pool.placed() == [0, 1]


def test_leaders_that_nobody_configured_are_bounded(connect: Connect, three: list[FakeMaster]) -> None:
    three[0].leads = False
    pool = Pool(connect, three[:1])
    for port in range(1, 20):
        three[0].leader = f"127.0.0.1:{port}"
        assert not pool.client.remove(pool.ns, "", packed(1)).answered
    assert len(list(pool.client._directory.masters)) <= 1 + NAMED_MAX


def test_the_leader_is_not_let_go_for_others_that_are_named(connect: Connect, three: list[FakeMaster]) -> None:
    lead(three, three[2], 5)
    pool = Pool(connect, three, three[0].address)
    assert pool.store()
    masters = pool.client._directory.masters
    for port in range(1, 20):
        masters._find(f"127.0.0.1:{port}")
    assert masters.writer.address == three[2].address and pool.store()
    assert len(list(masters)) == 1 + NAMED_MAX
    let_go = masters._find("127.0.0.1:99")
    assert let_go is not None
    for port in range(100, 120):
        masters._find(f"127.0.0.1:{port}")
    masters._leader = let_go  # as a thread that was just about to ask it
    assert pool.store()


def test_a_master_that_is_being_told_is_asked_last(
    connect: Connect, three: list[FakeMaster], nodes: dict[str, FakeNode]
) -> None:
    pool = Pool(connect, three)
    nodes["a"].put(pool.ns, "", packed(2), [b"x" * SIZE] * 2)
    three[2].learn()
    three[0].not_yet = three[1].not_yet = True
    assert pool.client.lookup(pool.ns, "", packed(2)).hit_blocks == 2
    before = three[0].lookups
    assert pool.client.lookup(pool.ns, "", packed(2)).hit_blocks == 2
    assert three[0].lookups == before, "the one that knew is asked first now"
    three[2].not_yet = True
    assert pool.client.lookup(pool.ns, "", packed(2, 50)).hit_blocks is None, "not yet, when nobody knows more"


def test_every_master_hears_of_every_client(connect: Connect, three: list[FakeMaster]) -> None:
    client = connect(all_of(three))
    until(lambda: all(len(master.server.sessions) == 1 for master in three))
    until(lambda: bool(client.health()["healthy"]))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("this master does not lead: the leader is 10.0.0.1:7400", "10.0.0.1:7400"),
        ("this master does not lead: the leader is [::1]:7400", "[::1]:7400"),
        ("this master does not lead: there is none now", ""),
        ("", ""),
    ],
)
def test_who_leads_is_read_from_the_refusal(text: str, address: str) -> None:
    assert leader_in(text) == address
