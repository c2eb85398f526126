"""A Llama-architecture decoder over paged KV, whose bits depend on a token, its position and its prefix alone.

Not on the batch it was computed in, how the prompt was cut in chunks, whether it was preempted, or whether its
prefix was computed here or loaded: so a pool that returns what was stored changes no token. It holds for one
numpy, one BLAS and kind of CPU, and one number of ranks (all of it is in :func:`weights.numerics` or the config).
On a GPU it rests on cuBLAS giving a product of one shape the same bits in any batch, which nobody promises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvstrata.engine_adapter.paged.model.arrays import F32, HOST, I64, Arrays
from kvstrata.engine_adapter.paged.model.attention import KV, PagedAttention, write_kv
from kvstrata.engine_adapter.paged.model.attention_plan import AttentionPlan, plan_attention
from kvstrata.engine_adapter.paged.model.collective_base import Collective, collective_of
from kvstrata.engine_adapter.paged.model.layers import rms_norm, swiglu
from kvstrata.engine_adapter.paged.model.llama_config import LlamaConfig
from kvstrata.engine_adapter.paged.model.rope import Rope
from kvstrata.engine_adapter.paged.model.rows import Batch, RowLayout, multiply
from kvstrata.engine_adapter.paged.model.weights import LayerWeights, LlamaWeights


class Llama:
    """One rank's part of a model; ``weights`` and the KV given to it are of ``arrays``. Not thread-safe."""

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, *, collective: Collective, arrays: Arrays = HOST
    ) -> None:
        config.check_tensor_parallel(collective.size)
        self.config, self.weights = config, weights
        self._arrays, self._xp = arrays, arrays.xp
        self._collective = collective_of(collective, arrays)
        self._heads = config.num_attention_heads // collective.size
        self._kv_heads = config.num_key_value_heads // collective.size
        self._rope = Rope(config, arrays)
        self._attention = PagedAttention(self._heads, self._kv_heads, config.head_dim, arrays)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def forward(self, batch: Batch, kv: Sequence[KV], before_reading: Callable[[int], object] | None = None) -> F32:
        """Compute a step: write its K and V into ``kv``, return the logits [m, vocab] of ``batch.logits_rows``.

        The batch and the logits are numpy's. ``before_reading(layer)`` is called before attention reads the layer's
        KV, when the step's own is written.

        ``kv``: one tensor a layer, ``[2, num_blocks, block_size, num_kv_heads, head_size]``, C-contiguous.
        """
        batch.check()
        self._check(batch, kv)
        xp, to_device = self._xp, self._arrays.to_device
        layout = RowLayout(batch.positions, self._arrays)
        plans = self._plans(batch, kv)
        positions = to_device(batch.positions)
        slots = [to_device(group.slot_mapping) for group in batch.groups]
        hidden = layout.scatter(xp.take(self.weights.embed, to_device(batch.token_ids), axis=0))
        for layer, weights in enumerate(self.weights.layers):
            group = batch.layer_group[layer]
            qkv = self._project(hidden, weights, layout, positions)
            queries = self._write(qkv, kv[layer], slots[group])
            if before_reading is not None:
                before_reading(layer)
            attended = layout.scatter(self._attention(queries, kv[layer], plans[group]))
            hidden += self._collective.all_reduce(multiply(xp, attended, weights.o))
            normed = rms_norm(xp, hidden, weights.post_norm, self.config.rms_norm_eps)
            mlp = multiply(xp, swiglu(xp, normed, weights.gate_up), weights.down)
            hidden += self._collective.all_reduce(mlp)
        return self._logits(batch, layout, hidden)

    def _project(self, hidden: F32, weights: LayerWeights, layout: RowLayout, positions: I64) -> F32:
        """Queries, keys and values of each token, rotated: [n, heads + 2 * kv_heads, head_dim]."""
        normed = rms_norm(self._xp, hidden, weights.input_norm, self.config.rms_norm_eps)
        qkv = multiply(self._xp, normed, weights.qkv)
        if weights.qkv_bias is not None:
            qkv += weights.qkv_bias
        heads = layout.gather(qkv).reshape(len(positions), -1, self.config.head_dim)
        self._rope.rotate(heads[:, : self._heads + self._kv_heads], positions)
        return heads

    def _write(self, heads: F32, kv: KV, slots: I64) -> F32:
        """Put keys and values into the cache; return the queries, [n, heads * head_dim]."""
        keys_from, values_from = self._heads, self._heads + self._kv_heads
        write_kv(kv, slots, heads[:, keys_from:values_from], heads[:, values_from:])
        return heads[:, :keys_from].reshape(len(heads), -1)

    def _logits(self, batch: Batch, layout: RowLayout, hidden: F32) -> F32:
        if not len(batch.logits_rows):
            self._arrays.synchronize()  # as to_host does where there are logits
            return np.empty((0, self.vocab_size), np.float32)
        wanted = RowLayout(batch.positions[batch.logits_rows], self._arrays)
        where = self._arrays.to_device(layout.rows[batch.logits_rows])
        rows = self._xp.take(hidden.reshape(-1, hidden.shape[-1]), where, axis=0)
        normed = rms_norm(self._xp, wanted.scatter(rows), self.weights.norm, self.config.rms_norm_eps)
        return self._arrays.to_host(wanted.gather(multiply(self._xp, normed, self.weights.lm_head)))

    def _plans(self, batch: Batch, kv: Sequence[KV]) -> list[AttentionPlan]:
        """One a group: its layers are alike."""
        plans = []
        for group in range(len(batch.groups)):
            layers = [layer for layer, its in enumerate(batch.layer_group) if its == group]
            kinds = {(kv[layer].shape[2], self.config.sliding_window(layer)) for layer in layers}
            assert len(kinds) == 1, f"group {group}: layers with (block size, window) {sorted(kinds)}: expected one"
            plans.append(plan_attention(batch, group, *kinds.pop(), self._arrays))
        return plans

    def _check(self, batch: Batch, kv: Sequence[KV]) -> None:
        layers = self.config.num_hidden_layers
        assert len(kv) == len(batch.layer_group) == layers, f"{len(kv)} KV tensors for {layers} layers"
        for layer, tensor in enumerate(kv):
            expected = (2, *tensor.shape[1:3], self._kv_heads, self.config.head_dim)
            assert tensor.shape == expected, f"KV of layer {layer} is {tensor.shape}: expected {expected}"
            assert tensor.flags.c_contiguous, f"KV of layer {layer} is not contiguous"
        longest = max(batch.context_ends, default=0)
        limit = self.config.max_position_embeddings
        assert longest <= limit, f"position {longest - 1}: the model ends at {limit - 1}"
        if len(batch.token_ids):
            low, high = int(batch.token_ids.min()), int(batch.token_ids.max())
            assert 0 <= low <= high < self.config.vocab_size, f"token ids {low} to {high}: vocab {self.vocab_size}"
