"""A reset of the pool's part of a model, asked for through vLLM: the next weight epoch, for all engines."""

from __future__ import annotations

from typing import Protocol

from kvstrata.engine_adapter.connector.access import BY_ENVIRONMENT, PoolAccess
from kvstrata.engine_adapter.connector.epochs import begin_epochs
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.proto.errors import KVError
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)


class Resettable(Protocol):
    """What is used of :class:`~kvstrata.engine_adapter.vllm.scheduler.StepPlanner`."""

    def reset(self) -> None: ...


def reset_pool(masters: str, layout: PoolLayout, planner: Resettable, access: PoolAccess = BY_ENVIRONMENT) -> bool:
    """True when the pool has begun the next epoch of every group of the layout, and this engine goes on in it.

    ``access``: what to show to masters. False, with the reason in the log, when it could not be told: the engine stays
    where it was.
    """
    try:
        begin_epochs(masters, [group.fingerprint for group in layout.groups if group.poolable], access)
    except KVError as error:
        log.error("the pool is not reset", reason=f"{type(error).__name__}: {error}")
        return False
    planner.reset()
    return True
