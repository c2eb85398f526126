"""Which order of eviction hits most? ``python bench/eviction.py TRACE... [--sizes 0.05 0.1 ...] [--seeds 3]``.

Plays recorded traces through the node's own bookkeeping (its inventory, its IsolatedLRU and its orders, over
slots without memory) with caches of some sizes, as shares of all blocks of the trace, and through caches by
other rules. Prints token hit rates in points: plain LRU, what each other adds to it, and the bound of one
that knows the future; the mean over seeds, which choose the sessions' starts, their order and their tenants.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from eviction_policies import Arc, ChainCache, Clairvoyant, S3Fifo, Segmented, TinyLfu

from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.options import ReplayOptions
from kvstrata.cli.replay.schedule import Schedule, Turn, build_schedule
from kvstrata.cli.replay.traces import read_trace
from kvstrata.proto.keys import Namespace
from kvstrata.storage.arena import Arena
from kvstrata.storage.eviction.isolated_lru import IsolatedLRU
from kvstrata.storage.eviction.orders import LruOrder, Order
from kvstrata.storage.eviction.segmented_order import SegmentedOrder
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.masters.delta_log import DeltaLog
from kvstrata.storage.records import VISIBLE, Block, Counts, NamespaceEntry

SLOT_BYTES = 64
SIZES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
#: A tenant with fewer requests is left out: its cache would be a handful of blocks.
REQUESTS_MIN = 100


class Slots(SlotGrid):
    """Slots of no memory."""

    def room_for(self, slot_bytes: int) -> tuple[int, int]:
        return self.nbytes // slot_bytes, 0


class NodeCache:
    """One tenant on a node of ``capacity`` blocks, without the bytes."""

    def __init__(self, capacity: int, hashes: Sequence[bytes], order: Callable[[], Order]) -> None:
        nbytes = max(1, capacity) * SLOT_BYTES
        arena = Arena([Slots(0, nbytes, [0] * max(1, capacity))], nbytes)
        self.inventory = Inventory(arena, IsolatedLRU(order), DeltaLog(), Counts())
        self._entry = NamespaceEntry(1, Namespace("trace", SLOT_BYTES, 16))
        self._hashes = hashes

    def request(self, chain: list[int]) -> int:
        """A lookup, a load of the prefix that is there, and a store of the rest: what a node does for it."""
        inventory, policy = self.inventory, self.inventory.policy
        shelf = inventory.shelf(self._entry, "")
        there: list[Block] = []
        for number in chain:
            block = shelf.blocks.get(self._hashes[number])
            if block is None or block.state != VISIBLE:
                break
            there.append(block)
        if there:
            policy.next_stamp()
            policy.touch(there)
        if len(there) < len(chain):
            before = there[-1] if there else None
            policy.next_stamp()
            if before is not None:
                policy.touch([before])
            missing = range(len(there), len(chain))
            blocks, _ = inventory.admit(shelf, [self._hashes[chain[at]] for at in missing], list(missing))
            for block in blocks:
                inventory.link(before, block)
                before = block
            inventory.publish(shelf, blocks)
        return len(there)


def parents_of(turns: Sequence[Turn], blocks: int) -> list[int]:
    parents = np.full(blocks, -1, dtype=np.int64)
    for turn in turns:
        parents[turn.blocks[1:]] = turn.blocks[:-1]
    found: list[int] = parents.tolist()
    return found


def hit_points(turns: Sequence[Turn], cache: NodeCache | ChainCache | Clairvoyant, block_tokens: int) -> float:
    """Token hit rate in points."""
    hits = sum(min(cache.request(turn.blocks.tolist()), turn.hit_limit) for turn in turns)
    return 100 * hits * block_tokens / sum(turn.tokens_in for turn in turns)


def play(schedule: Schedule, turns: Sequence[Turn], size: float, others: bool) -> dict[str, float]:
    """Hit rates of one tenant's turns in a cache of ``size`` of the blocks that they name."""
    blocks = len(schedule.hashes)
    capacity = max(1, int(size * len(np.unique(np.concatenate([turn.blocks for turn in turns])))))
    hashes = [row.tobytes() for row in schedule.hashes]
    tokens = schedule.block_tokens
    lru = NodeCache(capacity, hashes, LruOrder)
    segmented = NodeCache(capacity, hashes, SegmentedOrder)
    rates = {"LRU": hit_points(turns, lru, tokens), "segmented": hit_points(turns, segmented, tokens)}
    lru.inventory.check()
    segmented.inventory.check()
    if others:
        parents = parents_of(turns, blocks)
        rules: dict[str, type[ChainCache]] = {
            "SLRU 0.5": Segmented, "ARC": Arc, "S3-FIFO": S3Fifo, "W-TinyLFU": TinyLfu
        }  # fmt: skip
        for name, rule in rules.items():
            rates[name] = hit_points(turns, rule(capacity, parents), tokens)
        chains = [turn.blocks.tolist() for turn in turns]
        rates["bound"] = hit_points(turns, Clairvoyant(capacity, chains, blocks), tokens)
    return rates


