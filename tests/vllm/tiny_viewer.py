"""A small LLaVA with random weights, whose text model has the shape of ``tiny_llama``: prompts with images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.vllm.tiny_llama import SPECIAL, VOCAB, Shape, llama_config, llama_weights, write_tokenizer

SHAPE = Shape(hidden=128)
IMAGE_TOKEN = VOCAB - 1  #: stands for an image in a prompt
PIXELS, PATCH = 112, 14  # of a side
IMAGE_TOKENS = (PIXELS // PATCH) ** 2  #: of an image, whatever its size
VALUES, LAYERS = 32, 2


def make_viewer(folder: Path, seed: int = 0) -> Path:
    """Write the model, its processor and its tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"language_model.{name}": value for name, value in llama_weights(SHAPE, seed).items()}
    save_file(weights | _vision_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    mark = f"t{IMAGE_TOKEN}"
    write_tokenizer(folder, SHAPE, (*SPECIAL, mark))
    _write(folder / "config.json", _config())
    sizes = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    _write(folder / "processor_config.json", {"processor_class": "LlavaProcessor", "image_token": mark} | sizes)
    square = {"height": PIXELS, "width": PIXELS}
    extractor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": PIXELS}, "crop_size": square}
    _write(folder / "preprocessor_config.json", extractor)
    return folder


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": llama_config(SHAPE),
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": VALUES,
            "intermediate_size": 2 * VALUES,
            "num_attention_heads": 2,
            "num_hidden_layers": LAYERS,
            "image_size": PIXELS,
            "patch_size": PATCH,
        },
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "torch_dtype": "float32",
    }


def _vision_weights(seed: int) -> dict[str, np.ndarray]:
    """Strong in the projection: what is said depends on the image."""
    draw = np.random.default_rng(seed + 1000)
    weights: dict[str, np.ndarray] = {}
    tower = "vision_tower.vision_model."

    def matrix(name: str, *sizes: int, gain: float = 1.0, bias: bool = True) -> None:
        values = draw.standard_normal(sizes) * gain / np.prod(sizes[1:]) ** 0.5
        weights[f"{name}.weight"] = values.astype(np.float32)
        if bias:
            weights[f"{name}.bias"] = np.zeros(sizes[0], np.float32)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = np.ones(VALUES, np.float32)
        weights[f"{name}.bias"] = np.zeros(VALUES, np.float32)

    weights[f"{tower}embeddings.class_embedding"] = np.zeros(VALUES, np.float32)
    matrix(f"{tower}embeddings.patch_embedding", VALUES, 3, PATCH, PATCH, gain=4.0, bias=False)
    matrix(f"{tower}embeddings.position_embedding", IMAGE_TOKENS + 1, VALUES, bias=False)
    norm(f"{tower}pre_layrnorm")
    norm(f"{tower}post_layernorm")
    for layer in range(LAYERS):
        prefix = f"{tower}encoder.layers.{layer}."
        for name in ("q", "k", "v", "out"):
            matrix(f"{prefix}self_attn.{name}_proj", VALUES, VALUES)
        matrix(f"{prefix}mlp.fc1", 2 * VALUES, VALUES)
        matrix(f"{prefix}mlp.fc2", VALUES, 2 * VALUES)
        norm(f"{prefix}layer_norm1")
        norm(f"{prefix}layer_norm2")
    matrix("multi_modal_projector.linear_1", SHAPE.hidden, VALUES)
    matrix("multi_modal_projector.linear_2", SHAPE.hidden, SHAPE.hidden, gain=SHAPE.hidden**0.5)
    return weights


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))
