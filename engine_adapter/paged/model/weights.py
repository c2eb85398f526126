"""Weights of one rank, from a model's folder or from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import threadpoolctl
import xxhash

from kvstrata.engine_adapter.paged.model.arrays import F32, HOST, Arrays
from kvstrata.engine_adapter.paged.model.hf_config import load_hf_config
from kvstrata.engine_adapter.paged.model.llama_config import LlamaConfig
from kvstrata.engine_adapter.paged.model.safetensors_file import SafetensorsFile, open_folder
from kvstrata.engine_adapter.paged.model.sizes import named_config
from kvstrata.proto.errors import InvalidArgument

#: Part of every model's identity: raise it when anything here computes other bits from the same weights.
NUMERICS_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, of one rank: matrices are [in, out] and C-contiguous, outputs fused side by side."""

    input_norm: F32  #: [hidden]
    qkv: F32  #: [hidden, (heads + 2 * kv_heads) * head_dim]
    qkv_bias: F32 | None
    o: F32  #: [heads * head_dim, hidden]
    post_norm: F32  #: [hidden]
    gate_up: F32  #: [hidden, 2 * mlp]
    down: F32  #: [mlp, hidden]


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All of one rank. ``identity`` is the same for all ranks: whatever decides the bits of the KV is in it."""

    embed: F32  #: [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: F32  #: [hidden]
    lm_head: F32  #: [hidden, vocab]
    identity: str


Read = Callable[[str], F32]


def load_config(model: str, vocab_size: int) -> LlamaConfig:
    """Configuration of a model's folder, or of a named size for a tokenizer of ``vocab_size`` tokens."""
    folder = Path(model)
    return load_hf_config(folder / "config.json") if folder.is_dir() else named_config(model, vocab_size)


def load_weights(
    model: str,
    config: LlamaConfig,
    *,
    seed: int = 0,
    rank: int = 0,
    tensor_parallel: int = 1,
    arrays: Arrays = HOST,
) -> LlamaWeights:
    """One rank's part of ``model``, a folder or a named size, moved to ``arrays``. ``seed`` is of the latter only.

    Raises :class:`InvalidArgument` naming tensors that are missing, unknown or of another shape.
    """
    config.check_tensor_parallel(tensor_parallel)
    folder = Path(model)
    if not folder.is_dir():
        identity = _identity(f"random/{model}/{seed}/{config.vocab_size}", config, arrays)
        return _assemble(config, random_tensors(config, seed), rank, tensor_parallel, identity, arrays)
    files = open_folder(folder)
    where = _checked(files, tensor_shapes(config), folder)
    digest = xxhash.xxh3_128()
    for file in files:
        file.update(digest)
    identity = _identity(f"files/{digest.hexdigest()}", config, arrays)
    return _assemble(config, lambda name: where[name].tensor(name), rank, tensor_parallel, identity, arrays)


def numerics() -> str:
    """What of this process decides the bits of a sum: numpy, its BLAS, the kernels chosen for this CPU, the threads.

    As they are now: set the number of BLAS threads first.
    """
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    pools = [pool for pool in pools if "numpy" in pool["filepath"]] or pools
    blas = ",".join(
        f"{pool['internal_api']}-{pool['version']}-{pool.get('architecture', '')}-threads{pool['num_threads']}"
        for pool in pools
    )
    return f"numerics{NUMERICS_VERSION}/numpy-{np.__version__}/{blas}"


def _identity(weights: str, config: LlamaConfig, arrays: Arrays) -> str:
    parts = (weights, xxhash.xxh3_128_hexdigest(config.identity.encode()), numerics(), arrays.numerics)
    return "/".join(part for part in parts if part)


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its name in Hugging Face's files, with its shape there."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (query, hidden),
            prefix + "self_attn.k_proj.weight": (key, hidden),
            prefix + "self_attn.v_proj.weight": (key, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, query),
            prefix + "mlp.gate_proj.weight": (mlp, hidden),
            prefix + "mlp.up_proj.weight": (mlp, hidden),
            prefix + "mlp.down_proj.weight": (hidden, mlp),
        }
        if config.qkv_bias:
            shapes |= {
                f"{prefix}self_attn.{name}_proj.bias": (size,)
                for name, size in zip("qkv", (query, key, key), strict=True)
            }
    return shapes


