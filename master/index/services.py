"""What a master offers to routers: watched changes, KV events of the pool, engines' events, and who is best."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstrata.master.hub import Hub
from kvstrata.master.index.engine_events import EngineEvents
from kvstrata.master.index.engine_source import EngineAddress
from kvstrata.master.index.pool_events import PoolEvents
from kvstrata.master.index.routing import Host, Routing
from kvstrata.master.index.watch import Watchers
from kvstrata.transfer.kv_events.publisher import Publisher, endpoint_of
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.sessions import Session

#: What stands between an engine's name and a rank's in the name of a pool client.
_RANK: Final = ":/@"


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Endpoints as :func:`endpoint_of` takes them; "" is off. ``engines``: whose events are read."""

    kv_events: str = ""
    kv_events_replay: str = ""
    kv_events_salts: bool = False  #: tenants by name in events, else by a hash
    engines: tuple[EngineAddress, ...] = ()


class IndexServices(Collector):
    """Built with the hub, closed before it. Raises :class:`ConfigError` for endpoints that cannot be."""

    def __init__(self, hub: Hub, sessions: Mapping[bytes, Session], loops: Loops, config: IndexConfig) -> None:
        self.publisher: Publisher | None = None
        self.engines: EngineEvents | None = None
        self._hub = hub
        self._closes: list[Callable[[], None]] = []
        self.watchers = Watchers(hub)
        try:
            if config.kv_events:
                replay = endpoint_of(config.kv_events_replay) if config.kv_events_replay else ""
                self.publisher = Publisher(loops, endpoint_of(config.kv_events), replay)
                self._closes.append(self.publisher.close)
                PoolEvents(hub, self.publisher, loops, clear_salts=config.kv_events_salts)
            if config.engines:
                self.engines = EngineEvents(config.engines, loops)
                self._closes.append(self.engines.close)
        except BaseException:
            self.close()
            raise
        self.routing = Routing(hub, self.engines, lambda names: hosts_of(names, sessions))

    def close(self) -> None:
        while self._closes:
            self._closes.pop()()

    def problems(self) -> list[str]:
        return self.engines.problems() if self.engines is not None else []

    def ready(self) -> dict[str, object]:
        """For the ready line."""
        if self.publisher is None:
            return {}
        return {"kv_events": self.publisher.endpoint, "kv_events_replay": self.publisher.replay}

    def collect(self) -> Iterable[Metric]:
        """Metrics, worked out at the scrape."""
        yield GaugeMetricFamily(
            "kvstrata_master_index_watchers", "Streams that follow the directory", value=self.watchers.watching
        )
        for what, count in self.watchers.counts.items():
            yield CounterMetricFamily(
                f"kvstrata_master_index_{what}", f"Of those that follow the directory: {what}", value=count
            )
        if self.publisher is not None:
            published = CounterMetricFamily(
                "kvstrata_master_kv_event_batches", "Batches of the pool's KV events", labels=["what"]
            )
            published.add_metric(["published"], self.publisher.published)
            published.add_metric(["dropped"], self.publisher.dropped)
            yield published
        if self.engines is not None:
            yield from _engine_metrics(self.engines)


def _engine_metrics(engines: EngineEvents) -> Iterable[Metric]:
    states = engines.states()
    for name, text, value in (
        ("live", "1 while an engine's KV events can be reached", lambda state: int(state.live)),
        ("blocks", "Blocks that an engine is known to have in its own cache", lambda state: state.blocks),
        ("age_seconds", "Time since an engine last said something", lambda state: state.age_s),
    ):
        gauge = GaugeMetricFamily(f"kvstrata_master_engine_{name}", text, labels=["engine"])
        for state in states:
            gauge.add_metric([state.name], value(state))
        yield gauge
    counter = CounterMetricFamily(
        "kvstrata_master_engine_events", "What became of engines' batches of events", labels=["engine", "what"]
    )
    for engine, counts in engines.counts().items():
        for what, count in counts.items():
            counter.add_metric([engine, what], count)
    yield counter


def hosts_of(names: Collection[str], sessions: Mapping[bytes, Session]) -> dict[str, Host]:
    """Where the pool client of each name, or of a rank of it, runs. O(sessions)."""
    hosts: dict[str, Host] = {}
    for session in list(sessions.values()):
        hello = session.hello
        ends = [place for place, character in enumerate(hello.name) if character in _RANK]
        for name in (hello.name, *(hello.name[:end] for end in ends)):
            if name in names:
                hosts.setdefault(name, Host(hello.host, hello.boot_id))
    return hosts
