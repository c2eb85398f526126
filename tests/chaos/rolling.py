"""Every node of a cluster restarted in turn while a trace is replayed on it, and what the requests noticed.

The replay is `kvstrata replay`'s own: engine stand-ins that check every byte they load, without a cache of their own,
one request at a time, at a steady pace. What each request would have hit on a pool that nothing happens to comes from
the replay's simulator, so that a change of the trace is no dip.
"""

from __future__ import annotations

import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstrata.cli.replay.coordinator import Coordinator
from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.messages import Outcome
from kvstrata.cli.replay.options import ReplayOptions
from kvstrata.cli.replay.replay import load_trace
from kvstrata.cli.replay.schedule import Schedule, build_schedule
from kvstrata.cli.replay.simulator import infinite_cache
from tests.chaos.cluster import Cluster
from tests.waiting import until

#: A restarted node is active within this.
BACK_S = 60.0
#: The deepest dip is that of so many requests in a row.
WINDOW = 25
#: Phases of a run, in order.
PHASES = ("before", "during", "after")


@dataclass(frozen=True, slots=True)
class Restart:
    """One node's. Monotonic seconds: told to stop, gone, ready again, active again (its share of writes ramps now)."""

    name: str
    told: float
    gone: float
    ready: float
    back: float
    blocks_before: int
    drained: bool  #: the leader said that all it had is elsewhere

    @property
    def stop_s(self) -> float:
        return self.gone - self.told


@dataclass(frozen=True, slots=True)
class Phase:
    """Some requests in a row: percent of prompt tokens that the pool had, and would have had if nothing happened."""

    requests: int
    hit: float
    undisturbed: float

    @property
    def points(self) -> float:
        """Below zero: lost by the restarts."""
        return self.hit - self.undisturbed


@dataclass(frozen=True, slots=True)
class Rolled:
    """All that one run shows. Seconds are real; calls are lookup, load and store of one request together."""

    phases: dict[str, Phase]
    deepest_points: float
    restarts: list[Restart]
    requests: int
    errors: list[str]
    wrong_bytes: int
    reasons: dict[str, int]
    lost_tokens: int  #: prompt tokens that were computed and would not have been
    blocks_moved: int
    longest_calls_s: float
    longest_undisturbed_s: float

    @property
    def failed_calls(self) -> dict[str, int]:
        """Calls that the pool did not serve at all: named by their call and error, as misses are not."""
        return {reason: count for reason, count in self.reasons.items() if " " in reason}


def restart(cluster: Cluster, name: str, stop_s: float) -> Restart:
    """SIGTERM, its end (within ``stop_s``), and its next process on the same data until it takes part again."""
    daemon = cluster.daemon(name)
    node_id = daemon.ready["node_id"]
    blocks = _blocks(cluster, node_id)
    told = time.monotonic()
    daemon.signal(signal.SIGTERM)
    daemon.process.wait(stop_s)
    gone = time.monotonic()
    assert daemon.process.returncode == 0
    daemon.end()
    cluster.start(name)
    assert cluster.daemon(name).ready["node_id"] == node_id
    ready = time.monotonic()
    until(cluster.whole, BACK_S)
    drained = any(not record["problem"] for record in cluster.logged(name, "stopping: drained"))
    return Restart(name, told, gone, ready, time.monotonic(), blocks, drained)


def _blocks(cluster: Cluster, node_id: str) -> int:
    with cluster.admin() as admin:
        return sum(int(row.blocks) for row in admin.nodes() if row.node_id == node_id)


def blocks_moved(cluster: Cluster) -> int:
    """Blocks that nodes have copied from each other since the master started."""
    url = f"http://{cluster.daemon('master0').ready['http']}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    stored = 'kvstrata_master_copied_blocks_total{status="stored"}'
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(stored))


@dataclass(slots=True)
class _Pace:
    """The replay's progress: keeps the pace after the warm-up, and when each request began and ended."""

    warm: int
    interval_s: float
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    warmed: threading.Event = field(default_factory=threading.Event)

    def __call__(self, done: int, of: int) -> None:
        self.ended.append(time.monotonic())
        if done >= self.warm:
            self.warmed.set()
            time.sleep(max(0.0, self.began[-1] + self.interval_s - time.monotonic()))
        self.began.append(time.monotonic())


