"""The engine on a GPU, where there is one: cupy's arrays behave as the stand-in says, and compute the same model.

To a tolerance: cuBLAS adds in another order than a CPU does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvstrata.engine_adapter.connector.base import ConnectorMeta, JobKind
from kvstrata.engine_adapter.paged.config import CacheConfig, EngineConfig, ModelConfig, StepConfig
from kvstrata.engine_adapter.paged.engine import Engine
from kvstrata.engine_adapter.paged.model.arrays import HOST, ArrayModule, Arrays, make_arrays
from kvstrata.engine_adapter.paged.model.attention import KV
from kvstrata.engine_adapter.paged.model.collective_base import NoCollective
from kvstrata.engine_adapter.paged.model.llama import Llama
from kvstrata.engine_adapter.paged.model.rows import F32, Batch, GroupBatch
from kvstrata.engine_adapter.paged.model.weights import load_config, load_weights
from kvstrata.engine_adapter.paged.ranks.device_mirror import DeviceMirror
from kvstrata.engine_adapter.paged.request import SamplingParams
from kvstrata.proto.errors import InvalidArgument
from tests.engine_adapter.paged.ranks.test_device_mirror import LAYOUT, Inner, ended, job


@pytest.fixture
def cuda() -> Arrays:
    try:
        return make_arrays("cuda")
    except InvalidArgument as error:
        pytest.skip(str(error))


def test_cupy_has_what_the_model_takes() -> None:
    """Needs no GPU, only cupy."""
    cupy = pytest.importorskip("cupy")
    assert not [name for name in vars(ArrayModule) if not name.startswith("_") and not hasattr(cupy, name)]


@pytest.mark.gpu
def test_what_crosses_comes_back(cuda: Arrays) -> None:
    for array in (np.arange(5), np.eye(3, dtype=np.float16), np.array([True, False])):
        back = cuda.to_host(cuda.to_device(array))
        assert type(back) is np.ndarray and back.dtype == array.dtype and np.array_equal(back, array)
    out = cuda.xp.zeros((2, 3), np.float32)
    source = cuda.to_device(np.arange(12, dtype=np.float32).reshape(4, 3))
    cuda.take_into(source, cuda.to_device(np.array([3, 1])), out)
    assert cuda.to_host(out).tolist() == [[9, 10, 11], [3, 4, 5]]
    with pytest.raises(TypeError):
        np.asarray(out)
    cuda.synchronize()


def logits_of(arrays: Arrays, size: str, dtype: type[np.float32 | np.float16]) -> list[F32]:
    """A prompt in two chunks, and a token after it."""
    config = load_config(size, 512)
    llama = Llama(config, load_weights(size, config, arrays=arrays), collective=NoCollective(), arrays=arrays)
    layers = config.num_hidden_layers
    kv: Sequence[KV] = [arrays.xp.zeros((2, 40, 16, 2, 16), dtype) for _ in range(layers)]
    windows = sorted({config.sliding_window(layer) for layer in range(layers)})
    groups = [windows.index(config.sliding_window(layer)) for layer in range(layers)]
    tokens = np.random.default_rng(0).integers(0, 512, 500)
    found = []
    for start, end in ((0, 300), (300, 499), (499, 500)):
        where = np.arange(start, end)
        group = GroupBatch(where + 16, [np.arange(1, 40)])
        rows = np.arange(end - start)
        batch = Batch(tokens[start:end], where, [(0, end - start)], [group] * len(windows), groups, rows)
        found.append(llama.forward(batch, kv))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["tiny", "tiny-swa"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_model_says_what_it_says_on_a_cpu(cuda: Arrays, size: str, dtype: type[np.float32 | np.float16]) -> None:
    for ours, theirs in zip(logits_of(cuda, size, dtype), logits_of(HOST, size, dtype), strict=True):
        assert type(ours) is np.ndarray
        np.testing.assert_allclose(ours, theirs, atol=1e-3 if dtype is np.float32 else 5e-2)


@pytest.mark.gpu
def test_blocks_cross_both_ways(cuda: Arrays) -> None:
    draw = np.random.default_rng(0)
    host = draw.integers(0, 128, LAYOUT.memory_bytes, np.uint8)
    before = draw.integers(128, 256, LAYOUT.memory_bytes, np.uint8)
    device = cuda.to_device(before)
    inner = Inner(host)
    mirror = DeviceMirror(inner, LAYOUT, host, device, cuda, copy_bytes=400)
    load, store = job(JobKind.LOAD, (0, [1, 2, 5])), job(JobKind.STORE, (1, [7, 9]), job_id=2)
    mirror.start(ConnectorMeta(loads=[load], stores=[store]))
    mirror.forward_ended()
    inner.outcomes = [ended(load, b"\x01\x00\x01")]
    mirror.take_output()
    after = cuda.to_host(device)
    for group, ids, ours, theirs in ((1, [7, 9], host, before), (0, [1, 5], after, host), (0, [2], after, before)):
        for start, length in LAYOUT.descriptors(group)[ids].reshape(-1, 2):
            assert np.array_equal(ours[start : start + length], theirs[start : start + length])


@pytest.mark.gpu
def test_an_engine_answers(cuda: Arrays) -> None:
    config = EngineConfig(
        model=ModelConfig(max_model_len=512),
        cache=CacheConfig(num_blocks=100),
        step=StepConfig(max_num_batched_tokens=64),
        device="cuda",
    )
    engine = Engine.create(config)
    answer = engine.generate([list(range(100))], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.close()
    assert [len(tokens) for tokens in answer] == [5]
