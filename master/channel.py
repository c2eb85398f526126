"""The master's side of the framed channel: what clients and heartbeats ask, frame by frame."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvstrata.master import messages as m
from kvstrata.master.client_calls import ClientCalls
from kvstrata.master.hub import Hub
from kvstrata.master.namespaces import Opened
from kvstrata.master.operations import NAMES, OPERATIONS
from kvstrata.master.placement import writer_tag
from kvstrata.master.replies import lookup_ok, place_ok
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Refused
from kvstrata.proto.keys import Namespace
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import expect
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.identity import SOFTWARE, advertised, boot_id
from kvstrata.transfer.observed import observed
from kvstrata.transfer.server import Handler, Reply
from kvstrata.transfer.sessions import ServerConnection, Session
from kvstrata.transfer.timings import Timings

log = get_logger(__name__)

#: Values of a status that this version knows.
_STATUSES: Final = frozenset(BlockStatus)
#: Of the nodes that a client cannot reach, so many are heeded.
AVOID_MAX: Final = 64
_NOBODY: Final[frozenset[m.Process]] = frozenset()


@dataclass(slots=True)
class Endpoints:
    """Where this master listens: real ports, hosts as bound."""

    channel: str = ""
    grpc: str = ""
    http: str = ""


class MasterChannel:
    """Handlers for :class:`kvstrata.transfer.server.ChannelServer`."""

    def __init__(self, hub: Hub, endpoints: Endpoints) -> None:
        self._hub = hub
        self._calls = ClientCalls(hub)
        #: Seconds of what clients ask, by operation.
        self.timings = Timings(NAMES)
        self._endpoints = endpoints
        self._boot_id = boot_id()
        # Namespace handles are this process's own: a client that sees another number opens them anew.
        self._incarnation = int.from_bytes(os.urandom(8), "little")

    def handlers(self) -> dict[int, Handler]:
        answered: dict[int, Callable[[ServerConnection, Frame], Reply | None]] = {
            Kind.PING: self._ping,
            Kind.OPEN_NAMESPACE: self._open_namespace,
            Kind.LOOKUP: self._lookup,
            Kind.PLACE: self._place,
            Kind.MISS_REPORT: self._miss_report,
            Kind.REMOVE: self._remove,
            Kind.HEARTBEAT: self._heartbeat,
        }
        return observed(answered, OPERATIONS, self.timings)

    def hello(self, session: Session) -> pb.HelloOk:
        """Who this is, and where else it listens: a wildcard host becomes the one the asker came by."""
        host = session.reached_at()
        leading, leader = self._hub.leads()
        return pb.HelloOk(
            software=SOFTWARE,
            role="master",
            cluster_id=self._hub.cluster_id,
            incarnation=self._incarnation,
            boot_id=self._boot_id,
            channel=advertised(self._endpoints.channel, host),
            grpc=advertised(self._endpoints.grpc, host),
            http=advertised(self._endpoints.http, host),
            leading=leading,
            leader=advertised(self._endpoints.channel, host) if leading else leader,
        )

    # ------------------------------------------------------------------ frames

    def _ping(self, connection: ServerConnection, frame: Frame) -> Reply:
        return Reply(Kind.PONG)

    def _open_namespace(self, connection: ServerConnection, frame: Frame) -> Reply:
        request = expect(pb.OpenNamespace, frame, Kind.OPEN_NAMESPACE)
        connection.rights.touch_group(request.spec.group)
        opened = self._calls.open_namespace(Namespace.from_spec(request.spec), connection.rights.accountable)
        answer = pb.NamespaceHandle(handle=opened.handle, epoch=opened.group.epoch)
        return Reply(Kind.NAMESPACE_HANDLE, answer.SerializeToString())

    def _lookup(self, connection: ServerConnection, frame: Frame) -> Reply:
        request = expect(pb.Lookup, frame, Kind.LOOKUP)
        opened = self._touched(connection, request)
        host = connection.owner.hello.boot_id
        avoid = _avoided(request)
        answer, nodes = self._calls.lookup(
            opened, request.salt, request.hashes, host, request.epoch, request.request, avoid
        )
        return Reply(Kind.LOOKUP_OK, lookup_ok(answer, opened.namespace.shard_count, nodes).SerializeToString())

    def _place(self, connection: ServerConnection, frame: Frame) -> Reply:
        request = expect(pb.Place, frame, Kind.PLACE)
        opened = self._touched(connection, request)
        host = request.boot_id or connection.owner.hello.boot_id
        avoid = _avoided(request)
        writer = writer_tag(connection.owner.key)
        placed, nodes = self._calls.place(
            opened, request.salt, request.hashes, host, request.epoch, avoid, writer, request.unasked
        )
        return Reply(Kind.PLACE_OK, place_ok(placed, nodes, standing=True).SerializeToString())

    def _touched(
        self, connection: ServerConnection, request: pb.Lookup | pb.Place | pb.MissReport | pb.Remove
    ) -> Opened:
        """The namespace that a request names. Raises :class:`ForbiddenSalt` before anything else is looked at."""
        opened = self._calls.opened(request.ns)
        connection.rights.touch(request.salt, opened.namespace.group)
        return opened

    def _miss_report(self, connection: ServerConnection, frame: Frame) -> None:
        report = expect(pb.MissReport, frame, Kind.MISS_REPORT)
        event = m.MissReport(
            report.ns,
            report.salt,
            report.hashes,
            report.node_id,
            report.incarnation,
            report.delta_seq,
            report.epoch,
            BlockStatus(report.status) if report.status in _STATUSES else BlockStatus.UNKNOWN,
            report.at_store,
        )
        try:
            self._touched(connection, report)
            self._calls.miss(event)
        except Refused as error:  # one-way: a failure frame would answer some other request
            log.warning("miss report refused", reason=str(error), client=connection.owner.hello.name)

    def _remove(self, connection: ServerConnection, frame: Frame) -> Reply:
        request = expect(pb.Remove, frame, Kind.REMOVE)
        opened = self._touched(connection, request)
        result = self._calls.remove(opened, request.salt, request.hashes, request.deadline_ms / 1000)
        answer = pb.RemoveOk(removed=result.removed, unreached=result.unreached)
        return Reply(Kind.REMOVE_OK, answer.SerializeToString())

    def _heartbeat(self, connection: ServerConnection, frame: Frame) -> Reply:
        beat = expect(pb.Heartbeat, frame, Kind.HEARTBEAT)
        event = m.Heartbeat(beat.node_id, beat.incarnation, beat.progress_age_ms / 1000, beat.dying)
        return Reply(Kind.HEARTBEAT_OK, pb.HeartbeatOk(known=self._hub.heartbeat(event)).SerializeToString())


def _avoided(request: pb.Lookup | pb.Place) -> frozenset[m.Process]:
    if not request.avoid:
        return _NOBODY
    return frozenset(islice(zip(request.avoid, request.avoid_incarnation, strict=False), AVOID_MAX))
