"""The pool's KV events: what its nodes have taken in and let go of, as an engine would tell it.

A topic is ``kv@NODE@GROUP``, with ``#TENANT`` behind it for all but the empty salt. AllBlocksCleared speaks of its
topic alone. A node that begins a snapshot, or goes, is cleared first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from kvstrata.master.hub import Hub
from kvstrata.master.index.pool_log import Blocks, NodeCleared, Said, ScopeCleared
from kvstrata.proto.keys import salt_tag, split_hashes
from kvstrata.proto.status import Tier
from kvstrata.transfer.kv_events import events
from kvstrata.transfer.kv_events.publisher import Publisher
from kvstrata.transfer.loops import Loop, Loops

MEDIA: Final[dict[int, str]] = {Tier.HBM: events.GPU, Tier.DRAM: events.CPU, Tier.SSD: events.STORAGE}
#: How often what was said is passed on.
PERIOD_S: Final = 0.05
TAKEN_MAX: Final = 256
#: Hashes in one event.
HASHES_MAX: Final = 4096
#: Topics that are remembered, so that they can be cleared. Of those past it a reader learns by their next event only.
TOPICS_MAX: Final = 1 << 16

#: A node, a namespace group, a tenant.
_Topic = tuple[str, str, str]


class PoolEvents:
    """Passes on what the state's :class:`PoolLog` gathers. ``clear_salts``: tenants by name, else by a hash."""

    def __init__(self, hub: Hub, publisher: Publisher, loops: Loops, *, clear_salts: bool = False) -> None:
        self.publisher = publisher
        self._hub = hub
        self._clear_salts = clear_salts
        self._topics: dict[_Topic, None] = {}
        hub.read(lambda state, now: setattr(state.pool_log, "on", True))
        self._loop = loops.add(Loop("pool kv events", PERIOD_S, self._turn, bound_s=10.0))

    def _turn(self) -> None:
        while not self.publisher.full():
            said, lost = self._hub.read(lambda state, now: state.pool_log.take(TAKEN_MAX))
            failure = self._tell_all(said)
            if lost:
                self.publisher.skip(lost)
            if failure is not None:
                raise failure  # the loop counts, logs and shows it, and goes on with those that follow
            if len(said) < TAKEN_MAX:
                return

    def _tell_all(self, said: Iterable[Said]) -> Exception | None:
        """One that cannot be told leaves a gap for itself alone. Returns the last failure."""
        failure = None
        for each in said:
            try:
                self._tell(each)
            except Exception as error:  # noqa: BLE001  raised by the caller, when the others are told
                self.publisher.skip(1)
                failure = error
        return failure

    def _tell(self, said: Said) -> None:
        match said:
            case Blocks():
                self._blocks(said)
            case NodeCleared(node_id):
                self._clear(lambda topic: topic[0] == node_id)
            case ScopeCleared(group, salt):
                self._clear(lambda topic: group in ("", topic[1]) and salt in (None, topic[2]))

    def _blocks(self, said: Blocks) -> None:
        topic = (said.node_id, said.namespace.group, said.salt)
        if len(self._topics) < TOPICS_MAX:
            self._topics[topic] = None
        medium = MEDIA.get(said.tier, events.STORAGE)  # of a newer node: anything slower
        hashes: list[events.Hash] = list(split_hashes(said.hashes, said.namespace.hash_bytes))
        for start in range(0, len(hashes), HASHES_MAX):
            part = hashes[start : start + HASHES_MAX]
            if said.added:
                keys: list[list[Any] | None] | None = [[self._tenant(said.salt)]] * len(part) if said.salt else None
                tokens = said.namespace.block_tokens
                self._publish(
                    topic,
                    [events.BlockStored(part, None, [], tokens, None, medium, None, keys, ownership=said.node_id)],
                )
            else:
                self._publish(topic, [events.BlockRemoved(part, medium, ownership=said.node_id)])

    def _clear(self, of: Callable[[_Topic], bool]) -> None:
        for topic in [topic for topic in self._topics if of(topic)]:
            del self._topics[topic]
            self._publish(topic, [events.AllBlocksCleared()])

    def _publish(self, topic: _Topic, said: Iterable[events.Event]) -> None:
        node_id, group, salt = topic
        self.publisher.publish(list(said), f"kv@{node_id}@{group}" + (f"#{self._tenant(salt)}" if salt else ""))

    def _tenant(self, salt: str) -> str:
        return salt if self._clear_salts else salt_tag(salt)
