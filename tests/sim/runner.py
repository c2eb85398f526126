"""Run a plan to its end, or to the first thing that must not be."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import kvstrata.master.converters
import kvstrata.master.directory.probing
import kvstrata.master.hub
import kvstrata.master.replication.replicas
import kvstrata.master.replication.replication
import kvstrata.master.replication.trims
import kvstrata.master.reuse.lookup_log
import kvstrata.storage.copying.intake
import kvstrata.storage.masters.outbox
import kvstrata.storage.masters.policies
from tests.sim.clock import Future
from tests.sim.memory import replace
from tests.sim.oracle import BLOCK_BYTES, Violation
from tests.sim.plan import Plan
from tests.sim.world import World

#: After the last action, and after all faults have ended: everything must have come right by then.
SETTLE_S = 20.0
#: Of those, what is waited in any case: drains are cancelled late, what comes late may still do harm.
SETTLE_MIN_S = 6.0
READ_S = 60.0
#: After the last call: leases that were not given back have ended, what was on its way has come.
QUIET_S = 8.0


@dataclass
class Result:
    """``problem`` is empty when all held."""

    plan: Plan
    problem: str = ""
    story: list[tuple[float, str]] = field(default_factory=list)
    trace: str = ""
    reads: int = 0
    hits: int = 0
    writes: int = 0
    events: int = 0
    seconds: float = 0.0  #: of the story

    def told(self) -> str:
        """The story in words."""
        lines = [f"{at:8.3f}  {words}" for at, words in self.story]
        return "\n".join([*lines, f"          {self.problem}"])


@contextlib.contextmanager
def scaled(seed: int) -> Iterator[None]:
    """Bounds that a small cluster and a short story come to, and nothing that sleeps for real, is kept in a real
    file, or is up to chance."""
    timeless = SimpleNamespace(
        monotonic=time.monotonic,
        perf_counter=time.perf_counter,
        thread_time=lambda: 0.0,
        time=lambda: 0.0,
        sleep=lambda seconds: None,
    )
    chance = random.Random(f"{seed}/secrets")
    told = SimpleNamespace(randbits=chance.getrandbits, token_hex=lambda nbytes: chance.randbytes(nbytes).hex())
    places = (
        (kvstrata.storage.masters.outbox, "PART_HASHES", 5),
        (kvstrata.master.converters, "HASHES_AN_EVENT", 3),
        (kvstrata.master.hub, "time", timeless),
        (kvstrata.master.hub, "secrets", told),
        (kvstrata.master.directory.probing, "secrets", told),
        (kvstrata.master.reuse.lookup_log, "time", timeless),
        (kvstrata.storage.masters.policies, "durable_file", SimpleNamespace(replace=replace)),
        (kvstrata.storage.copying.intake, "PIECE_BYTES", 3 * BLOCK_BYTES),
        (kvstrata.master.replication.replicas, "SETTLED_S", 2.0),
        (kvstrata.master.replication.trims, "SHOWS_S", 2.0),
        (kvstrata.master.replication.replication, "REPAIR_AFTER_S", 1.0),
    )
    before = [getattr(module, name) for module, name, _ in places]
    level = logging.getLogger("kvstrata").level
    logging.getLogger("kvstrata").setLevel(logging.CRITICAL + 1)
    try:
        for module, name, value in places:
            setattr(module, name, value)
        yield
    finally:
        logging.getLogger("kvstrata").setLevel(level)
        for (module, name, _), value in zip(places, before, strict=True):
            setattr(module, name, value)


def run(plan: Plan) -> Result:
    """Everything of a plan, then the checks of the end."""
    gc.freeze()  # what is loaded stays
    gc.disable()  # nothing big becomes garbage within a world
    try:
        return _result(plan)
    finally:
        gc.enable()
        gc.collect()


def _result(plan: Plan) -> Result:
    with scaled(plan.seed):
        world = World(plan)
        result = Result(plan, story=world.story)
        try:
            _run(world)
        except Violation as error:
            result.problem = str(error)
        except Exception as error:  # noqa: BLE001  whatever the shipped code raises is a finding
            result.problem = f"{type(error).__name__}: {error}"
            result.trace = traceback.format_exc()
        if result.problem:
            world.tell("this must not be:")
        oracle = world.oracle
        result.reads, result.hits, result.writes = oracle.reads, oracle.hits, len(oracle.writes)
        result.events, result.seconds = world.scheduler.count, world.now
        return result


def _run(world: World) -> None:
    scheduler, checks = world.scheduler, world.checks
    for action in world.plan.actions:
        scheduler.run_until(action.at)
        world.act(action)
    scheduler.run_until(scheduler.now + 1.0)
    world.mend()
    scheduler.run_until(scheduler.now + SETTLE_MIN_S)
    _within(world, SETTLE_S - SETTLE_MIN_S, checks.converged)
    checks.structures()
    checks.cleared()
    client = world.clients[world.plan.client_names[0]]
    _finish(world, client.process.start(checks.read_all()))
    _within(world, QUIET_S, checks.quiet)
    if world.plan.epilogue:
        _finish(world, client.process.start(checks.epilogue()), 300.0)
    else:
        _finish(world, client.process.start(checks.store_more()))
    _within(world, SETTLE_S, checks.quiet, checks.converged)
    checks.structures()
    checks.truth()


def _within(world: World, seconds: float, *hold: Callable[[], None]) -> None:
    """Let time pass until all of it holds at once."""
    until = world.now + seconds
    while True:
        try:
            for each in hold:
                each()
            return
        except Violation:
            if world.now >= until:
                raise
        world.scheduler.run_until(world.now + 0.5)


def _finish(world: World, over: Future, seconds: float = READ_S) -> None:
    until = world.now + seconds
    while not over.done and world.now < until:
        world.scheduler.run_until(world.now + 0.25)
    if not over.done:
        raise Violation(f"a reader is not done after {seconds:.0f} s")
    if over.problem is not None:
        raise Violation(f"a reader gave up: {over.problem}")
