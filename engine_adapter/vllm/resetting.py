"""What becomes of the pool's part of a model when vLLM clears its caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvstrata.engine_adapter.connector.access import BY_ENVIRONMENT, PoolAccess
from kvstrata.engine_adapter.connector.epochs import begin_epochs
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.vllm.settings import Settings
from kvstrata.proto.errors import KVError
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

#: What the ranks may take to say under which names they store.
RANKS_SAY_S: Final = 2.0


class Resettable(Protocol):
    """What is used of :class:`~kvstrata.engine_adapter.vllm.scheduler.StepPlanner`."""

    def reset(self) -> None: ...


def reset_cache(
    settings: Settings,
    layout: PoolLayout,
    layout_now: Callable[[], PoolLayout],
    planner: Resettable,
    stored: Callable[[], Sequence[str]],
) -> bool:
    """False makes the call of vLLM fail that it is a part of: a reset, a sleep, or a pause that clears caches. vLLM
    does not say whether new weights follow; only who runs it knows.

    ``stored`` asks the ranks for the namespace groups that they have stored under since the start. The scheduler's
    ``layout`` would not do: of a group whose layers differ in size vLLM tells the scheduler one layer's alone, so that
    its name is another one. Nor would a layout of now, which is of other weights where the model's files have been
    replaced. ``layout_now`` makes one: where it differs, weights are not fixed, whatever the settings say."""
    if settings.reset_external:
        return reset_pool(settings.masters, stored, planner, settings)
    if settings.fixed_weights:
        if problem := _changed(layout, layout_now):
            log.error(f"the pool is not reset, and so vLLM's reset, sleep or pause fails: {problem}")
            return False
        log.info("the pool stays as it is: this engine's weights are fixed")
        return True
    log.error(
        "the pool is not reset, and so vLLM's reset, sleep or pause fails. In kv_connector_extra_config, "
        '"fixed_weights": true says that weights never change while this engine runs; '
        '"reset_external": true has the pool\'s blocks of this model end, for all engines'
    )
    return False


def _changed(layout: PoolLayout, layout_now: Callable[[], PoolLayout]) -> str:
    """Why ``fixed_weights`` is not believed; empty where nothing speaks against it. Weights that came from elsewhere
    than the model's files are not seen."""
    try:
        now = layout_now()
    except OSError as error:
        return f'"fixed_weights" is set, and the model\'s files cannot be read: {error}'
    if [group.fingerprint for group in now.groups] != [group.fingerprint for group in layout.groups]:
        return '"fixed_weights" is set, and the model\'s files are others than at the start: restart the engine'
    return ""


def reset_pool(
    masters: str, stored: Callable[[], Sequence[str]], planner: Resettable, access: PoolAccess = BY_ENVIRONMENT
) -> bool:
    """True when the pool has begun the next epoch of every namespace group ``stored``, and this engine goes on in it.

    ``access``: what to show to masters. False, with the reason in the log, when it could not be told, or the ranks do
    not say which groups they are: the engine stays where it was.
    """
    try:
        begin_epochs(masters, stored(), access)
    except KVError as error:
        log.error("the pool is not reset", reason=f"{type(error).__name__}: {error}")
        return False
    planner.reset()
    return True
