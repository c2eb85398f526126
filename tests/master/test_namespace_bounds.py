"""One token opens a part of the namespaces that there is room for, however hard it tries: others find room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.master import namespaces as master
from kvstrata.proto.errors import Busy
from kvstrata.proto.keys import Namespace
from kvstrata.storage import namespaces as node
from kvstrata.transfer.security.rights import EVERYTHING, Rights, Role


def named(number: int, shard: int = 0) -> Namespace:
    return Namespace(f"model/{number}", 4096, 16, shard=shard, shard_count=1024)


def open_at_master(book: master.Namespaces, namespace: Namespace, by: str) -> int:
    book.register(namespace, by)
    return book.open(namespace, by).handle


def test_a_token_does_not_fill_the_groups_of_a_master() -> None:
    book = master.Namespaces()
    for number in range(master.GROUPS_OF_A_SUBJECT):
        open_at_master(book, named(number), "acme")
    with pytest.raises(Busy, match="acme has opened 256 namespace groups"):
        open_at_master(book, named(-1), "acme")
    assert len(book.groups) == master.GROUPS_OF_A_SUBJECT
    assert open_at_master(book, named(0), "acme") == 1, "what there is stays in reach"
    assert open_at_master(book, named(-2), "other")
    assert open_at_master(book, named(-2), "acme"), "what somebody else opened is nobody's share"
    for number in range(master.GROUPS_OF_A_SUBJECT, 2 * master.GROUPS_OF_A_SUBJECT):
        open_at_master(book, named(number), "")
    book.check()


def test_a_token_does_not_fill_the_handles_of_a_master() -> None:
    book = master.Namespaces()
    with pytest.raises(Busy, match="acme has opened 4096 namespaces"):
        for number in range(master.HANDLES_OF_A_SUBJECT + 1):
            open_at_master(book, named(number // 1024, number % 1024), "acme")
    assert open_at_master(book, named(99), "other")
    book.check()


def test_a_token_does_not_fill_a_node() -> None:
    book = node.NamespaceBook()
    with pytest.raises(Busy, match="acme has opened 1024 namespaces"):
        for number in range(node.NAMESPACES_OF_A_SUBJECT + 1):
            book.open(named(number), "acme")
    assert book.open(named(0), "acme")[1] is False
    assert book.open(named(-1), "other")[1] is True
    assert book.open(named(-2))[1] is True, "copies and what is read from SSD are nobody's"
    book.check()


@given(
    opens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.sampled_from(("", "a", "b"))), max_size=60),
    groups=st.integers(1, 4),
    handles=st.integers(1, 6),
)
def test_shares_are_of_what_was_new(opens: list[tuple[int, int, str]], groups: int, handles: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(master, "GROUPS_OF_A_SUBJECT", groups)
        patch.setattr(master, "HANDLES_OF_A_SUBJECT", handles)
        patch.setattr(node, "NAMESPACES_OF_A_SUBJECT", handles)
        book, known, at_node = master.Namespaces(), set[tuple[int, int]](), node.NamespaceBook()
        for number, shard, by in opens:
            try:
                open_at_master(book, named(number, shard), by)
                known.add((number, shard))
            except Busy:
                assert by and (number, shard) not in known
            try:
                at_node.open(named(number, shard), by)
            except Busy:
                assert by
            book.check()
            at_node.check()


def test_nodes_act_for_all_and_without_tickets_nobody_is_counted() -> None:
    assert Rights("acme", Role.CLIENT).accountable == "acme"
    assert Rights("node/n1", Role.NODE).accountable == "" == EVERYTHING.accountable
