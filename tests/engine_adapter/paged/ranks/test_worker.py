"""A rank without a pool, and one with a connector that is scripted: what is called, and when."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl

from kvstrata.engine_adapter.connector import worker_side
from kvstrata.engine_adapter.connector.base import ConnectorMeta, ConnectorOutput, GroupBlocks, Job, JobKind, JobOutcome
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.paged.config import CacheConfig, EngineConfig, ModelConfig
from kvstrata.engine_adapter.paged.model.attention import KV
from kvstrata.engine_adapter.paged.model.collective_base import NoCollective
from kvstrata.engine_adapter.paged.model.llama import Llama
from kvstrata.engine_adapter.paged.model.rows import F32, Batch
from kvstrata.engine_adapter.paged.outputs import NewRequest, SchedulerOutput
from kvstrata.engine_adapter.paged.ranks import worker as worker_module
from kvstrata.engine_adapter.paged.ranks.worker import Worker
from kvstrata.engine_adapter.paged.request import SamplingParams
from kvstrata.proto.errors import InvalidArgument
from tests.engine_adapter.paged.model.strict_device import StrictArrays, storage_of

CACHE = CacheConfig(num_blocks=20)
MODEL = ModelConfig(max_model_len=128)


class ScriptedSide:
    """Records the calls of a worker."""

    def __init__(self, layout: PoolLayout, config: PoolConfig, *, rank: int, endpoint: str, name: str) -> None:
        self.memory = np.zeros(layout.memory_bytes, np.uint8)
        self.made = (rank, endpoint, name)
        self.calls: list[object] = []

    def start(self, meta: ConnectorMeta) -> None:
        self.calls.append(meta)

    def forward_ended(self) -> None:
        self.calls.append("forward_ended")

    def take_output(self) -> ConnectorOutput:
        self.calls.append("take_output")
        return ConnectorOutput(outcomes=[JobOutcome(job_id=4, kind=JobKind.STORE, done=b"\x01")])

    def set_waker(self, wake: Callable[[], None]) -> None:
        wake()

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedSide]:
    made: list[ScriptedSide] = []

    def make(layout: PoolLayout, config: PoolConfig, **named: object) -> ScriptedSide:
        made.append(ScriptedSide(layout, config, **named))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(worker_side, "make_worker_side", make)
    return made


def step(meta: ConnectorMeta | None = None, tokens: int = 20) -> SchedulerOutput:
    new = NewRequest(
        request_id="a",
        token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        sampling=SamplingParams(),
        block_ids=([3, 2],),
        num_computed_tokens=0,
    )
    return SchedulerOutput(step_id=1, new=[new], num_scheduled_tokens={"a": tokens}, connector_meta=meta)


def test_what_a_worker_says_of_itself() -> None:
    worker = Worker(EngineConfig(model=MODEL, cache=CACHE), 0, NoCollective())
    assert worker.shape.vocab_size == 512
    assert worker.shape.eos_token_id == 257
    assert worker.shape.max_model_len == 128
    assert worker.shape.kv_config.num_blocks == worker.shape.layout.num_blocks == 20
    assert len(worker.kv.buffer) == worker.shape.layout.memory_bytes
    result = worker.execute(step())
    assert result.connector is None and "a" in result.sampled
    worker.close()


def test_loads_begin_before_the_model_and_stores_after_it(
    side: list[ScriptedSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=MODEL, cache=CACHE, pool=PoolConfig(masters="127.0.0.1:1"), name="e1")
    worker = Worker(config, 0, NoCollective(), "ipc://somewhere")
    connector = side[0]
    assert connector.made == (0, "ipc://somewhere", "e1/0")
    assert np.shares_memory(worker.kv.layers[0], connector.memory)
    forward = Llama.forward

    def noted(self: Llama, batch: Batch, kv: Sequence[KV]) -> F32:
        connector.calls.append("forward")
        return forward(self, batch, kv)

    monkeypatch.setattr(Llama, "forward", noted)
    meta = ConnectorMeta()
    result = worker.execute(step(meta))
    assert connector.calls == [meta, "forward", "forward_ended", "take_output"]
    assert connector.memory.any()
    assert result.connector is not None and result.connector.outcomes[0].job_id == 4
    connector.calls.clear()
    assert worker.execute(SchedulerOutput(step_id=2)).connector is not None
    assert connector.calls == ["forward_ended", "take_output"]
    worker.close()
    assert connector.calls[-1] == "close"


def test_on_a_device_stores_find_their_blocks_in_host_memory(
    side: list[ScriptedSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Worker(EngineConfig(model=MODEL, cache=CACHE), 0, NoCollective())
    expected = plain.execute(step())
    monkeypatch.setattr(worker_module, "make_arrays", lambda device, rank: StrictArrays())
    config = EngineConfig(model=MODEL, cache=CACHE, pool=PoolConfig(masters="127.0.0.1:1"), device="cuda")
    worker = Worker(config, 0, NoCollective(), "ipc://somewhere")
    blocks = GroupBlocks(group=0, hashes=bytes(worker.shape.layout.hash_bytes), block_ids=[3])
    store = Job(job_id=4, kind=JobKind.STORE, request_id="a", cache_salt="", groups=[blocks], deadline_s=1.0)
    meta = ConnectorMeta(stores=[store])
    result = worker.execute(step(meta))
    assert result.sampled == expected.sampled
    assert side[0].calls == [meta, "forward_ended", "take_output"]
    assert np.array_equal(storage_of(worker.kv.buffer), plain.kv.buffer)
    found = np.zeros(len(side[0].memory), np.uint8)
    for start, length in worker.shape.layout.descriptors(0)[3]:
        found[start : start + length] = plain.kv.buffer[start : start + length]
    assert found.any() and np.array_equal(side[0].memory, found)
    worker.close()
    plain.close()


def test_only_rank_0_answers_lookups(side: list[ScriptedSide]) -> None:
    class SecondOfTwo(NoCollective):
        rank, size = 1, 2

    pool = PoolConfig(masters="127.0.0.1:1")
    worker = Worker(EngineConfig(model=MODEL, cache=CACHE, pool=pool, tensor_parallel=2), 1, SecondOfTwo(), "ipc://x")
    assert side[0].made == (1, "", "engine/1")
    assert worker.shape.layout.shard_count == 2
    worker.close()


def test_blas_threads_are_as_configured_until_it_is_closed() -> None:
    def threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        worker = Worker(EngineConfig(model=MODEL, cache=CACHE, threads=1), 0, NoCollective())
        assert threads() == {1}
        worker.close()
        assert threads() == {2}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (EngineConfig(model=ModelConfig(model="nothing")), "'nothing'"),
        (EngineConfig(model=ModelConfig(max_model_len=5000)), "max_model_len is 5000: the model has 4096"),
        (EngineConfig(model=ModelConfig(), cache=CacheConfig(num_blocks=4)), "max_model_len|does not fit|blocks"),
        (EngineConfig(tensor_parallel=3), "tensor_parallel 3"),
    ],
)
def test_what_cannot_be_is_refused(config: EngineConfig, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Worker(config, 0, NoCollective())


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 100,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
                "rms_norm_eps": 1e-5,
            }
        )
    )
    with pytest.raises(InvalidArgument, match="the tokenizer has 512 tokens and the model 100"):
        Worker(EngineConfig(model=ModelConfig(model=str(tmp_path))), 0, NoCollective())
