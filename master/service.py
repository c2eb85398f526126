"""gRPC: node sync streams, calls by whole namespace, and listings for people."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, Final, NoReturn, TypeVar

import grpc

from kvstrata.master import messages as m
from kvstrata.master.access import RPCS
from kvstrata.master.client_calls import ClientCalls
from kvstrata.master.content.calls import Content
from kvstrata.master.converters import attach_of, events_of, message_of, stamped
from kvstrata.master.hub import Hub
from kvstrata.master.index.services import IndexServices
from kvstrata.master.leadership.roll import Roll
from kvstrata.master.outbox import Outbox
from kvstrata.master.replication.calls import Replicating
from kvstrata.master.replies import lookup_ok, place_ok
from kvstrata.master.tenants.answers import Tenants
from kvstrata.master.views import Views
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import control_pb2_grpc
from kvstrata.proto.errors import (
    Busy,
    ConfigError,
    InvalidArgument,
    KVError,
    Refused,
    Retryable,
    Unauthenticated,
    VersionMismatch,
)
from kvstrata.proto.keys import Namespace
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.security.access import CALLER
from kvstrata.transfer.security.grpc_security import Guard, server_credentials, standing
from kvstrata.transfer.security.opened import OPEN, Security

log = get_logger(__name__)

MESSAGE_BYTES_MAX: Final = 16 << 20
#: A sync stream holds a thread for its life, so there are as many as there may be nodes, and some.
THREADS_MAX: Final = 1024
#: A new stream must say who it is within this.
ATTACH_S: Final = 10.0
#: An idle stream looks up this often whether it is over.
IDLE_S: Final = 1.0

_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)

#: A snapshot's reader stands aside this long after each part: the lock goes to whoever asks next, and a
#: thread that never pauses would always be first.
BREATH_S: Final = 0.001

T = TypeVar("T")


class MasterService(control_pb2_grpc.MasterServicer):
    """The servicer. Errors of ours become status codes with their text."""

    def __init__(self, hub: Hub, views: Views, roll: Roll, index: IndexServices) -> None:
        self._roll = roll
        self._index = index
        self._hub = hub
        self._views = views
        self._calls = ClientCalls(hub)
        self._content = Content(hub)
        self._tenants = Tenants(hub, self._content)
        self._replicating = Replicating(hub)

    # ------------------------------------------------------------------ sync

    def Sync(
        self, request_iterator: Iterator[control.NodeMessage], context: grpc.ServicerContext
    ) -> Iterator[control.MasterMessage]:
        """One node's stream. A thread of its own reads; this one writes."""
        stream = _SyncStream(self._hub, request_iterator, context)
        yield from stream.serve()

    # ------------------------------------------------------------------ named calls

    def LookupBlocks(self, request: control.NamedLookup, context: grpc.ServicerContext) -> pb.LookupOk:
        def call() -> pb.LookupOk:
            opened = self._calls.open_namespace(Namespace.from_spec(request.spec), CALLER.get().accountable)
            answer, nodes = self._calls.lookup(opened, request.salt, request.hashes, "")
            return lookup_ok(answer, opened.namespace.shard_count, nodes)

        return _answered(context, call)

    def PlaceBlocks(self, request: control.NamedPlace, context: grpc.ServicerContext) -> pb.PlaceOk:
        def call() -> pb.PlaceOk:
            opened = self._calls.open_namespace(Namespace.from_spec(request.spec), CALLER.get().accountable)
            return place_ok(*self._calls.place(opened, request.salt, request.hashes, request.boot_id))

        return _answered(context, call)

    def RemoveBlocks(self, request: control.NamedRemove, context: grpc.ServicerContext) -> pb.RemoveOk:
        def call() -> pb.RemoveOk:
            opened = self._calls.open_namespace(Namespace.from_spec(request.spec), CALLER.get().accountable)
            result = self._calls.remove(opened, request.salt, request.hashes, request.deadline_ms / 1000)
            return pb.RemoveOk(removed=result.removed, unreached=result.unreached)

        return _answered(context, call)

    # ------------------------------------------------------------------ listings

    def ListNodes(self, request: pb.Empty, context: grpc.ServicerContext) -> control.NodeList:
        return _answered(context, self._views.nodes)

    def ListClients(self, request: pb.Empty, context: grpc.ServicerContext) -> control.ClientList:
        return _answered(context, self._views.clients)

    def ListMasters(self, request: pb.Empty, context: grpc.ServicerContext) -> control.MasterList:
        return _answered(context, self._roll.masters)

    def ListNamespaces(self, request: pb.Empty, context: grpc.ServicerContext) -> control.NamespaceList:
        return _answered(context, self._views.namespaces)

    # ------------------------------------------------------------------ tenants

    def ListTenants(self, request: control.TenantQuery, context: grpc.ServicerContext) -> control.TenantList:
        return _answered(context, lambda: self._tenants.list(request))

    def SetTenant(self, request: control.TenantSet, context: grpc.ServicerContext) -> control.TenantChanged:
        return _answered(context, lambda: self._tenants.set(request))

    def RemoveTenant(self, request: control.TenantRemove, context: grpc.ServicerContext) -> control.TenantChanged:
        return _answered(context, lambda: self._tenants.remove(request))

    # ------------------------------------------------------------------ content

    def BumpEpoch(self, request: control.GroupName, context: grpc.ServicerContext) -> control.Dropped:
        return _answered(context, lambda: self._content.bump(request))

    def DropBlocks(self, request: control.Scope, context: grpc.ServicerContext) -> control.Dropped:
        return _answered(context, lambda: self._content.drop(request))

    def ListBlocks(self, request: control.BlockQuery, context: grpc.ServicerContext) -> control.BlockList:
        return _answered(context, lambda: self._content.blocks(request))

    def Explain(self, request: control.ExplainQuery, context: grpc.ServicerContext) -> control.Explanation:
        return _answered(context, lambda: self._content.explain(request))

    # ------------------------------------------------------------------ nodes that leave, and replicas

    def DrainNode(self, request: control.NodeDrain, context: grpc.ServicerContext) -> control.NodeRow:
        return _answered(context, lambda: self._replicating.drain(request))

    def RemoveNode(self, request: control.NodeRemove, context: grpc.ServicerContext) -> control.NodeRow:
        return _answered(context, lambda: self._replicating.remove(request))

    def SetReplicas(self, request: control.Replicas, context: grpc.ServicerContext) -> control.ReplicasList:
        return _answered(context, lambda: self._replicating.set(request))

    def ListReplicas(self, request: pb.Empty, context: grpc.ServicerContext) -> control.ReplicasList:
        return _answered(context, self._replicating.list)

    # ------------------------------------------------------------------ for routers

    def WatchIndex(self, request: control.IndexQuery, context: grpc.ServicerContext) -> Iterator[control.IndexMessage]:
        stand = standing()

        def active() -> bool:
            stand()
            return context.is_active()

        try:
            yield from self._index.watchers.watch(request, CALLER.get(), active)
        except KVError as error:
            _abort(context, error)

    def Route(self, request: control.RouteQuery, context: grpc.ServicerContext) -> control.RouteAnswer:
        return _answered(context, lambda: self._index.routing.route(request))

    # ------------------------------------------------------------------ health

    def Health(self, request: pb.Empty, context: grpc.ServicerContext) -> control.HealthReport:
        return _answered(context, self._views.health)


