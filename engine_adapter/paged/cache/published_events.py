"""An engine's KV events for others: over ZMQ, as vLLM publishes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvstrata.engine_adapter.paged.cache import kv_events as own
from kvstrata.transfer.kv_events import events
from kvstrata.transfer.kv_events.publisher import Publisher, endpoint_of
from kvstrata.transfer.loops import Loops

STOP_S: Final = 2.0


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Endpoints as :func:`endpoint_of` takes them. ``endpoint`` "": no events; ``replay`` "": none are sent again."""

    endpoint: str = ""
    replay: str = ""
    topic: str = ""


class PublishedEvents:
    """Owns a publisher and its loop. Raises :class:`ConfigError` for endpoints that cannot be listened on."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._topic = config.topic
        self._loops = Loops()
        replay = endpoint_of(config.replay) if config.replay else ""
        self._publisher = Publisher(self._loops, endpoint_of(config.endpoint), replay)

    @property
    def endpoints(self) -> dict[str, str]:
        """Where they are, for the ready line."""
        return {"kv_events": self._publisher.endpoint, "kv_events_replay": self._publisher.replay}

    def publish(self, said: Sequence[own.KVEvent]) -> None:
        """One batch; never waits."""
        self._publisher.publish([_as_published(event) for event in said], self._topic)

    def problems(self) -> list[str]:
        dropped = self._publisher.dropped
        return self._loops.problems() + ([f"{dropped} batches of KV events were dropped"] if dropped else [])

    def close(self) -> None:
        self._publisher.close()
        self._loops.stop(STOP_S)


def _as_published(event: own.KVEvent) -> events.Event:
    match event:
        case own.BlockStored():
            extra: list[list[Any] | None] | None = None
            if event.salt and not event.parent:  # it is part of a chain's first hash, and so of all
                extra = [[event.salt], *([None] * (len(event.hashes) - 1))]
            return events.BlockStored(
                list(event.hashes),
                event.parent or None,
                list(event.token_ids),
                event.block_size,
                None,
                events.GPU,
                None,
                extra,
                event.group,
            )
        case own.BlockRemoved():
            return events.BlockRemoved(list(event.hashes), events.GPU, event.group)
        case own.AllBlocksCleared():
            return events.AllBlocksCleared()
