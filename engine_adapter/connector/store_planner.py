"""Which blocks of the computed requests go to the pool in this step, as store jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstrata.engine_adapter.connector.base import BlockIds, ConnectorRequest, GroupBlocks
from kvstrata.engine_adapter.connector.hits import block_hash, group_blocks
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.connector.offers import OfferedBlocks, OfferKey
from kvstrata.engine_adapter.connector.tracked import TrackedRequest

#: The engine's null block: what attention does not need any more is not there.
NULL_BLOCK = 0


class StorePlanner:
    """Walks each request's chain once: blocks that the pool is not known to have, and that were not offered yet."""

    def __init__(self, layout: PoolLayout, offers: OfferedBlocks, *, store_decode: bool) -> None:
        self._layout = layout
        self._offers = offers
        self._store_decode = store_decode

    def set_limits(self, state: TrackedRequest, request: ConnectorRequest, computed_tokens: int) -> None:
        """Note which full blocks may be offered: computed, hashed, and of the prompt only if so configured."""
        tokens = min(computed_tokens, request.num_tokens)
        if not self._store_decode:
            tokens = min(tokens, request.num_prompt_tokens)
        tokens = min(tokens, len(request.block_hashes) * self._layout.hash_block_tokens)
        for index, group in enumerate(self._layout.groups):
            if group.layers:
                state.limit[index] = tokens // group.block_tokens

    def take(
        self, state: TrackedRequest, block_hashes: Sequence[bytes], read_tables: Callable[[], BlockIds], room: int
    ) -> list[GroupBlocks]:
        """Runs of consecutive blocks to store, at most ``room`` blocks; the cursor moves past what was looked at.

        A group with holes gives several runs, in order. What did not fit is offered in a later step.
        """
        runs: list[GroupBlocks] = []
        behind = [group for group in range(len(self._layout.groups)) if state.cursor[group] < state.limit[group]]
        tables = read_tables() if behind else ()
        for group in behind:
            rows = self._wanted(state, group, block_hashes, tables[group], room)
            room -= len(rows)
            runs += [group_blocks(self._layout, group, block_hashes, run, tables[group]) for run in consecutive(rows)]
        return runs

    def _wanted(
        self, state: TrackedRequest, group: int, block_hashes: Sequence[bytes], table: Sequence[int], room: int
    ) -> list[int]:
        rows: list[int] = []
        index, end = state.cursor[group], min(state.limit[group], len(table))
        while index < end and len(rows) < room:
            if state.question is not None and state.question.ended:
                index = state.question.next_missing(group, index, end)
                if index == end:
                    break
            if table[index] != NULL_BLOCK and self._unoffered(state, group, block_hashes, index):
                rows.append(index)
            index += 1
        state.cursor[group] = max(state.cursor[group], index)
        return rows

    def _unoffered(self, state: TrackedRequest, group: int, block_hashes: Sequence[bytes], index: int) -> bool:
        asked = state.question.looked_up(group, index) if state.question and state.question.ended else 0
        return self._offers.wanted(OfferKey(group, block_hash(self._layout, group, block_hashes, index)), asked)


def consecutive(rows: Sequence[int]) -> list[range]:
    """Ascending numbers as runs without holes."""
    runs: list[range] = []
    for row in rows:
        if runs and runs[-1].stop == row:
            runs[-1] = range(runs[-1].start, row + 1)
        else:
            runs.append(range(row, row + 1))
    return runs
