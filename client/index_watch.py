"""Follows the directory of a pool: a thread that keeps an :class:`IndexMirror`, and one that ends silent streams."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from kvstrata.client.admin import AdminClient, IndexStream
from kvstrata.client.index_mirror import IndexMirror, MirrorPrefix
from kvstrata.proto.errors import KVError, Unavailable
from kvstrata.proto.keys import Namespace
from kvstrata.transfer.loops import Loop

#: A stream that is silent for so long is ended, and another one begun. It has no other end: a first snapshot takes as
#: long as it takes. A master says where it is at least every five seconds.
SILENCE_S: Final = 15.0
#: How often that is looked at.
LOOK_S: Final = 1.0
RETRY_S: Final = 1.0


class IndexWatch:
    """A mirror of the pool's directory, kept up to date until :meth:`close`.

    ``groups`` and ``salts`` are patterns (``*``, ``?``); none: all that the token may see. ``connect`` opens an admin
    client, and is called again after each failure. Thread-safe.
    """

    def __init__(
        self, connect: Callable[[], AdminClient], *, groups: Sequence[str] = (), salts: Sequence[str] = ()
    ) -> None:
        self._connect = connect
        self._groups, self._salts = tuple(groups), tuple(salts)
        self._mirror = IndexMirror()
        self._lock = threading.Condition()
        self._heard_at = self._stream_heard_at = time.monotonic()
        self._error = ""
        self._admin: AdminClient | None = None
        self._stream: IndexStream | None = None
        self._closed = False
        self._resets_when_live = 0
        # A turn is a whole stream, which has no bound: its silence has, and another loop ends it.
        self._loop = Loop("index watch", RETRY_S, self._turn, bound_s=math.inf).start()
        self._watchdog = Loop("index silence", LOOK_S, self._end_silent).start()

    # ------------------------------------------------------------------ questions

    def prefix(self, namespace: Namespace, salt: str, hashes: bytes) -> MirrorPrefix:
        """See :meth:`IndexMirror.prefix`: as of the last message. Nothing, until the first snapshot is here."""
        with self._lock:
            return self._mirror.prefix(namespace, salt, hashes)

    def read(self, question: Callable[[IndexMirror], object]) -> object:
        """Ask the mirror something under the lock; keep nothing of it."""
        with self._lock:
            return question(self._mirror)

    def wait_live(self, timeout_s: float) -> bool:
        """Wait until the first snapshot is complete; False when it is not in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self._mirror.live, timeout_s)

    def age_s(self) -> float:
        """Seconds since the last message."""
        return time.monotonic() - self._heard_at

    def problem(self) -> str:
        """Why the mirror may be behind; "" when nothing is known against it."""
        if self._error:
            return self._error
        if self.age_s() > SILENCE_S:
            return f"the master has said nothing for {self.age_s():.0f} s"
        with self._lock:
            begun = self._mirror.resets - self._resets_when_live
        if begun > 1:
            return (
                f"the snapshot was begun {begun} times and never came to its end: this process is too slow for the "
                "pool's changes, or its way to the master breaks. Ask for fewer groups or salts"
            )
        return self._loop.problem() or self._watchdog.problem()

    # ------------------------------------------------------------------ the loop

    def _turn(self) -> None:
        try:
            self._follow()
            self._error = ""
        except KVError as error:
            self._error = str(error)
            self._drop_admin()

    def _follow(self) -> None:
        """One stream, from where the mirror is to its end."""
        if self._closed:
            return
        if self._admin is None:
            self._admin = self._connect()
        with self._lock:
            mirror = self._mirror
            epoch, sequence = (mirror.epoch, mirror.sequence) if mirror.resumable else (0, 0)
        stream = self._admin.watch_index(
            groups=self._groups, salts=self._salts, epoch=epoch, sequence=sequence, timeout_s=None
        )
        self._stream_heard_at, self._stream = time.monotonic(), stream
        if self._closed:
            stream.cancel()
        try:
            for message in stream:
                with self._lock:
                    self._mirror.apply(message)
                    if self._mirror.resumable:
                        self._resets_when_live = self._mirror.resets
                    self._heard_at = self._stream_heard_at = time.monotonic()
                    self._error = ""
                    self._lock.notify_all()
        finally:
            self._stream = None
        if not self._closed:
            raise Unavailable(f"the stream of the master's index ended, or was silent for {SILENCE_S:.0f} s")

    def _end_silent(self) -> None:
        stream = self._stream
        if stream is not None and time.monotonic() - self._stream_heard_at > SILENCE_S:
            stream.cancel()

    def _drop_admin(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()

    def close(self) -> None:
        """End the thread; bounded, safe twice. What was known can still be asked."""
        self._closed = True
        stream = self._stream
        if stream is not None:
            stream.cancel()
        self._loop.stop(5.0)
        self._watchdog.stop(1.0)
        self._drop_admin()

    def __enter__(self) -> IndexWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