def roll(
    cluster: Cluster,
    options: ReplayOptions,
    *,
    warm: int,
    around_s: float,
    pause_s: float,
    per_second: float,
    stop_s: float,
    say: Callable[[str], None] = lambda _: None,
) -> Rolled:
    """Replay; after ``warm`` requests as fast as they go, and ``around_s`` at ``per_second``, restart every node.

    ``pause_s`` of replay follow each restart, ``around_s`` all of them. Raises what a restart raises, and
    :class:`AssertionError` when the trace ends before.
    """
    schedule = build_schedule(load_trace(options), options, CostModel())
    pace = _Pace(warm, 1 / per_second)
    over = threading.Event()
    restarts: list[Restart] = []
    problems: list[BaseException] = []

    def restart_all() -> None:
        try:
            while not pace.warmed.wait(0.1):
                if over.is_set():
                    return
            over.wait(around_s)
            for name in cluster.names("node"):
                done = restart(cluster, name, stop_s)
                restarts.append(done)
                say(f"{name}: gone after {done.stop_s:.1f} s, back {done.back - done.gone:.1f} s later")
                over.wait(pause_s)
            over.wait(around_s)
        except BaseException as error:  # noqa: BLE001  raised below, in the caller's thread
            problems.append(error)
        finally:
            over.set()

    coordinator = Coordinator(schedule, options, cluster.masters, "rolling restart")
    rolling = threading.Thread(target=restart_all, name="rolling restart")
    try:
        rolling.start()
        pace.began.append(time.monotonic())
        outcomes = coordinator.run(pace, enough=over.is_set).outcomes
        assert over.is_set(), f"the trace of {len(outcomes)} requests was over first: more sessions, or fewer a second"
    finally:
        over.set()
        rolling.join()
        coordinator.close()
    if problems:
        raise problems[0]
    return _summary(schedule, outcomes, pace, warm, restarts, blocks_moved(cluster))


def _summary(
    schedule: Schedule, outcomes: list[Outcome], pace: _Pace, warm: int, restarts: list[Restart], moved: int
) -> Rolled:
    count = len(outcomes)
    tokens = np.fromiter((turn.tokens_in for turn in schedule.turns[:count]), np.int64, count)
    hit = np.fromiter((outcome.pool_blocks for outcome in outcomes), np.int64, count) * schedule.block_tokens
    undisturbed = infinite_cache(schedule).pool[:count]
    calls = np.fromiter((o.lookup_s + o.load_s + o.store_s for o in outcomes), np.float64, count)
    # A request that was under way when the first node was told to stop is one of those during the restarts.
    first = max(warm, int(np.searchsorted(pace.ended, restarts[0].told)))
    last = int(np.searchsorted(pace.began[:count], restarts[-1].back))
    spans = dict(zip(PHASES, ((warm, first), (first, last), (last, count)), strict=True))

    def phase(begin: int, end: int) -> Phase:
        total = max(1, int(tokens[begin:end].sum()))
        return Phase(end - begin, *(100 * int(each[begin:end].sum()) / total for each in (hit, undisturbed)))

    windows = [phase(start, start + WINDOW).points for start in range(first, max(first + 1, count - WINDOW))]
    reasons: Counter[str] = Counter()
    for outcome in outcomes:
        reasons.update(outcome.reasons)
    return Rolled(
        phases={name: phase(*span) for name, span in spans.items()},
        deepest_points=min(windows),
        restarts=restarts,
        requests=count,
        errors=[outcome.error for outcome in outcomes if outcome.error],
        wrong_bytes=sum(outcome.wrong_bytes for outcome in outcomes),
        reasons=dict(reasons),
        lost_tokens=int((undisturbed - hit)[first:].sum()),
        blocks_moved=moved,
        longest_calls_s=float(calls[first:last].max(initial=0.0)),
        longest_undisturbed_s=float(calls[warm:first].max(initial=0.0)),
    )
