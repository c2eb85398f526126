"""``config.json`` of three architectures: what is read, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvstrata.engine_adapter.paged.cache.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from kvstrata.engine_adapter.paged.model.hf_config import load_hf_config, parse_hf_config
from kvstrata.engine_adapter.paged.model.llama_config import LlamaConfig, RopeScaling
from kvstrata.engine_adapter.paged.model.sizes import SIZES
from kvstrata.proto.errors import InvalidArgument

BASE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def parse(**fields: object) -> LlamaConfig:
    return parse_hf_config(json.dumps(BASE | fields).encode())


def test_llama() -> None:
    config = parse(eos_token_id=[1, 2], torch_dtype="bfloat16", use_cache=True, initializer_range=0.1)
    assert config.head_dim == 8
    assert config.rms_norm_eps == 1e-6
    assert config.rope_theta == 10_000
    assert config.eos_token_ids == (1, 2)
    assert config.sliding_windows == ()
    assert not config.qkv_bias
    assert parse(num_key_value_heads=None).num_key_value_heads == 8
    assert parse(head_dim=24).head_dim == 24
    assert parse(architectures=None, model_type="llama").head_dim == 8


def test_rope_in_older_and_newer_files() -> None:
    expected = RopeScaling(rope_type="llama3", **LLAMA3)  # type: ignore[arg-type]
    old = parse(rope_theta=5e5, rope_scaling={"rope_type": "llama3"} | LLAMA3)
    new = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3)
    assert old == new
    assert old.rope_scaling == expected
    assert old.rope_theta == 5e5
    assert parse(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == RopeScaling(
        rope_type="linear", factor=2.0
    )
    assert parse(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_scaling is None


def test_windows() -> None:
    mistral, qwen = ["MistralForCausalLM"], ["Qwen2ForCausalLM"]
    assert parse(architectures=mistral, sliding_window=77).sliding_windows == (77,) * 4
    assert parse(architectures=mistral, sliding_window=None).sliding_windows == ()
    assert parse(architectures=qwen, sliding_window=77).sliding_windows == ()
    assert parse(architectures=qwen).qkv_bias
    windowed = parse(architectures=qwen, sliding_window=77, use_sliding_window=True, max_window_layers=3)
    assert windowed.sliding_windows == (0, 0, 0, 77)
    kinds = ["sliding_attention", "full_attention"] * 2
    by_layer = parse(architectures=qwen, sliding_window=77, use_sliding_window=True, layer_types=kinds)
    assert by_layer.sliding_windows == (77, 0, 77, 0)
    assert parse(sliding_window=77).sliding_windows == ()  # Llama does not read it


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None}, "expected one of LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"],
            },
            "sliding windows for 1 layers",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads is 8: expected a multiple"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": "many"}, "hidden_size"),
    ],
)
def test_refused_by_name(fields: dict[str, object], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        parse(**fields)


def test_files_that_are_not_there_or_not_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        load_hf_config(path)
    path.write_bytes(b"{")
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        load_hf_config(path)


def test_layer_specs() -> None:
    full = FullAttentionSpec(block_size=16, dtype="float16", num_kv_heads=1, head_size=16)
    window = SlidingWindowSpec(block_size=16, dtype="float16", num_kv_heads=1, head_size=16, sliding_window=64)
    assert SIZES["tiny-swa"].layer_specs(16, "float16", 2) == [window, full, window, full]
    assert SIZES["tiny"].layer_specs(16, "float32")[0].page_size_bytes == 2 * 16 * 2 * 16 * 4
    with pytest.raises(InvalidArgument, match="tensor_parallel 3"):
        SIZES["tiny"].layer_specs(16, "float32", 3)


def test_every_field_but_the_end_of_text_is_part_of_the_identity() -> None:
    config = SIZES["tiny"]
    others = {
        "rope_scaling": RopeScaling(rope_type="linear", factor=2.0),
        "tie_word_embeddings": True,
        "qkv_bias": True,
        "sliding_windows": (3, 3),
    }
    for name in config.__struct_fields__:
        value = others.get(name)
        if name == "eos_token_ids":
            assert msgspec.structs.replace(config, eos_token_ids=(7,)).identity == config.identity
            continue
        changed = msgspec.structs.replace(config, **{name: getattr(config, name) + 2 if value is None else value})
        assert changed.identity != config.identity, name
