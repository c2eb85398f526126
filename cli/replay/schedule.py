"""The order of a replay: which request reaches which engine when, in virtual time, from the seed alone.

Every case (no pool, private caches, pool, infinite cache) sees the same order, so that their hit rates
compare. Sessions of a closed-loop trace start as a Poisson process and send their next request at the end
of the last one plus min(think, cap), where a request lasts as long as it did when it was recorded (or, if
that was not recorded, as it takes without any queue and with its whole prompt computed). Sessions of an
open-loop trace keep their recorded times.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.cli.replay.blocks import Blocking, BlockTable, Chain
from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.options import ReplayOptions
from kvstrata.cli.replay.traces import Request, Session, Trace

#: Exponent of the Zipf law by which sessions belong to tenants.
TENANT_ZIPF = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, placed: ``blocks`` int32 [full blocks] are the prompt's block numbers, head first.

    ``hit_limit`` blocks may be served from a cache: the last token of a prompt is always computed.
    """

    index: int
    session: int
    engine: int
    salt: str
    at_s: float
    think_s: float
    tokens_in: int
    tokens_out: int
    blocks: npt.NDArray[np.int32]
    hit_limit: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Turns in virtual-time order; ``hashes`` uint8 [blocks, 16] has the hash of each block number."""

    trace_name: str
    closed_loop: bool
    block_tokens: int
    sessions: int
    turns: tuple[Turn, ...]
    hashes: npt.NDArray[np.uint8]

    @property
    def tokens_in(self) -> int:
        return sum(turn.tokens_in for turn in self.turns)

    @property
    def unique_blocks(self) -> int:
        return len(self.hashes)


def build_schedule(trace: Trace, options: ReplayOptions, costs: CostModel) -> Schedule:
    """Place every request of the chosen sessions. Deterministic from ``options.seed``."""
    rng = random.Random(options.seed)
    chosen = _choose(trace, options)
    salts = _salts(len(chosen), options.tenants, rng)
    table = BlockTable(Blocking(trace.block_tokens, options.block_tokens))
    chains = [table.chain(salt) for salt in salts]
    arrivals = _closed_loop(chosen, options, costs, rng) if trace.closed_loop else _open_loop(chosen)
    engines: dict[int, int] = {}
    turns = []
    for index, (at_s, session, request) in enumerate(arrivals):
        sticky = engines.setdefault(session, len(engines) % options.engines)
        engine = sticky if options.routing == "sticky" else index % options.engines
        turns.append(_turn(index, session, engine, salts[session], at_s, request, chains[session], options))
    return Schedule(trace.name, trace.closed_loop, options.block_tokens, len(chosen), tuple(turns), table.hashes())


def _turn(
    index: int,
    session: int,
    engine: int,
    salt: str,
    at_s: float,
    request: Request,
    chain: Chain,
    options: ReplayOptions,
) -> Turn:
    blocks = chain.numbers(request)
    return Turn(
        index=index,
        session=session,
        engine=engine,
        salt=salt,
        at_s=at_s,
        think_s=min(request.think_s, options.think_cap_s),
        tokens_in=request.tokens_in,
        tokens_out=request.tokens_out,
        blocks=blocks,
        hit_limit=min(len(blocks), (request.tokens_in - 1) // options.block_tokens),
    )


def _choose(trace: Trace, options: ReplayOptions) -> tuple[Session, ...]:
    """The leading sessions of the file: a count, then a fraction; of an open-loop trace that is a slice of time."""
    count = min(options.sessions or len(trace.sessions), len(trace.sessions))
    return trace.sessions[: max(1, round(count * options.scale))]


def _salts(sessions: int, tenants: int, rng: random.Random) -> list[str]:
    names = [f"tenant-{number}" for number in range(tenants)]
    weights = [1 / (number + 1) ** TENANT_ZIPF for number in range(tenants)]
    return rng.choices(names, weights, k=sessions)


def _open_loop(sessions: Sequence[Session]) -> Iterator[tuple[float, int, Request]]:
    flat = [(request.at_s, number, request) for number, session in enumerate(sessions) for request in session.requests]
    flat.sort(key=lambda arrival: arrival[:2])
    yield from flat


def _closed_loop(
    sessions: Sequence[Session], options: ReplayOptions, costs: CostModel, rng: random.Random
) -> Iterator[tuple[float, int, Request]]:
    """Yield (virtual seconds, session, request) in time order; ties go to the session that started first."""
    queue: list[tuple[float, int, int]] = []
    start_s = 0.0
    for number in range(len(sessions)):
        queue.append((start_s, number, 0))
        start_s += rng.expovariate(1 / options.session_start_s) if options.session_start_s > 0 else 0.0
    heapq.heapify(queue)
    while queue:
        at_s, number, position = heapq.heappop(queue)
        requests = sessions[number].requests
        request = requests[position]
        yield at_s, number, request
        if position + 1 < len(requests):
            think_s = min(requests[position + 1].think_s, options.think_cap_s)
            heapq.heappush(queue, (at_s + service_s(request, costs) + think_s, number, position + 1))


def service_s(request: Request, costs: CostModel) -> float:
    """How long a request lasts in the schedule's virtual time."""
    if request.service_s is not None:
        return request.service_s
    return costs.prefill_s(0, request.tokens_in) + costs.decode_s(request.tokens_out)
