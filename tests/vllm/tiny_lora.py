"""A LoRA adapter with random weights for a model of ``tiny_llama``, as PEFT writes one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.vllm.tiny_llama import Shape

RANK = 8
SHAPE = Shape()


def make_adapter(folder: Path, seed: int = 0) -> Path:
    """Of the projections that K and V come from, and strong enough to change what is said; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    weights = {}
    for layer in range(SHAPE.layers):
        for name in ("k_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = draw.standard_normal((RANK, SHAPE.hidden)) / SHAPE.hidden**0.5
            up = draw.standard_normal((SHAPE.kv_heads * SHAPE.head_dim, RANK)) / RANK**0.5
            weights[f"{prefix}.lora_A.weight"] = down.astype(np.float32)
            weights[f"{prefix}.lora_B.weight"] = up.astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    return folder