class _SyncStream:
    """Both directions of one node's stream, for as long as its session lasts."""

    def __init__(self, hub: Hub, requests: Iterator[control.NodeMessage], context: grpc.ServicerContext) -> None:
        self._hub = hub
        self._requests = requests
        self._context = context
        self._failure: KVError | None = None
        self._stand = standing()

    def serve(self) -> Iterator[control.MasterMessage]:
        """Attach, then pass commands on until the session is over."""
        try:
            session, outbox = self._hub.attach(self._first())
        except KVError as error:
            _abort(self._context, error)
        try:
            self._context.add_callback(lambda: outbox.close("the stream ended"))
            threading.Thread(target=self._read, args=(session, outbox), name="kvstrata-sync-read", daemon=True).start()
            while True:
                self._stand()
                said = outbox.get(IDLE_S)
                if said is not None:
                    yield stamped(message_of(said[0], self._hub.cluster_id), said[1])
                elif outbox.closed is not None:
                    self._end(outbox.closed)
                    return
        except Unauthenticated as error:
            log.warning("sync stream ended: its token is not good any more", reason=str(error))
            _abort(self._context, error)
        finally:
            self._hub.link_lost(session)

    def _end(self, reason: str) -> None:
        """Tell the node why, if it still listens."""
        if not self._context.is_active():
            return
        if self._failure is not None:
            _abort(self._context, self._failure)
        self._context.abort(grpc.StatusCode.ABORTED, reason)

    def _first(self) -> m.Attach:
        """The attach message, in time: a stream that says nothing holds a thread."""
        timer = threading.Timer(ATTACH_S, self._context.cancel)
        timer.daemon = True
        timer.start()
        try:
            message = next(self._requests, None)
        finally:
            timer.cancel()
        if message is None or message.WhichOneof("body") != "attach":
            raise InvalidArgument("a sync stream begins with an attach message")
        try:
            return attach_of(message.attach)
        except VersionMismatch:
            self._hub.refused_versions.add(message.attach.software)
            raise

    def _read(self, session: int, outbox: Outbox) -> None:
        reason = "the node closed its stream"
        try:
            for message in self._requests:
                for event in events_of(message, session):
                    self._hub.handle(event)
                    if isinstance(event, m.SnapshotPart):
                        time.sleep(BREATH_S)
        except KVError as error:
            self._failure, reason = error, str(error)
            log.warning("sync stream refused", reason=reason)
        except grpc.RpcError:
            reason = "the stream broke"
        except Exception as error:
            reason = f"internal error: {error}"
            log.error("sync stream failed", exc_info=True)
        finally:
            outbox.close(reason)


