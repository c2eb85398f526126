"""One storage node as an object: its memory, its state, what serves it, and the loops that keep it going.

:mod:`.daemon` runs one in a process of its own; tests also run several in one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import wire
from kvstrata.proto.errors import ConfigError
from kvstrata.proto.logs import get_logger
from kvstrata.storage.arena import Arena, dram_arena
from kvstrata.storage.checking.background import BOUND_S as SCRUB_BOUND_S
from kvstrata.storage.checking.background import PERIOD_S as SCRUB_S
from kvstrata.storage.checking.background import BackgroundScrub
from kvstrata.storage.checking.node_check import NodeChecks
from kvstrata.storage.checking.scrubber import Scrubber
from kvstrata.storage.config import StorageConfig, open_keys, open_store
from kvstrata.storage.copying.bandwidth import Pace
from kvstrata.storage.copying.copier import Copier
from kvstrata.storage.copying.farewell import Farewell
from kvstrata.storage.copying.offers import BOUND_S as OFFERS_BOUND_S
from kvstrata.storage.copying.offers import TURN_S as OFFERS_S
from kvstrata.storage.copying.offers import Drains
from kvstrata.storage.copying.source import CopySource
from kvstrata.storage.eviction.orders import LruOrder, Order
from kvstrata.storage.eviction.segmented_order import SegmentedOrder
from kvstrata.storage.eviction.setting import EvictionOrder
from kvstrata.storage.http import serve_http
from kvstrata.storage.identity import DataDirectory
from kvstrata.storage.masters.attach import MasterLink
from kvstrata.storage.masters.commands import TURN_BOUND_S, TURN_S, Commands, shares_told
from kvstrata.storage.masters.copy_orders import CopyOrders
from kvstrata.storage.masters.dialing import Dialing
from kvstrata.storage.masters.policies import PolicyFile
from kvstrata.storage.masters.sidecar import Sidecar
from kvstrata.storage.report import NodeReport
from kvstrata.storage.serving.channel import NodeChannel
from kvstrata.storage.serving.index_memory import shared_memory
from kvstrata.storage.serving.published import Published
from kvstrata.storage.serving.rail_opening import open_rails
from kvstrata.storage.serving.rails import NodeRails
from kvstrata.storage.slab import Slab
from kvstrata.storage.ssd.base import SsdStore
from kvstrata.storage.state import NodeState
from kvstrata.storage.tiers.eraser import Eraser
from kvstrata.storage.tiers.ssd_tier import SsdTier
from kvstrata.transfer.identity import SOFTWARE, advertised, boot_id
from kvstrata.transfer.loops import Loop, Loops
from kvstrata.transfer.security.admission import Admission
from kvstrata.transfer.security.minted import node_tickets
from kvstrata.transfer.security.opened import Security
from kvstrata.transfer.server import ChannelServer
from kvstrata.transfer.sessions import Session
from kvstrata.transfer.socket_folder import socket_home
from kvstrata.transfer.traces import open_traces

log = get_logger(__name__)

#: Deadlines are looked at this often: a lease may outlive its own by as much, never the other way round.
EXPIRE_S: Final = 0.05
#: And so often while there are none. Less than any lease or reservation lasts.
REST_S: Final = 0.25
#: A dead heartbeat process is started again within this.
TEND_S: Final = 0.5
#: sun_path holds 107 bytes; the rest is for what containers mount in front.
UNIX_PATH_BYTES_MAX: Final = 100
STOP_S: Final = 2.0
#: Memory of nodes that have stopped, and that transfers may still write to.
_KEPT: Final[list[tuple[NodeRails, Arena[Slab]]]] = []
ORDERS: Final[dict[EvictionOrder, Callable[[], Order]]] = {
    EvictionOrder.SEGMENTED: SegmentedOrder,
    EvictionOrder.LRU: LruOrder,
}


class StorageNode:
    """Construction takes the directory and the memory, :meth:`start` serves, :meth:`stop` gives all back.

    Raises :class:`ConfigError` for what the operator has to change.
    """

    def __init__(self, config: StorageConfig) -> None:
        self.config = config.validated()
        self.security = Security.opened(config.security, config.listen, (config.http,))
        key_file = self.security.key_file
        self.directory = DataDirectory(config.data, config.name)
        self.identity = self.directory.identity
        self.lock = threading.Lock()
        self.loops = Loops()
        self.tickets = node_tickets(key_file, self.identity.node_id) if key_file is not None else None
        self.admission = Admission(key_file, self.config.bounds)
        self.channel = ""
        self._private: Path | None = None
        self._ends: list[Callable[[], None]] = [self.directory.close]
        try:
            policies = PolicyFile(config.data)
            quotas, epochs = policies.restored()
            self.arena = dram_arena(config.dram_bytes, config.slab_bytes, hugepages=config.hugepages)
        except BaseException:
            self.directory.close()
            raise
        self.rails: NodeRails | None = None
        self._ends.append(self._give_back)
        try:
            keys = open_keys(config)
            store = open_store(config, self.identity.node_id, keys)
        except BaseException:
            self.stop()
            raise
        try:
            self.published = self._published()
        except BaseException:
            if store is not None:
                store.close()
            self.stop()
            raise
        self.state = NodeState(
            self.arena, quotas=quotas, ssd=store, order=ORDERS[config.eviction], published=self.published
        )
        for group, epoch in epochs.items():
            self.state.known.advance(group, epoch)
        try:
            agent = f"{self.identity.node_id}-{self.identity.incarnation:x}"
            self.rails, no_rails = open_rails(agent, config.rails, self.state, self.lock)
        except BaseException:
            if store is not None:
                store.close()
            self.stop()
            raise
        self.ssd = self._ssd_tier(store) if store is not None else None
        self.pace = Pace(config.copy_bandwidth)
        moves = self.ssd.moves if self.ssd is not None else None
        self.copier = Copier(self.state, self.lock, self.pace, moves, self._changed, tickets=self.tickets)
        self.drains = Drains(self.state, self.lock)
        self.commands = Commands(self.state, self.lock, policies, self._eraser(), keys)
        self.unix_path = self._unix_path()
        self.links: list[MasterLink] = []
        self.sidecar = Sidecar(self.identity, config.masters, config.security.ticket_keys) if config.masters else None
        if self.sidecar is not None:
            self._ends.append(self.sidecar.stop)
        self._watched: list[Callable[[], str]] = []
        self.report = NodeReport(
            self.identity, self.state, self.lock, self.loops, self.commands, self.links, self._clients, self._watched
        )
        self.report.rails, self.report.no_rails = self.rails, no_rails
        self.report.security = self.security

    def _published(self) -> Published | None:
        """The index that clients of this host read. Raises :class:`ConfigError`."""
        if not self.config.shared_index:
            return None
        try:
            published = Published(self.identity.incarnation, self.arena.bytes_total, shared_memory)
        except OSError as error:
            raise ConfigError(
                f"no memory for the shared index: {error.strerror}; start with --no-shared-index"
            ) from error
        self._ends.append(published.close)
        return published

    def _ssd_tier(self, store: SsdStore) -> SsdTier:
        self._ends.append(store.close)
        policy, daily_writes = self.config.ssd_policy, self.config.ssd_daily_writes
        return SsdTier(store, self.state, self.lock, self._changed, policy=policy, daily_writes=daily_writes)

    def _eraser(self) -> Eraser | None:
        if self.ssd is None or self.state.ssd is None:
            return None
        return Eraser(self.state.ssd, self.ssd.moves.quarantine.let_go)

    # ------------------------------------------------------------------ start

    def start(self) -> dict[str, Any]:
        """Serve; returns what a ready line says. On an error everything taken is given back."""
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> dict[str, Any]:
        web = serve_http(self.report, self.config.http)
        self._ends.append(web.stop)
        self.http = web.address
        movers = None
        if self.ssd is not None:
            self.ssd.recover()
            movers = self.ssd.movers
        source = CopySource(self.state, self.lock, self.pace, self.ssd.moves if self.ssd is not None else None)
        handlers = NodeChannel(
            self.state,
            self.lock,
            changed=self._changed,
            info=self.report.health,
            movers=movers,
            copies=source,
            rails=self.rails,
        )
        self.report.timings = handlers.timings
        checks = self._checks()
        served = {**handlers.handlers(), **checks.handlers()}
        self.server = ChannelServer(served, self._hello, handlers.session_ended, self.loops, self.admission)
        self.server.refused_versions = self.report.refused_versions
        self.report.channel_counts = self.server.counts
        self._ends.append(lambda: self.loops.stop(STOP_S))
        self._trace()
        if self.ssd is not None:
            self.ssd.start(self.loops)
            self._ends.append(self.ssd.stop)
        self._ends.append(lambda: self.server.stop(STOP_S))
        self._ends.append(checks.stop)
        self._ends.append(self.copier.stop)
        self.copier.start(self.loops)
        drains = self.loops.add(Loop("drain", OFFERS_S, self.drains.turn, bound_s=OFFERS_BOUND_S))
        self.drains.wake = drains.wake
        self._watched.append(self.drains.problem)
        deadlines = self.loops.add(Loop("deadlines", EXPIRE_S, self._expire))
        orders = self.loops.add(Loop("commands", TURN_S, self.commands.turn, bound_s=TURN_BOUND_S))

        def ordered() -> None:
            orders.wake()
            deadlines.wake()  # there may be more to give back than it knew of

        self.commands.wake = ordered
        self.channel = self.server.listen_tcp(self.config.listen)
        self.server.listen_unix(self.unix_path)
        self._watched.append(web.problem)
        web.start()
        self._join_masters()
        return self._ready()

    def _trace(self) -> None:
        traces = open_traces(self.config.traces, "kvstrata-node", self.identity.node_id)
        if traces is not None:
            self.report.traces = traces
            traces.start(self.loops)
            self._ends.append(traces.stop)

    def _checks(self) -> NodeChecks:
        """What answers NODE_CHECK; and, on SSD, the scrub that goes on by itself."""
        moves = self.ssd.moves if self.ssd is not None else None
        store = self.ssd.store if self.ssd is not None else None
        if moves is not None and self.config.scrub_rate:
            scrubber = Scrubber(self.lock, self._changed, store)
            scrub = BackgroundScrub(moves, scrubber, self.config.scrub_rate)
            self.loops.add(Loop("scrub", SCRUB_S, scrub.turn, bound_s=SCRUB_BOUND_S))
        return NodeChecks(
            self.state, self.lock, changed=self._changed, health=self.report.health, moves=moves, store=store
        )

    def _join_masters(self) -> None:
        """None of them needs to be there."""
        if self.sidecar is not None:
            self.sidecar.start()
            self._watched.append(self.sidecar.problem)
            self.loops.add(Loop("heartbeat", TEND_S, self.sidecar.tend))
        self._ends.append(self._leave_masters)
        copies = CopyOrders(self.state, self.lock, self.copier, self.drains, self._changed)
        dialing = Dialing(self.security.files, self.security.own_token)
        for master in self.config.masters:
            link = MasterLink(
                master,
                self.state,
                self.lock,
                self.commands,
                self._attach,
                self.report.node_status,
                self._acknowledged,
                copies,
                self.tickets,
                dialing,
            )
            self.links.append(link)
            self._watched.append(link.problem)
            link.start()

    def _ready(self) -> dict[str, Any]:
        return {
            "event": "ready",
            "role": "node",
            "node_id": self.identity.node_id,
            "incarnation": self.identity.incarnation,
            "channel": self.channel,
            "unix": str(self.unix_path),
            "http": self.http,
            "dram_bytes": self.arena.bytes_total,
            **(self.ssd.facts() if self.ssd is not None else {}),
            **({"ssd_encrypted": True} if self.config.ssd_key_file is not None else {}),
            "rails": self.rails.kind if self.rails is not None else "",
            "pid": os.getpid(),
        }

    def _unix_path(self) -> Path:
        path = (self.config.data / "node.sock").absolute()
        if len(os.fsencode(path)) <= UNIX_PATH_BYTES_MAX:
            return path
        home = socket_home(f"kvstrata-12345678/{path.name}", UNIX_PATH_BYTES_MAX)
        self._private = Path(tempfile.mkdtemp(prefix="kvstrata-", dir=home))
        return self._private / path.name

    # ------------------------------------------------------------------ at work

    def _hello(self, session: Session) -> pb.HelloOk:
        host = session.reached_at()
        return pb.HelloOk(
            software=SOFTWARE,
            role="node",
            node_id=self.identity.node_id,
            incarnation=self.identity.incarnation,
            boot_id=boot_id(),
            unix_path=str(self.unix_path),
            channel=advertised(self.channel, host),
            http=advertised(self.http, host),
            rails=self.rails.kind if self.rails is not None else "",
        )

    def _attach(self, host: str) -> control.Attach:
        with self.lock:
            fence = self.commands.fence
            leader_epoch, leader_id = fence.epoch, fence.leader_id
            shares = shares_told(self.state.quotas.shares())
            epochs = [
                control.NamespaceEpoch(group=group, epoch=epoch) for group, epoch in self.state.known.epochs.items()
            ]
            ssd_bytes = self.state.ssd.arena.bytes_total if self.state.ssd is not None else 0
        return control.Attach(
            node_id=self.identity.node_id,
            incarnation=self.identity.incarnation,
            channel=advertised(self.channel, host),
            unix_path=str(self.unix_path),
            http=advertised(self.http, host),
            host=socket.gethostname(),
            boot_id=boot_id(),
            dram_bytes=self.arena.bytes_total,
            ssd_bytes=ssd_bytes,
            shares=shares,
            epochs=epochs,
            software=SOFTWARE,
            protocol=wire.PROTOCOL,
            pid=os.getpid(),
            leader_epoch=leader_epoch,
            leader_id=leader_id,
        )

    def _expire(self) -> float | None:
        """Seconds to the next turn when nothing has a deadline before it: see :attr:`NodeState.at_rest`."""
        with self.lock:
            self.state.expire(time.monotonic())
            rests, untold = self.state.at_rest, self.state.deltas.gathers
            if self.published is not None:
                self.published.beat(time.monotonic_ns())
        if untold:  # what left without a writer who says so
            self._changed()
        if self.rails is not None:
            self.rails.reap()
            rests = rests and not self.rails.pulls.held()[0]
        if self.sidecar is not None:
            self.sidecar.progress()
        return REST_S if rests else None

    def _changed(self) -> None:
        """Something for the directory to hear of."""
        for link in self.links:
            link.wake()

    def _acknowledged(self) -> None:
        """Forget what every master has applied; those that have been away for long get a snapshot when they come."""
        now = time.monotonic()
        acked = [link.acked_seq for link in self.links if link.catches_up(now)]
        if acked:
            with self.lock:
                self.state.deltas.trim(min(acked))

    def _clients(self) -> int:
        return len(self.server.sessions) if self.channel else 0

    # ------------------------------------------------------------------ stop

    def drain(self, budget_s: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Have what is here saved elsewhere, for at most so long, serving meanwhile; True when that was done.

        ``hurry`` is asked now and then whether to give up.
        """
        return Farewell(self.state, self.lock, self.drains, self.links).wait(budget_s, hurry)

    def _leave_masters(self) -> None:
        with self.lock:
            self.state.leave()
        for link in self.links:
            link.leave("the node is stopping")
        for link in self.links:
            link.stop()

    def _give_back(self) -> None:
        """The memory, unless a transfer may still write to it: then it stays until the process ends."""
        if self.rails is not None and not self.rails.close():
            _KEPT.append((self.rails, self.arena))
            return
        self.arena.close()

    def stop(self) -> None:
        """Leave, stop serving, give memory and directory back: each within its bound. Safe twice."""
        while self._ends:
            end = self._ends.pop()
            try:
                end()
            except Exception:
                log.error("stopping: a step failed, going on", exc_info=True)
        if self._private is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._private)
