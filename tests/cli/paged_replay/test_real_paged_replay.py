"""Whole replays on real engines and a real pool: the same tokens everywhere, and what the simulator says is hit."""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvstrata.cli.paged_replay import PagedOptions, PagedResult, run_paged_replay
from kvstrata.cli.paged_replay import replay as replay_module
from kvstrata.cli.paged_replay.conversation import generate_conversations
from kvstrata.proto.errors import ConfigError

#: Think time lets stores reach the directory: a request that comes earlier computes what it could have loaded.
SMALL = PagedOptions(
    engines=2, nodes=1, model="tiny", output_tokens=3, kv_bytes=16 << 20, pool_bytes=64 << 20, think_cap_s=0.3, seed=5
)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Data goes here, so that leftovers are seen. A short path: sockets are made in it."""
    before = set(psutil.Process().children())
    with tempfile.TemporaryDirectory(prefix="kvs-test-") as path:
        monkeypatch.setattr("tempfile.tempdir", path)
        yield Path(path)
        assert not set(psutil.Process().children()) - before
        assert list(Path(path).iterdir()) == []


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations of some hundred tokens."""
    conversations = generate_conversations(2, 3, 5, system_chars=300, turn_chars=150)
    monkeypatch.setattr(replay_module, "generate_conversations", lambda *_args: conversations)


def check_same_tokens(result: PagedResult) -> None:
    assert result.problems() == [], result.table()
    outputs = [[outcome.output for outcome in case.run.outcomes] for case in result.cases]
    assert all(output == outputs[0] for output in outputs)
    assert len({tuple(output) for output in outputs[0]}) > 1, "every request has the same output: nothing is shown"


def test_tokens_are_the_same_in_all_cases_and_the_pool_hits_what_the_simulator_says() -> None:
    seen: list[tuple[int, int]] = []
    options = dataclasses.replace(SMALL, cases=("none", "private", "pool"))
    result = run_paged_replay(options, lambda done, of: seen.append((done, of)))
    check_same_tokens(result)
    assert seen == [(n + 1, 18) for n in range(18)]
    none, private, pool = result.cases
    assert none.hit_rate == 0
    assert (private.local_tokens == result.private_ceiling).all(), result.table()
    assert pool.external_tokens.sum() > 0
    assert (pool.local_tokens + pool.external_tokens == result.ceiling).all(), result.table()
    assert pool.run.counted("connector.load_tokens") == pool.external_tokens.sum()
    assert (pool.run.counted("connector.loads_failed"), pool.run.counted("connector.store_blocks_failed")) == (0, 0)
    for case in result.cases:
        assert all(0 < outcome.ttft_s <= outcome.total_s for outcome in case.run.outcomes)
        assert all(0 < outcome.compute_s <= outcome.engine_s <= outcome.ttft_s for outcome in case.run.outcomes)


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_loads_that_fail_are_computed_and_change_no_token(rate: float) -> None:
    options = dataclasses.replace(SMALL, faults=rate, tokenizer="bpe:400", concurrency=2, think_cap_s=0.1)
    result = run_paged_replay(options)
    check_same_tokens(result)
    pool = result.case("pool")
    assert pool is not None
    assert pool.run.counted("connector.loads_partial") + pool.run.counted("connector.loads_failed") > 0
    if rate == 1.0:
        assert pool.external_tokens.sum() == 0


def test_an_engine_that_dies_is_named_and_the_others_serve_on() -> None:
    options = dataclasses.replace(SMALL, cases=("private",))

    def kill(done: int, _of: int) -> None:
        if done == 2:
            engines = [child for child in psutil.Process().children() if "engine_process" in " ".join(child.cmdline())]
            os.kill(engines[0].pid, signal.SIGKILL)

    result = run_paged_replay(options, kill)
    run = result.cases[0].run
    assert len(run.faults) == 1 and "SIGKILL" in run.faults[0] and run.faults[0].startswith("engine 0")
    # A request that it had is reported as failed; those after it go to the engine that lives.
    assert sum(bool(outcome.error) for outcome in run.outcomes) <= 1
    assert not run.outcomes[-1].error


def test_what_an_engine_cannot_be_is_said_before_anything_is_sent() -> None:
    with pytest.raises(ConfigError, match=r"engine 0 cannot serve: .*9000b"):
        run_paged_replay(dataclasses.replace(SMALL, model="9000b"))
    with pytest.raises(ConfigError, match="engine 0 cannot serve"):
        run_paged_replay(dataclasses.replace(SMALL, kv_bytes=1 << 14))
