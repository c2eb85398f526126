"""Who runs a step on all ranks: in this process, or in one process a rank."""

from __future__ import annotations

import contextlib
import os
from typing import Protocol

from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import KVCacheConfig
from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.model.collective_base import NoCollective
from kvstrata.engine_adapter.paged.outputs import ModelRunnerOutput, SchedulerOutput
from kvstrata.engine_adapter.paged.ranks.process_executor import ProcessExecutor
from kvstrata.engine_adapter.paged.ranks.worker import Worker
from kvstrata.proto.errors import Closed


class Executor(Protocol):
    """All ranks of one engine. For one thread."""

    @property
    def kv_config(self) -> KVCacheConfig: ...
    @property
    def layout(self) -> PoolLayout: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def max_model_len(self) -> int: ...

    def execute(self, output: SchedulerOutput) -> list[ModelRunnerOutput]:
        """Run one step: one output a rank, in order. Raises :class:`KVError` naming a rank that is lost."""
        ...

    def wake_fds(self) -> list[int]:
        """Descriptors that become readable when a rank has a connector outcome; :meth:`execute` drains them."""
        ...

    def close(self) -> None:
        """Bounded; idempotent."""
        ...


class InProcessExecutor:
    """One rank, in this process."""

    def __init__(self, config: EngineConfig, lookup_endpoint: str = "") -> None:
        assert config.tensor_parallel == 1, f"{config.tensor_parallel} ranks in one process"
        self._worker = Worker(config, 0, NoCollective(), lookup_endpoint)
        shape = self._worker.shape
        self.kv_config, self.layout = shape.kv_config, shape.layout
        self.vocab_size, self.eos_token_id = shape.vocab_size, shape.eos_token_id
        self.max_model_len = shape.max_model_len
        self._wake_fd = wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._worker.set_waker(lambda: os.eventfd_write(wake_fd, 1))

    def execute(self, output: SchedulerOutput) -> list[ModelRunnerOutput]:
        if self._wake_fd < 0:
            raise Closed("the executor is closed")
        # Before the outcomes are taken: one that comes in between wakes once too often, never once too few.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        return [self._worker.execute(output)]

    def wake_fds(self) -> list[int]:
        return [self._wake_fd] if self._wake_fd >= 0 else []

    def close(self) -> None:
        if self._wake_fd >= 0:
            self._worker.close()
            os.close(self._wake_fd)
            self._wake_fd = -1


def make_executor(config: EngineConfig, lookup_endpoint: str = "") -> Executor:
    """``lookup_endpoint``: a ZMQ address that rank 0 binds to answer the scheduler's lookups; with a pool only.

    Returns when every rank has loaded its model. Raises :class:`InvalidArgument` (or another :class:`Refused`)
    for what cannot be, and :class:`Unavailable` for a rank that did not come up.
    """
    config.validated()
    if config.tensor_parallel == 1:
        return InProcessExecutor(config, lookup_endpoint)
    return ProcessExecutor(config, lookup_endpoint)
