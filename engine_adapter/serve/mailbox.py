"""Outputs from the engine's thread to one coroutine."""

from __future__ import annotations

import asyncio
import threading
import time

import msgspec

from kvstrata.engine_adapter.paged.outputs import RequestOutput


class Mail(msgspec.Struct, frozen=True):
    """One output of the prompt with this index; ``at_s``: monotonic seconds when the engine gave it."""

    index: int
    output: RequestOutput
    at_s: float


class Mailbox:
    """Any thread puts, one coroutine takes everything that is there. Make it in the coroutine's event loop.

    Bounded by what was asked for: a request gives no more outputs than ``max_tokens``.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._mail: list[Mail] = []
        self._some = asyncio.Event()
        self._closed = False

    def put(self, index: int, output: RequestOutput) -> None:
        with self._lock:
            if self._closed:
                return
            self._mail.append(Mail(index, output, time.monotonic()))
            if len(self._mail) > 1:
                return  # the coroutine has been told and has not taken yet
            # Under the lock: after close() returns, nothing speaks to an event loop that may be gone.
            self._loop.call_soon_threadsafe(self._some.set)

    async def take(self) -> list[Mail]:
        """Wait until there is something; everything so far, in order."""
        await self._some.wait()
        with self._lock:
            mail, self._mail = self._mail, []
            self._some.clear()
        return mail

    def close(self) -> None:
        """What comes from now on is dropped: nobody is there to read it."""
        with self._lock:
            self._closed = True
            self._mail.clear()
