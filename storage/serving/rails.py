"""The node's end of one-sided transfers: its agent, what peers are told of it, and the agents of its sessions.

::

    client                                   node
      OPEN_RAILS (its agent)      -->          add the agent to the session
      <-- OPEN_RAILS_OK (ours, where the slabs are, a pattern to read first)
      REGISTER_REGION (its memory) -->         a region that this agent reads
      TEST_RAIL (that region)     -->          read the pattern that the client has put there, compare

Slabs are registered once and stay registered until the node has stopped: peers read them by themselves.
"""

from __future__ import annotations

import mmap
import secrets
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, InvalidArgument, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.storage.serving import process_memory
from kvstrata.storage.serving.rail_pulls import RailPulls
from kvstrata.storage.serving.rail_region import Flights, RailRegion, Starter
from kvstrata.storage.state import NodeState
from kvstrata.transfer.identity import boot_id
from kvstrata.transfer.rdma.engine import Job, JobState, Pieces, RailEngine
from kvstrata.transfer.rdma.pattern import mismatch, pattern
from kvstrata.transfer.rdma.rails import Rails
from kvstrata.transfer.sessions import Session

log = get_logger(__name__)

#: What each side reads of the other before it trusts a rail.
PATTERN_BYTES: Final = 64 << 10
#: Tests of rails at a time: each has memory of its own, which it keeps until its transfer has settled.
TESTS_MAX: Final = 8
TEST_S: Final = 2.0
#: What an agent says of itself or of a region.
AGENT_BYTES_MAX: Final = 1 << 20
#: The agent gets this long to settle what it has posted when the node stops.
CLOSE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class AgentReads:
    """A :data:`Starter`: reads from one agent's memory."""

    rails: NodeRails
    agent: str

    def __call__(self, local: Pieces, remote: Pieces) -> Job:
        return self.rails.read(self.agent, local, remote)


