"""The admin client: asks a master over gRPC, and tells it what to do. The only module here that imports gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.control_pb2_grpc import MasterStub
from kvstrata.proto.errors import Busy, InvalidArgument, KVError, Refused, Unavailable
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import Identity

CALL_S: Final = 5.0
MESSAGE_BYTES_MAX: Final = 64 << 20

R = TypeVar("R", bound=Message)


class AdminClient:
    """One master, found by its channel address: the hello there names its gRPC endpoint.

    Every call ends within ``timeout_s`` (those that wait for nodes: ``wait_s`` later) and raises

    * :class:`Unavailable` with what to do, when the master cannot be reached,
    * :class:`InvalidArgument` for values that cannot be (a negative limit, floors that do not fit),
    * :class:`Refused` otherwise.
    """

    def __init__(self, master: str, *, timeout_s: float = CALL_S) -> None:
        self.address = master
        self.timeout_s = timeout_s
        self.hello = self._greet(master)
        options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.insecure_channel(self.hello.grpc, options)
        self._stub = MasterStub(self._channel)  # type: ignore[no-untyped-call]

    @staticmethod
    def _greet(master: str) -> pb.HelloOk:
        try:
            connection = Connection.open(master, Identity.new(role="admin"), connect_s=1.0, silence_s=1.0)
        except Unavailable as error:
            raise Unavailable(f"no master at {master}: {error}. Is it running, and is this its channel?") from error
        connection.close()
        hello = connection.hello
        if hello.role != "master":
            raise InvalidArgument(f"{master} is a {hello.role or 'stranger'}, not a master: give a master's channel")
        if not hello.grpc:
            raise Unavailable(f"the master at {master} names no gRPC endpoint: start it with --grpc HOST:PORT")
        return hello

    # ------------------------------------------------------------------ the pool

    def health(self) -> control.HealthReport:
        return self._call(control.HealthReport, self._stub.Health, pb.Empty())

    def nodes(self) -> list[control.NodeRow]:
        listed = self._call(control.NodeList, self._stub.ListNodes, pb.Empty())
        return list(listed.nodes)

    def clients(self) -> list[control.ClientRow]:
        listed = self._call(control.ClientList, self._stub.ListClients, pb.Empty())
        return list(listed.clients)

    def masters(self) -> control.MasterList:
        """Every master that this one knows of, itself included, and who leads."""
        return self._call(control.MasterList, self._stub.ListMasters, pb.Empty())

    def namespaces(self) -> list[control.NamespaceRow]:
        """One row a shard."""
        listed = self._call(control.NamespaceList, self._stub.ListNamespaces, pb.Empty())
        return list(listed.namespaces)

    # ------------------------------------------------------------------ nodes that leave, and replicas

    def drain_node(self, node_id: str, *, budget_s: float = 0.0, cancel: bool = False) -> control.NodeRow:
        """Begin to empty a node, within ``budget_s`` (0: as long as it takes); ``cancel``: it stays after all.

        Returns its row at once: :meth:`nodes` shows how far the drain is.
        """
        asked = control.NodeDrain(node_id=node_id, budget_ms=min(int(budget_s * 1e3), (1 << 32) - 1), cancel=cancel)
        return self._call(control.NodeRow, self._stub.DrainNode, asked)

    def remove_node(self, node_id: str, *, force: bool = False) -> control.NodeRow:
        """Take a node off the roster. ``force``: although it is here."""
        return self._call(control.NodeRow, self._stub.RemoveNode, control.NodeRemove(node_id=node_id, force=force))

    def set_replicas(self, count: int, *, group: str = "", salt: str | None = None) -> control.ReplicasList:
        """So many replicas for a tenant (``salt``), a namespace group, or by default; 0 takes the number away."""
        return self._call(
            control.ReplicasList, self._stub.SetReplicas, control.Replicas(group=group, salt=salt, count=count)
        )

    def list_replicas(self) -> control.ReplicasList:
        """The numbers that are set, the default, and the replicas that are missing and too many."""
        return self._call(control.ReplicasList, self._stub.ListReplicas, pb.Empty())

    # ------------------------------------------------------------------ tenants

    def list_tenants(self, salts: Sequence[str] = (), *, what_if: bool = False) -> control.TenantList:
        """Those named, or all that have a policy or use anything; the default and the cluster's bytes.

        ``what_if``: with hit rates predicted for other quotas.
        """
        return self._call(control.TenantList, self._stub.ListTenants, control.TenantQuery(salts=salts, what_if=what_if))

    def set_tenant(self, policy: control.TenantPolicy, *, dry_run: bool = False) -> control.TenantChanged:
        """Give one tenant its policy, whole: an absent limit is none. ``dry_run`` says what would be."""
        return self._call(
            control.TenantChanged, self._stub.SetTenant, control.TenantSet(policy=policy, dry_run=dry_run)
        )

    def set_default(
        self, policy: control.TenantPolicy, *, deny: bool = False, dry_run: bool = False
    ) -> control.TenantChanged:
        """The policy of salts without one of their own (``policy.salt`` means nothing). ``deny``: they store
        nothing."""
        asked = control.TenantSet(policy=policy, is_default=True, deny=deny, dry_run=dry_run)
        return self._call(control.TenantChanged, self._stub.SetTenant, asked)

    def remove_tenant(
        self, salt: str, *, drop_blocks: bool = False, erase: bool = False, dry_run: bool = False, wait_s: float = 5.0
    ) -> control.TenantChanged:
        """Take a tenant's policy away: the default applies. ``drop_blocks``: its blocks go too, everywhere;
        ``erase``: and are overwritten on SSD."""
        asked = control.TenantRemove(salt=salt, drop_blocks=drop_blocks, erase=erase, dry_run=dry_run)
        return self._call(control.TenantChanged, self._stub.RemoveTenant, asked, wait_s if drop_blocks else 0.0)

    # ------------------------------------------------------------------ content

    def bump_epoch(self, group: str, *, wait_s: float = 5.0) -> control.Dropped:
        """The weights of ``group`` have changed: what was computed with older ones is a miss from the answer on.

        ``unreached`` in the answer: nodes that did not confirm within ``wait_s``; the master goes on telling them.
        """
        return self._call(
            control.Dropped, self._stub.BumpEpoch, control.GroupName(group=group, deadline_ms=_ms(wait_s)), wait_s
        )

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
        return self._call(control.Dropped, self._stub.DropBlocks, scope, wait_s)

    def list_blocks(
        self, group: str = "", salt: str | None = None, *, hash_prefix: bytes = b"", limit: int = 0
    ) -> control.BlockList:
        """Blocks within a scope, at most ``limit`` (0: the master's bound), and how many there are in all."""
        query = control.BlockQuery(
            group=group, salt=salt or "", any_salt=salt is None, hash_prefix=hash_prefix, limit=limit
        )
        return self._call(control.BlockList, self._stub.ListBlocks, query)

    def remove_blocks(self, spec: pb.NamespaceSpec, salt: str, hashes: bytes, *, wait_s: float = 5.0) -> pb.RemoveOk:
        """Take single blocks (``hashes`` packed) out of the pool for good."""
        asked = control.NamedRemove(spec=spec, salt=salt, hashes=hashes, deadline_ms=_ms(wait_s))
        return self._call(pb.RemoveOk, self._stub.RemoveBlocks, asked, wait_s)

    def explain(
        self, *, request: str = "", block_hash: bytes = b"", group: str = "", salt: str | None = None
    ) -> control.Explanation:
        """Why a request missed, or where a block is and was. ``group``, ``salt``: to narrow a hash down."""
        query = control.ExplainQuery(request=request, hash=block_hash, group=group)
        if salt is not None:
            query.salt = salt
        return self._call(control.Explanation, self._stub.Explain, query)

    # ------------------------------------------------------------------ calls

    def _call(self, kind: type[R], method: Callable[..., object], request: Message, wait_s: float = 0.0) -> R:
        started = time.monotonic()
        try:
            answer = method(request, timeout=self.timeout_s + wait_s)
            assert isinstance(answer, kind)
            return answer
        except grpc.RpcError as error:
            raise self._meaning(error, time.monotonic() - started) from error

    def _meaning(self, error: grpc.RpcError, took_s: float) -> KVError:
        code = error.code() if isinstance(error, grpc.Call) else None
        text = error.details() if isinstance(error, grpc.Call) else str(error)
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"the master's gRPC at {self.hello.grpc} gave no answer in {took_s:.1f} s")
        if code == grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"cannot reach the master's gRPC at {self.hello.grpc}: {text}. Is the port open?")
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidArgument(text or "the master calls an argument invalid")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Busy(f"the master is busy: {text}")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return Refused(f"the master ({self.hello.software}) does not know this call: it is older than this client")
        return Refused(f"the master refused: {text}")

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1e3))