def random_tensors(config: LlamaConfig, seed: int) -> Read:
    """Tensors by name, each from a generator of its own: any process, rank and order gives the same bits.

    Scaled by fan-in so that activations keep their size, with attention sharp enough that what a model reads in
    its cache changes what it says: a wrong block gives wrong tokens.
    """
    shapes = tensor_shapes(config)

    def read(name: str) -> F32:
        key = xxhash.xxh3_128_intdigest(f"{seed}/{name}".encode())
        draws = np.random.Generator(np.random.Philox(key=key)).standard_normal(shapes[name], dtype=np.float32)
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind.endswith("norm"):
            return np.float32(1) + np.float32(0.1) * draws
        if kind == "embed_tokens":
            return draws
        gain = _GAINS.get(kind, 1.0)
        return draws * np.float32(gain / shapes[name][-1] ** 0.5)

    return read


_GAINS: Final = {"q_proj": 2.4, "k_proj": 2.4, "o_proj": 2.0, "lm_head": 2.0}


def _checked(
    files: list[SafetensorsFile], expected: dict[str, tuple[int, ...]], folder: Path
) -> dict[str, SafetensorsFile]:
    """Which file has each tensor; all of them, and no other."""
    where = {name: file for file in files for name in file.shapes if _matters(name, expected)}
    for name, shape in expected.items():
        if name not in where:
            raise InvalidArgument(f"{folder}: tensor {name} is missing")
        found = where[name].shapes[name]
        if found != shape:
            raise InvalidArgument(f"{folder}: tensor {name} has shape {found}: expected {shape}")
    extra = sorted(where.keys() - expected.keys())
    if extra:
        raise InvalidArgument(f"{folder}: tensor {extra[0]} is not of this architecture ({len(extra)} such)")
    return where


def _matters(name: str, expected: dict[str, tuple[int, ...]]) -> bool:
    # Old files carry the frequencies that RoPE computes, and a tied head beside the embedding.
    return not name.endswith("rotary_emb.inv_freq") and (name != "lm_head.weight" or name in expected)


def _assemble(config: LlamaConfig, read: Read, rank: int, ranks: int, identity: str, arrays: Arrays) -> LlamaWeights:
    put = arrays.to_device
    embed = read("model.embed_tokens.weight")
    head = embed if config.tie_word_embeddings else read("lm_head.weight")
    return LlamaWeights(
        embed=put(embed),
        layers=tuple(
            _on(arrays, _layer(config, read, f"model.layers.{layer}.", rank, ranks))
            for layer in range(config.num_hidden_layers)
        ),
        norm=put(read("model.norm.weight")),
        lm_head=put(np.ascontiguousarray(head.T)),
        identity=identity,
    )


def _layer(config: LlamaConfig, read: Read, prefix: str, rank: int, ranks: int) -> LayerWeights:
    def outputs(name: str) -> F32:
        """A column-parallel matrix or bias: this rank's outputs, [in, outputs] or [outputs]."""
        whole = read(prefix + name)
        part = len(whole) // ranks
        return whole[rank * part : (rank + 1) * part].T

    def inputs(name: str) -> F32:
        """A row-parallel matrix: this rank's inputs, [inputs, out]."""
        whole = read(prefix + name)
        part = whole.shape[1] // ranks
        return np.ascontiguousarray(whole[:, rank * part : (rank + 1) * part].T)

    def beside(*names: str) -> F32:
        return np.ascontiguousarray(np.concatenate([outputs(name) for name in names], axis=-1))

    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    return LayerWeights(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=beside(*(name + ".weight" for name in qkv)),
        qkv_bias=beside(*(name + ".bias" for name in qkv)) if config.qkv_bias else None,
        o=inputs("self_attn.o_proj.weight"),
        post_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=beside("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=inputs("mlp.down_proj.weight"),
    )


def _on(arrays: Arrays, layer: LayerWeights) -> LayerWeights:
    put = arrays.to_device
    return LayerWeights(
        input_norm=put(layer.input_norm),
        qkv=put(layer.qkv),
        qkv_bias=None if layer.qkv_bias is None else put(layer.qkv_bias),
        o=put(layer.o),
        post_norm=put(layer.post_norm),
        gate_up=put(layer.gate_up),
        down=put(layer.down),
    )
