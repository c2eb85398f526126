"""The owner of a process's NIXL agent: one thread that posts, polls and ends every one-sided transfer.

::

    callers -- read() --> queue --> owner thread: post, poll --> Job ends --> callers wake
                                    (idle: it only answers other agents' first contact)

A posted transfer cannot be recalled. A caller that stops waiting leaves its :class:`Job` behind; the memory on both
ends is in use until the job has settled, which for a stopped peer is when it goes on or dies. Nothing is unmapped or
deregistered under a job that has not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import Unavailable
from kvstrata.transfer.memory import HOST, Memory

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """``address``, ``length``: i64[n] each, all in one kind of memory."""

    address: Int64s
    length: Int64s
    memory: Memory = HOST


class JobState(Enum):
    WAITING = "waiting"  #: not posted yet: it can still be dropped
    POSTED = "posted"  #: bytes may move at any time
    DONE = "done"
    FAILED = "failed"  #: no byte moves any more; the peer is gone, or not reached: remove it and add it again
    DROPPED = "dropped"  #: it was never posted


class Job(Protocol):
    """A transfer. Satisfies :class:`kvstrata.transfer.base.Landing`."""

    state: JobState
    problem: str  #: why it FAILED

    def settled(self) -> bool:
        """True once it is DONE, FAILED or DROPPED."""

    def wait(self, deadline: float) -> bool:
        """Wait until then, or until ``deadline`` (monotonic seconds); :meth:`settled`."""

    def give_up(self) -> bool:
        """The caller waits no longer. A job that was not posted is dropped; :meth:`settled`."""

    def then(self, call: Callable[[], None]) -> None:
        """``call`` runs once it has settled: now, or in the owner thread. It must be quick and must not raise."""


#: To register memory: a device pins every page of it.
REGISTER_S: Final = 120.0


class NotInTime(Unavailable):
    """The owner did not get to it: it has refused nothing."""


class Registration(Protocol):
    """Memory that the agent knows. ``metadata``: what another agent needs to reach it."""

    address: int
    nbytes: int
    memory: Memory
    metadata: bytes

    def close(self) -> None:
        """Deregister, once no job names it any more. Returns at once. Safe twice."""


class RailEngine(Protocol):
    """What node and client use of an agent. Thread-safe. Every call is quick but for :meth:`close`."""

    name: str  #: of the agent: another one in each incarnation
    backend: str
    kind: str  #: as :class:`kvstrata.transfer.rdma.rails.Rails`

    def metadata(self) -> bytes:
        """All that another agent needs to reach this one and everything it has registered."""

    def connection(self) -> bytes:
        """The same, without the memory."""

    def register(
        self, address: int, nbytes: int, memory: Memory = HOST, *, within_s: float | None = None
    ) -> Registration:
        """Raises :class:`Unavailable` with what to do (memlock, ...) when the memory cannot be registered,
        :class:`NotInTime` when that is not known ``within_s``, by default :data:`REGISTER_S`."""

    def add_peer(self, metadata: bytes) -> str:
        """Its agent's name; once more adds to what is known of it. Raises :class:`InvalidArgument` for garbage,
        :class:`VersionMismatch` for another NIXL, :class:`Unavailable` when it cannot be reached."""

    def remove_peer(self, name: str) -> None:
        """Forget an agent. Jobs with it that were posted are left to settle. Safe twice."""

    def read(self, peer: str, local: Pieces, remote: Pieces) -> Job:
        """Copy piece i of ``remote``, in the peer's address space, to piece i of ``local``. Lengths are equal in pairs.

        ``local`` lies in registered memory. Never raises for the peer's sake: the job FAILS.
        """

    def stir(self) -> None:
        """A peer is about to need this agent's attention: look more often for a while."""

    def health(self) -> dict[str, object]:
        """Plain values for JSON: ``kind``, ``age_seconds``, ``peers``, ``registered_bytes``, ``unsettled``, ..."""

    def problem(self) -> str:
        """What is wrong with the owner thread, or ""."""

    def close(self, timeout_s: float = 2.0) -> None:
        """End: waiting jobs are dropped, posted ones get ``timeout_s`` to settle."""
