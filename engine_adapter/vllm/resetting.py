"""What becomes of the pool's part of a model when vLLM clears its caches."""

from __future__ import annotations

from typing import Protocol

from kvstrata.engine_adapter.connector.access import BY_ENVIRONMENT, PoolAccess
from kvstrata.engine_adapter.connector.epochs import begin_epochs
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.vllm.settings import Settings
from kvstrata.proto.errors import KVError
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)


class Resettable(Protocol):
    """What is used of :class:`~kvstrata.engine_adapter.vllm.scheduler.StepPlanner`."""

    def reset(self) -> None: ...


def reset_cache(settings: Settings, layout: PoolLayout, planner: Resettable) -> bool:
    """False makes the call of vLLM fail that it is a part of: a reset, a sleep, or a pause that clears caches. vLLM
    does not say whether new weights follow; only who runs it knows.

    ``layout``: what this engine has stored under since its start. One that is made now may be of other weights, as the
    model's files may have been replaced, and the pool would go on with the older ones."""
    if settings.reset_external:
        return reset_pool(settings.masters, layout, planner, settings)
    if settings.fixed_weights:
        log.info("the pool stays as it is: this engine's weights are fixed")
        return True
    log.error(
        "the pool is not reset, and so vLLM's reset, sleep or pause fails. In kv_connector_extra_config, "
        '"fixed_weights": true says that weights never change while this engine runs; '
        '"reset_external": true has the pool\'s blocks of this model end, for all engines'
    )
    return False


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
