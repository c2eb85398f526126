"""Which replica a reader is sent to: near, then fast, then idle; equals in runs; never one to be avoided."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.master.content.misses import MissReason
from kvstrata.master.directory.holders import HolderSets, Ids, code_of
from kvstrata.master.directory.routes import LANES, RUN_BLOCKS, Routes

EMPTY = np.zeros(1, dtype=np.uint32)


def held_by(sets: HolderSets, *holders: tuple[int, int]) -> Ids:
    """The set of these (slot, tier)."""
    ids = EMPTY
    for slot, tier in holders:
        ids = sets.with_holder(ids, slot, tier)
    return ids


def routes_of(sets: HolderSets, hosts: dict[int, str]) -> Routes:
    routes = Routes(sets)
    routes.set_hosts(hosts)
    return routes


def slots(codes: np.ndarray) -> list[int]:  # type: ignore[type-arg]
    return [(int(code) - 1) >> 2 for code in codes]


def test_the_askers_host_comes_first_then_the_faster_tier() -> None:
    sets = HolderSets()
    both = held_by(sets, (1, 1), (2, 0))
    hosts = {1: "a", 2: "b"}
    assert routes_of(sets, hosts).codes(both, "") == 1 + code_of(2, 0)
    assert routes_of(sets, hosts).codes(both, "a") == 1 + code_of(1, 1)
    assert routes_of(sets, {1: "a"}).codes(both, "b") == 1 + code_of(1, 1)
    assert routes_of(sets, {}).codes(both, "a") == 0


def test_memory_comes_before_the_disk_of_the_same_node() -> None:
    sets = HolderSets()
    both = held_by(sets, (3, 1), (3, 0))
    for host in ("", "a", "b"):
        assert routes_of(sets, {3: "a"}).codes(both, host) == 1 + code_of(3, 0)
    disk = sets.without_holder(both, 3, 0, MissReason.EVICTED_ROOM)
    assert routes_of(sets, {3: "a"}).codes(disk, "a") == 1 + code_of(3, 1)


def test_hidden_replicas_and_ghosts_are_not_routed() -> None:
    sets = HolderSets()
    ids = held_by(sets, (0, 0))
    routes = routes_of(sets, {0: "a"})
    assert routes.codes(sets.hidden(ids, 0), "a") == 0
    assert routes.codes(sets.without_holder(ids, 0, 0, MissReason.EVICTED_ROOM), "a") == 0
    assert routes.held(ids, "a").all() and not routes.held(sets.hidden(ids, 0), "a").any()


def test_a_prefix_is_read_from_equal_replicas_in_runs() -> None:
    sets = HolderSets()
    ids = np.repeat(held_by(sets, (0, 0), (1, 0)), 4 * RUN_BLOCKS)
    found = slots(routes_of(sets, {0: "a", 1: "b"}).codes(ids, "elsewhere"))
    runs = [set(found[at : at + RUN_BLOCKS]) for at in range(0, len(found), RUN_BLOCKS)]
    assert all(len(run) == 1 for run in runs) and [run.pop() for run in runs] in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_on_the_askers_host_one_node_serves_a_prefix_and_prefixes_are_spread() -> None:
    sets = HolderSets()
    ids = np.repeat(held_by(sets, (0, 0), (1, 0)), 4 * RUN_BLOCKS)
    routes = routes_of(sets, {0: "here", 1: "here"})
    served = [set(slots(routes.codes(ids, "here", start))) for start in range(2 * LANES)]
    assert all(len(nodes) == 1 for nodes in served) and set.union(*served) == {0, 1}


def test_hosts_that_are_not_known_are_not_the_same_host() -> None:
    sets = HolderSets()
    ids = np.repeat(held_by(sets, (0, 0), (1, 0)), 2 * RUN_BLOCKS)
    assert set(slots(routes_of(sets, {0: "", 1: ""}).codes(ids, ""))) == {0, 1}


def test_a_busy_replica_gets_fewer_runs() -> None:
    sets = HolderSets()
    ids = np.repeat(held_by(sets, (0, 0), (1, 0)), LANES * RUN_BLOCKS)
    routes = routes_of(sets, {0: "a", 1: "b"})
    assert slots(routes.codes(ids, "")).count(0) == len(ids) / 2
    routes.set_weights({0: 1.0, 1: 3.0})
    assert slots(routes.codes(ids, "")).count(0) == len(ids) / 4
    routes.set_weights({})
    assert slots(routes.codes(ids, "")).count(0) == len(ids) / 2


def test_a_slot_that_goes_takes_its_routes_along() -> None:
    sets = HolderSets()
    ids = held_by(sets, (0, 0), (1, 0))
    routes = routes_of(sets, {0: "a", 1: "b"})
    assert {slots(routes.codes(ids, "", start))[0] for start in range(LANES)} == {0, 1}
    sets.drop_slot(0)
    routes.forget(0)
    assert {slots(routes.codes(ids, "", start))[0] for start in range(LANES)} == {1}
    ids = sets.current(ids)
    assert {slots(routes.codes(ids, "", start))[0] for start in range(LANES)} == {1}
    sets.forget(sets.retired)
    again = sets.with_holder(EMPTY, 5, 0)  # takes a freed id: an earlier answer for it is void
    assert routes.codes(again, "") == 0


HOLDERS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=0, max_size=5)


@given(
    st.lists(HOLDERS, min_size=1, max_size=8),
    st.dictionaries(st.integers(0, 4), st.sampled_from(["a", "b"]), max_size=5),
    st.sampled_from(["", "a", "b", "c"]),
    st.sets(st.integers(0, 4), max_size=4),
    st.dictionaries(st.integers(0, 4), st.floats(0.01, 10), max_size=5),
    st.integers(0, 2**64 - 1),
)
def test_what_is_named_is_held_and_the_best_that_may_be_named(
    wanted: list[list[tuple[int, int]]],
    hosts: dict[int, str],
    asker: str,
    avoid: set[int],
    weights: dict[int, float],
    start: int,
) -> None:
    sets = HolderSets()
    routes = routes_of(sets, hosts)
    routes.codes(EMPTY, asker)  # the tables grow afterwards
    routes.set_weights(weights)
    ids = np.concatenate([held_by(sets, *holders) for holders in wanted] * 40)
    codes = routes.codes(ids, asker, start, frozenset(avoid))
    assert routes.held(ids, asker).tolist() == (codes != 0).tolist()

    def rank(holder: tuple[int, int]) -> int:
        slot, tier = holder
        return tier + 4 * (hosts[slot] != asker or not asker) + 8 * (slot in avoid)

    for code, holders in zip(codes.tolist(), wanted * 40, strict=True):
        here = [holder for holder in holders if holder[0] in hosts]
        if not here:
            assert code == 0
            continue
        named = ((code - 1) >> 2, (code - 1) & 3)
        assert named in here and rank(named) == min(map(rank, here))
