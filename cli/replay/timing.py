"""Modelled time to first token of one case: the same requests, on engines that take as long as that case makes them.

An engine loads and prefills one prompt at a time, first come first served; decoding is batched beside it.
What each request hits is given (it is that of the reference schedule); in a closed-loop trace a session's
next request waits for the last one, so that a slow case sends later rather than queue without end.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.schedule import Schedule, Turn
from kvstrata.cli.replay.simulator import Hits


@dataclass(frozen=True, slots=True)
class Latencies:
    """Virtual seconds of each turn, float64 [turns]: TTFT = queue + load + prefill."""

    queue_s: npt.NDArray[np.float64]
    load_s: npt.NDArray[np.float64]
    prefill_s: npt.NDArray[np.float64]

    @property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        total: npt.NDArray[np.float64] = self.queue_s + self.load_s + self.prefill_s
        return total


def latencies(schedule: Schedule, hits: Hits, costs: CostModel) -> Latencies:
    """Run the engines' clocks over ``schedule`` with these ``hits``. O(turns log turns)."""
    turns = len(schedule.turns)
    result = Latencies(np.zeros(turns), np.zeros(turns), np.zeros(turns))
    busy_until_s: defaultdict[int, float] = defaultdict(float)
    following = _following(schedule) if schedule.closed_loop else {}
    waits = {turn.index for turn in following.values()}
    arrivals = [(turn.at_s, turn.index) for turn in schedule.turns if turn.index not in waits]
    heapq.heapify(arrivals)
    while arrivals:
        at_s, index = heapq.heappop(arrivals)
        turn = schedule.turns[index]
        cached = int(hits.private[index] + hits.pool[index])
        load_s = costs.load_s(int(hits.pool[index]))
        prefill_s = costs.prefill_s(cached, turn.tokens_in - cached)
        start_s = max(at_s, busy_until_s[turn.engine])
        first_token_s = start_s + load_s + prefill_s
        busy_until_s[turn.engine] = first_token_s
        result.queue_s[index], result.load_s[index], result.prefill_s[index] = start_s - at_s, load_s, prefill_s
        if (follower := following.get(index)) is not None:
            next_at_s = first_token_s + costs.decode_s(turn.tokens_out) + follower.think_s
            heapq.heappush(arrivals, (next_at_s, follower.index))
    return result


def _following(schedule: Schedule) -> dict[int, Turn]:
    """Turn index -> the next turn of its session."""
    last: dict[int, int] = {}
    following = {}
    for turn in schedule.turns:
        if (before := last.get(turn.session)) is not None:
            following[before] = turn
        last[turn.session] = turn.index
    return following
