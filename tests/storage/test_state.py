"""What a node promises, one promise a test, with the time told by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstrata.proto.errors import FingerprintMismatch, InvalidArgument
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.state import WriteAsk

from .conftest import Node, fill, holds, key, keys

STORED, PRESENT, LOADED = BlockStatus.STORED, BlockStatus.ALREADY_PRESENT, BlockStatus.LOADED
RESERVED, IN_FLIGHT, MISSING = BlockStatus.RESERVED, BlockStatus.IN_FLIGHT, BlockStatus.MISSING
FULL, ABORTED = BlockStatus.FULL, BlockStatus.ABORTED
OTHER = b"o" * 16


# ---------------------------------------------------------------- visibility


def test_nothing_is_visible_before_its_commit(node: Node) -> None:
    got = node.reserve(range(4))
    assert list(got.status) == [RESERVED] * 4
    assert list(node.acquire(range(4)).status) == [MISSING] * 4
    assert got.reservation is not None
    node.state.commit(Node.SESSION, got.reservation.id, [1, 2, 3, 4], [1, 0, 1, 0], node.now)
    read = node.acquire(range(4))
    assert list(read.status) == [LOADED, MISSING, LOADED, MISSING]
    assert [block.checksum for block in read.blocks] == [1, 3]


def test_one_writer_a_key(node: Node) -> None:
    first = node.reserve([1, 2])
    second = node.reserve([2, 3], session=OTHER)
    assert list(second.status) == [IN_FLIGHT, RESERVED]
    assert first.reservation is not None
    node.state.abort(Node.SESSION, first.reservation.id, node.now)
    assert list(node.reserve([2], session=OTHER).status) == [RESERVED]


def test_a_key_named_twice_in_one_call_is_written_once(node: Node) -> None:
    assert list(node.reserve([5, 5, 6]).status) == [RESERVED, IN_FLIGHT, RESERVED]


def test_present_blocks_are_not_written_again(node: Node) -> None:
    node.store([1, 2])
    assert node.store([1, 2, 3]) == [PRESENT, PRESENT, STORED]
    assert node.state.counts.stored == 3


def test_another_tenant_sees_nothing(node: Node) -> None:
    node.store([1], salt="a")
    assert list(node.acquire([1], salt="b").status) == [MISSING]
    assert node.store([1], salt="b") == [STORED]


def test_another_session_cannot_commit_or_abort(node: Node) -> None:
    got = node.reserve([1])
    assert got.reservation is not None
    assert list(node.state.commit(OTHER, got.reservation.id, [0], None, node.now)) == [ABORTED]
    node.state.abort(OTHER, got.reservation.id, node.now)
    assert list(node.state.commit(Node.SESSION, got.reservation.id, [0], None, node.now)) == [STORED]


# ---------------------------------------------------------------- deadlines and deaths


def test_late_writer_changes_nothing(node: Node) -> None:
    """A's reservation lapses; B stores the key; A's late commit is refused and B's bytes stand."""
    late = node.reserve([1])
    assert late.reservation is not None
    node.now += 31
    node.state.expire(node.now)
    assert node.store([1], version=2, session=OTHER) == [STORED]
    assert list(node.state.commit(Node.SESSION, late.reservation.id, [0], None, node.now)) == [ABORTED]
    (block,) = node.acquire([1]).blocks
    assert holds(block, 2)


def test_commit_past_the_deadline_is_refused_even_before_anyone_looked(node: Node) -> None:
    got = node.reserve([1], deadline_ms=100)
    assert got.reservation is not None
    node.now = got.reservation.deadline
    assert list(node.state.commit(Node.SESSION, got.reservation.id, [0], None, node.now)) == [ABORTED]
    assert node.present([1]) == []


def test_leases_last_a_second_longer_than_their_caller_and_a_minute_at_most(node: Node) -> None:
    asked = {100: 1.1, 2_000: 3.0, 10_000_000: 60.0}
    for deadline_ms, lasts in asked.items():
        got = node.reserve([deadline_ms], deadline_ms=deadline_ms)
        assert got.reservation is not None
        assert got.reservation.deadline - node.now == pytest.approx(lasts)


