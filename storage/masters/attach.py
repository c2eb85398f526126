"""The link to one master: found over its channel, held over gRPC, taken up again for ever.

A node serves with or without its masters. Each link has a thread that attaches, listens for commands and
acknowledgements, and starts over when the stream ends; what is sent comes from an :class:`.Outbox`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.channel_pb2 import HelloOk
from kvstrata.proto.control_pb2_grpc import MasterStub
from kvstrata.proto.errors import KVError, ProtocolError, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.storage.masters.commands import Commands
from kvstrata.storage.masters.copy_orders import CopyOrders
from kvstrata.storage.masters.dialing import Dialing
from kvstrata.storage.masters.outbox import ATTACH_S, Outbox
from kvstrata.storage.masters.usage import Told
from kvstrata.storage.state import NodeState
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.security.tickets import TicketSource

log = get_logger(__name__)

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 1.0
#: A link whose threads have not come round for this long is a problem.
STUCK_S: Final = 10.0
HELLO_SILENCE_S: Final = 1.0
#: For a master that is away for less than this, deltas are kept within the log's bound.
CATCH_UP_S: Final = 60.0
MESSAGE_BYTES_MAX: Final = 16 << 20

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A master that was cut off or stopped is noticed within four seconds.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """A link at one moment. ``problem`` is why it is not attached."""

    master: str
    attached: bool
    cluster_id: str
    sent_seq: int
    acked_seq: int
    attaches: int
    problem: str


class MasterLink:
    """One master, by its channel address.

    ``attach`` builds the attach message; it is given the host by which the master was reached. ``commands``
    carries out what the master orders, ``copies`` what it orders of copies and drains; ``dialing`` is how it is called.
    """

    def __init__(
        self,
        master: str,
        state: NodeState,
        lock: threading.Lock,
        commands: Commands,
        attach: Callable[[str], control.Attach],
        status: Callable[[Told], control.NodeStatus],
        acknowledged: Callable[[], None],
        copies: CopyOrders | None = None,
        tickets: TicketSource | None = None,
        dialing: Dialing | None = None,
    ) -> None:
        self.master = master
        self.attached = False
        self.acked_seq = 0
        self._state = state
        self._lock = lock
        self._commands = commands
        self._attach = attach
        self._status = status
        self._acknowledged = acknowledged
        self._copies = copies
        self._dialing = dialing or Dialing()
        self._identity = Identity.new("node", tickets=tickets)
        self._lost_at: float | None = None
        self._outbox: Outbox | None = None
        self._call: Any = None
        self._cluster_id = ""
        self._attaches = 0
        self._why = "not tried yet"
        self._stopping = threading.Event()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"kvstrata-link-{master}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """The delta log has something new."""
        outbox = self._outbox
        if outbox is not None:
            outbox.wake()

    def catches_up(self, now: float) -> bool:
        """Whether deltas are kept for this master: it is attached, or was lately and may go on from where it was."""
        return self.attached or (self._lost_at is not None and now - self._lost_at < CATCH_UP_S)

    def line(self) -> Outbox | None:
        """Where the master is told something now; None while it is not attached."""
        return self._outbox if self.attached else None

    def status(self) -> LinkStatus:
        outbox = self._outbox
        sent = outbox.sent_seq if outbox is not None else 0
        return LinkStatus(self.master, self.attached, self._cluster_id, sent, self.acked_seq, self._attaches, self._why)

    def problem(self) -> str:
        """Why the link itself is not well (an unreachable master is not its fault), or an empty string."""
        if self._stopping.is_set():
            return ""
        if not self._thread.is_alive():
            return f"master link {self.master}: its thread is dead"
        outbox = self._outbox
        beat = max(self._beat, outbox.beat) if outbox is not None else self._beat
        age = time.monotonic() - beat
        return f"master link {self.master}: stuck for {age:.1f} s" if age > STUCK_S else ""

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        backoff = BACKOFF_MIN_S
        while not self._stopping.is_set():
            self._beat = time.monotonic()
            attaches = self._attaches
            try:
                self._session()
            except KVError as error:
                self._lost(str(error))
            except grpc.RpcError as error:
                self._lost(_reason(error))
            except Exception as error:
                log.error("master link failed", master=self.master, exc_info=True)
                self._lost(f"{type(error).__name__}: {error}")
            if self._attaches > attaches:
                backoff = BACKOFF_MIN_S
            self._stopping.wait(backoff)
            backoff = min(2 * backoff, BACKOFF_MAX_S)

    def _lost(self, why: str) -> None:
        if why != self._why and not self._stopping.is_set():
            log.warning("no link to master", master=self.master, reason=why)
        self._why = why

    def _session(self) -> None:
        """Attach and stay attached until the stream ends."""
        target, host = self._find()
        channel = self._dialing.dial(self.master, target, _OPTIONS)
        outbox = Outbox(self._state, self._lock, self._attach(host), self._status)
        timer = threading.Timer(ATTACH_S, self._give_up, [outbox])
        timer.daemon = True
        try:
            timer.start()
            self._outbox = outbox
            self._call = MasterStub(channel).Sync(outbox.messages(), metadata=self._dialing.shown())  # type: ignore[no-untyped-call]
            for message in self._call:
                self._heard(message, outbox)
            raise Unavailable("the master ended the stream")
        finally:
            timer.cancel()
            if self.attached:
                self._lost_at = time.monotonic()
            self.attached = False
            outbox.end()
            self._outbox = None
            self._call = None
            channel.close()

    def _find(self) -> tuple[str, str]:
        """(the master's gRPC endpoint, the address of ours that reaches it)."""
        connection = Connection.open(self.master, self._identity, silence_s=HELLO_SILENCE_S, accept=self._a_master)
        try:
            hello = connection.hello
            return hello.grpc, str(connection.stream.sock.getsockname()[0])
        finally:
            connection.close()

    def _a_master(self, hello: HelloOk) -> None:
        if hello.role != "master":
            raise ProtocolError(f"{self.master} is a {hello.role}, not a master: give the master's channel address")

    def _give_up(self, outbox: Outbox) -> None:
        call = self._call
        if call is not None and outbox is self._outbox and not outbox.attached.is_set():
            call.cancel()

    # ------------------------------------------------------------------ what the master says

    def _heard(self, message: control.MasterMessage, outbox: Outbox) -> None:
        body = message.WhichOneof("body")
        refusal = self._commands.obeys(message.leader_epoch, message.leader_id)
        if not refusal:
            self._commands.heard()
        if body == "attached":
            self._on_attached(message.attached, outbox, leads=not refusal)
        elif body == "ack":
            self.acked_seq = message.ack.seq
            self._acknowledged()
        elif body == "resync":
            log.info("snapshot asked for", master=self.master, reason=message.resync.reason)
            outbox.resync()
        elif refusal:
            self._refuse(message, refusal, outbox)
        elif body == "remove":
            self._commands.remove(message.remove, outbox.confirm)
        elif body == "epoch":
            self._commands.advance(message.epoch, outbox.confirm)
        elif body == "drop":
            self._commands.drop(message.drop, outbox.confirm)
            outbox.knows_drops()
        elif body == "orphaned":
            self._commands.orphaned(message.orphaned)
        elif body == "shares":
            self._commands.share(message.shares)
        elif self._copies is not None:
            self._copies.heard(message, outbox)

    def _refuse(self, message: control.MasterMessage, refusal: str, outbox: Outbox) -> None:
        """What is ordered by a master that does not lead is not done; it learns who does from the next report."""
        body = str(message.WhichOneof("body"))
        self._commands.refused(body, refusal)
        command = getattr(getattr(message, body), "command", 0)
        if body == "copy":
            outbox.tell(control.NodeMessage(copied=control.CopyDone(command=command, error=refusal)))
        elif command:
            outbox.confirm(control.CommandDone(command=command, error=refusal))
        outbox.report_soon()

    def _on_attached(self, attached: control.AttachOk, outbox: Outbox, *, leads: bool) -> None:
        if leads:
            self._commands.attached(attached)
        self._cluster_id = attached.cluster_id
        self._attaches += 1
        resumed = outbox.resume(attached.resume_seq)
        self.acked_seq = attached.resume_seq if resumed else 0
        self.attached = True
        self._why = ""
        outbox.attached.set()
        log.info(
            "attached", master=self.master, cluster_id=attached.cluster_id, session=attached.session,
            leads=leads, resumed=resumed,
        )  # fmt: skip

    # ------------------------------------------------------------------ stop

    def leave(self, reason: str) -> None:
        """Tell the master that this node goes; :meth:`stop` waits for it to have been said."""
        self._stopping.set()
        outbox = self._outbox
        if outbox is not None:
            outbox.detach(reason)

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the link within about ``timeout_s``. Safe twice."""
        self._stopping.set()
        if not self._thread.is_alive():
            return
        self._thread.join(timeout_s)
        call = self._call
        if call is not None:
            call.cancel()
        self._thread.join(timeout_s)


def _reason(error: grpc.RpcError) -> str:
    code = getattr(error, "code", None)
    details = getattr(error, "details", None)
    return f"{code().name}: {details()}" if code is not None and details is not None else str(error)
