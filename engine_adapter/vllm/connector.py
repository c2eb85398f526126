"""The class that vLLM loads: one object in its scheduler, one in each worker, of which each is one half."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.connector.scheduler_side import make_scheduler_side
from kvstrata.engine_adapter.connector.stored_groups import stored_groups
from kvstrata.engine_adapter.connector.worker_side import make_worker_side
from kvstrata.engine_adapter.vllm.block_pool import PoolBlockHolder
from kvstrata.engine_adapter.vllm.checks import HASH_BYTES, check_start
from kvstrata.engine_adapter.vllm.devices import check_devices, exchanges_memory, gpu_kind
from kvstrata.engine_adapter.vllm.endpoint import lookup_endpoint, remove_stale
from kvstrata.engine_adapter.vllm.figures import ChangedFigures
from kvstrata.engine_adapter.vllm.geometry import engine_memory
from kvstrata.engine_adapter.vllm.identity import Identity, engine_identity
from kvstrata.engine_adapter.vllm.layout import kv_heads, make_layout, poolable, rank_shards
from kvstrata.engine_adapter.vllm.messages import StepMeta
from kvstrata.engine_adapter.vllm.metrics import KVStrataMetrics, KVStrataStats
from kvstrata.engine_adapter.vllm.resetting import RANKS_SAY_S, reset_cache
from kvstrata.engine_adapter.vllm.scheduler import StepPlanner
from kvstrata.engine_adapter.vllm.settings import read_settings
from kvstrata.engine_adapter.vllm.worker import StepRunner
from kvstrata.proto.logs import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = get_logger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there when types are checked
    """vLLM's message down."""

    step: StepMeta


