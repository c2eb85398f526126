"""``python -m tests.sim --seed 7 --steps 400``: run a seed and tell its story."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time

from tests.sim.jobs import results
from tests.sim.mutants import MUTANTS
from tests.sim.plan import FAULTS, planned
from tests.sim.shrink import shrunk


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds from --seed on")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--masters", type=int, help="instead of what the seed says")
    parser.add_argument("--faults", default=",".join(FAULTS), help="comma-separated; empty for none")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break the shipped code on purpose")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds after which no further seed is begun")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--first", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--shrink", type=float, default=0.0, help="seconds for making a failing story short")
    parser.add_argument("--story", action="store_true", help="also of seeds in which all held")
    parser.add_argument("--json", action="store_true", help="one line a seed")
    options = parser.parse_args()
    faults = frozenset(part for part in options.faults.split(",") if part)
    if options.mutant:
        MUTANTS[options.mutant].apply()
    failed = done = 0
    began = time.perf_counter()
    seeds = range(options.seed, options.seed + options.seeds)
    plan_of = functools.partial(planned, steps=options.steps, faults=faults, masters=options.masters)
    found = results(seeds, plan_of, options.jobs, options.budget)
    for result in found:
        seed = result.plan.seed
        failed += bool(result.problem)
        done += 1
        if result.problem and options.shrink:
            result = shrunk(result, options.shrink)
        if options.json:
            print(json.dumps({"seed": seed, "problem": result.problem, "reads": result.reads, "hits": result.hits}))
        elif result.problem or options.story:
            print(f"seed {seed}: {result.plan}")
            print(result.told())
            print(result.trace, flush=True)
        else:
            print(f"seed {seed}: {result.reads} reads, {result.hits} hits, {result.writes} writes, "
                  f"{result.events} events in {result.seconds:.0f} s")  # fmt: skip
        if failed and options.first:
            break
    found.close()
    took = time.perf_counter() - began
    print(f"{done} seeds, {failed} failed, {done / took:.2f} seeds/s", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets is part of a story.
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    sys.exit(main())
