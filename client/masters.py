"""The masters of a pool: the process behind each address, which one leads, and which one to ask."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message

from kvstrata.client.namespace import PoolNamespace
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import (
    Busy,
    Closed,
    FingerprintMismatch,
    InvalidArgument,
    KVError,
    NotLeader,
    ProtocolError,
    TicketExpired,
    Unauthenticated,
    Unavailable,
)
from kvstrata.proto.keys import Namespace
from kvstrata.proto.logs import get_logger
from kvstrata.proto.wire import Kind
from kvstrata.transfer.channel import Channel
from kvstrata.transfer.connection import expect
from kvstrata.transfer.frames import Late
from kvstrata.transfer.identity import Identity, parse_address

log = get_logger(__name__)

MASTERS_MAX: Final = 16
#: Leaders that other masters named and nobody configured, of which a client keeps the newest.
NAMED_MAX: Final = 4
#: A master of which nothing was heard for so long is asked for a sign of life, so that no call finds it dead.
HEARTBEAT_S: Final = 2.0
#: Its answer may come so late: a silence is found out sooner, and a process that is held up itself blames nobody.
GREET_S: Final = 5.0

_LEADER: Final = re.compile(r"the leader is (\S+)$")

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

    def __init__(self, address: str, identity: Identity, heard: Callable[[pb.HelloOk], None]) -> None:
        self.channel = Channel([address], identity, accept=self._accept, greeted=self._greeted, self_probing=False)
        self.gone = False
        self._heard = heard
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
        with self._lock:
            self._check_same(hello)

    def _greeted(self, hello: pb.HelloOk) -> None:
        with self._lock:
            self._check_same(hello)
            self._who = (hello.cluster_id, hello.incarnation)
        self._heard(hello)

    def _check_same(self, hello: pb.HelloOk) -> None:
        if self._who is not None and self._who != (hello.cluster_id, hello.incarnation):
            self.gone = True
            raise Restarted(f"the master at {self.channel.addresses[0]} was restarted")


class Master:
    """One master's address, and the process that answers there now. ``greeted`` is told of each hello."""

    def __init__(self, address: str, identity: Identity, greeted: Callable[[Master, pb.HelloOk], None]) -> None:
        self.address = address
        #: When it last answered (monotonic seconds); 0.0 before the first time.
        self.heard_at = 0.0
        self._identity = identity
        self._greeted = greeted
        self._lock = threading.Lock()
        self._process = self._new()
        self._opens_before = 0  #: breakers of processes that are gone

    @property
    def breaker_opens(self) -> int:
        """Times that it was found silent or gone."""
        return self._opens_before + self._process.channel.breaker.opened

    def _new(self) -> _Process:
        return _Process(self.address, self._identity, lambda hello: self._greeted(self, hello))

    @property
    def process(self) -> _Process:
        process = self._process
        return self._renew(process) if process.gone else process

    def _renew(self, old: _Process) -> _Process:
        with self._lock:
            if self._process is old:
                self._opens_before += old.channel.breaker.opened
                self._process = self._new()
                old.channel.close()
            return self._process

    def is_at(self, address: str) -> bool:
        """True for the address it was given by, and for the one it names itself."""
        hello = self._process.channel.hello
        return address == self.address or (hello is not None and address == hello.channel)

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

    def _ask(
        self,
        process: _Process,
        namespace: PoolNamespace,
        deadline: float,
        kind: int,
        build: Callable[[int], Message],
    ) -> bytes:
        message = build(process.handle(namespace, deadline)).SerializeToString()
        frame = process.channel.call(kind, message, deadline)
        if frame.kind != kind + 1:  # every request kind of the master's is followed by its answer's
            raise ProtocolError(f"frame kind {frame.kind} answers {Kind(kind).name}")
        self.heard_at = time.monotonic()
        return frame.message

    def greet(self, deadline: float) -> None:
        """A sign of life, which keeps this client registered there. Raises as a call does."""
        self.process.channel.call(Kind.PING, b"", deadline)
        self.heard_at = time.monotonic()

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

    def upkeep(self, now: float) -> None:
        """Probe one that is lost; ask one that has been quiet for a sign of life. Bounded by one silence."""
        channel = self.process.channel
        if not channel.breaker.closed:
            channel.probe()
        elif now - self.heard_at > HEARTBEAT_S:
            self.heard_at = now
            try:
                self.greet(now + GREET_S)
            except (Unavailable, Busy):
                pass  # the breaker knows, where it is not only busy
            except KVError as error:
                channel.failed(f"{type(error).__name__}: {error}")

    def unreachable(self) -> bool:
        return not self._process.channel.breaker.closed

    def close(self) -> None:
        self._process.channel.close()


