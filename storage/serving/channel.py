"""The node's side of the framed channel: handlers by frame kind, over one state and its lock.

Handlers hold the lock for bookkeeping only, never while bytes move. Bytes are received straight into slots,
pulled straight into slots, and sent straight out of them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import InvalidArgument, Refused
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import HintKind
from kvstrata.proto.wire import Kind
from kvstrata.storage.copying.source import CopySource
from kvstrata.storage.serving.messages import parsed, reply, u32s
from kvstrata.storage.serving.operations import NAMES, OPERATIONS
from kvstrata.storage.serving.permission import check_touch
from kvstrata.storage.serving.rail_region import RailRegion
from kvstrata.storage.serving.rails import NodeRails
from kvstrata.storage.serving.reads import ReadHandlers
from kvstrata.storage.serving.regions import RegionAsk, RegionBook
from kvstrata.storage.serving.writes import WriteHandlers
from kvstrata.storage.slab import GENERATION_BYTES
from kvstrata.storage.state import NodeState
from kvstrata.storage.tiers.movers import Movers
from kvstrata.transfer.frames import FDS_MAX, Frame
from kvstrata.transfer.memory import Memory
from kvstrata.transfer.observed import observed
from kvstrata.transfer.server import Handler, Reply
from kvstrata.transfer.sessions import ServerConnection, Session
from kvstrata.transfer.timings import Timings


class NodeChannel:
    """All handlers of a node. ``lock`` is the state's; ``changed`` is called after changes that the
    directory should hear of; ``info`` gives what NODE_INFO answers; ``movers`` work the SSD, if there is one;
    ``copies`` serve other nodes; ``rails`` are for one-sided transfers, None where there are none."""

    def __init__(
        self,
        state: NodeState,
        lock: threading.Lock,
        *,
        changed: Callable[[], None] = lambda: None,
        info: Callable[[], Mapping[str, Any]] = dict,
        clock: Callable[[], float] = time.monotonic,
        movers: Movers | None = None,
        copies: CopySource | None = None,
        rails: NodeRails | None = None,
    ) -> None:
        self.regions = RegionBook()
        #: Seconds of reads and writes, by operation.
        self.timings = Timings(NAMES)
        self._rails = rails
        self._state = state
        self._lock = lock
        self._info = info
        self._clock = clock
        self._reads = ReadHandlers(state, lock, clock, movers, copies, rails)
        self._writes = WriteHandlers(state, lock, self.regions, changed, clock, movers, rails)

    def handlers(self) -> dict[int, Handler]:
        """By frame kind, for the channel server."""
        answered: dict[int, Handler] = {
            **self._reads.handlers(),
            **self._writes.handlers(),
            Kind.PING: lambda connection, frame: Reply(Kind.PONG),
            Kind.OPEN_NAMESPACE: self._open_namespace,
            Kind.MAP_SLABS: self._map_slabs,
            Kind.MAP_INDEX: self._map_index,
            Kind.REGISTER_REGION: self._register_region,
            Kind.UNREGISTER_REGION: self._unregister_region,
            Kind.OPEN_RAILS: self._open_rails,
            Kind.TEST_RAIL: self._test_rail,
            Kind.NODE_INFO: self._node_info,
            Kind.HINT: self._hint,
        }
        return observed(answered, OPERATIONS, self.timings)

    def session_ended(self, session: Session) -> None:
        """The server's word that a client is gone."""
        if self._rails is not None:
            self._rails.session_ended(session.key)
        self.regions.session_ended(session.key)
        with self._lock:
            self._state.session_ended(session.key, self._clock())

    def _open_namespace(self, connection: ServerConnection, frame: Frame) -> Reply:
        namespace = Namespace.from_spec(parsed(pb.OpenNamespace, frame).spec)
        connection.rights.touch_group(namespace.group)
        with self._lock:
            handle, epoch = self._state.open_namespace(namespace, connection.rights.accountable)
        return reply(Kind.NAMESPACE_HANDLE, pb.NamespaceHandle(handle=handle, epoch=epoch))

    def _node_info(self, connection: ServerConnection, frame: Frame) -> Reply:
        return reply(Kind.NODE_INFO_OK, pb.NodeInfoOk(json=json.dumps(dict(self._info()))))

    def _hint(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Hint, frame)
        check_touch(connection, self._state, message)
        try:
            kind = HintKind(message.kind)
        except ValueError as error:
            known = ", ".join(f"{each.value} {each.name.lower()}" for each in HintKind)
            raise InvalidArgument(f"hint kind {message.kind} is unknown: {known}") from error
        with self._lock:
            blocks = self._state.hint(
                message.ns, message.salt, message.hashes, message.epoch, kind, message.ttl_ms / 1e3, self._clock()
            )
        return reply(Kind.HINT_OK, pb.HintOk(blocks=blocks))

    def _map_slabs(self, connection: ServerConnection, frame: Frame) -> Reply:
        if not connection.local:
            raise InvalidArgument("descriptors travel over the node's unix socket only")
        wanted = u32s(parsed(pb.MapSlabs, frame).slabs)
        slabs = self._state.arena.slabs
        if len(wanted) > FDS_MAX or any(index >= len(slabs) for index in wanted):
            raise InvalidArgument(f"at most {FDS_MAX} slabs a call, each below {len(slabs)}")
        # A slab may be cut anew while it is mapped: the table is announced as long as it can ever get.
        answer = pb.MapSlabsOk(
            slabs=wanted.tobytes(),
            length=array("Q", [slabs[index].nbytes for index in wanted]).tobytes(),
            slots=array("I", [slabs[index].nbytes // GENERATION_BYTES for index in wanted]).tobytes(),
        )
        fds = [slabs[index].share_fd for index in wanted]
        return Reply(Kind.MAP_SLABS_OK, answer.SerializeToString(), fds=fds)

    def _map_index(self, connection: ServerConnection, frame: Frame) -> Reply:
        if not connection.local:
            raise InvalidArgument("descriptors travel over the node's unix socket only")
        first = parsed(pb.MapIndex, frame).first
        if self._state.published is None:
            raise Refused("this node shares no index (--no-shared-index)")
        connection.rights.touch_all(salts=True, groups=True)  # whoever has it can read all of it
        with self._lock:
            memories = self._state.published.memories[first:]
        answer = pb.MapIndexOk(length=array("Q", [memory.nbytes for memory in memories]).tobytes())
        fds = [memory.share_fd for memory in memories]
        return Reply(Kind.MAP_INDEX_OK, answer.SerializeToString(), fds=fds)

    def _register_region(self, connection: ServerConnection, frame: Frame) -> Reply:
        fds = connection.stream.take_fds()
        try:
            message = parsed(pb.RegisterRegion, frame)
            session = connection.owner
            pid, pidfd = (session.pid, session.pidfd) if connection.local else (0, -1)
            ask = RegionAsk(message.region, message.address, message.length, pid, pidfd)
            memory = Memory.parse(message.memory)
            if message.agent:
                start = self._with_rails().region(session, message.agent)
                method = self.regions.register_rail(session.key, ask, start, memory)
            elif not memory.on_host:
                raise InvalidArgument(f"memory on {message.memory} is reached over rails only: open them first")
            else:
                method = self.regions.register(session.key, ask, fds[0] if fds and message.memfd else -1)
            if session.over:  # it ended while this ran: nobody else will forget the region
                self.regions.session_ended(session.key)
        finally:
            for fd in fds:
                os.close(fd)
        return reply(Kind.REGISTER_REGION_OK, pb.RegisterRegionOk(method=method))

    def _unregister_region(self, connection: ServerConnection, frame: Frame) -> Reply:
        self.regions.unregister(connection.owner.key, parsed(pb.UnregisterRegion, frame).region)
        return reply(Kind.OK, pb.Empty())

    # ------------------------------------------------------------------ rails

    def _with_rails(self) -> NodeRails:
        if self._rails is None:
            raise Refused("this node has no rails for one-sided transfers: its health says why")
        return self._rails

    def _open_rails(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.OpenRails, frame)
        answer = self._with_rails().open(connection.owner, message, self.regions.close_rails)
        return reply(Kind.OPEN_RAILS_OK, answer)

    def _test_rail(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.TestRail, frame)
        rails = self._with_rails()
        region = self.regions.find(connection.owner.key, message.region)
        if not isinstance(region, RailRegion):
            raise InvalidArgument(f"region {message.region} is not read over rails")
        return reply(Kind.TEST_RAIL_OK, pb.TestRailOk(problem=rails.test(region, message.seed)))
