"""One replay from options to result: trace, schedule, pool, engines, simulator."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvstrata.cli.replay.coordinator import Coordinator
from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.generator import generate_trace
from kvstrata.cli.replay.options import ReplayOptions
from kvstrata.cli.replay.pool import OwnPool, RunningPool
from kvstrata.cli.replay.result import ReplayResult, assemble
from kvstrata.cli.replay.schedule import build_schedule
from kvstrata.cli.replay.traces import Trace, read_trace

#: Sessions of the generated trace when the options do not say how many.
GENERATED_SESSIONS = 40

ProgressCallback = Callable[[int, int], None]


def run_replay(options: ReplayOptions, progress: ProgressCallback | None = None) -> ReplayResult:
    """Replay a trace on real processes; ``progress(done, of)`` is called after each request.

    Raises :class:`~kvstrata.cli.replay.traces.TraceError` or ``ConfigError`` for what is asked,
    ``Unavailable`` when the pool or an engine cannot start. A fault on the way is in the result.
    """
    costs = CostModel()
    schedule = build_schedule(load_trace(options), options, costs)
    # A namespace of its own: what an earlier replay left in a running pool must not be hit.
    group = f"kvstrata.replay/{schedule.trace_name}/{uuid.uuid4().hex}"
    with _pool(options) as pool:
        coordinator = Coordinator(schedule, options, pool.masters, group)
        try:
            measured = coordinator.run(progress)
        finally:
            coordinator.close()
        losses = pool.losses()
    return assemble(options, costs, schedule, pool.blocks(options.block_bytes), measured, losses)


def load_trace(options: ReplayOptions) -> Trace:
    """The trace that the options name: a file, or the seeded generator."""
    if options.trace is not None:
        return read_trace(options.trace)
    return generate_trace(options.sessions or GENERATED_SESSIONS, options.seed)


@contextmanager
def _pool(options: ReplayOptions) -> Iterator[OwnPool | RunningPool]:
    pool = RunningPool(options.masters) if options.masters is not None else OwnPool.of(options)
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def console_progress() -> Iterator[ProgressCallback]:
    """A progress bar on stderr; gives the callback that :func:`run_replay` takes."""
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay", total=None)

        def update(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of)

        yield update
