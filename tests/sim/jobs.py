"""Many seeds, in several processes: each takes every so-manieth seed, and ends with the process that began it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait

from tests.sim.plan import Plan
from tests.sim.runner import Result, run


def results(seeds: range, plan_of: Callable[[int], Plan], jobs: int, budget_s: float = 0.0) -> Iterator[Result]:
    """As they come; after ``budget_s`` seconds (0: never) no further seed is begun. Closing it ends the others."""
    until = time.monotonic() + budget_s if budget_s else float("inf")
    if jobs <= 1:
        yield from _each(seeds, plan_of, until)
        return
    context = multiprocessing.get_context("fork")  # a broken build is broken in all of them
    ours: dict[Connection, multiprocessing.process.BaseProcess] = {}
    try:
        for index in range(jobs):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(seeds[index::jobs], plan_of, until, there), daemon=True)
            process.start()
            there.close()
            ours[here] = process
        while ours:
            for said in wait(list(ours)):
                assert isinstance(said, Connection)
                try:
                    yield said.recv()
                except EOFError:
                    process = ours.pop(said)
                    process.join()
                    assert process.exitcode == 0, f"a process of seeds ended with {process.exitcode}"
    finally:
        for process in ours.values():
            process.terminate()
            process.join()


def _each(seeds: range, plan_of: Callable[[int], Plan], until: float) -> Iterator[Result]:
    for seed in seeds:
        if time.monotonic() >= until:
            return
        yield run(plan_of(seed))


def _work(seeds: range, plan_of: Callable[[int], Plan], until: float, out: Connection) -> None:
    parent = os.getppid()
    for result in _each(seeds, plan_of, until):
        if os.getppid() != parent:
            return
        out.send(result)
