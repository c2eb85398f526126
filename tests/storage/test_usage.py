"""What masters hear of tenants: what changed, each of them once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.storage.masters import usage
from kvstrata.storage.masters.usage import TenantBytes, Told, WantedBook

SALTS = st.sampled_from(["", "a", "b", "c"])
BYTES = st.dictionaries(SALTS, st.integers(1, 9))


def test_a_session_hears_all_first_and_then_what_changed() -> None:
    book, told = WantedBook(), Told()
    assert book.report({"a": 5}, {"b": 7}, told) == [TenantBytes("a", 5), TenantBytes("b", 0, 7)]
    assert book.report({"a": 5}, {"b": 7}, told) == []
    assert book.report({}, {"b": 8}, told) == [TenantBytes("a"), TenantBytes("b", 0, 8)]
    assert book.report({}, {"b": 8}, Told()) == [TenantBytes("b", 0, 8)]


def test_refused_bytes_are_told_to_each_master_once() -> None:
    book, first, second = WantedBook(), Told(), Told()
    book.add({"a": 3}, {"a": 1})
    assert book.report({}, {}, first) == [TenantBytes("a", 0, 0, 3, 1)]
    book.add({"a": 4}, {})
    assert book.report({"a": 9}, {}, first) == [TenantBytes("a", 9, 0, 4, 0)]
    assert book.report({"a": 9}, {}, second) == [TenantBytes("a", 9, 0, 7, 1)]
    assert book.report({"a": 9}, {}, first) == book.report({"a": 9}, {}, second) == []


@given(st.lists(st.tuples(BYTES, BYTES, BYTES, BYTES, st.booleans())))
def test_whoever_adds_reports_up_has_it_all(
    steps: list[tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, int], bool]],
) -> None:
    book = WantedBook()
    masters = [(Told(), dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()) for _ in range(2)]
    refused: dict[str, tuple[int, int]] = {}
    for dram, ssd, dram_wanted, ssd_wanted, both in [*steps, ({}, {"a": 1}, {}, {}, True)]:
        book.add(dram_wanted, ssd_wanted)
        for salt in dram_wanted.keys() | ssd_wanted.keys():
            before = refused.get(salt, (0, 0))
            refused[salt] = before[0] + dram_wanted.get(salt, 0), before[1] + ssd_wanted.get(salt, 0)
        for told, used, wanted in masters if both else masters[:1]:
            for row in book.report(dram, ssd, told):
                used[row.salt] = row.dram_bytes, row.ssd_bytes
                known = wanted.get(row.salt, (0, 0))
                wanted[row.salt] = known[0] + row.dram_wanted, known[1] + row.ssd_wanted
            everyone = dram.keys() | ssd.keys()
            assert {s: b for s, b in used.items() if b != (0, 0)} == {
                s: (dram.get(s, 0), ssd.get(s, 0)) for s in everyone
            }
            assert {s: b for s, b in wanted.items() if b != (0, 0)} == refused


def test_reports_and_memory_are_bounded() -> None:
    book, told = WantedBook(), Told()
    many = {f"t{number}": 1 for number in range(usage.TENANTS_MAX + 10)}
    assert len(book.report(many, {}, told)) == usage.TENANTS_MAX
    assert len(book.report(many, {}, told)) == 10, "the others are in the next"
    book.add({f"t{number}": 1 for number in range(usage.WANTED_MAX + 10)}, {})
    assert len(book._total) == usage.WANTED_MAX
