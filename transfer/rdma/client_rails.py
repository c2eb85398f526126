"""What one client has to reach nodes one-sidedly: the rails of its host, and, once needed, an agent and its memory."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvstrata.proto.errors import Closed, KVError, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.frames import Late
from kvstrata.transfer.rdma.engine import RailEngine, Registration
from kvstrata.transfer.rdma.found import find_rails
from kvstrata.transfer.rdma.memory import LocalMemory
from kvstrata.transfer.rdma.owner import open_engine
from kvstrata.transfer.rdma.rails import RailOptions, Rails
from kvstrata.transfer.regions import Region

log = get_logger(__name__)

#: Nodes whose rails are opened at a time.
OPENING_THREADS: Final = 4
ENGINE_CLOSE_S: Final = 2.0

Opener = Callable[[str, Rails, RailOptions], RailEngine]


@dataclass(frozen=True, slots=True)
class Agent:
    """An open engine, and the memory it knows."""

    engine: RailEngine
    memory: LocalMemory


class ClientRails:
    """Thread-safe. Belongs to the process that made it: after a fork it refuses."""

    def __init__(
        self,
        name: str,
        options: RailOptions,
        *,
        find: Callable[[RailOptions], Rails] = find_rails,
        opener: Opener = open_engine,
    ) -> None:
        self.options = options
        self._name = name
        self._find, self._opener = find, opener
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._rails: Rails | None = None
        self._agent: Agent | None = None
        self._problem = ""
        self._closed = False
        self._regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
        self._makings: dict[int, Future[tuple[Registration, ...]]] = {}  # by region
        self._regions_lock = threading.Lock()  # around these two
        self._threads = ThreadPoolExecutor(OPENING_THREADS, thread_name_prefix="kvstrata-rails")
        self._registrar = ThreadPoolExecutor(1, thread_name_prefix="kvstrata-register")

    def rails(self) -> Rails:
        """What this host has; looked for once. Never raises."""
        if self._rails is None:
            try:
                self._rails = self._find(self.options)
            except KVError as error:
                self._rails = Rails("", problem=str(error))
        return self._rails

    @property
    def agent(self) -> Agent | None:
        """The open one, if there is."""
        return self._agent if self._pid == os.getpid() else None

    def opened(self) -> Agent:
        """The agent, opened when first asked for, with all regions registered that the client has by now.

        Takes a moment the first time. Raises :class:`Unavailable` with what is missing, :class:`Closed`.
        """
        if self._pid != os.getpid():
            raise Closed("this client belongs to the parent process: open a new one after fork")
        with self._lock:
            if self._agent is None and not self._closed:
                self._agent = self._open()
                with self._regions_lock:
                    regions = list(self._regions.values())
                for region in regions:
                    self._register(self._agent, region)
            if self._closed or self._agent is None:
                self._end()
                raise Closed("the client is closed")
            return self._agent

    def _open(self) -> Agent:
        rails = self.rails()
        if not rails.kind:
            raise Unavailable(rails.problem or "this process has no rails")
        if self._problem:
            raise Unavailable(self._problem)
        try:
            engine = self._opener(self._name, rails, self.options)
        except KVError as error:
            self._problem = f"no agent: {error}"
            log.warning("no rails agent", reason=self._problem)
            raise Unavailable(self._problem) from error
        return Agent(engine, LocalMemory(engine))

    def warm_up(self) -> None:
        """Begin to open the agent in the background: what it is made of takes a second to load the first time."""
        if self.rails().kind and self._agent is None:
            self.submit(self._warm)

    def _warm(self) -> None:
        with suppress(KVError):  # it is kept, and said to whoever asks for the agent
            self.opened()

    def submit(self, call: Callable[[], None]) -> bool:
        """Run it in the background; False when the client is closed."""
        try:
            self._threads.submit(call)
        except RuntimeError:
            return False
        return True

    # ------------------------------------------------------------------ memory

    def register(self, region: Region) -> None:
        """Known to the agent from now on, or from when it is opened on."""
        with self._regions_lock:
            self._regions[region.id] = region
        if (agent := self.agent) is not None:
            self._register(agent, region)

    def _register(self, agent: Agent, region: Region) -> None:
        if region.closed:
            return
        try:
            agent.memory.of(region)
        except Closed:  # meanwhile
            return
        except KVError as error:
            # Blocks in it go another way, and the read that would have named it says so.
            log.warning("memory not registered for rails", nbytes=region.nbytes, reason=str(error))

    def know(self, agent: Agent, region: Region, deadline: float) -> None:
        """``agent`` knows the region. Waits for its registration until ``deadline``; it goes on after that.

        Raises :class:`Unavailable` when it cannot be registered, :class:`Late`, :class:`Closed`.
        """
        region.check_open()
        if agent.memory.known(region):
            return
        with self._regions_lock:
            making = self._makings.get(region.id)
            if making is None:
                try:
                    making = self._registrar.submit(agent.memory.of, region)
                except RuntimeError:
                    raise Closed("the client is closed") from None
                self._makings[region.id] = making
                making.add_done_callback(lambda _: self._makings.pop(region.id, None))
        if not wait((making,), max(0.0, deadline - time.monotonic())).done:
            raise Late(f"the registration of {region.nbytes} bytes for rails takes longer than the call may")
        if making.cancelled():
            raise Closed("the client is closed")
        making.result()

    def forget(self, region: Region) -> None:
        with self._regions_lock:
            self._regions.pop(region.id, None)
        if (agent := self.agent) is not None:
            agent.memory.forget(region)

    # ------------------------------------------------------------------ life

    def problem(self) -> str:
        """Why there are none, or what is wrong with the agent's thread, or ""."""
        agent = self.agent
        return self._problem or (agent.engine.problem() if agent is not None else self.rails().problem)

    def health(self) -> dict[str, object]:
        """``kind``, ``problem``, and what the agent says of itself once it is open."""
        report: dict[str, object] = {"kind": self.rails().kind, "problem": self.problem(), "open": False}
        if (agent := self.agent) is not None:
            report |= {**agent.engine.health(), **agent.memory.health(), "open": True}
        return report

    def close(self) -> None:
        """End the agent; transfers that have not settled get a bounded time. Does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        self._closed = True
        for threads in (self._threads, self._registrar):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._lock.acquire(timeout=ENGINE_CLOSE_S):
            try:
                self._end()
            finally:
                self._lock.release()
        else:
            log.warning("an agent is being opened while its client closes: it ends when it is open")

    def _end(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.engine.close(ENGINE_CLOSE_S)
