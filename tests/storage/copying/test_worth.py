"""In which order a leaving node's blocks are saved."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.proto.keys import Namespace
from kvstrata.storage.copying.worth import TURN_BYTES, by_worth, in_turns
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.records import Block, NamespaceEntry, Shelf
from tests.storage.conftest import key


def shelf(salt: str = "", nbytes: int = 1 << 20) -> Shelf:
    return Shelf(NamespaceEntry(1, Namespace("m", nbytes, 16)), salt)


def block(on: Shelf, number: int, index: int, stamp: int, hits: int = 0, before: int | None = None) -> Block:
    one = Block(on, key(number), SlotGrid.__new__(SlotGrid), 0, 0, index)
    one.stamp, one.hits = stamp, hits
    one.before = key(before) if before is not None else b""
    return one


def idle(stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.asarray(1000.0 - stamps, np.float64)


def order(blocks: list[Block]) -> list[bytes]:
    return [each.hash for each in by_worth(blocks, idle)[1]]


def test_the_hottest_come_first() -> None:
    on = shelf()
    old, often, fresh = block(on, 0, 0, 100), block(on, 1, 0, 900, hits=20), block(on, 2, 0, 990)
    assert order([old, often, fresh]) == [often.hash, fresh.hash, old.hash]


def test_a_prefix_is_worth_what_follows_it() -> None:
    on = shelf()
    head = block(on, 0, 0, 1)
    middle = block(on, 1, 1, 2, before=0)
    tail = block(on, 2, 2, 999, hits=50, before=1)
    other = block(on, 3, 0, 500)
    assert order([other, tail, middle, head]) == [head.hash, middle.hash, tail.hash, other.hash]


def test_rings_and_strangers_do_no_harm() -> None:
    """Hashes come from clients, which may say anything of what is before them."""
    on = shelf()
    ring = [block(on, 0, 5, 10, before=1), block(on, 1, 5, 20, before=0), block(on, 2, 1, 30, before=77)]
    assert sorted(order(ring)) == sorted(each.hash for each in ring)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 900), st.integers(0, 5)), min_size=1, max_size=60),
)
def test_no_suffix_comes_before_its_prefix(parts: list[tuple[int, int, int]]) -> None:
    on = shelf()
    blocks: list[Block] = []
    for number, (back, stamp, hits) in enumerate(parts):
        before = number - 1 - back if number > back else None
        index = blocks[before].index + 1 if before is not None else 0
        blocks.append(block(on, number, index, stamp, hits, before))
    place = {name: row for row, name in enumerate(order(blocks))}
    assert len(place) == len(blocks)
    for each in blocks:
        if each.before:
            assert place[each.before] < place[each.hash]


def test_tenants_take_turns_by_bytes() -> None:
    large, small = shelf("large", 4 << 20), shelf("small", 1 << 20)
    one = [block(large, n, 0, 900, hits=9) for n in range(20)]
    two = [block(small, 100 + n, 0, 5) for n in range(20)]
    runs = list(in_turns([by_worth(one, idle), by_worth(two, idle)]))
    assert sorted(each.hash for run in runs for each in run) == sorted(each.hash for each in (*one, *two))
    given_bytes = {"large": 0, "small": 0}
    left = {"large": 80 << 20, "small": 20 << 20}
    for run in runs:
        salt = run[0].shelf.salt
        nbytes = len(run) * run[0].shelf.entry.block_bytes
        assert nbytes <= TURN_BYTES and all(each.shelf is run[0].shelf for each in run)
        given_bytes[salt] += nbytes
        left[salt] -= nbytes
        if all(left.values()):
            assert abs(given_bytes["large"] - given_bytes["small"]) <= TURN_BYTES


def test_within_a_tenant_the_better_shelf_goes_first() -> None:
    first, second = shelf("t"), shelf("t", 2 << 20)
    hot = [block(first, n, 0, 990 - n) for n in range(3)]
    cold = [block(second, 10 + n, 0, 10) for n in range(3)]
    runs = list(in_turns([by_worth(cold, idle), by_worth(hot, idle)]))
    assert [run[0].shelf for run in runs] == [first, second]


def test_nothing_is_worth_nothing() -> None:
    assert by_worth([], idle) == ([], []) and list(in_turns([([], [])])) == []
