"""Masters, nodes and clients under load while something is killed, stopped or cut off every few seconds.

Whatever happens: no wrong byte, no request that hangs or fails, and who does not need a victim does not wait for it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.chaos import hosts
from tests.chaos.cluster import Cluster, Traces
from tests.chaos.faults import Storm, quantile, untouched
from tests.waiting import until

#: A request is a lookup, a load and at most one store; each ends by its deadline of 2 s and a silence.
STUCK_S = 3 * (2.0 + 1.0)
#: Silence is believed after 250 ms: who waited for a victim waited that long.
SILENCE_S = 0.25

several = pytest.mark.skipif(shutil.which("redis-server") is None, reason="several masters need redis-server here")


def cluster_of(base: Path, masters: int, nodes: int = 4, players: int = 4) -> Cluster:
    on_hosts = not hosts.why_not()
    return Cluster(base, masters=masters, nodes=nodes, players=players, hosts=on_hosts, ssd="64MiB", transport="tcp")


def storm(cluster: Cluster, seed: int, seconds: float, base: Path, *, calm: bool = False) -> tuple[Storm, Traces]:
    """Load before, during and after; returns what was done and what the players saw."""
    for index, name in enumerate(cluster.names("player")):
        cluster.play(name, seed + index)
    until(lambda: all(cluster.trace(name).exists() for name in cluster.names("player")), 30)
    weather = Storm(cluster, seed, calm=calm, scratch=base)
    weather.blow(seconds)
    until(cluster.whole, 60)
    cluster.end_players()
    until(cluster.at_rest, 20)
    return weather, cluster.traces()


def check(weather: Storm, traces: Traces) -> None:
    story = "; ".join(map(str, weather.faults))
    assert traces.total("wrong") == 0, f"wrong bytes after: {story}"
    assert not traces.errors(), f"{traces.errors()[:3]} after: {story}"
    assert traces.longest_s() < STUCK_S, f"{traces.longest_s():.1f} s after: {story}"
    assert traces.total("loaded") > 1000, "there was a pool"


def told(weather: Storm, traces: Traces) -> str:
    beside = untouched(traces.requests, weather.faults)
    return (
        f"{len(weather.faults)} faults; {len(traces.requests)} requests, longest {traces.longest_s():.2f} s; "
        f"blocks loaded {traces.total('loaded')}, missed {traces.total('missed')}, wrong {traces.total('wrong')}; "
        f"failed {traces.total('failed')}; {len(beside)} requests beside a fault without its victim, "
        f"p50 {quantile(beside, 0.5) * 1e3:.1f} ms, p99 {quantile(beside, 0.99) * 1e3:.1f} ms, "
        f"{sum(request.seconds > SILENCE_S for request in beside)} over {SILENCE_S * 1e3:.0f} ms"
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("masters", [1, pytest.param(3, marks=several)])
def test_half_a_minute(masters: int, tmp_path: Path, seed: int) -> None:
    with cluster_of(tmp_path, masters) as cluster:
        weather, traces = storm(cluster, seed, 30.0 if masters > 1 else 15.0, tmp_path)
    print(told(weather, traces))
    check(weather, traces)
    beside = untouched(traces.requests, weather.faults)
    waited = [request for request in beside if request.seconds > SILENCE_S]
    # A busy machine may hold anybody up; were they waiting for victims it would be nearly all of them.
    assert len(waited) <= max(3, len(beside) // 10), f"{len(waited)} of {len(beside)} waited for nobody they needed"


@pytest.mark.long
@pytest.mark.timeout(1800)
@several
def test_ten_minutes(tmp_path: Path, seed: int) -> None:
    """And beside a control run of the same load, in which as many processes start and nothing is hurt."""
    folders = [tmp_path / name for name in ("control", "storm")]
    for folder in folders:
        folder.mkdir()
    with cluster_of(folders[0], 3) as cluster:
        weather, control = storm(cluster, seed, 120.0, folders[0], calm=True)
    print("control:", told(weather, control))
    with cluster_of(folders[1], 3) as cluster:
        weather, traces = storm(cluster, seed, 600.0, folders[1])
    print("storm:", told(weather, traces))
    check(weather, traces)
    beside = untouched(traces.requests, weather.faults)
    assert len(beside) > 1000
    assert quantile(beside, 0.99) <= 2 * quantile(control.requests, 0.99)
