"""The link to the directory: one of several masters, the next one when it fails, and its answers as arrays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from google.protobuf.message import Message

from kvstrata.client.locations import Located, Placed, decode_lookup, decode_place, join_located, join_placed
from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.plan import pieces_of
from kvstrata.client.results import RemoveResult
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, FingerprintMismatch, InvalidArgument, KVError, ProtocolError, Unavailable
from kvstrata.proto.keys import HASHES_MAX, Namespace
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Endpoint
from kvstrata.transfer.channel import Channel
from kvstrata.transfer.connection import expect
from kvstrata.transfer.frames import Late
from kvstrata.transfer.identity import Identity, parse_address

log = get_logger(__name__)

MASTERS_MAX: Final = 16
#: A miss report waits for a free connection no longer than this.
REPORT_S: Final = 0.1

M = TypeVar("M", bound=Message)
R = TypeVar("R")


class Restarted(Unavailable):
    """Another process answers at the master's address than the one that gave our handles."""


def parse_masters(addresses: str) -> tuple[str, ...]:
    """``"h:p,h:p"`` as a tuple; raises :class:`InvalidArgument` naming the part that is wrong."""
    masters = tuple(part.strip() for part in addresses.split(",")) if isinstance(addresses, str) else ()
    if not masters or len(masters) > MASTERS_MAX:
        raise InvalidArgument(f"masters {addresses!r}: expected HOST:PORT, or up to {MASTERS_MAX} with commas between")
    for master in masters:
        parse_address(master)
    return masters


class _Process:
    """One master process: its channel and the namespace handles it gave. Never outlives that process.

    Handles mean nothing to another process, so a connection that reaches one ends this object
    (:class:`Restarted`); calls in other threads can then never carry an old handle to it.
    """

    def __init__(self, address: str, identity: Identity) -> None:
        self.channel = Channel([address], identity, accept=self._accept, self_probing=False)
        self.gone = False
        self._who: tuple[str, int] | None = None
        self._handles: dict[Namespace, int] = {}
        self._lock = threading.Lock()

    def handle(self, namespace: PoolNamespace, deadline: float) -> int:
        handle = self._handles.get(namespace)
        if handle is None or namespace.pin.epoch is None:
            message = pb.OpenNamespace(spec=namespace.to_spec()).SerializeToString()
            frame = self.channel.call(Kind.OPEN_NAMESPACE, message, deadline)
            reply = expect(pb.NamespaceHandle, frame, Kind.NAMESPACE_HANDLE)
            namespace.pin.learn(reply.epoch)
            handle = self._handles[namespace] = reply.handle
        return handle

    def forget(self, namespace: Namespace) -> bool:
        """Drop a handle; False when there was none."""
        return self._handles.pop(namespace, None) is not None

    def _accept(self, hello: pb.HelloOk) -> None:
        if hello.role != "master":
            raise InvalidArgument(
                f"{self.channel.addresses[0]} is a {hello.role or 'stranger'}, not a master: give a master's channel"
            )
        who = (hello.cluster_id, hello.incarnation)
        with self._lock:
            if self._who is None:
                self._who = who
            elif self._who != who:
                self.gone = True
                raise Restarted(f"the master at {self.channel.addresses[0]} was restarted")


class Master:
    """One master's address, and the process that answers there now."""

    def __init__(self, address: str, identity: Identity) -> None:
        self.address = address
        self._identity = identity
        self._lock = threading.Lock()
        self._process = _Process(address, identity)

    @property
    def process(self) -> _Process:
        process = self._process
        return self._renew(process) if process.gone else process

    def _renew(self, old: _Process) -> _Process:
        with self._lock:
            if self._process is old:
                self._process = _Process(self.address, self._identity)
                old.channel.close()
            return self._process

    def ask(self, namespace: PoolNamespace, deadline: float, kind: int, build: Callable[[int], Message]) -> bytes:
        """One request of one namespace; returns the answer's message for the caller to decode.

        A restarted master, or one that forgot the namespace, is asked once more with a new handle.
        """
        process = self.process
        try:
            return self._ask(process, namespace, deadline, kind, build)
        except Restarted:
            process = self.process
        except FingerprintMismatch:
            if not process.forget(namespace):
                raise
        return self._ask(process, namespace, deadline, kind, build)

    @staticmethod
    def _ask(
        process: _Process, namespace: PoolNamespace, deadline: float, kind: int, build: Callable[[int], Message]
    ) -> bytes:
        message = build(process.handle(namespace, deadline)).SerializeToString()
        frame = process.channel.call(kind, message, deadline)
        if frame.kind != kind + 1:  # every request kind of the master's is followed by its answer's
            raise ProtocolError(f"frame kind {frame.kind} answers {Kind(kind).name}")
        return frame.message

    def health(self) -> dict[str, object]:
        channel = self._process.channel
        hello = channel.hello
        return {
            "address": self.address,
            "reachable": hello is not None and channel.breaker.closed,
            "reason": channel.breaker.reason,
            "cluster_id": hello.cluster_id if hello else "",
            "software": hello.software if hello else "",
        }

    def upkeep(self) -> None:
        """Probe, when the breaker is open and a probe is due."""
        self.process.channel.probe()

    def unreachable(self) -> bool:
        return not self._process.channel.breaker.closed

    def close(self) -> None:
        self._process.channel.close()


