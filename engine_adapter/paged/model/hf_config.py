"""``config.json`` of Hugging Face, for the three architectures that are one decoder.

Each of them reads a known set of keys. Those that change the result are honoured or refused by name; keys that
an architecture does not read cannot change its result and are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from kvstrata.engine_adapter.paged.model.llama_config import LlamaConfig, RopeScaling
from kvstrata.proto.errors import InvalidArgument

ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
_MODEL_TYPES: Final = {"llama": ARCHITECTURES[0], "mistral": ARCHITECTURES[1], "qwen2": ARCHITECTURES[2]}


class _Rope(msgspec.Struct, kw_only=True):
    """``rope_scaling`` of older files, ``rope_parameters`` of newer ones."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None


class _Raw(msgspec.Struct, kw_only=True):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    architectures: list[str] | None = None
    model_type: str = ""
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    partial_rotary_factor: float | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, object] | None = None
    auto_map: dict[str, object] | None = None


def load_hf_config(path: Path) -> LlamaConfig:
    """Read a ``config.json``. Raises :class:`InvalidArgument` naming what is not supported or not right."""
    try:
        return parse_hf_config(path.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror or error}") from error
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from error


def parse_hf_config(data: bytes) -> LlamaConfig:
    """As :func:`load_hf_config`, of the file's bytes."""
    try:
        raw = msgspec.json.decode(data, type=_Raw)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(str(error)) from error
    architecture = _architecture(raw)
    _refuse_unsupported(raw, architecture)
    rope = raw.rope_parameters or raw.rope_scaling or _Rope()
    eos = raw.eos_token_id
    return LlamaConfig(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_hidden_layers=raw.num_hidden_layers,
        num_attention_heads=raw.num_attention_heads,
        num_key_value_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=raw.head_dim or raw.hidden_size // raw.num_attention_heads,
        max_position_embeddings=raw.max_position_embeddings,
        rms_norm_eps=raw.rms_norm_eps,
        rope_theta=raw.rope_theta if rope.rope_theta is None else rope.rope_theta,
        rope_scaling=_rope_scaling(rope, raw.max_position_embeddings),
        tie_word_embeddings=raw.tie_word_embeddings,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        sliding_windows=_sliding_windows(raw, architecture),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    ).validated()


def _architecture(raw: _Raw) -> str:
    name = raw.architectures[0] if raw.architectures else _MODEL_TYPES.get(raw.model_type, raw.model_type)
    if name not in ARCHITECTURES:
        raise InvalidArgument(f"architecture {name!r} is not supported: expected one of {', '.join(ARCHITECTURES)}")
    return name


def _refuse_unsupported(raw: _Raw, architecture: str) -> None:
    rope = raw.rope_parameters or raw.rope_scaling or _Rope()
    rotary = {raw.partial_rotary_factor, rope.partial_rotary_factor} - {None, 1.0}
    llama = architecture == "LlamaForCausalLM"
    for unsupported, what in (
        (raw.quantization_config, "quantization_config: give the weights as bf16, f16 or f32"),
        (raw.auto_map, "auto_map: the model brings its own code"),
        (raw.hidden_act != "silu", f"hidden_act {raw.hidden_act!r}: only silu"),
        (llama and raw.attention_bias, "attention_bias: biases of Llama's attention"),
        (llama and raw.mlp_bias, "mlp_bias: biases of the MLP"),
        (rotary, "partial_rotary_factor: RoPE on a part of the head"),
        (raw.layer_types and architecture != "Qwen2ForCausalLM", f"layer_types of {architecture}"),
    ):
        if unsupported:
            raise InvalidArgument(f"not supported: {what}")


def _rope_scaling(rope: _Rope, max_position_embeddings: int) -> RopeScaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise InvalidArgument(f"not supported: rope_type {kind!r}: only default, linear and llama3")
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    for name in needed:
        if getattr(rope, name) is None:
            raise InvalidArgument(f"rope_type {kind!r} needs {name}")
    assert rope.factor is not None
    if kind == "linear":
        return RopeScaling(rope_type="linear", factor=rope.factor)
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    return RopeScaling(
        rope_type="llama3",
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_max_position_embeddings=rope.original_max_position_embeddings or max_position_embeddings,
    )


def _sliding_windows(raw: _Raw, architecture: str) -> tuple[int, ...]:
    layers = range(raw.num_hidden_layers)
    window = raw.sliding_window or 0
    if architecture == "LlamaForCausalLM" or not window:
        return ()
    if architecture == "MistralForCausalLM":
        return (window,) * raw.num_hidden_layers
    if not raw.use_sliding_window:
        if raw.layer_types and "sliding_attention" in raw.layer_types:
            raise InvalidArgument("layer_types name sliding_attention, but use_sliding_window is false")
        return ()
    if raw.layer_types:
        return tuple(window if kind == "sliding_attention" else 0 for kind in raw.layer_types)
    windows = tuple(window if layer >= raw.max_window_layers else 0 for layer in layers)
    return windows if any(windows) else ()
