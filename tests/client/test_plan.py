"""Plans: every position is served once, by the right node, in pieces that fit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.client.plan import blocks_in_message, by_node, gather, stripes
from kvstrata.proto.keys import HASHES_MAX
from kvstrata.proto.status import PlaceState
from kvstrata.proto.wire import MESSAGE_BYTES_MAX

codes_lists = st.lists(st.integers(0, 12), min_size=1, max_size=60)


@given(codes=codes_lists, limit=st.integers(1, 7), data=st.data())
def test_by_node_serves_each_located_position_once(codes: list[int], limit: int, data: st.DataObject) -> None:
    array = np.array(codes, np.uint16)
    chosen = data.draw(st.none() | st.lists(st.sampled_from(range(len(codes))), unique=True).map(sorted))
    positions = None if chosen is None else np.array(chosen, np.int64)
    seen: dict[int, int] = {}
    groups = by_node(array, positions, limit)
    for parts in groups:
        assert len({part.node for part in parts}) == 1
        for part in parts:
            where = np.arange(len(codes))[part.where].tolist()
            assert 1 <= len(where) <= limit and where == sorted(where)
            seen.update(dict.fromkeys(where, part.node))
            assert len(seen) == len(set(seen))
    wanted = range(len(codes)) if chosen is None else chosen
    assert seen == {p: (codes[p] - 1) // 4 for p in wanted if codes[p]}
    assert len({parts[0].node for parts in groups}) == len(groups)


@given(
    blocks=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(list(PlaceState))), min_size=1, max_size=60),
    limit=st.integers(1, 7),
)
def test_stripes_are_runs_of_what_is_to_be_sent(blocks: list[tuple[int, PlaceState]], limit: int) -> None:
    codes = np.array([code for code, _ in blocks], np.uint16)
    states = np.array([state for _, state in blocks], np.uint8)
    seen: dict[int, int] = {}
    for runs in stripes(codes, states, limit):
        for run in runs:
            assert isinstance(run.where, slice) and 1 <= run.where.stop - run.where.start <= limit
            for position in range(run.where.start, run.where.stop):
                assert position not in seen
                seen[position] = run.node
    sends = (PlaceState.NEW, PlaceState.PRESENT)
    assert seen == {i: (code - 1) // 4 for i, (code, state) in enumerate(blocks) if code and state in sends}


@given(width=st.integers(16, 32), pieces=st.integers(1, 1 << 16))
def test_a_message_never_outgrows_its_bound(width: int, pieces: int) -> None:
    count = blocks_in_message(width, pieces)
    assert 1 <= count <= HASHES_MAX
    assert count * (width + 8 + 16 * pieces) < MESSAGE_BYTES_MAX or count == 1


def test_gather_takes_runs_and_scattered_positions() -> None:
    data = b"".join(bytes([i]) * 16 for i in range(6))
    assert gather(data, 16, slice(2, 4)) == data[32:64]
    assert gather(data, 16, np.array([0, 5])) == data[:16] + data[80:]
