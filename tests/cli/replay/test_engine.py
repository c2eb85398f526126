"""The engine stand-in over a pool that is a dict, broken in the ways a pool breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from kvstrata.cli.replay.engine import Engine
from kvstrata.cli.replay.messages import Setup, Work
from kvstrata.proto.errors import ProtocolError

if TYPE_CHECKING:
    from kvstrata.client import Client

HASHES = np.random.default_rng(1).integers(0, 256, (64, 16), dtype=np.uint8)


def work(chain: list[int], hit_limit: int | None = None, settled: int = 0, salt: str = "s") -> Work:
    numbers = np.array(chain, dtype=np.int32)
    limit = len(chain) if hit_limit is None else hit_limit
    return Work(0, salt, limit, settled, numbers.tobytes() + HASHES[numbers].tobytes())


@pytest.fixture
def engine(setup: Setup, pool: Any) -> Engine:
    return Engine(setup, cast("Client", pool))


@pytest.fixture
def other(setup: Setup, pool: Any) -> Engine:
    """A second engine on the same pool."""
    return Engine(setup, cast("Client", pool))


def test_what_one_engine_stores_another_loads_and_verifies(engine: Engine, other: Engine, pool: Any) -> None:
    chain = list(range(10))
    first = engine.serve(work(chain))
    assert (first.private_blocks, first.pool_blocks, first.stored_bytes) == (0, 0, 1000)
    # A staging region of 4 blocks: three calls, each with the parent of its first block.
    parents = [None, HASHES[3].tobytes(), HASHES[7].tobytes()]
    assert pool.stores == [(parents[0], 0, 4), (parents[1], 4, 4), (parents[2], 8, 2)]
    second = other.serve(work([*chain, 10]))
    assert (second.private_blocks, second.pool_blocks, second.loaded_bytes, second.stored_bytes) == (0, 10, 1000, 100)
    assert second.wrong_bytes == 0
    assert second.reasons == {}


def test_private_blocks_are_not_asked_of_the_pool(engine: Engine, pool: Any) -> None:
    engine.serve(work([1, 2, 3]))
    again = engine.serve(work([1, 2, 3, 4]))
    assert (again.private_blocks, again.pool_blocks, again.loaded_bytes) == (3, 0, 0)


def test_hits_stop_at_the_limit(engine: Engine, other: Engine) -> None:
    engine.serve(work([1, 2, 3], hit_limit=2))
    assert engine.serve(work([1, 2, 3], hit_limit=2)).private_blocks == 2
    assert other.serve(work([1, 2, 3], hit_limit=2)).pool_blocks == 2


def test_a_flipped_byte_is_counted(engine: Engine, other: Engine, pool: Any) -> None:
    engine.serve(work([1, 2, 3]))
    key = ("s", HASHES[2].tobytes())
    pool.rows[key] = pool.rows[key][:50] + bytes([pool.rows[key][50] ^ 1]) + pool.rows[key][51:]
    assert other.serve(work([1, 2, 3])).wrong_bytes == 1


def test_a_load_that_moves_nothing_is_wrong_bytes(engine: Engine, other: Engine, pool: Any) -> None:
    engine.serve(work([1, 2, 3]))
    other.serve(work([1, 2, 3]))
    for key in pool.rows:
        pool.rows[key] = b""
    # The right bytes were in this engine's staging region a moment ago.
    other._private.touch(list(range(20, 30)))
    assert other.serve(work([1, 2, 3])).wrong_bytes > 250


def test_another_tenants_blocks_are_not_hits(engine: Engine, other: Engine) -> None:
    engine.serve(work([1, 2], salt="a"))
    assert other.serve(work([3, 4], salt="b")).pool_blocks == 0


def test_a_hole_ends_the_prefix_and_is_filled(engine: Engine, other: Engine, pool: Any) -> None:
    engine.serve(work([1, 2, 3, 4]))
    pool.lost.add(HASHES[2].tobytes())
    holed = other.serve(work([1, 2, 3, 4]))
    assert (holed.pool_blocks, holed.loaded_bytes, holed.wrong_bytes) == (1, 300, 0)
    assert holed.reasons == {"node_lost": 1}
    assert pool.stores[-1] == (HASHES[1].tobytes(), 1, 3)


def test_blocks_behind_a_hole_are_no_prefix_even_in_another_call(engine: Engine, other: Engine, pool: Any) -> None:
    engine.serve(work(list(range(10))))
    pool.lost.add(HASHES[1].tobytes())
    assert other.serve(work(list(range(10)))).pool_blocks == 1


def test_what_the_pool_dropped_of_a_private_prefix_is_given_back(engine: Engine, pool: Any) -> None:
    engine.serve(work([1, 2, 3, 4]))
    for number in (2, 3):
        del pool.rows["s", HASHES[number].tobytes()]
    pool.stores.clear()
    assert engine.serve(work([1, 2, 3, 4])).private_blocks == 4
    assert pool.stores == [(HASHES[1].tobytes(), 1, 2)]
    assert len(pool.rows) == 4


def test_what_was_stored_a_moment_ago_is_not_given_back(engine: Engine, pool: Any) -> None:
    engine.serve(work([1, 2, 3]))
    pool.hidden = {HASHES[number].tobytes() for number in (2, 3)}
    pool.stores.clear()
    engine.serve(work([1, 2, 3, 4], settled=3))
    assert pool.stores == [(HASHES[3].tobytes(), 3, 1)]


def test_a_pool_that_is_down_is_compute_and_not_a_failure(engine: Engine, pool: Any) -> None:
    pool.down = True
    outcome = engine.serve(work([1, 2, 3]))
    assert (outcome.error, outcome.pool_blocks, sum(outcome.body)) == ("", 0, 0)
    assert outcome.reasons == {"lookup Unavailable": 1, "store Unavailable": 1}
    pool.down = False
    assert engine.serve(work([1, 2, 3])).private_blocks == 3


def test_a_master_that_does_not_answer_is_compute(engine: Engine, pool: Any) -> None:
    pool.masterless = True
    outcome = engine.serve(work([1, 2, 3], settled=3))
    assert (outcome.pool_blocks, outcome.unsettled, outcome.error) == (0, False, "")
    assert outcome.reasons == {"node_lost": 3}


def test_not_yet_is_asked_again_and_ends(engine: Engine, pool: Any) -> None:
    pool.rebuilding = True
    outcome = engine.serve(work([1, 2, 3]))
    assert (outcome.pool_blocks, outcome.reasons) == (0, {"not_yet": 1})


def test_an_engine_waits_for_blocks_that_were_just_stored(engine: Engine, other: Engine, pool: Any) -> None:
    engine.serve(work([1, 2]))
    pool.hidden = {HASHES[2].tobytes()}
    waited = other.serve(work([1, 2], settled=2))
    assert (waited.unsettled, waited.reasons) == (True, {})
    assert waited.pool_blocks == 1
    pool.hidden = set()
    other._private.touch(list(range(20, 30)))
    assert not other.serve(work([1, 2], settled=2)).unsettled


def test_an_empty_prompt_is_served(engine: Engine) -> None:
    outcome = engine.serve(work([]))
    assert (outcome.private_blocks, outcome.pool_blocks, outcome.error) == (0, 0, "")


def test_work_of_the_wrong_size_is_refused(engine: Engine) -> None:
    with pytest.raises(ProtocolError, match="work 5 has a body of 7 bytes"):
        engine.serve(Work(5, "", 0, 0, bytes(7)))
    with pytest.raises(ProtocolError):
        engine.serve(work([1], hit_limit=2))