def test_a_lapsed_lease_no_longer_protects(make_node: Callable[..., Node]) -> None:
    node = make_node(slabs=2)
    full = range(node.capacity)
    node.store(full)
    lease = node.acquire(full, seconds=2.0)
    assert set(node.store([1000])) == {FULL}, "everything is leased"
    node.now += 2.0
    node.state.expire(node.now)
    assert node.store([1000]) == [STORED]
    assert any(block.generation != block.slab.generations[block.slot] for block in lease.blocks), "readers can tell"


def test_session_death_frees_everything_it_held(node: Node) -> None:
    node.store(range(8))
    node.acquire(range(8))
    node.reserve(range(100, 108))
    node.acquire([1], session=OTHER)
    node.state.session_ended(Node.SESSION, node.now)
    node.state.check()
    assert len(node.state.reservations) == 0 and len(node.state.leases) == 1 and node.state.sessions == 1
    node.state.session_ended(OTHER, node.now)
    assert node.state.sessions == 0
    assert node.arena.bytes_used == 8 * 4096


def test_a_busy_reservation_keeps_its_slots_until_the_mover_is_done(make_node: Callable[..., Node]) -> None:
    """INV-3: memory that a thread writes into is not given to anyone else, whoever dies meanwhile."""
    node = make_node(slabs=2)
    got = node.reserve(range(node.capacity))
    assert got.reservation is not None
    node.state.start_moving(got.reservation)
    node.state.session_ended(Node.SESSION, node.now)
    node.state.check()
    assert set(node.reserve([1], session=OTHER).status) == {FULL}, "the slots are still being written"
    assert not node.state.moved(got.reservation, node.now)
    assert node.arena.bytes_used == 0
    assert node.store([1], session=OTHER) == [STORED]


def test_the_keys_of_a_doomed_reservation_are_free_at_once(node: Node) -> None:
    got = node.reserve([1])
    assert got.reservation is not None
    node.state.start_moving(got.reservation)
    node.now += 100
    node.state.expire(node.now)
    assert node.store([1], version=7, session=OTHER) == [STORED]
    assert not node.state.moved(got.reservation, node.now)
    (block,) = node.acquire([1]).blocks
    assert holds(block, 7)


def test_two_movers_cannot_share_a_reservation(node: Node) -> None:
    got = node.reserve([1])
    assert got.reservation is not None
    node.state.start_moving(got.reservation)
    with pytest.raises(InvalidArgument, match="already"):
        node.state.start_moving(got.reservation)
    with pytest.raises(InvalidArgument, match="still being written"):
        node.state.commit(Node.SESSION, got.reservation.id, [0], None, node.now)
    assert node.state.moved(got.reservation, node.now)


def test_wrong_counts_leave_the_reservation_as_it_was(node: Node) -> None:
    got = node.reserve([1, 2])
    assert got.reservation is not None
    for checksums, mask in (([0], None), ([0, 0], [1])):
        with pytest.raises(InvalidArgument):
            node.state.commit(Node.SESSION, got.reservation.id, checksums, mask, node.now)
    assert list(node.state.commit(Node.SESSION, got.reservation.id, [0, 0], None, node.now)) == [STORED, STORED]


# ---------------------------------------------------------------- views


def test_views_are_renewed_up_to_their_age(node: Node) -> None:
    node.store([1])
    lease = node.acquire([1]).lease
    started = node.now
    while node.state.renew(Node.SESSION, lease.id, 30_000, node.now):
        node.now += 20
        node.state.expire(node.now)
        assert node.now - started < 700, "a view may not last for ever"
    assert node.now - started > 500
    node.now += 61
    node.state.expire(node.now)
    assert len(node.state.leases) == 0


def test_views_hold_at_most_a_quarter_of_the_pool(make_node: Callable[..., Node]) -> None:
    node = make_node(slabs=4)
    node.store(range(node.capacity))
    small, large = node.acquire(range(4)).lease, node.acquire(range(4, node.capacity)).lease
    assert node.state.renew(Node.SESSION, small.id, 1000, node.now) > 0
    assert node.state.renew(Node.SESSION, large.id, 1000, node.now) == 0
    assert node.state.renew(OTHER, small.id, 1000, node.now) == 0, "another session's lease"
    node.state.release(Node.SESSION, [small.id, large.id, 12345])
    assert node.state.renew(Node.SESSION, small.id, 1000, node.now) == 0


# ---------------------------------------------------------------- eviction