@dataclass
class RankReports(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """vLLM's message up: a :class:`~kvstrata.engine_adapter.vllm.messages.RankReport`, encoded, by rank."""

    reports: dict[int, bytes] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReports:
        """Those of several ranks of one step."""
        assert isinstance(other, RankReports)
        return RankReports({**self.reports, **other.reports})


class KVStrataConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """A pool of KV blocks behind vLLM's prefix cache: loads are asynchronous, stores hold their blocks by reference.

    Raises :class:`InvalidArgument` at the start for settings that are not understood, and for those under which
    nothing would ever be found in the pool. A pool that is down is no error: vLLM serves without it until it is there.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _log_as_vllm()
        transfer = self._kv_transfer_config
        self.settings = read_settings(transfer.kv_connector_extra_config)
        self._pool_config = self.settings.pool_config(stores=transfer.is_kv_producer, loads=transfer.is_kv_consumer)
        self._check(warn=role == KVConnectorRole.SCHEDULER)
        self._planner: StepPlanner | None = None
        self._runner: StepRunner | None = None
        self._bound: PoolLayout | None = None
        self._figures = ChangedFigures()
        if role == KVConnectorRole.WORKER:
            _allow_amx()

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is given up costs a later hit, nothing else."""
        return False

    def shutdown(self) -> None:
        """End this half, bounded in time: what is under way ends as not done. Safe twice."""
        planner, self._planner = self._planner, None
        runner, self._runner = self._runner, None
        if planner is not None:
            planner.close()
        if runner is not None:
            runner.close()

    def _check(self, *, warn: bool) -> None:
        config = self._vllm_config
        found = check_start(
            config.cache_config,
            config.parallel_config,
            self._kv_cache_config,
            failure_policy=config.kv_transfer_config.kv_load_failure_policy,
            loads=self._kv_transfer_config.is_kv_consumer,
            kv_shards=self.settings.kv_shards,
        )
        found.raise_refused()
        for warning in found.warnings if warn else ():
            log.warning(warning)

    # ------------------------------------------------------------------ scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The scheduler's half begins here: it needs references on vLLM's blocks."""
        layout = self._bound = self._layout()
        remove_stale(self._endpoint())
        side = make_scheduler_side(layout, self._pool_config, self._endpoint(), PoolBlockHolder(gpu_block_pool))
        self._planner = StepPlanner(side, aligned_tokens=layout.aligned_tokens, ranks=layout.ranks)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return StepMetadata(self._scheduler.build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, RankReports):
            self._scheduler.update_connector_output(reports.reports)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may be freed at once: stores under way hold them."""
        self._scheduler.request_finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Keeps an engine without requests stepping until the stores under way have ended."""
        return self._planner is not None and self._planner.has_pending_work()

    def get_kv_connector_stats(self) -> KVStrataStats | None:
        """What changed since the last step; the scheduler's half counts for all ranks."""
        figures = self._figures.take(self._planner.stats()) if self._planner is not None else None
        return KVStrataStats(data=figures) if figures else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStrataStats:
        return KVStrataStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStrataMetrics:
        return KVStrataMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool:
        """Whether nothing of older weights is found in the pool from here on: see :func:`reset_cache`."""
        assert self._bound is not None, "vLLM has not bound its block pool"
        stored = partial(stored_groups, self._endpoint(), RANKS_SAY_S)
        return reset_cache(self.settings, self._bound, self._layout, self._scheduler, stored)

    @property
    def _scheduler(self) -> StepPlanner:
        assert self._planner is not None, "vLLM has not bound its block pool, or this half was shut down"
        return self._planner

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The worker's half begins here: its KV memory is there."""
        check_devices(tensor.device.type for tensor in kv_caches.values())
        groups = self._kv_cache_config.kv_cache_groups
        kept = [poolable(group.kv_cache_spec) for group in groups]
        names = [group.layer_names for group in groups]
        heads = {name: count for group in groups for name, count in kv_heads(group).items()}
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        # Not of a layout: that reads samples of the weights, and the one below does.
        each = rank_shards(self._kv_cache_config, ranks, self.settings.kv_shards)
        memory = engine_memory(names, kept, kv_caches, self._kv_cache_config.num_blocks, each, heads)
        memory = replace(memory, staged=exchanges_memory(self._vllm_config.model_config))
        block_bytes = [int(table[0, :, 1].sum()) for table in memory.tables]
        layout, rank = self._layout(block_bytes), _tensor_parallel_rank()
        distinct, replica = divmod(rank, layout.replicas)
        side = make_worker_side(
            layout,
            self._pool_config,
            rank=distinct,
            endpoint=self._endpoint() if rank == 0 else "",
            name=f"vllm-{self._kv_transfer_config.engine_id}",
            engine_memory=memory,
        )
        layers = names[0] if len(groups) == 1 else []
        self._runner = StepRunner(side, rank, by_blocks=len(groups) == 1, stores=replica == 0, layers=layers)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if self._runner is not None:
            self._runner.begin(connector_metadata.step)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """Loads run since the step's metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for layered loads, of which the scheduler's half begins none: see :class:`StepPlanner`."""
        if self._runner is not None:
            self._runner.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any) -> None:
        """Whole blocks are stored, after the forward pass."""

    def wait_for_save(self) -> None:
        """The step's KV is written: its stores begin, in threads of their own."""
        if self._runner is not None:
            self._runner.forward_ended()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._runner is None:
            return KVConnectorTransferResults()
        results = self._runner.transfer_results()
        return KVConnectorTransferResults(finished_recving=results.finished, failed_recving=results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._runner.failed_blocks() if self._runner is not None else set()

    def build_connector_worker_meta(self) -> RankReports | None:
        return RankReports({self._runner.rank: self._runner.report()}) if self._runner is not None else None

    # ------------------------------------------------------------------ what both halves must agree on

    def _layout(self, block_bytes: Iterable[int] = ()) -> PoolLayout:
        config = self._vllm_config
        algorithm = config.cache_config.prefix_caching_hash_algo
        return make_layout(
            self._kv_cache_config,
            self._identity(),
            hash_bytes=HASH_BYTES[algorithm],
            tensor_parallel=config.parallel_config.tensor_parallel_size,
            kv_shards=self.settings.kv_shards,
            block_bytes=tuple(block_bytes),
        )

    def _identity(self) -> Identity:
        config = self._vllm_config
        model, cache = config.model_config, config.cache_config
        version = ".".join(vllm.__version__.split(".")[:2])
        seed = os.environ.get("PYTHONHASHSEED", "")
        return Identity(
            model=engine_identity(
                model,
                config.speculative_config,
                config.load_config.load_format,
                self.settings.namespace,
                config.parallel_config.tensor_parallel_size,
            ),
            kv=f"{model.dtype}/{cache.cache_dtype}/{_device_kind(config)}",
            hashes=f"vllm {version}/{cache.prefix_caching_hash_algo}/{seed}",
        )

    def _endpoint(self) -> str:
        return lookup_endpoint(str(self._kv_transfer_config.engine_id))


def _tensor_parallel_rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _log_as_vllm() -> None:
    """Our lines go where vLLM's go, from the same level on, unless somebody has decided otherwise."""
    ours, theirs = logging.getLogger("kvstrata"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


def _device_kind(config: VllmConfig) -> str:
    """What decides the order of bytes within a block: kernels pack K for the instructions that the CPU has."""
    from vllm.platforms import current_platform

    if current_platform.device_type != "cpu":
        return gpu_kind(current_platform, getattr(getattr(config, "attention_config", None), "backend", None))
    amx = "+amx" if torch.cpu._is_amx_tile_supported() else ""
    return f"cpu-{torch.backends.cpu.get_cpu_capability()}{amx}".lower().replace(" ", "")


def _allow_amx() -> None:
    """Ask the kernel for AMX now: a first forward pass that is tiny, thanks to a hit, would use it unasked and die."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