class NodeRails:
    """Over one engine, which it owns. Thread-safe; takes the state's lock for moments, never around the engine.

    Registers all slabs. Raises :class:`Unavailable` when their memory cannot be registered; the engine is closed then.
    """

    def __init__(
        self,
        engine: RailEngine,
        found: Rails,
        state: NodeState,
        lock: threading.Lock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = found.kind
        self.pulls = RailPulls(state, lock, clock)
        self._engine = engine
        self._found = found
        self._lock = threading.Lock()
        self._agents: dict[bytes, str] = {}
        self._flights = Flights()
        self._memory = mmap.mmap(-1, PATTERN_BYTES * (1 + TESTS_MAX))
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._scratch = [PATTERN_BYTES * (1 + each) for each in range(TESTS_MAX)]
        self._seed = secrets.randbits(63)
        self._bytes[:PATTERN_BYTES] = pattern(self._seed, PATTERN_BYTES)
        slabs = state.arena.slabs
        self._slabs = array("Q", [value for slab in slabs for value in (slab.address, slab.nbytes)]).tobytes()
        try:
            for slab in slabs:
                engine.register(slab.address, slab.nbytes)
            engine.register(self._address, self._bytes.nbytes)
            self._metadata = engine.metadata()
        except BaseException:
            engine.close()
            raise

    @property
    def _address(self) -> int:
        return int(self._bytes.ctypes.data)

    # ------------------------------------------------------------------ sessions

    def open(self, session: Session, message: pb.OpenRails, forget: Callable[[bytes], None]) -> pb.OpenRailsOk:
        """Enter the session's agent; an earlier one is forgotten, and by ``forget`` the regions that it could read.

        Raises :class:`InvalidArgument` when the two ends have nothing in common, or for an agent that is none.
        """
        self._check_common(session, message)
        if self._leave(session.key):
            forget(session.key)
        name = self._met(message.agent)
        with self._lock:
            self._check_own(session, name)
            other = self._agents.get(session.key, name)
            self._agents[session.key] = name
        if other != name:  # opened twice at one time
            self._engine.remove_peer(other)
        if session.over:  # it ended while this ran: nobody else will forget the agent
            self.session_ended(session.key)
        self._engine.stir()
        return pb.OpenRailsOk(
            agent=self._metadata,
            slabs=self._slabs,
            pattern_address=self._address,
            pattern_bytes=PATTERN_BYTES,
            pattern_seed=self._seed,
        )

    def _leave(self, session: bytes) -> bool:
        with self._lock:
            agent = self._agents.pop(session, None)
        if agent is not None:
            self._engine.remove_peer(agent)
        return agent is not None

    def _met(self, metadata: bytes) -> str:
        """The name of the agent that says this of itself."""
        if not 0 < len(metadata) <= AGENT_BYTES_MAX:
            raise InvalidArgument(f"{len(metadata)} bytes describe no agent: 1 to {AGENT_BYTES_MAX}")
        try:
            return self._engine.add_peer(metadata)
        except Unavailable as error:
            raise Busy(str(error)) from error

    def _check_own(self, session: Session, name: str) -> None:
        """With the lock held."""
        if name == self._engine.name:
            raise InvalidArgument("that is the node's own agent")
        if any(other == name and key != session.key for key, other in self._agents.items()):
            raise InvalidArgument(f"agent {name!r} belongs to another session")

    def _check_common(self, session: Session, message: pb.OpenRails) -> None:
        if message.rails != self.kind or message.backend != self._engine.backend:
            raise InvalidArgument(
                f"the node's rails are {self.kind} by {self._engine.backend}, "
                f"the peer's {message.rails or 'none'} by {message.backend or 'nothing'}"
            )
        if self.kind != "cma":
            return
        if session.hello.boot_id != boot_id():
            raise InvalidArgument("cma works between processes of one host, and the peer is on another")
        pid = session.pid or session.hello.pid
        if not process_memory.permitted(pid):
            raise InvalidArgument(
                f"the node may not read memory of process {pid}: both must run as one user, in one pid namespace, "
                "with kernel.yama.ptrace_scope 0 or CAP_SYS_PTRACE"
            )

    def region(self, session: Session, metadata: bytes) -> Starter:
        """What begins reads from memory that the session's agent has registered.

        Raises :class:`InvalidArgument` when the session has no agent, or the memory is another one's.
        """
        agent = self._agents.get(session.key)
        if agent is None:
            raise InvalidArgument("open rails before you register memory for them")
        name = self._met(metadata)
        with self._lock:
            self._check_own(session, name)
        if name != agent:
            self._engine.remove_peer(name)
            raise InvalidArgument(f"the memory is agent {name!r}'s, and the session's agent is {agent!r}")
        return AgentReads(self, agent)

    def stir(self, session: bytes) -> None:
        """The session is about to read by itself: its agent may need an answer of ours."""
        if session in self._agents:
            self._engine.stir()

    def session_ended(self, session: bytes) -> None:
        """Forget its agent. What was posted is left to settle."""
        self._leave(session)

    # ------------------------------------------------------------------ transfers

    def read(self, agent: str, local: Pieces, remote: Pieces) -> Job:
        """Begin a read from memory of ``agent``. Raises :class:`Unavailable` once the node stops."""
        if not self._flights.begin():
            raise Unavailable("the node is stopping")
        try:
            job = self._engine.read(agent, local, remote)
        except BaseException:
            self._flights.end()
            raise
        job.then(self._flights.end)
        return job

    def test(self, region: RailRegion, seed: int) -> str:
        """Read the region's first :data:`PATTERN_BYTES`; "" when they are the pattern of ``seed``, else what is wrong.

        Bounded by :data:`TEST_S`. Raises :class:`Busy` when too many tests have not settled, and
        :class:`InvalidArgument` when the region is too small.
        """
        if region.nbytes < PATTERN_BYTES:
            raise InvalidArgument(f"a region of {region.nbytes} bytes: the test reads {PATTERN_BYTES}")
        with self._lock:
            if not self._scratch:
                raise Busy(f"{TESTS_MAX} tests of rails have not settled: ask again later")
            offset = self._scratch.pop()
        found = self._bytes[offset : offset + PATTERN_BYTES]
        found[:] = 0
        try:
            job = region.read(
                np.array([self._address + offset]), np.array([0], np.int64), np.array([PATTERN_BYTES], np.int64)
            )
        except BaseException:
            self._scratch.append(offset)
            raise
        try:
            if not job.wait(time.monotonic() + TEST_S) and not job.give_up():
                return f"nothing arrived within {TEST_S:.0f} s"
            if job.state is not JobState.DONE:
                return job.problem or f"the transfer was not begun within {TEST_S:.0f} s"
            return mismatch(found, seed)
        finally:
            job.then(partial(self._scratch.append, offset))

    # ------------------------------------------------------------------ upkeep

    def reap(self) -> None:
        """Give back slots of late transfers that have settled. Called by a loop, many times a second."""
        self.pulls.reap()

    def problem(self) -> str:
        """What is wrong with the agent, or ""."""
        return self._engine.problem()

    def health(self) -> dict[str, Any]:
        """For health and metrics, JSON-ready. ``unsettled``: pulls that nobody waits for any more."""
        unsettled, held = self.pulls.held()
        return {
            **self._engine.health(),
            "in_flight": len(self._flights),
            "kind": self.kind,
            "backend": self._engine.backend,
            "devices": [asdict(device) for device in self._found.devices],
            "peers": len(self._agents),
            "unsettled": unsettled,
            "unsettled_bytes": held,
            "pulls": dict(self.pulls.counts),
            "problem": self._engine.problem(),
        }

    def close(self) -> bool:
        """End the agent. False when a transfer has not settled: it may still write to the slabs, so they must stay."""
        self._flights.close()
        self._engine.close(CLOSE_S)
        if self._flights.wait_idle(time.monotonic()):
            return True
        log.error("transfers have not settled: the memory stays until the process ends", jobs=len(self._flights))
        return False