def test_tail_first(make_node: Callable[..., Node]) -> None:
    """100 blocks stored in 10 calls, 30 % evicted: exactly the last 30."""
    node = make_node(slabs=10, block_bytes=6000)
    assert node.capacity >= 70
    extra = node.capacity - 70
    node.store(range(5000, 5000 + extra), salt="filler")
    lease = node.acquire(range(5000, 5000 + extra), salt="filler", seconds=1e6)  # all but 70 slots are out of reach
    assert lease.lease is not None or not extra
    node.chain(range(70), 10)
    node.store(range(1000, 1001), salt="z")
    assert node.present(range(100)) == list(range(69))


def test_tail_first_of_a_chain_that_grew_while_others_were_stored(make_node: Callable[..., Node]) -> None:
    node = make_node(slabs=8, block_bytes=4096)
    chain, others = range(100), range(5000, 5000 + node.capacity - 100)
    node.chain(chain, 10)
    node.store(others, salt="other")
    victims = 30
    assert node.store(range(9000, 9000 + victims), salt="new") == [STORED] * victims
    assert node.present(chain) == list(range(70)), "exactly the last 30 of the coldest chain"
    assert node.present(others, "other") == list(others)


def test_a_load_of_the_tail_keeps_the_head(make_node: Callable[..., Node]) -> None:
    """An engine serves the head from its own memory and loads the tail: the head must not look cold."""
    node = make_node(slabs=4)
    chain = range(20)
    node.chain(chain, 5)
    node.store(range(1000, 1000 + node.capacity - 20), salt="other")
    tail = node.acquire(range(10, 20))
    node.state.release(Node.SESSION, [tail.lease.id])
    node.store(range(3000, 3010), salt="new")
    assert node.present(chain) == list(chain)


def test_the_tenant_most_over_its_fair_share_goes_first(make_node: Callable[..., Node]) -> None:
    """However cold: recency decides within a tenant, shares between tenants."""
    node = make_node(slabs=2)
    third = node.capacity // 3
    node.store(range(third - 2), salt="small and cold")
    node.store(range(100, 100 + node.capacity - third + 2), salt="large and warm")
    node.store(range(7000, 7004), salt="new")
    assert len(node.present(range(third), "small and cold")) == third - 2
    assert len(node.present(range(100, 200), "large and warm")) == node.capacity - third - 2
    assert len(node.present(range(7000, 7004), "new")) == 4


def test_eviction_frees_what_was_asked(make_node: Callable[..., Node]) -> None:
    node = make_node(slabs=4)
    node.store(range(node.capacity))
    before = node.state.counts.evicted
    node.store(range(5000, 5007), salt="b")
    assert node.state.counts.evicted - before == 7
    assert node.state.inventory.visible == node.capacity


def test_a_store_larger_than_the_pool_keeps_its_beginning(make_node: Callable[..., Node]) -> None:
    node = make_node(slabs=2)
    node.store(range(9000, 9010), salt="old")
    status = node.store(range(node.capacity + 50))
    assert status == [STORED] * node.capacity + [FULL] * 50
    again = node.store(range(node.capacity + 50))
    assert again == [PRESENT] * node.capacity + [FULL] * 50, "what the call touched is not evicted for its rest"


def test_leased_and_in_flight_blocks_are_never_evicted(make_node: Callable[..., Node]) -> None:
    node = make_node(slabs=2)
    node.store(range(10))
    lease = node.acquire(range(5), seconds=1e6)
    flying = node.reserve(range(100, 110), deadline_ms=10**7)
    node.store(range(2000, 2000 + 2 * node.capacity), salt="flood")
    assert node.present(range(10)) == list(range(5))
    assert all(holds(block, 0) for block in lease.blocks)
    assert flying.reservation is not None
    for block in flying.reservation.blocks:
        fill(block, 0)
    assert set(node.state.commit(Node.SESSION, flying.reservation.id, [0] * 10, None, node.now)) == {STORED}


def test_probes_do_not_starve_stores(make_node: Callable[..., Node]) -> None:
    """95 % full, somebody acquires and releases every key in a loop: new stores succeed."""
    node = make_node(slabs=4)
    node.store(range(int(node.capacity * 0.95)))
    stored = 0
    for turn in range(200):
        got = node.acquire(range(int(node.capacity * 0.95)))
        if got.lease is not None:
            node.state.release(Node.SESSION, [got.lease.id])
        stored += node.store([10_000 + turn], salt=f"t{turn % 7}") == [STORED]
    assert stored == 200


