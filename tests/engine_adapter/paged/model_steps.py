"""A model, a paged cache full of rubbish, and sequences that are computed in steps of any make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.paged.model.collective_base import NoCollective
from kvstrata.engine_adapter.paged.model.llama import Llama
from kvstrata.engine_adapter.paged.model.rows import Batch, GroupBatch
from kvstrata.engine_adapter.paged.model.weights import load_config, load_weights


def make_model(size: str, *, seed: int = 0) -> Llama:
    config = load_config(size, 512)
    return Llama(config, load_weights(size, config, seed=seed), collective=NoCollective())


@dataclass
class Tokens:
    """Tokens, how far they are computed, a block table a group, and the logits of every computed position."""

    token_ids: npt.NDArray[np.int64]
    tables: list[list[int]]
    computed: int = 0
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)


class Steps:
    """Runs sequences through a model. Memory that nothing was written to is NaN."""

    def __init__(
        self,
        model: Llama,
        *,
        block_size: int = 16,
        dtype: npt.DTypeLike = np.float32,
        num_blocks: int = 400,
        seed: int = 0,
    ) -> None:
        self.model, self.block_size = model, block_size
        config = model.config
        windows = sorted({config.sliding_window(layer) for layer in range(config.num_hidden_layers)})
        self.windows = windows
        self.layer_group = [windows.index(config.sliding_window(layer)) for layer in range(config.num_hidden_layers)]
        shape = (2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.kv = [np.full(shape, np.nan, dtype) for _ in range(config.num_hidden_layers)]
        self._rng = np.random.default_rng(seed)
        self.free_blocks = (self._rng.permutation(num_blocks - 1) + 1).tolist()

    def sequence(self, token_ids: Sequence[int] | npt.NDArray[np.int64]) -> Tokens:
        return Tokens(np.asarray(token_ids, np.int64), [[] for _ in self.windows])

    def fork(self, parent: Tokens, blocks: int, token_ids: Sequence[int] | npt.NDArray[np.int64]) -> Tokens:
        """A sequence that shares the first ``blocks`` computed blocks of another."""
        child = self.sequence(token_ids)
        child.tables = [table[:blocks] for table in parent.tables]
        child.computed = blocks * self.block_size
        child.logits = list(parent.logits[: child.computed])
        return child

    def restart(self, sequence: Tokens) -> None:
        """As preemption does: its blocks are gone, and somebody has used them."""
        for table in sequence.tables:
            for block in set(table) - {0}:
                for kv in self.kv:
                    kv[:, block] = np.nan
                self.free_blocks.append(block)
            table.clear()
        self._rng.shuffle(self.free_blocks)
        sequence.computed = 0
        sequence.logits.clear()

    def step(self, parts: Sequence[tuple[Tokens, int]], *, common: int = 0) -> None:
        """Compute the next so many tokens of each sequence."""
        spans, positions, tokens = [], [], []
        for sequence, count in parts:
            end = sequence.computed + count
            for table in sequence.tables:
                while len(table) * self.block_size < end:
                    table.append(self.free_blocks.pop())
            start = spans[-1][1] if spans else 0
            spans.append((start, start + count))
            positions.append(np.arange(sequence.computed, end))
            tokens.append(sequence.token_ids[sequence.computed : end])
        flat = np.concatenate(positions)
        groups = []
        for group in range(len(self.windows)):
            tables = [np.array(sequence.tables[group], np.int64) for sequence, _ in parts]
            slots = [
                table[where // self.block_size] * self.block_size + where % self.block_size
                for table, where in zip(tables, positions, strict=True)
            ]
            groups.append(GroupBatch(np.concatenate(slots), tables, common))
        batch = Batch(np.concatenate(tokens), flat, spans, groups, self.layer_group, np.arange(len(flat)))
        logits = self.model.forward(batch, self.kv)
        for (sequence, count), (start, end) in zip(parts, spans, strict=True):
            sequence.logits.extend(logits[start:end])
            sequence.computed += count

    def slide(self, sequence: Tokens) -> None:
        """As a cache manager does: blocks that a window has left become the null block."""
        for window, table in zip(self.windows, sequence.tables, strict=True):
            for index in range(max(0, sequence.computed - window + 1) // self.block_size if window else 0):
                table[index] = 0

    def kv_of(self, sequence: Tokens, layer: int) -> npt.NDArray[np.float32 | np.float16]:
        """K and V of all computed positions, [2, computed, kv_heads, head_dim]."""
        kv, table = self.kv[layer], sequence.tables[self.layer_group[layer]]
        return kv[:, table].reshape(2, -1, *kv.shape[3:])[:, : sequence.computed]

    def assert_same(self, sequence: Tokens, reference: Tokens, theirs: Steps) -> None:
        """Every bit: logits and KV, as far as ``sequence`` is computed."""
        count = sequence.computed
        assert count == len(sequence.logits) > 0
        assert np.isfinite(sequence.logits).all()
        assert np.array_equal(sequence.logits, reference.logits[:count])
        for layer in range(len(self.kv)):
            assert np.array_equal(self.kv_of(sequence, layer), theirs.kv_of(reference, layer)[:, :count])
