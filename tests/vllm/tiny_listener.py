"""A small Qwen2-Audio with random weights, whose text model has the shape of ``tiny_llama``: prompts with sounds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.vllm.tiny_llama import SPECIAL, VOCAB, Shape, llama_config, llama_weights, write_tokenizer

SHAPE = Shape(hidden=128)
SOUND_TOKEN = VOCAB - 1  #: stands for a sound in a prompt
SOUND_TOKENS = 50  #: of a sound of two seconds
POSITIONS = 1500  # of the encoder: vLLM wants 30 seconds of sound, the rest of which is silence
MELS, VALUES, LAYERS = 32, 32, 2


def make_listener(folder: Path, seed: int = 0) -> Path:
    """Write the model, its processor and its tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = llama_weights(SHAPE, seed)
    for name in [name for name in text if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        text[name.replace("weight", "bias")] = np.zeros(len(text[name]), np.float32)
    weights = {f"language_model.{name}": value for name, value in text.items()} | _sound_weights(seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    marks = {
        name: f"t{SOUND_TOKEN - at}" for at, name in enumerate(("audio_token", "audio_bos_token", "audio_eos_token"))
    }
    write_tokenizer(folder, SHAPE, (*SPECIAL, *marks.values()))
    _write(folder / "config.json", _config())
    _write(folder / "processor_config.json", {"processor_class": "Qwen2AudioProcessor"} | marks)
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS}
    _write(folder / "preprocessor_config.json", extractor | {"return_attention_mask": True})
    return folder


def _config() -> dict[str, object]:
    text = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "text_config": llama_config(SHAPE) | text,
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": VALUES,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 2 * VALUES,
            "encoder_layers": LAYERS,
            "num_mel_bins": MELS,
            "max_source_positions": POSITIONS,
        },
        "audio_token_index": SOUND_TOKEN,
        "torch_dtype": "float32",
    }


def _sound_weights(seed: int) -> dict[str, np.ndarray]:
    """Strong in the projection: what is said depends on the sound."""
    draw = np.random.default_rng(seed + 1000)
    weights: dict[str, np.ndarray] = {}

    def matrix(name: str, *sizes: int, gain: float = 1.0, bias: bool = True) -> None:
        values = draw.standard_normal(sizes) * gain / np.prod(sizes[1:]) ** 0.5
        weights[f"{name}.weight"] = values.astype(np.float32)
        if bias:
            weights[f"{name}.bias"] = np.zeros(sizes[0], np.float32)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = np.ones(VALUES, np.float32)
        weights[f"{name}.bias"] = np.zeros(VALUES, np.float32)

    matrix("audio_tower.conv1", VALUES, MELS, 3)
    matrix("audio_tower.conv2", VALUES, VALUES, 3)
    matrix("audio_tower.embed_positions", POSITIONS, VALUES, bias=False)
    norm("audio_tower.layer_norm")
    for layer in range(LAYERS):
        prefix = f"audio_tower.layers.{layer}."
        for name in ("q", "k", "v", "out"):
            matrix(f"{prefix}self_attn.{name}_proj", VALUES, VALUES, bias=name != "k")
        matrix(f"{prefix}fc1", 2 * VALUES, VALUES)
        matrix(f"{prefix}fc2", VALUES, 2 * VALUES)
        norm(f"{prefix}self_attn_layer_norm")
        norm(f"{prefix}final_layer_norm")
    matrix("multi_modal_projector.linear", SHAPE.hidden, VALUES, gain=SHAPE.hidden**0.5)
    return weights


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))
