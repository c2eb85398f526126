"""Against transformers, on small random models saved as it saves them: prefill and decode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import threadpoolctl

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers", exc_type=ImportError)

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from kvstrata.engine_adapter.paged.model.collective_base import NoCollective
from kvstrata.engine_adapter.paged.model.llama import Llama
from kvstrata.engine_adapter.paged.model.weights import load_config, load_weights
from tests.engine_adapter.paged.model_steps import Steps

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}
QWEN = SHAPE | {"num_attention_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama, grouped heads": LlamaConfig(**SHAPE | {"hidden_size": 96, "num_attention_heads": 6}),
    "llama, one kv head a head": LlamaConfig(**SHAPE | {"hidden_size": 96, "num_key_value_heads": 6}),
    "llama, head_dim of its own": LlamaConfig(**SHAPE | {"hidden_size": 48, "head_dim": 24}),
    "llama, llama3 scaling": LlamaConfig(**SHAPE | {"hidden_size": 96}, rope_parameters=LLAMA3),
    "llama, linear scaling": LlamaConfig(
        **SHAPE | {"hidden_size": 96}, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    ),
    "llama, tied": LlamaConfig(**SHAPE | {"hidden_size": 96}, tie_word_embeddings=True),
    "mistral, window": MistralConfig(**SHAPE, sliding_window=100),
    "mistral, window past a segment": MistralConfig(**SHAPE, sliding_window=270),
    "mistral, no window": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**QWEN),
    "qwen2, windows on the last layers": Qwen2Config(
        **QWEN, use_sliding_window=True, sliding_window=50, max_window_layers=1
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_reference(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    theirs = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32, attn_implementation="eager").eval()
    for key, value in theirs.named_parameters():
        if key.endswith("bias"):  # or they are zeros
            torch.nn.init.normal_(value, std=0.3)
    theirs.save_pretrained(tmp_path)
    token_ids = np.random.default_rng(0).integers(0, 300, 340)
    with torch.no_grad():
        expected = theirs(torch.tensor(token_ids)[None]).logits[0].numpy()
    config = load_config(str(tmp_path), 0)
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        steps = Steps(Llama(config, load_weights(str(tmp_path), config), collective=NoCollective()))
        sequence = steps.sequence(token_ids)
        for count in (300, 28, *[1] * 12):
            steps.step([(sequence, count)])
    assert expected.std() > 0.5
    np.testing.assert_allclose(sequence.logits, expected, atol=1e-4)
