"""The engine: what callers use, and the thread that owns the agent. See ``engine`` for the contract.

A read that finds nothing else under way is posted by its caller; everything else is the owner's, one at a time.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from kvstrata.proto.errors import Closed, InvalidArgument, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.memory import HOST, Memory
from kvstrata.transfer.rdma.agent import Agent, AgentError
from kvstrata.transfer.rdma.driver import Driver
from kvstrata.transfer.rdma.engine import REGISTER_S, NotInTime, Pieces
from kvstrata.transfer.rdma.envelope import seal
from kvstrata.transfer.rdma.jobs import RailJob, RailRegistration
from kvstrata.transfer.rdma.ledger import Freed, Held, Ledger
from kvstrata.transfer.rdma.nixl import new_agent
from kvstrata.transfer.rdma.pace import IDLE_S, Pace
from kvstrata.transfer.rdma.rails import RailOptions, Rails

log = get_logger(__name__)
T = TypeVar("T")

#: To make an agent.
OPEN_S: Final = 30.0
CALL_S: Final = 10.0
#: A turn may hold one copy within a host, which is as long as its bytes take.
STUCK_S: Final = 10.0
#: A read that failed for part of its pieces: the others are done with by then.
LINGER_S: Final = 0.020
#: A caller that has posted its own read looks for its end for so long before it leaves that to the owner.
SPIN_S: Final = 50e-6


class Owner:
    """See :class:`kvstrata.transfer.rdma.engine.RailEngine`."""

    def __init__(self, name: str, kind: str, backend: str, make: Callable[[], Agent], linger_s: float = 0.0) -> None:
        """``make`` runs in the owner thread. ``linger_s``: how long a failed transfer is held in use."""
        self.name = name
        self.backend = backend
        self.kind = kind
        self._linger_s = linger_s
        self._pid = os.getpid()
        self._lock = threading.RLock()  # entered by one thread once: see _mid_step()
        #: Held by whoever uses the driver: the owner, or a caller whose read can begin at once.
        self._hands = threading.Lock()
        self._ledger = Ledger()
        self._more = self._crowded = False
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._pace = Pace(time.monotonic())
        self._closing = self._abandoned = False
        self._ended = threading.Event()
        self._beat = time.monotonic()
        self._bound_s = OPEN_S
        self._last_error = ""
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make, opened), name="kvstrata-rails", daemon=True)
        self._thread.start()
        try:
            opened.result(OPEN_S)
        except FutureTimeout:
            self._closing = True
            raise Unavailable(f"the {backend} agent did not start within {OPEN_S:.0f} s: look at UCX_TLS") from None
        atexit.register(self._abandon)

    # ---------------------------------------------------------------- callers

    def metadata(self) -> bytes:
        return self._ask(lambda driver: seal(driver.agent.version, driver.agent.metadata()))

    def connection(self) -> bytes:
        return self._ask(lambda driver: seal(driver.agent.version, driver.agent.connection()))

    def register(
        self, address: int, nbytes: int, memory: Memory = HOST, *, within_s: float | None = None
    ) -> RailRegistration:
        if address <= 0 or nbytes <= 0:
            raise InvalidArgument(f"memory at {address} of {nbytes} bytes cannot be registered")
        held, sealed = self._ask(
            lambda driver: driver.register(address, nbytes, memory),
            REGISTER_S if within_s is None else within_s,
            lambda late: self._close_memory(late[0]),
        )
        return RailRegistration(held, sealed, self._close_memory)

    def add_peer(self, metadata: bytes) -> str:
        return self._ask(lambda driver: driver.add_peer(bytes(metadata)))

    def remove_peer(self, name: str) -> None:
        if self._mid_step():  # a client was collected as garbage just here
            self._calls.put(lambda: self.remove_peer(name))
        elif self._here():
            with self._lock:
                freed = self._ledger.leave(name)
            self._later(freed)

    def read(self, peer: str, local: Pieces, remote: Pieces) -> RailJob:
        if len(local.length) != len(remote.length) or (local.length != remote.length).any():
            raise InvalidArgument("the pieces of a read do not pair up")
        self._must_be_open()
        job = RailJob(peer, local, remote, self._drop)
        with self._lock:
            problem = "the agent is closed" if self._closing else self._ledger.submit(job)
            alone = self._ledger.waiting == 1
        if problem:
            return job.refuse(problem)
        if not (alone and self._begun_here(job)):
            self._calls.put(_look)
        return job

    def _begun_here(self, job: RailJob) -> bool:
        """Post it in the caller's thread, if nobody else is at it: two threads less to wake. Whether it has settled."""
        if threading.current_thread() is threading.main_thread():
            return False  # a signal's handler may raise there, at any line
        on_host = job.local.memory.on_host and job.remote.memory.on_host  # else it takes a device's context
        if not on_host or not self._hands.acquire(blocking=False):
            return False
        try:
            self._step(self._driver, until=time.monotonic() + SPIN_S, job=job)
        finally:
            self._hands.release()
        return job.settled()

    def stir(self) -> None:
        self._pace.stir(time.monotonic())

    def health(self) -> dict[str, object]:
        if self._pid != os.getpid():
            return {"kind": self.kind, "problem": "of the process that this one was forked from"}
        with self._lock:
            ledger = self._ledger
            return {
                "kind": self.kind,
                "backend": self.backend,
                "agent": self.name,
                "age_seconds": round(time.monotonic() - self._beat, 3),
                "peers": len(ledger.peers),
                "registered_bytes": sum(held.nbytes for held in ledger.memory),
                "waiting": ledger.waiting,
                "unsettled": ledger.unsettled,
                "done": self._driver.done,
                "failed": self._driver.failed,
                "bytes_read": self._driver.bytes,
                "problem": self.problem(),
            }

    def problem(self) -> str:
        if self._closing:
            return ""
        if not self._thread.is_alive():
            return "rails: the agent's thread is dead"
        if (age_s := time.monotonic() - self._beat) > self._bound_s:
            return f"rails: no turn for {age_s:.1f} s (bound {self._bound_s:.1f} s)"
        return f"rails: {self._last_error}" if self._last_error else ""

    def close(self, timeout_s: float = 2.0) -> None:
        """Returns within ``timeout_s`` and a moment. Transfers that have not settled by then keep the agent and its
        memory alive until they have, or the process ends."""
        if self._pid != os.getpid():
            return
        if self._mid_step():
            self._calls.put(lambda: self.close(0.0))
            return
        with self._lock:
            self._closing = True
            freed = self._ledger.drop_waiting()
        self._later(freed)
        self._calls.put(_look)
        if self._thread is threading.current_thread():
            return
        if self._ended.wait(timeout_s):
            self._thread.join(timeout_s)
            return
        with self._lock:
            left = self._ledger.posted
        log.warning(
            "transfers have not settled: the agent and its memory stay until they have",
            agent=self.name,
            left=left,
        )

    # ---------------------------------------------------------------- between callers and owner

    def _must_be_open(self) -> None:
        if self._pid != os.getpid():
            raise Closed("one-sided transfers do not survive a fork: open a client in the child")
        if self._closing:
            raise Closed("the agent is closed")

    def _mid_step(self) -> bool:
        """Whether this thread is in the middle of a step: a finalizer runs wherever an allocation was."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # what threading.Condition asks too

    def _here(self) -> bool:
        return self._pid == os.getpid() and not self._ended.is_set()

    def _ask(
        self, work: Callable[[Driver], T], within_s: float = CALL_S, late: Callable[[T], object] | None = None
    ) -> T:
        """Have the owner do it. ``late`` undoes what is done after nobody waits any more."""
        self._must_be_open()
        answer: Future[T] = Future()
        self._calls.put(lambda: self._answer(answer, work, within_s))
        if self._ended.is_set():
            self._do_calls()
        try:
            return answer.result(within_s)
        except FutureTimeout:
            if not answer.cancel() and late is not None:
                answer.add_done_callback(lambda done: late(done.result()) if done.exception() is None else None)
            raise NotInTime(f"the agent's thread did not answer within {within_s:.0f} s") from None

    def _answer(self, answer: Future[T], work: Callable[[Driver], T], within_s: float) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        if self._ended.is_set():
            answer.set_exception(Closed("the agent is closed"))
            return
        self._bound_s = max(within_s, STUCK_S)
        try:
            answer.set_result(work(self._driver))
        except AgentError as error:
            answer.set_exception(Unavailable(str(error)))
        except Exception as error:  # noqa: BLE001  raised where it was asked for
            answer.set_exception(error)
        finally:
            self._bound_s = STUCK_S

    def _later(self, freed: Freed) -> None:
        """Freed by a caller: it ends transfers itself, the owner does the rest."""
        if freed.memory or freed.peer:
            self._calls.put(lambda: None if self._ended.is_set() else self._driver.free(freed))
        for transfer in freed.settled:
            assert isinstance(transfer, RailJob)
            transfer.ended()

    def _drop(self, job: RailJob) -> None:
        if self._mid_step():
            self._calls.put(lambda: self._drop(job))
        elif self._here():
            with self._lock:
                freed = self._ledger.give_up(job)
            self._later(freed)

    def _close_memory(self, held: Held) -> None:
        if self._mid_step():
            self._calls.put(lambda: self._close_memory(held))
        elif self._here():
            with self._lock:
                freed = self._ledger.close(held)
            self._later(freed)

    # ---------------------------------------------------------------- the owner thread

    def _run(self, make: Callable[[], Agent], opened: Future[None]) -> None:
        try:
            driver = Driver(self.name, make(), self._ledger, self._lock, self._pace, self._linger_s)
        except BaseException as error:  # noqa: BLE001  raised in the thread that opens
            self._ended.set()
            opened.set_exception(error)
            return
        self._driver = driver
        self._bound_s = STUCK_S
        opened.set_result(None)
        while not self._finished():
            self._turn(driver)
        self._end(driver)

    def _finished(self) -> bool:
        return self._abandoned or (self._closing and not self._ledger.unsettled)

    def _turn(self, driver: Driver) -> None:
        call = self._wait(driver)
        # Nobody has called, and a caller is at it: what is in hand is what that one looks after.
        self._crowded = not self._hands.acquire(blocking=call is not None)
        if not self._crowded:
            try:
                well = self._step(driver, call)
            finally:
                self._hands.release()
            if not well:
                time.sleep(IDLE_S)
        self._beat = time.monotonic()

    def _step(
        self,
        driver: Driver,
        call: Callable[[], None] | None = None,
        *,
        until: float = 0.0,
        job: RailJob | None = None,
    ) -> bool:
        """Do what is to be done now; again and again until ``job`` has settled, or ``until``. Never raises: an owner
        that ends leaves memory in use for ever. False when it went wrong."""
        try:
            if call is not None:
                call()
            if job is None:
                self._do_calls()
            self._more = driver.post(time.monotonic())
            driver.poll(time.monotonic())
            while job is not None and not job.settled() and time.monotonic() < until:
                driver.poll(time.monotonic())
            self._last_error = ""
        except Exception as error:
            if not self._last_error:
                log.error("the owner of one-sided transfers: a turn failed", agent=self.name, exc_info=True)
            self._last_error = f"{type(error).__name__}: {error}"
        return not self._last_error

    def _wait(self, driver: Driver) -> Callable[[], None] | None:
        """Until a call, or for as long as the pace allows; the call."""
        nap_s = self._pace.nap_s(time.monotonic(), posted=driver.busy and not self._crowded)
        try:
            return self._calls.get_nowait() if self._more and not self._crowded else self._calls.get(timeout=nap_s)
        except Empty:
            return None

    def _do_calls(self) -> None:
        """All that are there."""
        try:
            while True:
                self._calls.get_nowait()()
        except Empty:
            return

    def _end(self, driver: Driver) -> None:
        try:
            if not self._abandoned:
                with self._hands:
                    driver.agent.close()
        except Exception:
            log.error("the agent could not be closed", agent=self.name, exc_info=True)
        finally:
            atexit.unregister(self._abandon)
            self._ended.set()
            self._do_calls()  # they are answered that it is closed

    def _abandon(self) -> None:
        """The process ends: so does the thread, before the interpreter goes. The agent is left to the kernel."""
        if self._here():
            self._abandoned = True
            self._calls.put(_look)
            self._ended.wait(1.0)


def _look() -> None:
    """A call that only wakes: there is a transfer to post, or an end to see to."""


def open_engine(name: str, rails: Rails, options: RailOptions | None = None) -> Owner:
    """An engine over ``rails``. ``name``: for people; the agent's own is another one each time.

    Raises :class:`ConfigError` without rails, :class:`Unavailable` when the agent cannot be made. Takes some 50 ms.
    """
    options = options or RailOptions()
    unique = f"{name}-{secrets.token_hex(6)}"
    linger_s = LINGER_S if rails.kind == "rdma" else 0.0
    return Owner(unique, rails.kind, options.backend, partial(new_agent, unique, rails, options), linger_s)
