"""Waiting for one-sided transfers, and what is kept for those that nobody waits for any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata.proto.errors import Busy, KVError, Unavailable
from kvstrata.proto.wire import Kind
from kvstrata.transfer.channel import Channel
from kvstrata.transfer.frames import Late
from kvstrata.transfer.rdma.engine import Job, JobState
from kvstrata.transfer.regions import Region

#: A transfer that has not settled for so long has its node asked for a sign of life, and again after each answer. With
#: the silence that a connection bears, a stopped node is given up within 250 ms.
PING_AFTER_S: Final = 0.02
#: Transfers with a node that is gone end by themselves: the agent is told of it a little after the channel is.
GONE_S: Final = 0.15


def wait_for(job: Job, channel: Channel, deadline: float) -> None:
    """Until it is DONE; until ``deadline``, or its node is silent, at most.

    Raises :class:`Late`, or :class:`Unavailable` when it FAILED or its node is gone. It may be unsettled then.
    """
    while not job.wait(min(deadline, time.monotonic() + PING_AFTER_S)):
        if time.monotonic() >= deadline:
            raise Late("the transfer had not settled when the deadline passed")
        try:
            channel.call(Kind.PING, b"", deadline)
        except Late:
            continue
        except Busy:
            time.sleep(PING_AFTER_S)  # connections are in use, so the node is being waited for by others
        except KVError:
            if not job.wait(min(deadline, time.monotonic() + GONE_S)):
                raise
    if job.state is not JobState.DONE:
        raise Unavailable(f"the transfer failed: {job.problem or 'it was dropped'}")


class Unsettled:
    """A :class:`kvstrata.transfer.base.Landing`: jobs that were given up. ``region``, which they use, stays alive."""

    def __init__(self, jobs: Sequence[Job], region: Region) -> None:
        self.region = region
        self._jobs = tuple(jobs)
        self._left = len(jobs)
        self._lock = threading.Lock()
        self._end: Callable[[], None] = _nothing

    def then(self, end: Callable[[], None]) -> None:
        """``end`` runs when the last has settled. To be called once."""
        self._end = end
        for job in self._jobs:
            job.then(self._one_settled)

    def settled(self) -> bool:
        return all(job.settled() for job in self._jobs)

    def wait(self, deadline: float) -> bool:
        return all(job.wait(deadline) for job in self._jobs)

    def _one_settled(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._end()


def _nothing() -> None:
    """Nobody is to be told."""
