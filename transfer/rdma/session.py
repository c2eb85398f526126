"""Rails to one node over time: opened when first wanted, given up when they fail, opened anew with growing pauses.

::

    IDLE -- want() --> OPENING -- tested --> UP -- failed() --> DOWN -- pause over, upkeep() --> OPENING
                          \\-- anything else ------------------> DOWN
"""

from __future__ import annotations

import threading
import time
from enum import Enum
from typing import Final

from kvstrata.proto.errors import Closed, KVError
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.link import NodeLink
from kvstrata.transfer.rdma.client_rails import ClientRails
from kvstrata.transfer.rdma.opening import Opened, open_rails

log = get_logger(__name__)

BACKOFF_FIRST_S: Final = 0.2
BACKOFF_MAX_S: Final = 10.0


class RailState(Enum):
    IDLE = "idle"  #: nobody has wanted them yet
    OPENING = "opening"
    UP = "up"
    DOWN = "down"  #: ``problem`` says why
    CLOSED = "closed"


class RailSession:
    """Thread-safe. Opening takes place in the client's background threads, never in a caller's."""

    def __init__(self, link: NodeLink, own: ClientRails) -> None:
        self.state = RailState.IDLE
        self.problem = ""
        self.opened_count = 0  #: times that they came up
        self._link = link
        self._own = own
        self._change = threading.Condition()
        self._opened: Opened | None = None
        self._backoff_s = BACKOFF_FIRST_S
        self._retry_at = 0.0

    def ready(self) -> Opened | None:
        """Rails to be used now; when they never were opened, that begins."""
        opened = self._opened
        if opened is not None and opened.breaks == self._link.channel.breaker.opened:
            return opened
        if opened is not None:
            self.failed(opened, "the connection to the node was lost")
        elif self.state is RailState.IDLE:
            self._begin()
        return None

    def wait(self, deadline: float) -> Opened | None:
        """As :meth:`ready`, but waits for an opening that is under way."""
        opened = self.ready()
        if opened is None:
            with self._change:
                self._change.wait_for(lambda: self.state is not RailState.OPENING, deadline - time.monotonic())
                opened = self._opened
        return opened

    def worked(self) -> None:
        """A transfer went well: should they fail, the first pause is short."""
        self._backoff_s = BACKOFF_FIRST_S

    def failed(self, opened: Opened, reason: str) -> None:
        """These rails are used no more. Transfers that were posted are left to settle."""
        with self._change:
            if self._opened is not opened:
                return
            self._opened = None
            self._down(reason)
        opened.agent.engine.remove_peer(opened.peer)
        log.warning("rails given up", node=self._link.endpoint.node_id, reason=reason)

    def _down(self, problem: str) -> None:
        self.state, self.problem = RailState.DOWN, problem
        self._retry_at = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
        self._change.notify_all()

    def upkeep(self) -> None:
        """Open them anew when their pause is over and the node can be reached."""
        if self.state is RailState.UP:
            self.ready()
        elif self.state is RailState.DOWN and time.monotonic() > self._retry_at and self._link.channel.breaker.closed:
            self._begin()

    def _begin(self) -> None:
        with self._change:
            if self.state not in (RailState.IDLE, RailState.DOWN):
                return
            self.state = RailState.OPENING
        if not self._own.submit(self._open):
            self.close()

    def _open(self) -> None:
        problem = "not opened: a mistake in this program; the log has it"
        opened: Opened | None = None
        try:
            opened = open_rails(self._link, self._own)
        except Closed:
            self.close()
            return
        except KVError as error:
            problem = str(error)
        except Exception:
            log.exception("rails to a node not opened", node=self._link.endpoint.node_id)
        with self._change:
            if opened is not None and self.state is RailState.OPENING:
                self._opened, self.state, self.problem = opened, RailState.UP, ""
                self.opened_count += 1
                self._change.notify_all()
                return
            news = opened is None and problem != self.problem
            if self.state is RailState.OPENING:
                self._down(problem)
        if opened is not None:  # closed meanwhile
            opened.agent.engine.remove_peer(opened.peer)
        elif news:
            log.info("no rails to a node", node=self._link.endpoint.node_id, reason=problem)

    def health(self) -> dict[str, object]:
        """``state``, ``kind``, ``self_test`` ("passed" or why not), ``opened``: times."""
        state = self.state
        test = {RailState.UP: "passed", RailState.DOWN: self.problem}.get(state, "")
        return {
            "state": state.value,
            "kind": self._own.rails().kind,
            "self_test": test,
            "problem": self.problem,
            "opened": self.opened_count,
        }

    def close(self) -> None:
        with self._change:
            opened, self._opened = self._opened, None
            self.state = RailState.CLOSED
            self._change.notify_all()
        if opened is not None:
            opened.agent.engine.remove_peer(opened.peer)
