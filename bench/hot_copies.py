"""Are copies of hot prefixes worth it? A simulation: ``python -m bench.hot_copies [--seconds 60] [--seed 1]``.

Readers ask for prefixes by Zipf's law; each prefix stands in runs on nodes, as placement strews them, and a node sends
what it is asked for at the speed of its network, first come, first served. Rates, thresholds and choices are those of
:mod:`kvstrata.master.replication.hot`; a copy costs its node the bytes, both ways.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter, deque

from kvstrata.master.replication.hot import ASKED_MIN, COPIED_AT_ONCE, WINDOW_S, Rates

BLOCK = 1 << 20
RUN = 64
SPEED = 2 << 30  #: bytes a second that a node sends


def simulate(
    *, hot: bool, nodes: int, prefixes: int, alpha: float, blocks: int, load: float, seconds: float, seed: int
) -> tuple[float, float, float, int]:
    """(p50, p99 of a load in milliseconds, the busiest node's share of its time, blocks copied)."""
    rng = random.Random(seed)
    runs = [[[rng.randrange(nodes)] for _ in range(-(-blocks // RUN))] for _ in range(prefixes)]
    weights = [1 / (rank + 1) ** alpha for rank in range(prefixes)]
    free_at, sent, busy_s = [0.0] * nodes, [0] * nodes, [0.0] * nodes
    rates, asked = Rates(), deque[tuple[float, int]]()
    nbytes = blocks * BLOCK
    rate = load * nodes * SPEED / nbytes
    now, looked, copied, took = 0.0, 0.0, 0, []
    size = nbytes // len(runs[0])

    def send(node: int, amount: int) -> float:
        start = max(now, free_at[node])
        free_at[node] = start + amount / SPEED
        sent[node] += amount
        busy_s[node] += amount / SPEED
        return free_at[node]

    while now < seconds:
        now += rng.expovariate(rate)
        which = rng.choices(range(prefixes), weights)[0]
        asked.append((now, which))
        done = max(send(min(holders, key=lambda node: free_at[node]), size) for holders in runs[which])
        if now > seconds / 4:
            took.append(done - now)
        if now - looked < 1.0:
            continue
        looked = now
        rates.seen({str(node): sent[node] for node in range(nodes)}, now)
        while asked and now - asked[0][0] > WINDOW_S:
            asked.popleft()
        busiest = rates.busiest()
        if not hot or busiest is None:
            continue
        budget = COPIED_AT_ONCE
        idle = [int(name) for name in rates.idle()]
        for prefix, times in Counter(prefix for _, prefix in asked).most_common(8):
            for holders in runs[prefix]:
                if times >= ASKED_MIN and holders == [int(busiest)] and idle and budget > 0:
                    target = rng.choice(idle)
                    send(int(busiest), size)
                    send(target, size)
                    holders.append(target)
                    copied += size // BLOCK
                    budget -= size // BLOCK
    took.sort()
    return took[len(took) // 2] * 1e3, took[int(len(took) * 0.99)] * 1e3, max(busy_s) / seconds, copied


def main() -> None:
    """Print a table for prefixes of one run and of many, and for skews of several strengths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print("blocks  alpha  load   hot   p50 ms   p99 ms   busiest   copied")
    for blocks in (32, 512):
        for alpha in (0.8, 1.1, 1.4):
            for load in (0.3, 0.6):
                for hot in (False, True):
                    p50, p99, busiest, copied = simulate(
                        hot=hot, nodes=8, prefixes=2000, alpha=alpha, blocks=blocks, load=load,
                        seconds=given.seconds, seed=given.seed,
                    )  # fmt: skip
                    print(f"{blocks:6} {alpha:6} {load:5} {hot!s:>5} {p50:8.1f} {p99:8.1f} {busiest:9.0%} {copied:8}")


if __name__ == "__main__":
    main()