class Masters:
    """Which master to ask: any for questions, the one that leads for changes. Thread-safe.

    Who leads is learned from hellos and from the answers of those who do not. A leader that nobody configured
    is asked too. A master that was found dead is not asked again until a probe in the background reached it.
    """

    def __init__(self, addresses: Sequence[str], identity: Identity) -> None:
        self._identity = identity
        self._named: list[Master] = []
        self._epoch = 0
        self._lock = threading.Lock()
        self._leader: Master | None = None
        self._configured = [Master(address, identity, self._greeted) for address in addresses]
        self.current = self._configured[0]

    def __iter__(self) -> Iterator[Master]:
        return iter([*self._configured, *self._named])

    @property
    def writer(self) -> Master:
        """The master that changes go to: the leader, or while none is known the one that serves."""
        return self._leader or self.current

    def any(self, call: Callable[[Master], R], good: Callable[[R], bool] = lambda _: True) -> R:
        """Ask the master that served last, then each other one, until an answer is ``good``; else the first answer.

        Raises :class:`Unavailable` when none answers (:class:`Late` when time ran out), or a refusal:
        :class:`Unauthenticated` when no other master let this client in.
        """
        problem: KVError | None = None
        poor: list[R] = []
        for master in self._in_turn():
            try:
                answer = call(master)
            except Late:
                if poor:
                    break
                raise
            except (Unavailable, NotLeader, ProtocolError, Unauthenticated, TicketExpired) as error:
                problem = _worse(problem, error)
                continue
            if good(answer):
                self._serves(master, str(problem or "it knows more"))
                return answer
            poor.append(answer)
        if poor:
            return poor[0]
        if isinstance(problem, Unauthenticated):
            raise problem
        raise Unavailable(f"no master answers: {problem}") from problem

    def leading(self, call: Callable[[Master], R]) -> R:
        """Ask the leader: the one last known, whoever is named instead, then each other one. Raises as :meth:`any`."""
        problem: KVError | None = None
        waiting = [self.writer, *self._in_turn()]
        asked: list[Master] = []
        while waiting and len(asked) < MASTERS_MAX + NAMED_MAX:
            master = waiting.pop(0)
            if master in asked:
                continue
            asked.append(master)
            try:
                answer = call(master)
            except Late:
                raise
            except NotLeader as error:
                problem = error
                named = self._find(leader_in(str(error)))
                if named is not None:
                    waiting.insert(0, named)
                continue
            except (Unavailable, ProtocolError, Unauthenticated, TicketExpired) as error:
                problem = _worse(problem, error)
                continue
            except Closed as error:
                if master in self:
                    raise
                problem = error  # others were named meanwhile, and this one was let go
                continue
            self._leads(master)
            return answer
        if isinstance(problem, Unauthenticated):
            raise problem
        raise Unavailable(f"no master takes changes: {problem}") from problem

    def _in_turn(self) -> list[Master]:
        start = self._configured.index(self.current)
        return [*self._configured[start:], *self._configured[:start]]

    def _serves(self, master: Master, why: str) -> None:
        if master is not self.current:
            log.warning("master failed over", to=master.address, why=why)
            self.current = master

    def _leads(self, master: Master) -> None:
        if master is not self._leader:
            log.info("changes go to another master", to=master.address)
            self._leader = master

    def _greeted(self, master: Master, hello: pb.HelloOk) -> None:
        """A hello says who leads; of two the one of the later leader epoch is right."""
        leader = master if hello.leading else self._find(hello.leader)
        with self._lock:
            if leader is not None and hello.epoch >= self._epoch:
                self._epoch, self._leader = hello.epoch, leader

    def _find(self, address: str) -> Master | None:
        """The master at an address that another one named; None when that is no address."""
        if not address:
            return None
        known = next((master for master in self if master.is_at(address)), None)
        if known is not None:
            return known
        try:
            parse_address(address)
        except InvalidArgument as error:
            log.warning("a master names a leader that has no address", reason=str(error))
            return None
        with self._lock:
            named = Master(address, self._identity, self._greeted)
            kept = [*self._named, named]
            while len(kept) > NAMED_MAX:
                kept.remove(dropped := next(master for master in kept if master is not self._leader))
                dropped.close()
            self._named = kept
        return named

    def breaker_opens(self) -> int:
        """Times that a master was found silent or gone."""
        return sum(master.breaker_opens for master in self)

    def health(self) -> list[dict[str, object]]:
        """One dict a master: ``serving`` marks the one that is asked first, ``leads`` where changes go."""
        shown = [*self._configured, *(master for master in self._named if master is self._leader)]
        return [
            {**master.health(), "serving": master is self.current, "leads": master is self._leader} for master in shown
        ]

    def close(self) -> None:
        for master in self:
            master.close()


def _worse(known: KVError | None, error: KVError) -> KVError:
    """Which of two problems to tell: that this client is not let in can be mended by whoever runs it."""
    return known if isinstance(known, Unauthenticated) else error


def leader_in(text: str) -> str:
    """The address at the end of a :class:`NotLeader` text; "" when it names none."""
    found = _LEADER.search(text)
    return found.group(1) if found else ""
