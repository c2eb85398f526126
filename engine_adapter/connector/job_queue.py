"""Accepted jobs that wait for a thread, oldest first, within bounds."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from kvstrata.engine_adapter.connector.base import GroupBlocks, Job
from kvstrata.engine_adapter.connector.outbox import OpenJob

JOBS_MAX: Final = 4096
#: A store is continued with at most so many more of the same request, found among so many behind it.
MERGE_MAX: Final = 64


class JobQueue:
    """Thread-safe. ``blocks_max`` bounds the blocks of all waiting jobs."""

    def __init__(self, blocks_max: int, jobs_max: int = JOBS_MAX) -> None:
        self._blocks_max = blocks_max
        self._jobs_max = jobs_max
        self._lock = threading.Lock()
        self._jobs: deque[OpenJob] = deque()
        self._blocks = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._jobs)

    def offer(self, opened: OpenJob) -> bool:
        """False when a bound would be passed, or after :meth:`drain`: the caller ends the job."""
        blocks = len(opened.status)
        with self._lock:
            full = len(self._jobs) >= self._jobs_max or self._blocks + blocks > self._blocks_max
            if full or self._closed:
                return False
            self._jobs.append(opened)
            self._blocks += blocks
        return True

    def take(self) -> OpenJob | None:
        with self._lock:
            return self._pop() if self._jobs else None

    def take_chain(self, hash_bytes: int) -> list[OpenJob]:
        """The oldest job, and those behind it that continue its request's chain block for block."""
        with self._lock:
            if not self._jobs:
                return []
            chain = [self._pop()]
            for following in list(self._jobs)[:MERGE_MAX]:
                before = chain[-1]
                if before.generation == following.generation and continues(before.job, following.job, hash_bytes):
                    self._jobs.remove(following)
                    self._blocks -= len(following.status)
                    chain.append(following)
            return chain

    def drain(self) -> list[OpenJob]:
        """Close, and return what was left."""
        with self._lock:
            left, self._jobs, self._blocks, self._closed = list(self._jobs), deque(), 0, True
        return left

    def check(self) -> None:
        """Assert every structural invariant."""
        with self._lock:
            assert self._blocks == sum(len(opened.status) for opened in self._jobs) <= self._blocks_max
            assert len(self._jobs) <= self._jobs_max

    def _pop(self) -> OpenJob:
        opened = self._jobs.popleft()
        self._blocks -= len(opened.status)
        return opened


def continues(before: Job, after: Job, hash_bytes: int) -> bool:
    """Whether ``after``'s blocks follow ``before``'s in the same chains, group by group, for the same request."""
    return (
        before.request_id == after.request_id
        and before.cache_salt == after.cache_salt
        and before.trace == after.trace
        and len(before.groups) == len(after.groups)
        and all(_follows(a, b, hash_bytes) for a, b in zip(before.groups, after.groups, strict=True))
    )


def _follows(before: GroupBlocks, after: GroupBlocks, hash_bytes: int) -> bool:
    return (
        before.group == after.group
        and before.first_index + len(before.block_ids) == after.first_index
        and before.hashes[-hash_bytes:] == after.parent
    )
