"""The owner's hands: what is done to the agent for the ledger, by one thread at a time, without waiting.

Time comes in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.memory import Memory
from kvstrata.transfer.rdma.agent import Agent, AgentError, BadMetadata
from kvstrata.transfer.rdma.envelope import seal, unseal
from kvstrata.transfer.rdma.jobs import RailJob
from kvstrata.transfer.rdma.ledger import PEERS_MAX, Freed, Held, Ledger
from kvstrata.transfer.rdma.pace import Pace

log = get_logger(__name__)

#: Posts between two looks at everything else.
POSTS_A_TURN: Final = 8


class Driver:
    """Not thread-safe. ``lock`` is held around each use of the ledger, and never while the agent works.

    ``linger_s``: how long memory of a transfer that failed stays in use. The agent reports the first piece that failed,
    and others may be on their way.
    """

    def __init__(
        self,
        name: str,
        agent: Agent,
        ledger: Ledger,
        lock: AbstractContextManager[object],
        pace: Pace,
        linger_s: float,
    ) -> None:
        self.name = name
        self.agent = agent
        self.done = self.failed = self.bytes = 0
        self._ledger = ledger
        self._lock = lock
        self._pace = pace
        self._linger_s = linger_s
        self._posted: dict[RailJob, None] = {}
        self._lingering: deque[tuple[float, RailJob, str]] = deque()

    @property
    def busy(self) -> bool:
        """Something is posted."""
        return bool(self._posted or self._lingering)

    # ---------------------------------------------------------------- memory and peers

    def register(self, address: int, nbytes: int, memory: Memory) -> tuple[Held, bytes]:
        """Also the sealed metadata. Raises :class:`Unavailable`."""
        try:
            handle = self.agent.register(address, nbytes, memory)
        except AgentError as error:
            advice = "raise the memlock limit (ulimit -l)" if memory.on_host else "can the devices reach that memory?"
            raise Unavailable(f"{error}: {advice}") from error
        try:
            metadata = seal(self.agent.version, self.agent.describe(handle))
        except AgentError as error:
            self._tried("memory could not be deregistered", partial(self.agent.deregister, handle))
            raise Unavailable(str(error)) from error
        with self._lock:
            return self._ledger.register(address, nbytes, memory, handle), metadata

    def add_peer(self, metadata: bytes) -> str:
        with self._lock:
            if len(self._ledger.peers) >= PEERS_MAX:
                raise Unavailable(f"{PEERS_MAX} agents are known here already")
        try:
            name = self.agent.load(unseal(self.agent.version, metadata))
        except BadMetadata as error:
            raise InvalidArgument(str(error)) from error
        except AgentError as error:
            raise Unavailable(str(error)) from error
        with self._lock:
            self._ledger.meet(name)
        return name

    def free(self, freed: Freed) -> None:
        """Do to the agent what an event in the ledger has set free."""
        for held in freed.memory:
            with self._lock:
                going = self._ledger.take_out(held)
            if going:
                self._tried("memory could not be deregistered", partial(self.agent.deregister, held.handle))
        if freed.peer and freed.peer not in self._ledger.peers:  # met again since
            self._tried("an agent could not be forgotten", partial(self.agent.forget, freed.peer))

    # ---------------------------------------------------------------- transfers

    def post(self, now: float) -> bool:
        """Begin what may begin, a bounded number; whether there may be more."""
        for _ in range(POSTS_A_TURN):
            with self._lock:
                job = self._ledger.take()
            if job is None:
                return False
            assert isinstance(job, RailJob)
            self._begin(job, now)
        return True

    def poll(self, now: float) -> None:
        """Look at all that is posted, and answer other agents when it is time."""
        for job in list(self._posted):
            try:
                if self.agent.poll(job.handle):
                    self._settle(job, now)
            except AgentError as error:
                self._fail(job, now, str(error))
        while self._lingering and self._lingering[0][0] <= now:
            _, job, problem = self._lingering.popleft()
            self._settle(job, now, problem)
        if self._pace.progress_due(now):
            self.agent.progress()

    def _begin(self, job: RailJob, now: float) -> None:
        try:
            job.handle = self.agent.create(job.peer, job.local, job.remote)
        except AgentError as error:
            self._settle(job, now, str(error))
            return
        self._posted[job] = None
        try:
            ended = self.agent.post(job.handle)
        except AgentError as error:
            self._fail(job, now, str(error))
            return
        self._pace.active(now)
        if ended:
            self._settle(job, now)

    def _fail(self, job: RailJob, now: float, problem: str) -> None:
        del self._posted[job]
        self._lingering.append((now + self._linger_s, job, problem))

    def _settle(self, job: RailJob, now: float, problem: str = "") -> None:
        self._posted.pop(job, None)
        with self._lock:
            freed = self._ledger.settle(job, problem)
        if problem:
            self.failed += 1
        else:
            self.done, self.bytes = self.done + 1, self.bytes + job.nbytes
        self._pace.active(now)
        handle, job.handle = job.handle, None
        job.ended()
        if handle is not None:
            self._tried("a transfer could not be released", partial(self.agent.release, handle))
        self.free(freed)

    def _tried(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except AgentError as error:
            log.warning(what, agent=self.name, error=str(error))
