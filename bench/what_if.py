"""Are the predictions right? ``python bench/what_if.py TRACE... [--tenants 50] [--json]``.

Plays the sessions of recorded traces, each session's tenant drawn by Zipf's law, through the sampled
reuse distances that the master keeps, and through an exact cache of 0.5, 1, 2 and 4 times each tenant's
quota. Prints both for the busiest tenants, the greatest difference in points, and how many samples there
were; exits with 1 when a difference is above the bound.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstrata.cli.replay.chain_lru import ChainLRU
from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.options import ReplayOptions
from kvstrata.cli.replay.schedule import Schedule, Turn, build_schedule
from kvstrata.cli.replay.traces import read_trace
from kvstrata.master.directory.probing import Keys
from kvstrata.master.reuse.what_if import FACTORS, WhatIf

BLOCK_BYTES = 4096
#: A tenant's quota, as a share of all the bytes it ever names.
QUOTA = 0.2
BOUND_POINTS = 2.0
#: Tenants with fewer blocks asked than this have no hit rate worth the name.
ASKED_MIN = 5000


def schedule_of(path: Path, tenants: int, block_tokens: int | None, sessions: int | None, seed: int) -> Schedule:
    trace = read_trace(path)
    options = ReplayOptions(
        trace=path, tenants=tenants, block_tokens=block_tokens or trace.block_tokens, sessions=sessions, seed=seed
    )
    return build_schedule(trace, options, CostModel())


def exact(turns: Sequence[Turn], quota_blocks: int) -> list[float]:
    """Hit rates by block at each factor."""
    caches = [ChainLRU(int(factor * quota_blocks)) for factor in FACTORS]
    hits, asked = [0] * len(caches), 0
    for turn in turns:
        chain = turn.blocks.tolist()
        asked += len(chain)
        for number, cache in enumerate(caches):
            hits[number] += cache.prefix(chain)
            cache.touch(chain)
    return [count / asked for count in hits]


def predicted(schedule: Schedule, quotas: dict[str, int], seed: int) -> WhatIf:
    """Play the whole schedule, all tenants in one; what the pool has is what each quota would hold."""
    keys: Keys = schedule.hashes.view("<u8").reshape(-1, 2)
    what_if = WhatIf(random.Random(seed), half_life_s=math.inf)
    pool = {salt: ChainLRU(quota) for salt, quota in quotas.items()}
    for second, turn in enumerate(schedule.turns):
        # Recorded times are rounded, so that two requests of one prompt would look like one that polls.
        chain, cache = keys[turn.blocks], pool[turn.salt]
        numbers = turn.blocks.tolist()
        hit = cache.prefix(numbers)
        present = np.arange(len(numbers)) < hit
        what_if.asked(0, turn.salt, chain, present, BLOCK_BYTES, second)
        what_if.stored(0, turn.salt, chain[hit:], BLOCK_BYTES, second)
        cache.touch(numbers)
    what_if.check()
    return what_if


def measure(schedule: Schedule, top: int, seed: int) -> list[dict[str, object]]:
    """A row for each of the busiest tenants: quota, both hit rates at each factor, in points."""
    by_salt: dict[str, list[Turn]] = defaultdict(list)
    for turn in schedule.turns:
        by_salt[turn.salt].append(turn)
    blocks = {salt: len(np.unique(np.concatenate([t.blocks for t in turns]))) for salt, turns in by_salt.items()}
    quotas = {salt: max(1, int(QUOTA * count)) for salt, count in blocks.items()}
    asked = {salt: sum(len(turn.blocks) for turn in turns) for salt, turns in by_salt.items()}
    what_if = predicted(schedule, quotas, seed)
    rows: list[dict[str, object]] = []
    for salt in sorted(asked, key=lambda salt: -asked[salt])[:top]:
        if asked[salt] < ASKED_MIN:
            continue
        truth = exact(by_salt[salt], quotas[salt])
        row = what_if.predict_row(salt, quotas[salt] * BLOCK_BYTES)
        rows.append(
            {
                "trace": schedule.trace_name,
                "tenant": salt,
                "blocks": blocks[salt],
                "asked": asked[salt],
                "sampled": what_if.asked_by(salt).references,
                "exact": [round(100 * rate, 2) for rate in truth],
                "predicted": [round(100 * prediction.hit_rate, 2) for prediction in row],
            }
        )
    return rows


def off(row: dict[str, object]) -> float:
    truth, guess = row["exact"], row["predicted"]
    assert isinstance(truth, list) and isinstance(guess, list)
    return max(abs(a - b) for a, b in zip(truth, guess, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, nargs="+", help="recorded traces, as kvstrata replay takes them")
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--top", type=int, default=8, help="busiest tenants that are compared")
    parser.add_argument("--block-tokens", type=int, default=None, help="default: the trace's own")
    parser.add_argument("--sessions", type=int, default=None, help="the first so many of each trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for path in args.traces:
        schedule = schedule_of(path, args.tenants, args.block_tokens, args.sessions, args.seed)
        rows += measure(schedule, args.top, args.seed)
    worst = max((off(row) for row in rows), default=math.inf)
    if args.json:
        print(json.dumps({"rows": rows, "worst_points": worst, "bound_points": BOUND_POINTS}, indent=2))
    else:
        print(f"{'trace':24} {'tenant':10} {'blocks':>8} {'asked':>9} {'sampled':>8}  "
              "hit rate at 0.5x, 1x, 2x, 4x of quota (%): exact | predicted  [points off]")  # fmt: skip
        for row in rows:
            truth = " ".join(f"{rate:6.2f}" for rate in row["exact"])  # type: ignore[attr-defined]
            guess = " ".join(f"{rate:6.2f}" for rate in row["predicted"])  # type: ignore[attr-defined]
            print(f"{row['trace']:24} {row['tenant']:10} {row['blocks']:8} {row['asked']:9} {row['sampled']:8}  "
                  f"{truth} | {guess}  [{off(row):.2f}]")  # fmt: skip
        print(f"greatest difference: {worst:.2f} points (bound {BOUND_POINTS})")
    return 0 if worst <= BOUND_POINTS else 1


if __name__ == "__main__":
    sys.exit(main())
