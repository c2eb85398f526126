"""Makes the folders beside it: small models as transformers saves them, and the logits that it computes.

Run by hand when a case is added; it needs the ``reference`` extra. The weights are those of our seeded
generator, rounded to each case's dtype.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvstrata.engine_adapter.paged.model.hf_config import load_hf_config
from kvstrata.engine_adapter.paged.model.weights import random_tensors, tensor_shapes

HERE = Path(__file__).parent
TOKENS, KEPT = 300, 40
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def cases() -> dict[str, tuple[PreTrainedModel, torch.dtype]]:
    """Models by name, still to be filled, and the dtype their weights are stored in."""
    llama = LlamaConfig(**SHAPE, rope_parameters=LLAMA3, attn_implementation="eager")
    mistral = MistralConfig(**SHAPE, sliding_window=24, attn_implementation="eager")
    qwen2 = Qwen2Config(
        **SHAPE,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
        attn_implementation="eager",
    )
    return {
        "llama": (LlamaForCausalLM(llama), torch.bfloat16),
        "mistral": (MistralForCausalLM(mistral), torch.float16),
        "qwen2": (Qwen2ForCausalLM(qwen2), torch.float32),
    }


def make(name: str, model: PreTrainedModel, dtype: torch.dtype) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.config.save_pretrained(folder)
    config = load_hf_config(folder / "config.json")
    read = random_tensors(msgspec.structs.replace(config, eos_token_ids=()), seed=1)
    state = {tensor: torch.tensor(read(tensor)).to(dtype) for tensor in tensor_shapes(config)}
    missing, unexpected = model.load_state_dict({key: value.float() for key, value in state.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    token_ids = np.random.default_rng(1).integers(0, config.vocab_size, TOKENS)
    with torch.no_grad():
        logits = model.float().eval()(torch.tensor(token_ids)[None]).logits[0]
    np.savez(folder / "expected.npz", token_ids=token_ids.astype(np.int16), logits=logits[-KEPT:].numpy())
    model.to(dtype).save_pretrained(folder, max_shard_size="40KB" if name == "qwen2" else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    for case, (filled, stored) in cases().items():
        make(case, filled, stored)
