"""What masters order of copies, surplus replicas and drains, handed on to who carries it out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import KVError
from kvstrata.proto.keys import Namespace
from kvstrata.proto.logs import get_logger
from kvstrata.storage.copying.copier import Copier
from kvstrata.storage.copying.offers import Drains, Line
from kvstrata.storage.state import NodeState

log = get_logger(__name__)


class CopyOrders:
    """Over one node. Called by the links' threads, without the node's lock."""

    def __init__(
        self,
        state: NodeState,
        lock: threading.Lock,
        copier: Copier,
        drains: Drains,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._lock = lock
        self._copier = copier
        self._drains = drains
        self._changed = changed
        self._clock = clock

    def heard(self, message: control.MasterMessage, line: Line) -> None:
        """Carry out one message, if it is about these; answers go back by the line it came by."""
        body = message.WhichOneof("body")
        if body == "copy":
            self._copier.take(
                message.copy, message.leader_epoch, lambda done: line.tell(control.NodeMessage(copied=done))
            )
        elif body == "surplus":
            self._surplus(message.surplus)
        elif body == "drain":
            self._drains.order(message.drain, line)
        elif body == "drained":
            self._drains.over(message.drained)

    def _surplus(self, message: control.Surplus) -> None:
        """Nobody waits for it, and one that makes no sense is passed over."""
        try:
            namespace = Namespace.from_spec(message.spec)
            with self._lock:
                gone = self._state.let_go(namespace, message.salt, message.hashes, message.epoch, self._clock())
        except KVError as error:
            log.warning("an order to let replicas go was refused", reason=str(error))
            return
        if gone:
            self._changed()