class Directory:
    """Calls to whichever master answers. Thread-safe. Any master serves lookups: no leader is needed."""

    def __init__(self, addresses: Sequence[str], identity: Identity) -> None:
        self.masters = [Master(address, identity) for address in addresses]
        self._current = 0

    def greet(self, deadline: float) -> None:
        """Say hello to the first master that answers before ``deadline``, so that this client is known.

        Unreachable ones are left for later; raises the refusal of a master that answers.
        """
        for master in self.masters:
            with suppress(Unavailable, Busy):
                master.process.channel.call(Kind.PING, b"", deadline)
                return

    def open(self, namespace: PoolNamespace, deadline: float) -> None:
        """Learn the namespace's weight epoch, if a master can be asked; raises its refusal."""
        for master in self.masters:
            with suppress(Unavailable, Busy):
                master.process.handle(namespace, deadline)
                return

    def lookup(self, namespace: PoolNamespace, salt: str, packed: bytes, deadline: float, request: str = "") -> Located:
        """``request``: the engine's name of the request that asks, for the master's log of lookups.

        Raises :class:`Unavailable` (:class:`Late` when time ran out), or the refusal of the call."""

        def ask(piece: bytes) -> Located:
            def build(handle: int) -> Message:
                return pb.Lookup(ns=handle, salt=salt, hashes=piece, epoch=namespace.epoch, request=request)

            count = len(piece) // namespace.hash_bytes
            decode = _decoder(pb.LookupOk, lambda reply: decode_lookup(reply, count))
            return self._call(namespace, deadline, Kind.LOOKUP, build, decode)

        return join_located([ask(piece) for piece in _split(packed, namespace.hash_bytes)])

    def place(self, namespace: PoolNamespace, salt: str, packed: bytes, boot_id: str, deadline: float) -> Placed:
        """Where to store; raises like :meth:`lookup`."""

        def ask(piece: bytes) -> Placed:
            def build(handle: int) -> Message:
                return pb.Place(ns=handle, salt=salt, hashes=piece, boot_id=boot_id, epoch=namespace.epoch)

            count = len(piece) // namespace.hash_bytes
            decode = _decoder(pb.PlaceOk, lambda reply: decode_place(reply, count))
            return self._call(namespace, deadline, Kind.PLACE, build, decode)

        return join_placed([ask(piece) for piece in _split(packed, namespace.hash_bytes)])

    def remove(self, namespace: PoolNamespace, salt: str, packed: bytes, deadline: float, left_ms: int) -> RemoveResult:
        """Raises like :meth:`lookup`. ``left_ms``: how long the master may wait for nodes to confirm."""

        def ask(piece: bytes) -> pb.RemoveOk:
            def build(handle: int) -> Message:
                return pb.Remove(ns=handle, salt=salt, hashes=piece, deadline_ms=left_ms)

            return self._call(namespace, deadline, Kind.REMOVE, build, _decoder(pb.RemoveOk, lambda reply: reply))

        replies = [ask(piece) for piece in _split(packed, namespace.hash_bytes)]
        unreached = {node for reply in replies for node in reply.unreached}
        return RemoveResult(sum(reply.removed for reply in replies), tuple(sorted(unreached)))

    def report_miss(
        self,
        namespace: PoolNamespace,
        salt: str,
        packed: bytes,
        node: Endpoint,
        delta_seq: int,
        deadline: float,
        *,
        status: BlockStatus,
        at_store: bool = False,
    ) -> None:
        """Tell the master that ``node`` did not give these blocks, or did not take them (``at_store``), and how that
        ended. Best effort, ``REPORT_S`` at most within the call's ``deadline``: the node's deltas will say so too,
        and intents lapse."""
        deadline = min(deadline, time.monotonic() + REPORT_S)
        process = self.masters[self._current].process
        try:
            for piece in _split(packed, namespace.hash_bytes):
                report = pb.MissReport(
                    ns=process.handle(namespace, deadline),
                    salt=salt,
                    hashes=piece,
                    node_id=node.node_id,
                    incarnation=node.incarnation,
                    delta_seq=delta_seq,
                    epoch=namespace.epoch,
                    status=status,
                    at_store=at_store,
                )
                process.channel.tell(Kind.MISS_REPORT, report.SerializeToString(), deadline)
        except KVError as error:
            log.debug("miss not reported", node=node.node_id, reason=str(error))

    def _call(
        self,
        namespace: PoolNamespace,
        deadline: float,
        kind: int,
        build: Callable[[int], Message],
        decode: Callable[[bytes], R],
    ) -> R:
        """Ask the master that served last, then each other one."""
        problem: KVError | None = None
        start = self._current
        for step in range(len(self.masters)):
            index = (start + step) % len(self.masters)
            try:
                answer = decode(self.masters[index].ask(namespace, deadline, kind, build))
            except Late:
                raise
            except (Unavailable, ProtocolError) as error:
                problem = error
                continue
            if index != start:
                log.warning("master failed over", to=self.masters[index].address, why=str(problem))
                self._current = index
            return answer
        raise Unavailable(f"no master answers: {problem}") from problem

    def health(self) -> list[dict[str, object]]:
        """One dict a master; ``serving`` marks the one that is asked first."""
        return [{**master.health(), "serving": i == self._current} for i, master in enumerate(self.masters)]

    def close(self) -> None:
        for master in self.masters:
            master.close()


def _decoder(message: type[M], decode: Callable[[M], R]) -> Callable[[bytes], R]:
    def run(data: bytes) -> R:
        try:
            reply = message.FromString(data)
        except Exception as error:
            raise ProtocolError(f"a {message.__name__} that does not decode") from error
        return decode(reply)

    return run


def _split(packed: bytes, hash_bytes: int) -> list[bytes]:
    limit = HASHES_MAX * hash_bytes
    return [packed] if len(packed) <= limit else [packed[low:high] for low, high in pieces_of(len(packed), limit)]
