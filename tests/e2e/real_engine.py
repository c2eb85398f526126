"""Engines in end-to-end tests: stepped until nothing is under way, and then nothing may be held."""

from __future__ import annotations

import time

from kvstrata.engine_adapter.paged.engine import Engine

SETTLE_S = 20.0


def settle(engine: Engine) -> None:
    """Step until nothing is under way: what was computed is stored then."""
    deadline = time.monotonic() + SETTLE_S
    while engine.has_work:
        assert time.monotonic() < deadline, engine.stats()
        engine.step()
        engine.wait(0.05)


def counters_are_zero(engine: Engine) -> None:
    """After the last job has ended: no request, no reference on any block, every invariant."""
    settle(engine)
    engine.scheduler.check()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.loading, stats.connector.get("jobs_pending", 0)) == (0, 0, 0, 0)
    assert engine.kv.pool.num_free_blocks == engine.kv.pool.num_blocks - 1