def schedule_of(path: Path, args: argparse.Namespace, seed: int) -> Schedule:
    trace = read_trace(path)
    sessions = list(trace.sessions)
    if trace.closed_loop and seed:  # which sessions, when, beside which others; the open ones have their times
        random.Random(seed).shuffle(sessions)
        trace = dataclasses.replace(trace, sessions=tuple(sessions))
    tokens = max(args.block_tokens, trace.block_tokens) if trace.block_tokens > 64 else args.block_tokens
    options = ReplayOptions(trace=path, block_tokens=tokens, sessions=args.sessions, seed=seed, tenants=args.tenants)
    return build_schedule(trace, options, CostModel())


def rates_of(schedule: Schedule, size: float, others: bool) -> dict[str, float]:
    """Over all tenants, each with a cache of its own: the mean by tokens."""
    by_salt: dict[str, list[Turn]] = defaultdict(list)
    for turn in schedule.turns:
        by_salt[turn.salt].append(turn)
    total: dict[str, float] = defaultdict(float)
    tokens = 0
    for turns in by_salt.values():
        if len(turns) < REQUESTS_MIN and len(by_salt) > 1:
            continue
        weight = sum(turn.tokens_in for turn in turns)
        tokens += weight
        for name, rate in play(schedule, turns, size, others).items():
            total[name] += rate * weight
    return {name: rate / tokens for name, rate in total.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, nargs="+", help="recorded traces, as kvstrata replay takes them")
    parser.add_argument("--sizes", type=float, nargs="+", default=list(SIZES), help="cache, as a share of all blocks")
    parser.add_argument("--block-tokens", type=int, default=512, help="a divisor or multiple of the trace's")
    parser.add_argument("--sessions", type=int, default=None, help="so many sessions of each trace")
    parser.add_argument("--tenants", type=int, default=1, help="Zipf tenants, each with a cache of its own")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--others", action="store_true", help="also other rules, and the bound")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for path in args.traces:
        schedules = [schedule_of(path, args, seed) for seed in range(args.seeds)]
        for size in args.sizes:
            runs = [rates_of(schedule, size, args.others) for schedule in schedules]
            row: dict[str, object] = {"trace": schedules[0].trace_name, "size": size}
            for name in runs[0]:
                gains = [run[name] - (run["LRU"] if name not in ("LRU", "bound") else 0) for run in runs]
                row[name] = round(statistics.mean(gains), 2)
                if name == "segmented":
                    row["least"], row["most"] = round(min(gains), 2), round(max(gains), 2)
            rows.append(row)
            if not args.json:
                head = {"trace": 24, "size": 5}
                print("  ".join(f"{name} {value:>{head.get(name, 6)}}" for name, value in row.items()), flush=True)
    if args.json:
        print(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
