"""The admin client: asks a master over gRPC, and tells it what to do. The only module here that imports gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from kvstrata.client.masters import leader_in, parse_masters
from kvstrata.client.security.credentials import Credentials
from kvstrata.client.security.greeting import greet
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.control_pb2_grpc import MasterStub
from kvstrata.proto.errors import (
    Busy,
    Forbidden,
    InvalidArgument,
    KVError,
    NotLeader,
    Refused,
    Unauthenticated,
    Unavailable,
)
from kvstrata.transfer.identity import named_host
from kvstrata.transfer.security.grpc_security import open_channel

CALL_S: Final = 5.0
MESSAGE_BYTES_MAX: Final = 64 << 20
#: Calls that change nothing begin with one of these: what one master does not answer, another may.
_QUESTIONS: Final = ("Health", "List", "Explain", "Route")
#: Calls about the very master that is asked.
_OWN: Final = frozenset({"Health", "ListClients", "ListMasters", "Route"})
#: How the text of a :class:`NotLeader` begins, where nothing was changed.
_NOT_LEADER: Final = "this master does not lead"

R = TypeVar("R", bound=Message)


class _Link:
    """One master's gRPC, found by its channel address: the hello there names it."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self.hello = greet(address, "admin")
        if not self.hello.grpc:
            raise Unavailable(f"the master at {address} names no gRPC endpoint: start it with --grpc HOST:PORT")
        self._credentials = credentials
        self._channel = _channel(self.hello.grpc, credentials, named_host(address, self.hello.grpc))
        self._stub = MasterStub(self._channel)  # type: ignore[no-untyped-call]

    def call(self, kind: type[R], rpc: str, request: Message, timeout_s: float) -> R:
        """Raises what the master's refusal means; see :class:`AdminClient`, and :class:`NotLeader`."""
        started = time.monotonic()
        shown = tuple(self._credentials.bearer().items())
        try:
            answer = getattr(self._stub, rpc)(request, timeout=timeout_s, metadata=shown)
            assert isinstance(answer, kind)
            return answer
        except grpc.RpcError as error:
            raise self._meaning(error, time.monotonic() - started) from error

    def watch(self, query: control.IndexQuery, timeout_s: float | None) -> IndexStream:
        shown = tuple(self._credentials.bearer().items())
        return IndexStream(self._stub.WatchIndex(query, timeout=timeout_s, metadata=shown), self._meaning)

    def _meaning(self, error: grpc.RpcError, took_s: float) -> KVError:
        code = error.code() if isinstance(error, grpc.Call) else None
        text = error.details() if isinstance(error, grpc.Call) else str(error)
        if text and _NOT_LEADER in text:
            return NotLeader(text)
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"the master's gRPC at {self.hello.grpc} gave no answer in {took_s:.1f} s")
        if code == grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"cannot reach the master's gRPC at {self.hello.grpc}: {text}. {self._hint()}")
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(f"the master asks who calls: {text}. Give a token (--token-file) that it knows")
        if code == grpc.StatusCode.PERMISSION_DENIED:
            return Forbidden(f"the master refused: {text}")
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidArgument(text or "the master calls an argument invalid")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Busy(f"the master is busy: {text}")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return Refused(f"the master ({self.hello.software}) does not know this call: it is older than this client")
        return Refused(f"the master refused: {text}")

    def _hint(self) -> str:
        if self._credentials.ca is None:
            return "Is the port open? Where the pool uses TLS, give its authority (--ca)"
        return f"Is the port open, does it serve TLS, and is its certificate one of {self._credentials.ca}?"

    def close(self) -> None:
        self._channel.close()


class IndexStream:
    """Messages of one ``WatchIndex`` call, to be iterated once. Ends quietly at its time, or when cancelled."""

    def __init__(self, call: Any, meaning: Callable[[grpc.RpcError, float], KVError]) -> None:
        self._call = call
        self._meaning = meaning

    def __iter__(self) -> Iterator[control.IndexMessage]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            if self._call.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                raise self._meaning(error, 0.0) from error

    def cancel(self) -> None:
        """End it, from any thread."""
        self._call.cancel()


def _channel(endpoint: str, credentials: Credentials, named: str) -> grpc.Channel:
    """``named``: the host that the server's certificate has to name."""
    options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.enable_http_proxy", 0)]
    credentials.check_way(endpoint)
    return open_channel(endpoint, options, ca=credentials.ca, cert=credentials.cert, key=credentials.key, named=named)


