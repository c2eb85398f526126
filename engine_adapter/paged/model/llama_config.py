"""What decides the shape and the arithmetic of a Llama-architecture decoder."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvstrata.engine_adapter.paged.cache.kv_cache_spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from kvstrata.proto.errors import InvalidArgument


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched beyond the trained length.

    ``linear``: all by ``factor``. ``llama3``: waves longer than ``original_max_position_embeddings /
    low_freq_factor`` by ``factor``, shorter than ``.../high_freq_factor`` not at all, a blend between.
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Names are those of Hugging Face's ``config.json``.

    ``sliding_windows``: one a layer, in tokens, 0 for full attention; empty when all layers are full.
    ``qkv_bias``: the Qwen2 kind, on q, k and v only. ``eos_token_ids`` decides no arithmetic.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    sliding_windows: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def sliding_window(self, layer: int) -> int:
        """Tokens that a token of ``layer`` attends to, itself included; 0: all before it."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def validated(self) -> LlamaConfig:
        """Return self, or raise :class:`InvalidArgument` naming the field and what is expected."""
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}: expected at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidArgument(
                f"num_attention_heads is {self.num_attention_heads}: expected a multiple of num_key_value_heads, "
                f"which is {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise InvalidArgument(f"head_dim is {self.head_dim}: expected an even number, for RoPE")
        if self.sliding_windows and len(self.sliding_windows) != self.num_hidden_layers:
            raise InvalidArgument(
                f"sliding windows for {len(self.sliding_windows)} layers: the model has {self.num_hidden_layers}"
            )
        if any(window < 0 for window in self.sliding_windows):
            raise InvalidArgument("a sliding window is negative: 0 is full attention")
        return self

    def check_tensor_parallel(self, tensor_parallel: int) -> None:
        """Raises :class:`InvalidArgument` when heads or the MLP cannot be divided by ``tensor_parallel`` ranks."""
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(self, name) % tensor_parallel:
                raise InvalidArgument(
                    f"{name} is {getattr(self, name)}: it cannot be divided by tensor_parallel {tensor_parallel}"
                )

    def layer_specs(self, block_size: int, kv_dtype: str, tensor_parallel: int = 1) -> list[KVCacheSpec]:
        """What each layer needs of the KV cache of one rank."""
        self.check_tensor_parallel(tensor_parallel)
        heads = self.num_key_value_heads // tensor_parallel
        full = FullAttentionSpec(block_size=block_size, dtype=kv_dtype, num_kv_heads=heads, head_size=self.head_dim)
        return [
            SlidingWindowSpec(
                block_size=block_size,
                dtype=kv_dtype,
                num_kv_heads=heads,
                head_size=self.head_dim,
                sliding_window=self.sliding_window(layer),
            )
            if self.sliding_window(layer)
            else full
            for layer in range(self.num_hidden_layers)
        ]

    @property
    def identity(self) -> str:
        """Stable text of every field that decides the arithmetic."""
        return msgspec.json.encode(msgspec.structs.replace(self, eos_token_ids=())).decode()
