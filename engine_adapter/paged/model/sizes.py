"""Models by name, to be filled with seeded random weights: shapes that are quick to compute, or costly enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from kvstrata.engine_adapter.paged.model.llama_config import LlamaConfig
from kvstrata.proto.errors import InvalidArgument

DEFAULT_VOCAB_SIZE: Final = 512

_TINY: Final = LlamaConfig(
    vocab_size=DEFAULT_VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
)
_SMALL: Final = LlamaConfig(
    vocab_size=DEFAULT_VOCAB_SIZE,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=32_768,
)

SIZES: Final[dict[str, LlamaConfig]] = {
    "tiny": _TINY,
    "tiny-swa": msgspec.structs.replace(_TINY, num_hidden_layers=4, sliding_windows=(64, 0, 64, 0)),
    "8m": _SMALL,
    "13m": msgspec.structs.replace(_SMALL, num_hidden_layers=8),
    "100m": msgspec.structs.replace(
        _SMALL,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=12,
        num_key_value_heads=4,
    ),
}


def named_config(size: str, vocab_size: int = DEFAULT_VOCAB_SIZE) -> LlamaConfig:
    """The configuration of a named size, for a tokenizer of ``vocab_size`` tokens."""
    if size not in SIZES:
        raise InvalidArgument(f"model size {size!r}: choose one of {', '.join(SIZES)}, or give a model's folder")
    return msgspec.structs.replace(SIZES[size], vocab_size=vocab_size).validated()


@dataclass(frozen=True, slots=True)
class Size:
    """What a model costs. Weights and KV in float32; ``*_per_token`` without what attention adds with length."""

    parameters: int  #: without embeddings and the output head
    embedding_parameters: int
    flops_per_token: int  #: of the layers' weight products
    attention_flops_per_token: int  #: for each token of context, and full-attention layers only
    kv_bytes_per_token: int

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e6:.1f}M parameters and {self.embedding_parameters / 1e6:.1f}M of embeddings, "
            f"{self.flops_per_token / 1e6:.0f} Mflop a token and {self.attention_flops_per_token / 1e3:.1f} kflop "
            f"for each token before it, {self.kv_bytes_per_token / 1024:.1f} KiB of KV a token"
        )


def describe(config: LlamaConfig, kv_itemsize: int = 4) -> Size:
    """Count parameters, operations and KV bytes of a model."""
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    hidden, layers = config.hidden_size, config.num_hidden_layers
    weights = hidden * (query + 2 * key) + query * hidden + 3 * hidden * config.intermediate_size
    full = sum(1 for layer in range(layers) if not config.sliding_window(layer))
    return Size(
        parameters=layers * (weights + 2 * hidden) + hidden,
        embedding_parameters=(1 if config.tie_word_embeddings else 2) * config.vocab_size * hidden,
        flops_per_token=2 * layers * weights,
        attention_flops_per_token=4 * full * query,
        kv_bytes_per_token=2 * layers * key * kv_itemsize,
    )
