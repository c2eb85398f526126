"""A small Llama with random weights and a byte tokenizer, made on the spot: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 2048
SPECIAL = ("<s>", "</s>")


@dataclass(frozen=True, slots=True)
class Shape:
    """The default has 1 KiB of float32 KV a token, so that a block of 32 tokens is 32 KiB.

    ``window``: tokens that every other layer attends to, from the first on; 0: all layers attend to everything."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 128
    positions: int = 16_384
    window: int = 0


def make_model(folder: Path, shape: Shape = Shape(), seed: int = 0) -> Path:
    """Write ``config.json``, ``model.safetensors`` and a tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(llama_weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", llama_config(shape))
    write_tokenizer(folder, shape)
    return folder


def llama_config(shape: Shape) -> dict[str, object]:
    """As in ``config.json``."""
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(shape.layers)]
    windows = {"sliding_window": shape.window, "layer_types": kinds} if shape.window else {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.positions,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | windows


def write_tokenizer(folder: Path, shape: Shape, special: Sequence[str] = SPECIAL) -> None:
    _write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    _tokenizer(special).save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[1],
            "model_max_length": shape.positions,
            "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
        },
    )


def llama_weights(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """Scaled so that attention is peaked and logits are far apart: greedy tokens then depend on the whole prefix."""
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    ones = np.ones(shape.hidden, np.float32)
    hidden, queries, pairs = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden, hidden**0.5),
        "lm_head.weight": matrix(VOCAB, hidden, 3.0),
        "model.norm.weight": ones,
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": matrix(queries, hidden, 2.0),
            f"{prefix}self_attn.k_proj.weight": matrix(pairs, hidden, 2.0),
            f"{prefix}self_attn.v_proj.weight": matrix(pairs, hidden, 1.0),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, queries, 1.0),
            f"{prefix}mlp.gate_proj.weight": matrix(shape.intermediate, hidden, 1.0),
            f"{prefix}mlp.up_proj.weight": matrix(shape.intermediate, hidden, 1.0),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, shape.intermediate, 1.0),
            f"{prefix}input_layernorm.weight": ones,
            f"{prefix}post_attention_layernorm.weight": ones,
        }
    return weights


def _tokenizer(special: Sequence[str]) -> Tokenizer:
    """A token a byte, and filler up to the vocabulary, so that every token has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*SPECIAL, *alphabet]
    texts += [f"t{number}" for number in range(len(texts), VOCAB)]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))
