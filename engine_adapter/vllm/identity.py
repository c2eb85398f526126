"""What makes the KV of two vLLM instances interchangeable, but for the groups: model, numerics, hashes.

Weights are told apart by content where they are files on this host: ``config.json`` whole, and of each weights file
its name, size and 16 samples of 4 KiB. A copy of a model under another path is the same model; weights that were
changed in fewer places than are looked at are not noticed: raise the pool's epoch, or set ``namespace``. A name on a
hub counts with its revision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvstrata.engine_adapter.vllm.capability import check_methods

SAMPLES: Final = 16
SAMPLE_BYTES: Final = 4096
WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")
#: Of a model's configuration, what says nothing about its KV, and differs between hosts and versions.
IGNORED: Final = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "torch_dtype"})


@dataclass(frozen=True, slots=True)
class Identity:
    """Three texts: equal exactly when the KV is interchangeable, as far as they go."""

    model: str
    kv: str
    hashes: str


class HfConfig(Protocol):
    def to_dict(self) -> Mapping[str, object]: ...


class ModelConfig(Protocol):
    """What is read of vLLM's ``ModelConfig``."""

    model: str
    revision: str | None
    quantization: str | None
    seed: int
    hf_config: HfConfig


class LoadConfig(Protocol):
    load_format: str


class Drafts(Protocol):
    """What is read of ``SpeculativeConfig``."""

    draft_model_config: ModelConfig | None
    draft_load_config: LoadConfig | None

    def uses_draft_kv_cache(self) -> bool: ...


def engine_identity(
    model: ModelConfig, drafts: Drafts | None, load_format: str, namespace: str = "", ranks: int = 1
) -> str:
    """Of the model, and of the one that drafts for it where its KV is in the same blocks, also where that is the model
    by name: it may be another revision of it, quantized, or loaded in another way. Raises :class:`InvalidArgument` for
    a vLLM that does not tell."""
    text = model_identity(model, load_format, namespace, ranks)
    if drafts is None:
        return text
    check_methods(drafts, ("draft_model_config", "draft_load_config", "uses_draft_kv_cache"), "speculative config")
    drafter = drafts.draft_model_config
    if drafter is None or not drafts.uses_draft_kv_cache():
        return text
    loaded = drafts.draft_load_config.load_format if drafts.draft_load_config is not None else load_format
    return f"{text} drafts {model_identity(drafter, loaded, namespace, ranks)}"


def model_identity(model: ModelConfig, load_format: str, namespace: str = "", ranks: int = 1) -> str:
    """``namespace``, where it is set, stands for name and weights, of a model that drafts too. ``ranks`` of tensor
    parallelism: vLLM draws random weights for each by itself."""
    settings = f"{model.quantization or 'none'}/{_digest(_config_text(model.hf_config))}"
    if namespace:
        return f"{namespace} {settings}"
    if load_format == "dummy":  # random weights
        return f"dummy/{model.seed}/{ranks} {settings}"
    folder = Path(model.model)
    if folder.is_dir():
        return f"files/{weights_digest(folder)} {settings}"
    revision = model.revision or getattr(model.hf_config, "_commit_hash", None) or "main"
    return f"{model.model}@{revision} {settings}"


def weights_digest(folder: Path, configuration: str = "config.json") -> str:
    """32 hex digits of the configuration and samples of the weights in a folder. Reads 64 KiB a file."""
    digest = hashlib.sha256()
    config = folder / configuration
    if config.is_file():
        digest.update(config.read_bytes())
    for path in sorted(entry for entry in folder.iterdir() if entry.suffix in WEIGHTS):
        size = path.stat().st_size
        digest.update(f"\n{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _config_text(config: HfConfig) -> str:
    fields = {name: value for name, value in config.to_dict().items() if name not in IGNORED}
    return json.dumps(fields, sort_keys=True, default=str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
