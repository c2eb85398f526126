"""Weights by name, from files and from seeds; shards that are slices; identities that tell models apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import threadpoolctl
from safetensors.numpy import save_file

from kvstrata.engine_adapter.paged.model.llama_config import LlamaConfig
from kvstrata.engine_adapter.paged.model.rows import F32
from kvstrata.engine_adapter.paged.model.safetensors_file import SafetensorsFile
from kvstrata.engine_adapter.paged.model.sizes import SIZES, describe, named_config
from kvstrata.engine_adapter.paged.model.weights import (
    LlamaWeights,
    load_config,
    load_weights,
    numerics,
    random_tensors,
    tensor_shapes,
)
from kvstrata.proto.errors import InvalidArgument

TINY = SIZES["tiny"]
HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": TINY.vocab_size,
    "hidden_size": TINY.hidden_size,
    "intermediate_size": TINY.intermediate_size,
    "num_hidden_layers": TINY.num_hidden_layers,
    "num_attention_heads": TINY.num_attention_heads,
    "num_key_value_heads": TINY.num_key_value_heads,
    "max_position_embeddings": TINY.max_position_embeddings,
    "rms_norm_eps": TINY.rms_norm_eps,
}


def tensors(config: LlamaConfig = TINY, seed: int = 0) -> dict[str, F32]:
    read = random_tensors(config, seed)
    return {name: read(name) for name in tensor_shapes(config)}


def folder(path: Path, what: dict[str, F32], **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(HF | config))
    save_file(what, path / "model.safetensors")
    return path


def load(path: Path, **options: int) -> LlamaWeights:
    return load_weights(str(path), load_config(str(path), 0), **options)


def arrays(weights: LlamaWeights) -> list[F32]:
    parts = [weights.embed, weights.norm, weights.lm_head]
    for layer in weights.layers:
        parts += [layer.input_norm, layer.qkv, layer.o, layer.post_norm, layer.gate_up, layer.down]
    return parts


def assert_equal(one: LlamaWeights, other: LlamaWeights) -> None:
    for a, b in zip(arrays(one), arrays(other), strict=True):
        assert np.array_equal(a, b)
        assert a.flags.c_contiguous


def test_files_and_seeds_give_the_same_model(tmp_path: Path) -> None:
    assert_equal(load(folder(tmp_path / "m", tensors())), load_weights("tiny", TINY))


def test_an_index_names_the_files(tmp_path: Path) -> None:
    whole = folder(tmp_path / "whole", tensors())
    cut = folder(tmp_path / "cut", {})
    (cut / "model.safetensors").unlink()
    names = sorted(tensors())
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, its in parts.items():
        save_file({name: tensors()[name] for name in its}, cut / file)
    index = {"weight_map": {name: file for file, its in parts.items() for name in its}}
    (cut / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(load(cut), load(whole))
    index["weight_map"][names[0]] = "../whole/model.safetensors"
    (cut / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidArgument, match="not a file name"):
        load(cut)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision(tmp_path: Path, kind: str) -> None:
    values = np.array([[1.0, -2.5, 3e-5], [0.0, 65504.0, -0.125]], np.float32)
    if kind == "F16":
        data, expected = values.astype("<f2").tobytes(), values.astype(np.float16).astype(np.float32)
    else:
        upper = (values.view(np.uint32) >> 16).astype("<u2")
        data, expected = upper.tobytes(), (upper.astype(np.uint32) << 16).view(np.float32)
    path = tmp_path / "x.safetensors"
    header = json.dumps({"x": {"dtype": kind, "shape": [2, 3], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)  # an odd header: data is not aligned
    assert np.array_equal(SafetensorsFile(path).tensor("x"), expected)
    np.testing.assert_allclose(SafetensorsFile(path).tensor("x"), values, rtol=1e-2, atol=1e-7)


def test_what_is_missing_unknown_or_of_another_shape_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    good = tensors()
    for match, what in (
        (f"{name} is missing", {key: value for key, value in good.items() if key != name}),
        (f"{name} has shape \\(64, 128\\): expected \\(128, 64\\)", good | {name: np.ascontiguousarray(good[name].T)}),
        ("model.layers.2.mlp.up_proj.weight is not of this", good | {"model.layers.2.mlp.up_proj.weight": good[name]}),
        ("q_proj.bias is not of this", good | {"model.layers.0.self_attn.q_proj.bias": good["model.norm.weight"]}),
        (f"{name} is I64", good | {name: good[name].astype(np.int64)}),
    ):
        with pytest.raises(InvalidArgument, match=match):
            load(folder(tmp_path / "m", what))
    ignored = good | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    load(folder(tmp_path / "m", ignored))


def test_tied_embeddings(tmp_path: Path) -> None:
    weights = load(folder(tmp_path / "m", tensors(), tie_word_embeddings=True))
    assert np.array_equal(weights.lm_head, weights.embed.T)


def test_files_that_are_not_what_they_say(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", tensors()) / "model.safetensors"
    whole = path.read_bytes()
    for data in (b"", b"short", whole[:5000], b"\xff" * 100, whole[:8] + b"{" + whole[9:-1], whole[:-4]):
        path.write_bytes(data)
        with pytest.raises(InvalidArgument, match=r"model\.safetensors"):
            load(tmp_path / "m")
    path.unlink()
    with pytest.raises(InvalidArgument, match=r"neither model\.safetensors nor"):
        load(tmp_path / "m")


@pytest.mark.parametrize("bias", [False, True])
def test_a_shard_is_a_slice_of_the_whole(bias: bool) -> None:
    config = msgspec.structs.replace(TINY, qkv_bias=bias)
    whole = load_weights("tiny", config)
    ranks = [load_weights("tiny", config, rank=rank, tensor_parallel=2) for rank in range(2)]
    assert len({weights.identity for weights in (whole, *ranks)}) == 1
    for index, layer in enumerate(whole.layers):
        one, two = (weights.layers[index] for weights in ranks)
        assert np.array_equal(np.concatenate([one.o, two.o]), layer.o)
        assert np.array_equal(np.concatenate([one.down, two.down]), layer.down)
        assert np.array_equal(one.input_norm, layer.input_norm)
        for fused, first, second, cuts in (
            (layer.qkv, one.qkv, two.qkv, (64, 96)),
            (layer.gate_up, one.gate_up, two.gate_up, (128,)),
            (layer.qkv_bias, one.qkv_bias, two.qkv_bias, (64, 96)),
        ):
            if fused is None or first is None or second is None:
                assert not bias
                continue
            halves = tuple(cut // 2 for cut in cuts)
            parts = zip(np.split(first, halves, axis=-1), np.split(second, halves, axis=-1), strict=True)
            for part, pair in zip(np.split(fused, cuts, axis=-1), parts, strict=True):
                assert np.array_equal(np.concatenate(pair, axis=-1), part)
    with pytest.raises(InvalidArgument, match="num_attention_heads is 4: it cannot be divided by tensor_parallel 3"):
        load_weights("tiny", config, tensor_parallel=3)


def test_identity_tells_models_apart(tmp_path: Path) -> None:
    other = tensors()
    other["model.norm.weight"][3] += 1
    random = msgspec.structs.replace
    identities = [
        load_weights("tiny", TINY).identity,
        load_weights("tiny", TINY, seed=1).identity,
        load_weights("tiny", named_config("tiny", 600)).identity,
        load_weights("tiny", random(TINY, rms_norm_eps=1e-6)).identity,
        load(folder(tmp_path / "a", tensors())).identity,
        load(folder(tmp_path / "a", other)).identity,
        load(folder(tmp_path / "a", tensors(), rope_theta=5e5)).identity,
    ]
    assert len(set(identities)) == len(identities)
    assert load(folder(tmp_path / "b", tensors())).identity == identities[4]
    assert load_weights("tiny", random(TINY, eos_token_ids=(5,))).identity == identities[0]


def test_identity_and_weights_are_the_same_in_every_process() -> None:
    code = (
        "from kvstrata.engine_adapter.paged.model.weights import *; import hashlib; c = load_config('tiny', 512);"
        "w = load_weights('tiny', c); print(w.identity, hashlib.md5(w.layers[1].down.tobytes()).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "OPENBLAS_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(seen) == 1


def test_the_number_of_blas_threads_is_part_of_the_identity() -> None:
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        one = numerics()
    assert "threads1" in one
    assert np.__version__ in one


def test_sizes() -> None:
    for name, config in SIZES.items():
        config.validated()
        size = describe(config)
        counted = sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
        assert counted == size.parameters + size.embedding_parameters, name
    assert 12e6 < describe(SIZES["13m"]).parameters < 14e6
    assert 7e6 < describe(SIZES["8m"]).parameters < 9e6
    assert 90e6 < describe(SIZES["100m"]).parameters < 110e6
    assert describe(TINY).kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert "KiB of KV a token" in str(describe(TINY))
    assert named_config("tiny", 1000).vocab_size == 1000
    with pytest.raises(InvalidArgument, match="choose one of tiny, tiny-swa"):
        named_config("huge")
