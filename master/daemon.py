"""The master process: store, state, channel, gRPC, HTTP and tick, started and stopped in order."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

from kvstrata.master.channel import Endpoints, MasterChannel
from kvstrata.master.content.calls import Content
from kvstrata.master.http import application
from kvstrata.master.hub import Hub
from kvstrata.master.index.services import IndexConfig, IndexServices
from kvstrata.master.leadership.campaign import Campaign
from kvstrata.master.leadership.roll import Roll, announced
from kvstrata.master.service import serve
from kvstrata.master.status.document import StatusDocument
from kvstrata.master.status.pages import routes
from kvstrata.master.status.sampler import Sampler
from kvstrata.master.stores.base import LeaderRecord, StateStore
from kvstrata.master.stores.opening import open_store
from kvstrata.master.tenants.answers import Tenants
from kvstrata.master.views import Views
from kvstrata.master.web import serve_http
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.security.admission import REFUSALS, Admission
from kvstrata.transfer.security.files import SecurityFiles
from kvstrata.transfer.security.opened import Security
from kvstrata.transfer.security.rates import USUAL, Bounds
from kvstrata.transfer.server import ChannelServer
from kvstrata.transfer.traces import BY_ENVIRONMENT, TraceOptions, open_traces

log = get_logger(__name__)

STOP_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """Addresses are ``HOST:PORT``; port 0 picks a free one.

    ``state`` is the path of a SQLite file, or the URL of a Redis with the password in ``state_password_file``; None
    keeps policy in memory only.
    """

    listen: str
    grpc: str
    http: str
    state: str | None = field(repr=False)  #: a URL may hold a password
    cluster_id: str | None = None
    grace_s: float = 5.0
    seed: int | None = None
    state_password_file: Path | None = None
    advertise: str | None = None  #: the host by which clients and other masters reach this one
    hot_copies: bool = False
    security: SecurityFiles = field(default_factory=SecurityFiles)
    bounds: Bounds = USUAL  #: of each client
    traces: TraceOptions = BY_ENVIRONMENT
    index: IndexConfig = field(default_factory=IndexConfig)


class Master:
    """A running master. Raises :class:`kvstrata.proto.errors.ConfigError` when it cannot start."""

    def __init__(self, config: MasterConfig) -> None:
        self._stops: list[Callable[[], object]] = []
        self.endpoints = Endpoints()
        try:
            self._start(config)
        except BaseException:
            self.stop()
            raise

    def _start(self, config: MasterConfig) -> None:
        self.security = Security.opened(config.security, config.listen, (config.grpc, config.http))
        store = open_store(config.state, config.cluster_id, config.state_password_file)
        self._stops.append(store.close)
        self.hub = Hub(store, random.Random(config.seed), config.grace_s)
        self.hub.copy_hot(config.hot_copies)
        self._stops.append(self.hub.journal.flush)
        self._advertise = config.advertise
        self.hub.address = lambda: self._record().channel
        self.roll = Roll(self.hub, store, self._record)
        self.loops = Loops()
        self._stops.append(lambda: self.loops.stop(STOP_S))
        channel = MasterChannel(self.hub, self.endpoints)
        self.admission = Admission(self.security.key_file, config.bounds)
        self.server = ChannelServer(channel.handlers(), channel.hello, lambda session: None, self.loops, self.admission)
        self.server.refused_versions = self.hub.refused_versions
        self.views = Views(self.hub, self.server.sessions, self.loops)
        self.views.timings = channel.timings
        self._trace(config.traces)
        self.views.security = self.security
        self.views.channel_counts = self.server.counts
        self.index = IndexServices(self.hub, self.server.sessions, self.loops, config.index)
        self.hub.metrics.registry.register(self.index)
        self.views.troubles.append(self.index.problems)
        self._stops.append(self.index.close)
        grpc_server, self.endpoints.grpc = serve(
            self.hub, self.views, self.roll, self.index, config.grpc, self.security
        )
        self._stops.append(lambda: grpc_server.stop(STOP_S / 2).wait(STOP_S))
        self._stops.append(lambda: self.hub.close_sessions("the master stops"))
        self.sampler = Sampler(self.hub, self.views, self.roll.masters, self._refused)
        self.status = StatusDocument(self.hub, self.views, self.sampler, self._refused)
        tenants = Tenants(self.hub, Content(self.hub))
        pages = routes(self.status, self.hub.events)
        self.web_application = application(self.hub, self.views, tenants, pages)
        web = serve_http(self.web_application, config.http, self.security)
        self._stops.append(lambda: web.stop(STOP_S))
        self.endpoints.http = web.start().address
        self.hub.start(self.loops)
        self._stops.append(lambda: self.server.stop(STOP_S / 2))
        self.endpoints.channel = self.server.listen_tcp(config.listen)
        if store.shared:
            self._campaign(store)
        self.sampler.start(self.loops)

    def _refused(self) -> dict[str, int]:
        """Callers that were turned away, by door and reason."""
        counted = {f"channel: {reason}": self.server.counts[reason] for reason in REFUSALS}
        if self.security.gate is not None:
            counted |= {f"token: {reason}": count for reason, count in self.security.gate.refused().items()}
        return {what: count for what, count in counted.items() if count}

    def _campaign(self, store: StateStore) -> None:
        campaign = Campaign(self.hub, store, self._record)
        self.views.troubles.append(campaign.problems)
        campaign.start(self.loops)
        self._stops.append(campaign.resign)

    def _trace(self, options: TraceOptions) -> None:
        traces = open_traces(options.validated(), "kvstrata-master", self.hub.master_id)
        if traces is not None:
            self.views.traces = traces
            traces.start(self.loops)
            self._stops.append(traces.stop)

    def _record(self) -> LeaderRecord:
        """Where others reach this master."""
        own = self.endpoints
        channel, grpc, http = (announced(each, self._advertise) for each in (own.channel, own.grpc, own.http))
        return LeaderRecord(self.hub.master_id, 0, channel, grpc, http)

    def ready(self) -> dict[str, object]:
        """What the ready line says."""
        return {
            "event": "ready",
            "role": "master",
            "channel": self.endpoints.channel,
            "grpc": self.endpoints.grpc,
            "http": self.endpoints.http,
            "pid": os.getpid(),
            "cluster_id": self.hub.cluster_id,
            "leading": self.hub.standing().leading,
            **self.index.ready(),
        }

    def stop(self) -> None:
        """Stop everything, last started first; bounded in time, safe twice."""
        while self._stops:
            step = self._stops.pop()
            try:
                step()
            except Exception:
                log.error("a step of the stop failed", exc_info=True)

    def __enter__(self) -> Master:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def run(config: MasterConfig, on_ready: Callable[[dict[str, object]], None]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Must be called from the main thread."""
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    with Master(config) as master:
        on_ready(master.ready())
        while not asked.wait(1.0):
            pass
        log.info("master stops", cluster_id=master.hub.cluster_id)
    return 0