def test_many_protected_blocks_cost_one_look_each(make_node: Callable[..., Node]) -> None:
    """A view over the cold end is parked once, not scanned again for every victim; it returns as the coldest."""
    node = make_node(slabs=4)
    node.store(range(node.capacity))
    held = node.acquire(range(40), seconds=1e6)
    node.acquire([50]).lease  # noqa: B018  keeps the stamps apart
    for turn in range(10):
        node.store([20_000 + turn], salt="n")
    assert node.present(range(40)) == list(range(40))
    assert sum(block.parked for block in held.blocks) <= 40
    node.state.release(Node.SESSION, [held.lease.id])
    node.state.check()


def test_rings_of_parents_do_not_make_blocks_immortal(make_node: Callable[..., Node]) -> None:
    node = make_node(slabs=2)
    node.store([1], parent=key(2), first_index=5)
    node.store([2], parent=key(1), first_index=5)
    node.store([1], parent=key(2), first_index=9)
    node.store(range(100, 100 + 2 * node.capacity), salt="flood")
    assert node.present([1, 2]) == []


# ---------------------------------------------------------------- mixed sizes


def test_classes_share_a_node(make_node: Callable[..., Node]) -> None:
    """FAULTS "allocation failure, fragmentation by mixed block sizes": a new size always gets its room."""
    node = make_node(slabs=4, block_bytes=1024)
    node.store(range(node.capacity))
    large = node.state.open_namespace(Namespace("large", 20_000, 16))[0]
    assert node.store(range(4), handle=large) == [STORED] * 4
    assert node.state.counts.slabs_taken_over == 2
    node.store(range(90_000, 90_010), handle=node.handle)
    assert len(node.arena.capacity()) == 2


def test_the_colder_class_gives_way_and_the_warmer_one_does_not(make_node: Callable[..., Node]) -> None:
    node = make_node(slabs=4, block_bytes=4096)
    per_slab = node.arena.slots_in_a_slab(4096)
    large = node.state.open_namespace(Namespace("large", 20_000, 16))[0]
    node.store(range(2 * per_slab))
    node.store(range(6), handle=large)
    assert node.arena.free_slabs == 0
    for number in range(100, 106):  # the small ones are colder: their slabs go first
        node.store([number], handle=large)
    assert len(node.arena.capacity()) == 1 and node.present(range(2 * per_slab)) == []
    node.store([1])
    assert len(node.arena.capacity()) == 2, "and a size that has nothing takes a slab of whoever has"


def test_a_slab_with_a_reader_in_it_is_not_taken(make_node: Callable[..., Node]) -> None:
    node = make_node(slabs=2, block_bytes=4096)
    per_slab = node.arena.slots_in_a_slab(4096)
    node.store(range(2 * per_slab))
    held = node.acquire([0, per_slab], seconds=1e6)
    assert {block.slab.index for block in held.blocks} == {0, 1}
    large = node.state.open_namespace(Namespace("large", 20_000, 16))[0]
    assert node.store([1], handle=large) == [FULL]
    node.state.release(Node.SESSION, [held.lease.id])
    assert node.store([1], handle=large) == [STORED]


def test_blocks_larger_than_a_slab_are_refused(node: Node) -> None:
    huge = node.state.open_namespace(Namespace("huge", 1 << 20, 16))[0]
    assert node.store([1], handle=huge) == [BlockStatus.REFUSED]


# ---------------------------------------------------------------- removal, epochs, directory


def test_a_removed_block_is_invisible_at_once_and_freed_with_its_last_reader(node: Node) -> None:
    node.store([1, 2])
    lease = node.acquire([1, 2]).lease
    assert node.state.remove(node.namespace, "", keys([1, 2, 3]), node.now) == 2
    assert list(node.acquire([1, 2]).status) == [MISSING, MISSING]
    assert all(holds(block, 0) for block in lease.blocks)
    assert node.store([1], version=3) == [STORED], "the key may be stored anew meanwhile"
    assert node.arena.bytes_used == 3 * 4096
    node.state.release(Node.SESSION, [lease.id])
    assert node.arena.bytes_used == 4096
    assert holds(node.acquire([1]).blocks[0], 3)


def test_resurrection(node: Node) -> None:
    """A write that was under way when its key was removed does not bring it back."""
    got = node.reserve([1])
    assert got.reservation is not None
    assert node.state.remove(node.namespace, "", keys([1]), node.now) == 1
    assert node.store([1], version=2, session=OTHER) == [STORED]
    assert list(node.state.commit(Node.SESSION, got.reservation.id, [0], None, node.now)) == [ABORTED]
    assert holds(node.acquire([1]).blocks[0], 2)


