"""Several clients at once, each a process: what they move together, and copies by as many processes beside it.

Before each measurement all have done the same once, as rooflines have; but for ``first loads``. Those are of clients
that were begun for them, have one transport, and have stored the blocks but loaded nothing, whatever it is.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import BATCH, FIRST_LOADS, Case, CpuWatch, Round, joined, measure
from rooflines import memcpy_round
from suite_scale import Found, Group, Scale
from transfer_pool import Missed, Pool, Way, pool
from transfer_shapes import Shape, Worker, serve

SHAPE: Final = Shape("clients", BATCH, 1 << 20)
TRANSPORTS: Final = ("shm", "tcp")
#: From the question to the moment at which all begin.
LEAD_S: Final = 0.25
#: Of all clients together in one round.
CALLS: Final = 16
CALLS_MIN: Final = 2
HELD: Final = 2
FIRST: Final = "clients first"
_begun = itertools.count()


def client(pipe: Connection, master: str, name: str, transports: tuple[str, ...], loads_first: bool) -> None:
    """The main of a :class:`transfer_shapes.Worker`. ``name``: of no other client of that pool."""
    with contextlib.ExitStack() as stack:
        systems: dict[str, Callable[..., Round]] = {"memcpy": _copies, "memcpy+xxh3": _hashes}
        for transport in transports:
            way = Way(f"{name}-{transport}", master, transport, nbytes=SHAPE.nbytes, loads_first=loads_first)
            stack.callback(way.close)
            loads = stack.enter_context(way.held(SHAPE, HELD))
            systems[f"kvstrata-{transport}"] = partial(_moves, way, loads)
        serve(pipe, systems)


def _moves(way: Way, loads: list[Callable[[], None]], op: str, calls: int, at: float) -> Round:
    if op == "load":
        wanted = [loads[index % len(loads)] for index in range(calls)]
        return measured(wanted, calls, at)
    return way.stores(SHAPE, calls, partial(wait_until, at))


def _copies(op: str, calls: int, at: float) -> Round:
    return memcpy_round(SHAPE.block_bytes, SHAPE.blocks, hashed=False, calls=calls, begin=partial(wait_until, at))


def _hashes(op: str, calls: int, at: float) -> Round:
    return memcpy_round(SHAPE.block_bytes, SHAPE.blocks, hashed=True, calls=calls, begin=partial(wait_until, at))


def measured(calls: list[Callable[[], Any]], count: int, at: float) -> Round:
    wait_until(at)
    return measure(calls, count * SHAPE.nbytes)


def wait_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


@contextlib.contextmanager
def clients_pool(scale: Scale, wanted: Callable[[str], bool]) -> Iterator[list[Group]]:
    """First loads, then groups of one, two and more clients; open until the end of the block."""
    counts = [count for count in scale.clients if wanted(f"clients {count}")]
    first, most = (max(scale.clients) if wanted(FIRST) else 0), max(counts, default=0)
    calls_held = first * HELD + most * len(TRANSPORTS) * HELD
    bytes_held = (calls_held + max(CALLS, CALLS_MIN * most) + 2) * SHAPE.nbytes
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(pool(f"{(bytes_held >> 20) * 5 // 4}MiB", "off"))
        workers = _begin(stack, running, most, TRANSPORTS, loads_first=True)
        groups = [_first(running, first)] if first else []
        yield [*groups, *(_group(running, workers[:count]) for count in counts)]


def _begin(
    stack: contextlib.ExitStack, running: Pool, count: int, transports: tuple[str, ...], *, loads_first: bool
) -> list[Worker]:
    """So many clients that run until the stack is left."""
    workers = []
    for _ in range(count):
        workers.append(Worker(client, running.master, f"client-{next(_begun)}", transports, loads_first))
        stack.callback(workers[-1].close)
    return workers


def _first(running: Pool, count: int) -> Group:
    """Each turn has clients of its own, also one that is a repeat: a client's second load is no first one."""

    def turn(transport: str) -> Found:
        with contextlib.ExitStack() as stack:
            workers = _begin(stack, running, count, (transport,), loads_first=False)
            case = Case("clients", "load", SHAPE.blocks, SHAPE.block_bytes, f"{_number(workers)}, {FIRST_LOADS}")
            return {case: _together(running, workers, f"kvstrata-{transport}", "load", HELD)}

    return Group(FIRST, {f"kvstrata-{transport}": partial(turn, transport) for transport in TRANSPORTS})


def _group(running: Pool, workers: list[Worker]) -> Group:
    calls = max(CALLS_MIN, CALLS // len(workers))

    def turn(system: str) -> Found:
        found = {}
        for op in ("store", "load"):
            if op == "load" or not system.startswith("kvstrata"):  # a store has been made by each that holds blocks
                _together(running, workers, system, op, HELD)
            case = Case("clients", op, SHAPE.blocks, SHAPE.block_bytes, _number(workers))
            found[case] = _together(running, workers, system, op, calls)
        return found

    systems = [*(f"kvstrata-{transport}" for transport in TRANSPORTS), "memcpy", "memcpy+xxh3"]
    return Group(f"clients {len(workers)}", {system: partial(turn, system) for system in systems})


def _number(workers: list[Worker]) -> str:
    return f"{len(workers)} client{'s' if len(workers) > 1 else ''}"


def _together(running: Pool, workers: list[Worker], system: str, op: str, calls: int) -> Round:
    watch, at = CpuWatch(running.pids), time.monotonic() + LEAD_S
    for worker in workers:
        worker.ask(system, op, calls, at)
    done = [worker.attempt() for worker in workers]  # all of them, so that none has an answer left in its pipe
    failed = [one for one in done if not isinstance(one, Round)]
    if failed:
        raise Missed(f"{len(failed)} of {len(workers)} clients: {failed[0]}")
    return joined([one for one in done if isinstance(one, Round)], watch.seconds(), at_once=len(workers))
