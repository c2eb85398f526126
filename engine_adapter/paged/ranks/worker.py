"""One rank: its shard of the model, its KV memory, its runner, and its half of the connector."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import threadpoolctl

from kvstrata.engine_adapter.connector.base import WorkerSide
from kvstrata.engine_adapter.connector.fingerprint import make_layout
from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.capacity import plan_kv_cache
from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.model.arrays import Arrays, make_arrays
from kvstrata.engine_adapter.paged.model.collective_base import Collective
from kvstrata.engine_adapter.paged.model.llama import Llama
from kvstrata.engine_adapter.paged.model.llama_config import LlamaConfig
from kvstrata.engine_adapter.paged.model.weights import load_config, load_weights
from kvstrata.engine_adapter.paged.outputs import ModelRunnerOutput, SchedulerOutput
from kvstrata.engine_adapter.paged.ranks.device_mirror import DeviceMirror
from kvstrata.engine_adapter.paged.ranks.kv_memory import KVMemory
from kvstrata.engine_adapter.paged.ranks.rank_messages import EngineShape
from kvstrata.engine_adapter.paged.ranks.runner import ModelRunner
from kvstrata.engine_adapter.paged.text.tokenizer import Tokenizer, load_tokenizer
from kvstrata.proto.errors import InvalidArgument


class Worker:
    """Everything a rank has. For one thread, but for the waker.

    ``lookup_endpoint``: where rank 0 answers the scheduler's lookups; only with a pool. A pool that is absent is
    no error: its KV memory is there all the same. Raises :class:`InvalidArgument` for a model, a cache, a
    device or a number of ranks that cannot be.
    """

    def __init__(self, config: EngineConfig, rank: int, collective: Collective, lookup_endpoint: str = "") -> None:
        with contextlib.ExitStack() as stack:
            # Bits of a product may depend on how many threads share it, so this is part of what a model computes.
            limits = threadpoolctl.threadpool_limits(config.threads, user_api="blas")
            stack.callback(limits.restore_original_limits)
            arrays = make_arrays(config.device, rank)
            self.shape, model = _load(config, rank, collective, arrays)
            self._connector: WorkerSide | None = None
            memory = None
            if config.pool.masters:
                # Nothing of a pool is needed, or imported, without one.
                from kvstrata.engine_adapter.connector.worker_side import make_worker_side

                endpoint, name = lookup_endpoint if rank == 0 else "", f"{config.name or 'engine'}/{rank}"
                side = make_worker_side(self.shape.layout, config.pool, rank=rank, endpoint=endpoint, name=name)
                stack.callback(side.close)
                self._connector, memory = side, side.memory
            self.kv = KVMemory(self.shape.kv_config, memory if arrays.on_host else None, arrays)
            if self._connector is not None and memory is not None and not arrays.on_host:
                self._connector = DeviceMirror(self._connector, self.shape.layout, memory, self.kv.buffer, arrays)
            self._by_layer = config.pool.layered_stores and arrays.on_host
            self._runner = ModelRunner(
                model, self.shape.kv_config, self.kv.layers, max_num_seqs=config.step.max_num_seqs
            )
            self._cleanup = stack.pop_all()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step: loads begin, tokens are computed, stores begin; and the outcomes that there are by now."""
        if self._connector is None:
            return self._runner.execute(output)
        wait_layer = layer_written = None
        if output.connector_meta is not None:
            self._connector.start(output.connector_meta)
            if any(job.layered for job in output.connector_meta.loads):
                wait_layer = self._connector.wait_layer
            if self._by_layer and output.connector_meta.stores:
                layer_written = self._connector.layer_written
        result = self._runner.execute(output, wait_layer, layer_written)
        self._connector.forward_ended()
        return ModelRunnerOutput(
            step_id=result.step_id,
            sampled=result.sampled,
            logprobs=result.logprobs,
            connector=self._connector.take_output(),
            compute_s=result.compute_s,
        )

    def set_waker(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, from any thread, when the next step would bring an outcome."""
        if self._connector is not None:
            self._connector.set_waker(wake)

    def close(self) -> None:
        """Bounded. The KV memory is not to be used any more."""
        self._cleanup.close()


def _load(config: EngineConfig, rank: int, collective: Collective, arrays: Arrays) -> tuple[EngineShape, Llama]:
    """The rank's part of the model, and what the engine is told of it."""
    ranks = config.tensor_parallel
    tokenizer = load_tokenizer(config.model.tokenizer)
    model_config = load_config(config.model.model, tokenizer.vocab_size)
    model_config.check_tensor_parallel(ranks)
    _check_vocabulary(model_config, tokenizer)
    weights = load_weights(
        config.model.model, model_config, seed=config.model.seed, rank=rank, tensor_parallel=ranks, arrays=arrays
    )
    shape = _shape(config, model_config, tokenizer, weights.identity)
    return shape, Llama(model_config, weights, collective=collective, arrays=arrays)


def _check_vocabulary(model: LlamaConfig, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise InvalidArgument(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {model.vocab_size}: "
            "give the tokenizer of this model"
        )


def _shape(config: EngineConfig, model: LlamaConfig, tokenizer: Tokenizer, identity: str) -> EngineShape:
    max_model_len = config.model.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise InvalidArgument(f"max_model_len is {max_model_len}: the model has {model.max_position_embeddings}")
    kv_config = plan_kv_cache(
        model.layer_specs(config.cache.block_size, config.model.kv_dtype, config.tensor_parallel),
        num_blocks=config.cache.num_blocks,
        memory_bytes=config.cache.memory_bytes,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.step.max_num_batched_tokens,
    )
    layout = make_layout(
        kv_config,
        model_identity=identity,
        hasher=BlockHasher(config.cache.block_size, config.cache.hash_algorithm),
        tensor_parallel=config.tensor_parallel,
        kv_dtype=config.model.kv_dtype,
        kv_shards=config.pool.kv_shards,
    )
    eos_token_id = tokenizer.eos_token_id
    if eos_token_id is None and model.eos_token_ids:
        eos_token_id = model.eos_token_ids[0]
    return EngineShape(
        kv_config=kv_config,
        layout=layout,
        vocab_size=model.vocab_size,
        eos_token_id=eos_token_id,
        max_model_len=max_model_len,
    )