def serve(
    hub: Hub, views: Views, roll: Roll, index: IndexServices, address: str, security: Security = OPEN
) -> tuple[grpc.Server, str]:
    """Start a server on ``HOST:PORT``; returns it and its real address. Raises :class:`ConfigError`."""
    tls, gate = security.tls, security.gate
    pool = futures.ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="kvstrata-grpc")
    guards: list[grpc.ServerInterceptor[Any, Any]] = [Guard(gate, RPCS)] if gate is not None else []
    server = grpc.server(pool, interceptors=guards, options=_OPTIONS, maximum_concurrent_rpcs=THREADS_MAX)
    control_pb2_grpc.add_MasterServicer_to_server(MasterService(hub, views, roll, index), server)  # type: ignore[no-untyped-call]
    try:
        port = (
            server.add_insecure_port(address)
            if tls is None
            else server.add_secure_port(address, server_credentials(tls))
        )
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address} for gRPC ({error}): stop what listens there, or choose another port"
        ) from error
    server.start()
    return server, f"{address.rpartition(':')[0]}:{port}"


def _answered(context: grpc.ServicerContext, call: Callable[[], T]) -> T:
    try:
        return call()
    except KVError as error:
        _abort(context, error)


def _abort(context: grpc.ServicerContext, error: KVError) -> NoReturn:
    context.abort(_code_for(error), str(error))
    raise AssertionError("abort returned")


def _code_for(error: KVError) -> Any:
    if isinstance(error, InvalidArgument):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, Unauthenticated):
        return grpc.StatusCode.UNAUTHENTICATED
    if isinstance(error, Busy):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, Refused):
        return grpc.StatusCode.FAILED_PRECONDITION
    return grpc.StatusCode.UNAVAILABLE if isinstance(error, Retryable) else grpc.StatusCode.INTERNAL
