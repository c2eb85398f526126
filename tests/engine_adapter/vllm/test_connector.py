"""The class that vLLM loads, over stand-ins of the modules that it imports of vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvstrata.engine_adapter.vllm as package
from kvstrata.engine_adapter.vllm import identity, resetting
from tests.engine_adapter.vllm.stand_ins import (
    ArrayTensor,
    BlockPool,
    CacheGroup,
    CacheSettings,
    FullAttentionSpec,
    KVCacheConfig,
    LoadConfig,
    ModelConfig,
    ParallelSettings,
    UniformTypeKVCacheSpecs,
    for_the_scheduler,
)

BLOCKS, TOKENS, CONTENT = 4, 16, 4
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """``KVConnectorBase_V1``, as far as the connector uses it."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config


class Tensor(ArrayTensor):
    device = SimpleNamespace(type="cpu")


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The connector's module."""
    pytest.importorskip("torch")
    contents: dict[str, dict[str, object]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {},
        "vllm.distributed.kv_transfer.kv_connector": {},
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
        V1: {},
        f"{V1}.base": {"KVConnectorBase_V1": Base, "KVConnectorRole": Role},
        f"{V1}.metrics": {},
    }
    kinds = ("Metadata", "TransferResults", "WorkerMetadata")
    contents[f"{V1}.base"] |= {f"KVConnector{kind}": type(kind, (), {}) for kind in kinds}
    contents[f"{V1}.base"]["SupportsHMA"] = type("SupportsHMA", (), {})
    contents[f"{V1}.metrics"] |= {f"KVConnector{kind}": type(kind, (), {}) for kind in ("PromMetrics", "Stats")}
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    ours = ("connector", "metrics")
    for name in ours:
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
        monkeypatch.setattr(package, name, None, raising=False)
    yield importlib.import_module(f"{package.__name__}.connector")
    for name in ours:
        sys.modules.pop(f"{package.__name__}.{name}", None)


Make = Callable[[Role, KVCacheConfig], Any]


@pytest.fixture
def make(connector: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Halves of one engine, whose pool is down and whose model is a folder. Their socket is the test's alone."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(connector, "lookup_endpoint", lambda engine_id: f"ipc://{tmp_path}/{engine_id}")
    made: list[Any] = []

    def half(role: Role, kv: KVCacheConfig) -> Any:
        transfer = SimpleNamespace(
            kv_connector_extra_config={"masters": "127.0.0.1:1", "reset_external": True},
            is_kv_producer=True,
            is_kv_consumer=True,
            kv_load_failure_policy="recompute",
            engine_id="engine",
        )
        model = ModelConfig(str(tmp_path / "model"))
        vars(model)["dtype"] = "float32"
        cache = CacheSettings()
        vars(cache)["cache_dtype"] = "auto"
        config = SimpleNamespace(
            kv_transfer_config=transfer,
            cache_config=cache,
            parallel_config=ParallelSettings(),
            model_config=model,
            speculative_config=None,
            load_config=LoadConfig("auto"),
        )
        made.append(connector.KVStrataConnector(config, role, kv))
        return made[-1]

    yield half
    for one in made:
        one.shutdown()


def config_of(*heads: int) -> KVCacheConfig:
    """One group, whose layers have so many KV heads of float32."""
    specs = {f"layer{i}": FullAttentionSpec(TOKENS, 4 * n * TOKENS * CONTENT, n) for i, n in enumerate(heads)}
    return KVCacheConfig([CacheGroup(list(specs), UniformTypeKVCacheSpecs(specs))], num_blocks=BLOCKS)


def tensors_of(*heads: int) -> dict[str, Tensor]:
    arrays = [np.zeros((BLOCKS, n, TOKENS, CONTENT), np.float32) for n in heads]
    return {f"layer{i}": Tensor(array, array.reshape(-1).view(np.uint8)) for i, array in enumerate(arrays)}


def test_each_half_reads_the_weights_samples_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    digest = identity.weights_digest

    def counted(folder: Path) -> str:
        read.append(folder)
        return digest(folder)

    monkeypatch.setattr(identity, "weights_digest", counted)
    make(Role.WORKER, config_of(2, 2)).register_kv_caches(tensors_of(2, 2))
    assert len(read) == 1
    make(Role.SCHEDULER, config_of(2, 2)).bind_gpu_block_pool(BlockPool(BLOCKS))
    assert len(read) == 2


def test_a_reset_of_layers_that_differ_in_size_ends_what_the_rank_opens(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def begin_epochs(masters: str, groups: Sequence[str], access: object) -> None:
        ended.extend(groups)

    monkeypatch.setattr(resetting, "begin_epochs", begin_epochs)
    scheduler = make(Role.SCHEDULER, for_the_scheduler(config_of(4, 2)))
    scheduler.bind_gpu_block_pool(BlockPool(BLOCKS))
    worker = make(Role.WORKER, config_of(4, 2))
    worker.register_kv_caches(tensors_of(4, 2))
    assert scheduler.reset_cache()
    (group,) = ended
    assert f"{4 * (4 + 2) * TOKENS * CONTENT} bytes" in group
