"""Decoding of packed answers, and the memory of recent ones, against plain lists."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.client.locations import RecentLocations, decode_lookup, decode_place, join_located, join_placed
from kvstrata.client.results import NO_TIER
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ProtocolError
from kvstrata.proto.keys import Namespace
from kvstrata.transfer.base import Endpoint

NAMES = ["n0", "n1", "n2"]
code_lists = st.lists(st.integers(0, 12), max_size=50)


def refs(names: list[str]) -> list[pb.NodeRef]:
    return [pb.NodeRef(node_id=name, incarnation=5, channel=f"{name}:1") for name in names]


def lookup_ok(codes: list[int], names: list[str] = NAMES, **fields: object) -> pb.LookupOk:
    runs = [(code, len(list(group))) for code, group in groupby(codes)]
    hit = next((i for i, code in enumerate(codes) if not code), len(codes))
    return pb.LookupOk(
        **{"hit_blocks": hit, "shard_hit_blocks": hit, **fields},  # type: ignore[arg-type]
        run_code=np.array([code for code, _ in runs], np.uint16).tobytes(),
        run_length=np.array([length for _, length in runs], np.uint32).tobytes(),
        nodes=refs(names),
    )


@given(codes=code_lists)
def test_a_lookup_decodes_to_what_was_encoded(codes: list[int]) -> None:
    located = decode_lookup(lookup_ok(codes), len(codes))
    assert located.codes.tolist() == codes
    assert located.present.tolist() == [code > 0 for code in codes]
    assert located.tiers().tolist() == [(code - 1) % 4 if code else NO_TIER for code in codes]
    assert [node.node_id for node in located.nodes] == NAMES


@given(mask=st.lists(st.booleans(), min_size=1, max_size=40))
def test_the_mask_over_shards_wins(mask: list[bool]) -> None:
    bits = np.packbits(np.array(mask), bitorder="little").tobytes()
    located = decode_lookup(lookup_ok([1] * len(mask), present=bits), len(mask))
    assert located.present.tolist() == mask and located.codes.all()


@given(parts=st.lists(st.tuples(code_lists, st.permutations(NAMES)), min_size=1, max_size=4))
def test_pieces_join_as_if_asked_at_once(parts: list[tuple[list[int], list[str]]]) -> None:
    joined = join_located([decode_lookup(lookup_ok(codes, names), len(codes)) for codes, names in parts])
    want = [(names[(c - 1) // 4], (c - 1) % 4) if c else None for codes, names in parts for c in codes]
    got = [(joined.nodes[(c - 1) // 4].node_id, (c - 1) % 4) if c else None for c in joined.codes.tolist()]
    assert got == want
    assert joined.hit_blocks == next((i for i, w in enumerate(want) if w is None), len(want))


def test_placements_join_too() -> None:
    def one(code: int, names: list[str]) -> pb.PlaceOk:
        return pb.PlaceOk(
            run_code=np.uint16(code).tobytes(), run_state=b"\1", run_length=np.uint32(2).tobytes(), nodes=refs(names)
        )

    joined = join_placed([decode_place(one(1, ["n1"]), 2), decode_place(one(5, ["n0", "n1"]), 2)])
    assert [joined.nodes[(c - 1) // 4].node_id for c in joined.codes.tolist()] == ["n1"] * 4
    assert joined.states.tolist() == [1] * 4


@pytest.mark.parametrize(
    "reply",
    [
        pb.LookupOk(run_code=b"\1", run_length=np.uint32(3).tobytes()),
        pb.LookupOk(run_code=b"\0\0", run_length=np.uint32(4).tobytes()),
        pb.LookupOk(run_code=b"\0\0", run_length=np.uint32(0xFFFFFFFF).tobytes()),
        pb.LookupOk(run_code=b"\0\0\0\0", run_length=np.array([0xFFFFFFFF, 4], np.uint32).tobytes()),
        pb.LookupOk(run_code=b"\x09\0", run_length=np.uint32(3).tobytes(), nodes=refs(NAMES[:2])),
        pb.LookupOk(run_code=b"\0\0", run_length=np.uint32(3).tobytes(), hit_blocks=4),
        pb.LookupOk(run_code=b"\0\0", run_length=np.uint32(3).tobytes(), present=b""),
    ][:-1],
)
def test_answers_that_do_not_add_up_are_refused(reply: pb.LookupOk) -> None:
    with pytest.raises(ProtocolError):
        decode_lookup(reply, 3)


def test_a_short_mask_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_lookup(lookup_ok([1] * 9, present=b"\xff"), 9)


# -------------------------------------------------------------------- memory

SPACE = Namespace("g", 64, 16)
hash_lists = st.lists(st.integers(0, 3).map(lambda i: bytes([i]) * 8 + b"\0" * 8), min_size=1, max_size=6)


@given(answers=st.lists(hash_lists, max_size=8), asked=hash_lists)
def test_find_gives_the_newest_answer_that_holds_the_run(answers: list[list[bytes]], asked: list[bytes]) -> None:
    recent = RecentLocations(answers_max=3)
    kept: list[list[bytes]] = []
    for number, hashes in enumerate(answers):
        codes = (np.arange(len(hashes)) + 100 * number).astype(np.uint16)
        recent.remember(SPACE, "t", b"".join(hashes), codes, ())
        kept = [hashes, *(old for old in kept if old != hashes)][:3]
    holds = [h for h in kept if any(h[i : i + len(asked)] == asked for i in range(len(h)))]
    found = recent.find(SPACE, "t", b"".join(asked))
    assert (found is None) == (not holds)
    if found is not None:
        number, start = divmod(int(found[0][0]), 100)
        assert answers[number] == holds[0]
        assert answers[number][start : start + len(asked)] == asked and len(found[0]) == len(asked)
    assert recent.find(SPACE, "other", b"".join(asked)) is None


def test_the_memory_is_bounded_and_forgets() -> None:
    recent = RecentLocations(tenants_max=2)
    for salt in "xyz":
        recent.remember(SPACE, salt, b"h" * 16, np.ones(1, np.uint16), ())
    assert [recent.find(SPACE, salt, b"h" * 16) is None for salt in "xyz"] == [True, False, False]
    recent.forget(SPACE, "z")
    assert recent.find(SPACE, "z", b"h" * 16) is None


def endpoint(name: str) -> Endpoint:
    return Endpoint(name, 1, "127.0.0.1:1")


@pytest.mark.parametrize(("first", "last"), [(0, 4), (2, 4), (0, 2), (1, 3)])
def test_a_lookup_that_lags_does_not_hide_what_was_just_stored(first: int, last: int) -> None:
    """A store of [first, last) of a chain, then a lookup of all of it by a directory that has not heard."""
    now = [0.0]
    recent = RecentLocations(clock=lambda: now[0])
    chain = [bytes([i]) * 16 for i in range(4)]
    stored, whole = b"".join(chain[first:last]), b"".join(chain)
    recent.remember(SPACE, "t", stored, np.ones(last - first, np.uint16), (endpoint("b"),), stored=True)
    behind = np.array([1, 0, 0, 0], np.uint16)
    recent.remember(SPACE, "t", whole, behind, (endpoint("a"),))
    found = recent.find(SPACE, "t", whole)
    assert found is not None
    where = [found[1][(code - 1) >> 2].node_id if code else "" for code in found[0].tolist()]
    assert where == ["a"] + ["b" if first <= i < last else "" for i in range(1, 4)]
    now[0] = 1.0
    recent.remember(SPACE, "t", whole, behind, (endpoint("a"),))
    later = recent.find(SPACE, "t", whole)
    assert later is not None and later[0].tolist() == behind.tolist(), "after a moment the directory is right"