class AdminClient:
    """The masters of a pool, by their channel addresses: ``"HOST:PORT"``, several with commas.

    What concerns one master (its health, its clients) is asked of the first that answers, all else of the leader.
    A question that it does not answer goes to the next one; a change goes to whoever leads, once.

    Every call ends within ``timeout_s`` a master that is asked (those that wait for nodes: ``wait_s`` later) and
    raises

    * :class:`Unavailable` with what to do, when no master can be reached, or none leads for now,
    * :class:`InvalidArgument` for values that cannot be (a negative limit, floors that do not fit),
    * :class:`Unauthenticated` and :class:`Forbidden` when the master wants a token, or one of another role,
    * :class:`Refused` otherwise.

    ``token`` and what follows it: as for :class:`~kvstrata.client.Client`. Over TLS a master is believed that shows a
    certificate for the host of its address here; a leader elsewhere is followed when one of these has named it.
    """

    def __init__(
        self,
        masters: str,
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        insecure: bool = False,
        timeout_s: float = CALL_S,
    ) -> None:
        self.timeout_s = timeout_s
        shown = Credentials.given(token, token_file, tls_ca, tls_cert, tls_key, insecure=insecure)
        self._credentials = shown.checked()
        self._addresses = parse_masters(masters)
        self._links: dict[str, _Link] = {}
        self._first = next(self._reachable())
        hello = self._first.hello
        self._leader = self._first.address if hello.leading else self._believed(hello.leader)
        self._others_asked = False  #: who leads; a change that is refused asks anew, a question does not

    @property
    def address(self) -> str:
        """The channel of the master that answered first."""
        return self._first.address

    @property
    def hello(self) -> pb.HelloOk:
        """What that master said of itself."""
        return self._first.hello

    # ------------------------------------------------------------------ the pool

    def health(self) -> control.HealthReport:
        return self._call(control.HealthReport, "Health", pb.Empty())

    def nodes(self) -> list[control.NodeRow]:
        listed = self._call(control.NodeList, "ListNodes", pb.Empty())
        return list(listed.nodes)

    def clients(self) -> list[control.ClientRow]:
        listed = self._call(control.ClientList, "ListClients", pb.Empty())
        return list(listed.clients)

    def masters(self) -> control.MasterList:
        """Every master that this one knows of, itself included, and who leads."""
        return self._call(control.MasterList, "ListMasters", pb.Empty())

    def namespaces(self) -> list[control.NamespaceRow]:
        """One row a shard."""
        listed = self._call(control.NamespaceList, "ListNamespaces", pb.Empty())
        return list(listed.namespaces)

    # ------------------------------------------------------------------ nodes that leave, and replicas

    def drain_node(self, node_id: str, *, budget_s: float = 0.0, cancel: bool = False) -> control.NodeRow:
        """Begin to empty a node, within ``budget_s`` (0: as long as it takes); ``cancel``: it stays after all.

        Returns its row at once: :meth:`nodes` shows how far the drain is.
        """
        asked = control.NodeDrain(node_id=node_id, budget_ms=min(int(budget_s * 1e3), (1 << 32) - 1), cancel=cancel)
        return self._call(control.NodeRow, "DrainNode", asked)

    def remove_node(self, node_id: str, *, force: bool = False) -> control.NodeRow:
        """Take a node off the roster. ``force``: although it is here."""
        return self._call(control.NodeRow, "RemoveNode", control.NodeRemove(node_id=node_id, force=force))

    def set_replicas(self, count: int, *, group: str = "", salt: str | None = None) -> control.ReplicasList:
        """So many replicas for a tenant (``salt``), a namespace group, or by default; 0 takes the number away."""
        return self._call(control.ReplicasList, "SetReplicas", control.Replicas(group=group, salt=salt, count=count))

    def list_replicas(self) -> control.ReplicasList:
        """The numbers that are set, the default, and the replicas that are missing and too many."""
        return self._call(control.ReplicasList, "ListReplicas", pb.Empty())

    # ------------------------------------------------------------------ tenants

    def list_tenants(self, salts: Sequence[str] = (), *, what_if: bool = False) -> control.TenantList:
        """Those named, or all that have a policy or use anything; the default and the cluster's bytes.

        ``what_if``: with hit rates predicted for other quotas.
        """
        return self._call(control.TenantList, "ListTenants", control.TenantQuery(salts=salts, what_if=what_if))

    def set_tenant(self, policy: control.TenantPolicy, *, dry_run: bool = False) -> control.TenantChanged:
        """Give one tenant its policy, whole: an absent limit is none. ``dry_run`` says what would be."""
        return self._call(control.TenantChanged, "SetTenant", control.TenantSet(policy=policy, dry_run=dry_run))

    def set_default(
        self, policy: control.TenantPolicy, *, deny: bool = False, dry_run: bool = False
    ) -> control.TenantChanged:
        """The policy of salts without one of their own (``policy.salt`` means nothing). ``deny``: they store
        nothing."""
        asked = control.TenantSet(policy=policy, is_default=True, deny=deny, dry_run=dry_run)
        return self._call(control.TenantChanged, "SetTenant", asked)

    def remove_tenant(
        self, salt: str, *, drop_blocks: bool = False, erase: bool = False, dry_run: bool = False, wait_s: float = 5.0
    ) -> control.TenantChanged:
        """Take a tenant's policy away: the default applies. ``drop_blocks``: its blocks go too, everywhere;
        ``erase``: and are overwritten on SSD."""
        asked = control.TenantRemove(salt=salt, drop_blocks=drop_blocks, erase=erase, dry_run=dry_run)
        return self._call(control.TenantChanged, "RemoveTenant", asked, wait_s if drop_blocks else 0.0)

    # ------------------------------------------------------------------ content

    def bump_epoch(self, group: str, *, wait_s: float = 5.0) -> control.Dropped:
        """The weights of ``group`` have changed: what was computed with older ones is a miss from the answer on.

        ``unreached`` in the answer: nodes that did not confirm within ``wait_s``; the master goes on telling them.
        """
        return self._call(control.Dropped, "BumpEpoch", control.GroupName(group=group, deadline_ms=_ms(wait_s)), wait_s)

    def drop(
        self,
        group: str = "",
        salt: str | None = None,
        *,
        erase: bool = False,
        dry_run: bool = False,
        wait_s: float = 5.0,
    ) -> control.Dropped:
        """Everything within a scope goes, durably. ``group`` "": every namespace; ``salt`` None: every tenant.

        ``erase``: nodes overwrite it on SSD before they confirm. ``unreached`` as for :meth:`bump_epoch`.
        """
        scope = control.Scope(
            group=group,
            salt=salt or "",
            any_salt=salt is None,
            erase=erase,
            dry_run=dry_run,
            deadline_ms=_ms(wait_s),
        )
        return self._call(control.Dropped, "DropBlocks", scope, wait_s)

    def list_blocks(
        self, group: str = "", salt: str | None = None, *, hash_prefix: bytes = b"", limit: int = 0
    ) -> control.BlockList:
        """Blocks within a scope, at most ``limit`` (0: the master's bound), and how many there are in all."""
        query = control.BlockQuery(
            group=group, salt=salt or "", any_salt=salt is None, hash_prefix=hash_prefix, limit=limit
        )
        return self._call(control.BlockList, "ListBlocks", query)

    def remove_blocks(self, spec: pb.NamespaceSpec, salt: str, hashes: bytes, *, wait_s: float = 5.0) -> pb.RemoveOk:
        """Take single blocks (``hashes`` packed) out of the pool for good."""
        asked = control.NamedRemove(spec=spec, salt=salt, hashes=hashes, deadline_ms=_ms(wait_s))
        return self._call(pb.RemoveOk, "RemoveBlocks", asked, wait_s)

    def explain(
        self, *, request: str = "", block_hash: bytes = b"", group: str = "", salt: str | None = None
    ) -> control.Explanation:
        """Why a request missed, or where a block is and was. ``group``, ``salt``: to narrow a hash down."""
        query = control.ExplainQuery(request=request, hash=block_hash, group=group)
        if salt is not None:
            query.salt = salt
        if not request or len(self._addresses) == 1:
            return self._call(control.Explanation, "Explain", query)
        unknown: InvalidArgument | None = None
        for link in self._reachable():  # a request is remembered where it was asked
            try:
                return link.call(control.Explanation, "Explain", query, self.timeout_s)
            except InvalidArgument as error:
                unknown = error
            except Unavailable as error:
                unknown = unknown or InvalidArgument(f"request {request!r} is not known; and {error}")
        assert unknown is not None
        raise unknown

    # ------------------------------------------------------------------ for routers

    def route(
        self,
        spec: pb.NamespaceSpec,
        salt: str,
        hashes: bytes,
        *,
        loads: Mapping[str, float] | None = None,
        engines: Sequence[str] = (),
    ) -> control.RouteAnswer:
        """Who has most of a chain of blocks (``hashes`` packed), engines and nodes, best first.

        ``loads``: how busy engines are, 0 to 1, as far as you know. ``engines``: rank these only.
        """
        query = control.RouteQuery(spec=spec, salt=salt, hashes=hashes, loads=dict(loads or {}), engines=engines)
        return self._call(control.RouteAnswer, "Route", query)

    def watch_index(
        self,
        *,
        groups: Sequence[str] = (),
        salts: Sequence[str] = (),
        epoch: int = 0,
        sequence: int = 0,
        timeout_s: float | None = 30.0,
    ) -> IndexStream:
        """The directory of the first master that answers, then its changes, for ``timeout_s``; None: until it is
        cancelled, by whoever sees that it has been silent for too long.

        ``epoch`` and ``sequence`` of the last message go on from there. See
        :class:`kvstrata.client.index_watch.IndexWatch`, which keeps a copy.
        """
        query = control.IndexQuery(groups=groups, salts=salts, epoch=epoch, sequence=sequence)
        return self._first.watch(query, timeout_s)

    # ------------------------------------------------------------------ calls

    def _call(self, kind: type[R], rpc: str, request: Message, wait_s: float = 0.0) -> R:
        timeout_s = self.timeout_s + wait_s
        try:
            return self._ask_leader(kind, rpc, request, timeout_s)
        except Unavailable as error:
            if not rpc.startswith(_QUESTIONS):
                raise
            problem = error
        for link in self._reachable(problem):
            try:
                return link.call(kind, rpc, request, timeout_s)
            except (Unavailable, NotLeader) as error:
                if str(error) not in str(problem):  # the first master is asked again
                    problem = Unavailable(f"{problem}; {error}")
        raise problem

    def _ask_leader(self, kind: type[R], rpc: str, request: Message, timeout_s: float) -> R:
        """Ask the leader, or the first master where it does not matter or none is known; follow once who is named."""
        if rpc not in _OWN and not self._leader and not self._others_asked:
            self._others_asked = True
            self._leader = self._known_to_others(self._first)  # one that has just started knows no nodes either
        try:
            link = self._first if rpc in _OWN or not self._leader else self._link(self._leader)
        except Unavailable:
            link = self._first  # the leader of the last hello is gone: that master knows who is next
        try:
            return link.call(kind, rpc, request, timeout_s)
        except NotLeader as error:
            self._leader = leader_in(str(error)) or self._known_to_others(link)
            if not self._leader or not str(error).startswith(_NOT_LEADER):
                raise Unavailable(f"{error}: try again in a few seconds") from error
        try:
            return self._link(self._leader).call(kind, rpc, request, timeout_s)
        except (Unavailable, NotLeader) as error:
            raise Unavailable(f"the leader, {self._leader}, does not answer as one: {error}. Try again") from error

    def _known_to_others(self, asked: _Link) -> str:
        """Who leads, where a master that is cut off does not know it: by what the others say of themselves first."""
        named = ""
        for address in self._addresses:
            if address == asked.address:
                continue
            try:
                hello = greet(address, "admin")
            except Unavailable:
                continue
            if hello.leading:
                return address
            named = named or self._believed(hello.leader)
        return named

    def _believed(self, leader: str) -> str:
        """A leader that a hello names, "" for one that is not to be shown a token on such word alone."""
        return leader if self._credentials.ca is None or leader in self._addresses else ""

    def _link(self, address: str) -> _Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(address, self._credentials)
        return link

    def _reachable(self, problem: KVError | None = None) -> Iterator[_Link]:
        """Every configured master that says hello; raises :class:`Unavailable` after the last if there was none."""
        reasons = [str(problem)] if problem else []
        found = False
        for address in self._addresses:
            try:
                link = self._link(address)
            except Unavailable as error:
                reasons.append(str(error))
                continue
            found = True
            yield link
        if not found:
            raise Unavailable("; ".join(reasons))

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1e3))
