"""Whole replays on real processes: a master, nodes, engines; also with processes killed on the way."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import psutil
import pytest

from kvstrata.cli.replay import ReplayOptions, ReplayResult, run_replay
from kvstrata.cli.replay.pool import OwnPool
from kvstrata.proto.errors import ConfigError, Unavailable
from kvstrata.storage.eviction.setting import EvictionOrder

SMALL = ReplayOptions(sessions=3, seed=11, engines=2, private_tokens=60_000, bytes_per_token=8)


def pool_processes(role: str) -> list[psutil.Process]:
    """Daemons of a role that this test run has started."""
    return [child for child in psutil.Process().children() if role in child.cmdline()[3:4]]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data goes under tmp_path, so that leftovers are seen."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def check_clean(tmp_path: Path) -> None:
    assert pool_processes("master") == []
    assert pool_processes("storage") == []
    assert list(tmp_path.iterdir()) == []


def replay_killing(role: str, at: int) -> ReplayResult:
    def kill(done: int, _of: int) -> None:
        if done == at:
            pool_processes(role)[0].send_signal(signal.SIGKILL)

    return run_replay(SMALL, kill)


def test_a_replay_equals_its_simulator(tmp_path: Path) -> None:
    seen: list[int] = []
    result = run_replay(SMALL, lambda done, _of: seen.append(done))
    assert result.problems() == [], result.table()
    assert seen == list(range(1, len(result.schedule.turns) + 1))
    assert abs(result.oracle_points) < 0.05, result.table()
    assert abs(result.ceiling_points) < 0.05, result.table()
    assert result.cases.pool.hits.pool_rate() > 0.3
    assert result.traffic.loaded_bytes == int(result.cases.pool.hits.pool.sum()) * SMALL.bytes_per_token
    assert result.traffic.wrong_bytes == 0
    check_clean(tmp_path)


def test_a_pool_too_small_evicts_as_its_simulator_does(tmp_path: Path) -> None:
    # A node of the least size holds 510 blocks of 16 KiB: two prompts and a bit, of three sessions.
    tight = dataclasses.replace(
        SMALL, nodes=1, private_tokens=0, bytes_per_token=32, pool_bytes=1 << 20, eviction=EvictionOrder.LRU
    )
    result = run_replay(tight)
    assert result.traffic.wrong_bytes == 0
    assert result.ceiling_points < -5, result.table()
    assert abs(result.oracle_points) <= 0.5, result.table()


@pytest.mark.parametrize("role", ["storage", "master"])
def test_a_kill_on_the_way_is_compute_and_never_wrong_or_failed(role: str, tmp_path: Path) -> None:
    result = replay_killing(role, 40)
    assert result.traffic.wrong_bytes == 0
    assert result.traffic.failed_requests == 0
    assert len(result.faults) == 1
    assert "SIGKILL" in result.faults[0]
    assert result.exit_code == 0
    # The other half of the pool, or the private caches, go on serving.
    assert result.cases.private.hits.rate() <= result.cases.pool.hits.rate() < result.cases.oracle.hits.rate()
    check_clean(tmp_path)


def test_a_running_pool_is_used_twice_and_left_running(tmp_path: Path) -> None:
    pool = OwnPool.of(SMALL)
    try:
        running = dataclasses.replace(SMALL, sessions=2, engines=1, private_tokens=0, masters=pool.masters)
        rates = []
        for _ in range(2):
            result = run_replay(running)
            assert result.problems() == [], result.table()
            assert result.pool_blocks == pool.blocks(SMALL.block_bytes)
            rates.append(result.cases.pool.hits.rate())
        assert rates[0] == rates[1] > 0
        assert pool.losses() == []
    finally:
        pool.close()
    check_clean(tmp_path)


def test_an_address_without_a_master_is_an_error_that_names_it() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        run_replay(ReplayOptions(sessions=1, masters="127.0.0.1:1"))


def test_a_running_pool_without_nodes_is_refused(tmp_path: Path) -> None:
    pool = OwnPool.of(SMALL)
    try:
        for node in pool.nodes:
            node.stop()
        assert len(pool.losses()) == SMALL.nodes
        with pytest.raises(ConfigError, match="has no active node"):
            run_replay(ReplayOptions(sessions=1, masters=pool.masters))
    finally:
        pool.close()
    check_clean(tmp_path)
