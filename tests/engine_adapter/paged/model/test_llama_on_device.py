"""The model on arrays that refuse to meet numpy's: the same bits, and nothing but index arrays crosses in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import threadpoolctl

from kvstrata.engine_adapter.paged.model.arrays import HOST, Arrays
from kvstrata.engine_adapter.paged.model.attention import KV
from kvstrata.engine_adapter.paged.model.attention_plan import SEGMENT
from kvstrata.engine_adapter.paged.model.collective_base import Collective, NoCollective
from kvstrata.engine_adapter.paged.model.llama import Llama
from kvstrata.engine_adapter.paged.model.rows import F32, TILE, Batch, GroupBatch
from kvstrata.engine_adapter.paged.model.sizes import SIZES
from kvstrata.engine_adapter.paged.model.weights import load_weights
from tests.engine_adapter.paged.model.strict_device import DeviceArray, StrictArrays, on_storage
from tests.engine_adapter.paged.model_steps import Steps, Tokens


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


class Twice:
    """The first of two ranks, whose other has the same: sums are made in the host's memory."""

    rank, size = 0, 2

    def all_reduce(self, array: F32) -> F32:
        assert type(array) is np.ndarray
        return array * np.float32(2)


class OnDevice:
    """A model on the device, for steps whose KV is kept by numpy: the device's memory is that very memory."""

    def __init__(self, arrays: StrictArrays, inner: Llama) -> None:
        self.arrays, self.inner, self.config = arrays, inner, inner.config

    def forward(self, batch: Batch, kv: Sequence[KV]) -> F32:
        on_device: list[Any] = [on_storage(tensor) for tensor in kv]
        logits = self.inner.forward(batch, on_device)
        assert type(logits) is np.ndarray
        return logits


def llama(size: str, arrays: Arrays, collective: Collective | None = None, **changes: object) -> Llama:
    config = msgspec.structs.replace(SIZES[size], **changes)
    ranks = collective or NoCollective()
    weights = load_weights("tiny", config, tensor_parallel=ranks.size, arrays=arrays)
    return Llama(config, weights, collective=ranks, arrays=arrays)


def on_device(size: str, collective: Collective | None = None, **changes: object) -> OnDevice:
    arrays = StrictArrays()
    return OnDevice(arrays, llama(size, arrays, collective, **changes))


@cache
def prompt(length: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(length).integers(0, 512, length)


def computed(model: Any, dtype: str, kv_heads: int = 2) -> tuple[Steps, list[Tokens]]:
    """Three sequences, two of which share a prefix, in chunks and then token by token."""
    steps = Steps(model, dtype=dtype)
    if kv_heads != 2:
        steps.kv = [np.ascontiguousarray(tensor[:, :, :, :kv_heads]) for tensor in steps.kv]
    shared = prompt(272)
    parent = steps.sequence(shared)
    other = steps.sequence(prompt(70))
    for count, more in ((200, 30), (72, 1)):
        steps.step([(parent, count), (other, more)])
    children = [steps.fork(parent, 17, np.concatenate([shared, prompt(tail)])) for tail in (40, 5)]
    steps.step([(children[0], 38), (children[1], 3)], common=17)
    steps.step([(children[0], 1), (children[1], 1)], common=17)
    steps.step([(child, 1) for child in (*children, other)])
    return steps, [parent, other, *children]


@pytest.mark.parametrize("size", ["tiny", "tiny-swa"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_bits_of_numpy(size: str, dtype: str) -> None:
    steps, sequences = computed(on_device(size), dtype)
    theirs, references = computed(llama(size, HOST), dtype)
    for sequence, reference in zip(sequences, references, strict=True):
        steps.assert_same(sequence, reference, theirs)


def test_every_kind_of_model_and_sums_over_ranks() -> None:
    kinds: dict[str, object] = {"qkv_bias": True, "tie_word_embeddings": True}
    steps, sequences = computed(on_device("tiny", Twice(), **kinds), "float32", kv_heads=1)
    theirs, references = computed(llama("tiny", HOST, Twice(), **kinds), "float32", kv_heads=1)
    for sequence, reference in zip(sequences, references, strict=True):
        steps.assert_same(sequence, reference, theirs)


def test_weights_and_tables_are_on_the_device() -> None:
    weights = llama("tiny", StrictArrays(), qkv_bias=True).weights
    for part in (weights.embed, weights.norm, weights.lm_head):
        assert type(part) is DeviceArray
    for layer in weights.layers:
        for name in layer.__dataclass_fields__:
            assert type(getattr(layer, name)) is DeviceArray, name


def test_a_step_moves_indices_down_and_logits_up() -> None:
    model = on_device("tiny")
    steps = Steps(model)  # type: ignore[arg-type]
    sequence = steps.sequence(prompt(1025))
    steps.step([(sequence, 1024)])
    model.arrays.moved = [0, 0]
    steps.step([(sequence, 1)])
    down, up = model.arrays.moved
    assert up == 512 * 4
    # A slot for each position of the five segments it sees, and the last one's mask.
    assert down < 5 * SEGMENT * 8 + TILE * SEGMENT + 200


def test_a_step_without_logits_waits_for_the_device() -> None:
    """Its seconds are the prefill rate that loads are weighed against."""
    model = on_device("tiny")
    where = np.arange(20)
    none = np.empty(0, np.int64)
    batch = Batch(prompt(20), where, [(0, 20)], [GroupBatch(where + 16, [np.array([1, 2])])], [0, 0], none)
    kv = [np.zeros((2, 3, 16, 2, 16), np.float32) for _ in range(2)]
    assert model.forward(batch, kv).shape == (0, 512)
    assert kv[1][:, 2, 3].all()
    assert model.arrays.waits == 1


def test_memory_or_weights_on_the_wrong_side_are_an_error() -> None:
    arrays = StrictArrays()
    right, wrong = llama("tiny", arrays), llama("tiny", HOST)
    with pytest.raises(TypeError):
        Steps(right).step([(Steps(right).sequence(prompt(20)), 20)])
    mixed = OnDevice(arrays, Llama(right.config, wrong.weights, collective=NoCollective(), arrays=arrays))
    steps = Steps(mixed)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        steps.step([(steps.sequence(prompt(20)), 20)])