def test_a_new_epoch_ends_the_old_weights(node: Node) -> None:
    node.store([1])
    flying = node.reserve([2])
    assert node.state.set_epoch("model", 4, node.now) == 2
    assert flying.reservation is not None
    assert list(node.state.commit(Node.SESSION, flying.reservation.id, [0], None, node.now)) == [ABORTED]
    assert node.present([1, 2]) == []
    with pytest.raises(FingerprintMismatch, match="epoch"):
        node.reserve([1])
    assert list(node.reserve([1], epoch=4).status) == [RESERVED]
    assert node.state.set_epoch("model", 3, node.now) == 0, "an older epoch is not news"


def test_nobody_finds_anything_at_a_node_that_has_said_goodbye(node: Node) -> None:
    """What is dropped from now on it is not told."""
    node.store([1])
    reading = node.acquire([1])
    node.state.leave()
    assert list(node.acquire([1]).status) == [MISSING]
    assert reading.lease is not None and node.state.leases.stands(reading.lease), "a read that has begun goes on"


def test_the_delta_log_tells_the_inventory(make_node: Callable[..., Node]) -> None:
    """Whoever applies every batch in order has what the node has."""
    node = make_node(slabs=2)
    node.chain(range(60), 7)
    node.store(range(40), salt="b")
    node.state.remove(node.namespace, "", keys(range(5)), node.now)
    node.state.deltas.close_batch()
    directory: set[tuple[str, bytes]] = set()
    for batch in node.state.deltas.after(0) or []:
        for run in batch.runs:
            for start in range(0, len(run.hashes), 16):
                entry = (run.salt, run.hashes[start : start + 16])
                assert (entry in directory) is not run.added, "a change that changes nothing"
                (directory.add if run.added else directory.discard)(entry)
    held = {(e.salt, e.hashes[i : i + 16]) for e in node.state.snapshot() for i in range(0, len(e.hashes), 16)}
    assert directory == held and held


def test_answers_name_the_delta_that_carries_what_they_saw(node: Node) -> None:
    assert node.acquire([1]).delta_seq == 0, "nothing has happened: any directory knows"
    node.store([1])
    assert node.acquire([1]).delta_seq == 1
    assert node.state.deltas.close_batch() == 1
    assert node.acquire([1]).delta_seq == 1
    node.state.remove(node.namespace, "", key(1), node.now)
    assert node.acquire([1]).delta_seq == 2


def test_story(node: Node) -> None:
    node.store([1])
    node.now += 5
    node.state.remove(node.namespace, "", key(1), node.now)
    verbs = node.state.story(node.namespace, "", key(1))
    assert [verb for _, verb in verbs] == ["reserved", "committed", "removed"]
    assert verbs[-1][0] - verbs[0][0] == 5
    assert node.state.story(node.namespace, "", key(2)) == []


# ---------------------------------------------------------------- bad input


def test_bad_input_is_refused_and_changes_nothing(node: Node) -> None:
    with pytest.raises(FingerprintMismatch):
        node.state.acquire(Node.SESSION, 99, "", key(1), 1.0, node.now)
    with pytest.raises(InvalidArgument, match="multiple"):
        node.state.acquire(Node.SESSION, node.handle, "", b"short", 1.0, node.now)
    for bad in (
        WriteAsk(node.handle, "", b"short"),
        WriteAsk(node.handle, "", key(1), parent=b"p"),
        WriteAsk(node.handle, "s" * 129, key(1)),
        WriteAsk(node.handle, "", key(1) * 70_000),
    ):
        with pytest.raises(InvalidArgument):
            node.state.reserve(Node.SESSION, bad, node.now)
    assert node.arena.bytes_used == 0


def test_generations_are_never_used_twice(make_node: Callable[..., Node]) -> None:
    node = make_node(slabs=2)
    seen: set[int] = set()
    for turn in range(5):
        got = node.reserve(range(turn * 1000, turn * 1000 + node.capacity))
        assert got.reservation is not None
        fresh = {block.generation for block in got.reservation.blocks}
        assert not fresh & seen and len(fresh) == node.capacity
        seen |= fresh
        node.state.abort(Node.SESSION, got.reservation.id, node.now)
