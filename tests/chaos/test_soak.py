"""Many requests, some dropped while they load, some killed with their client, over faulty transports and a node that
is killed now and then: afterwards nothing is held by anybody (INV-5), and nothing has grown.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.chaos.cluster import Cluster
from tests.waiting import until

#: Requests in all, and seconds between two kills of a node.
CI = pytest.param(2_000, 6.0, id="ci", marks=[pytest.mark.slow, pytest.mark.timeout(240)])
LONG = pytest.param(100_000, 30.0, id="long", marks=[pytest.mark.long, pytest.mark.timeout(3600)])
PLAYERS = 3
#: Of the warm size; and what a small process may grow by whatever it is.
RSS_RATIO = 1.2
RSS_SLACK = 16 << 20


def held(process: psutil.Process) -> tuple[int, int, int]:
    """Descriptors, threads, resident bytes."""
    return process.num_fds(), process.num_threads(), process.memory_info().rss


@pytest.mark.parametrize(("requests", "kill_every_s"), [CI, LONG])
def test_nothing_is_held_and_nothing_grows(tmp_path: Path, seed: int, requests: int, kill_every_s: float) -> None:
    more = ("--aborts", "0.1", "--chains", "120")
    with Cluster(tmp_path, nodes=3, players=PLAYERS, ssd="64MiB", transport="auto+faults:lose=0.02") as cluster:
        for index, name in enumerate(cluster.names("player")):
            cluster.play(name, seed + index, *more)
        warm_at = requests // 5
        until(lambda: cluster.requests() >= warm_at, 600)
        # node0 is never killed, so that what it has leaked stays in sight.
        watched = {name: psutil.Process(cluster.pid(name)) for name in ("master0", "node0", "player1")}
        warm = {name: held(process) for name, process in watched.items()}
        due, turn, number = time.monotonic() + kill_every_s, 0, 0
        while cluster.requests() < requests:
            time.sleep(0.25)
            if time.monotonic() > due:
                turn += 1
                number += 1
                victim = f"node{1 + turn % 2}"
                cluster.kill(victim)
                cluster.start(victim)
                cluster.kill("player0")  # with whatever it was at
                cluster.play("player0", seed + 100 + number, *more)
                due = time.monotonic() + kill_every_s
        until(cluster.whole, 30)
        # Quiet: players live and do nothing.
        for name in ("player1", "player2"):
            cluster.signal(name, signal.SIGUSR1)
        cluster.kill("player0")
        until(cluster.at_rest, 20)
        traces = cluster.traces()
        assert traces.total("wrong") == 0 and not traces.errors(), traces.errors()[:3]
        assert traces.total("aborted") > requests // 50 and traces.total("loaded") > requests
        for name, process in watched.items():
            with contextlib.suppress(AssertionError):
                until(_no_more(process, warm[name]))
            assert _no_more(process, warm[name])(), (
                f"{name}: {held(process)} (descriptors, threads, bytes), {warm[name]} warm"
            )
        for name in cluster.names("node"):
            body = cluster.http(name, "/healthz")
            assert not body.get("problems"), body
        cluster.end_players()


def _no_more(process: psutil.Process, warm: tuple[int, int, int]) -> Callable[[], bool]:
    """Not more descriptors and threads than when it was warm, but for those of one client or node more or less."""

    def holds() -> bool:
        now = held(process)
        few = now[0] <= warm[0] + 16 and now[1] <= warm[1] + 16
        return few and now[2] <= max(warm[2] * RSS_RATIO, warm[2] + RSS_SLACK)

    return holds
