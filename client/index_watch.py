"""Follows the directory of a pool: a thread that keeps an :class:`IndexMirror`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from kvstrata.client.admin import AdminClient, IndexStream
from kvstrata.client.index_mirror import IndexMirror, MirrorPrefix
from kvstrata.proto.errors import KVError
from kvstrata.proto.keys import Namespace
from kvstrata.transfer.loops import Loop

#: A stream is ended and gone on with after this, so that a master that is silent for ever is left.
STREAM_S: Final = 30.0
#: A master says where it is at least every five seconds.
SILENCE_S: Final = 15.0
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
        self._heard_at = time.monotonic()
        self._error = ""
        self._admin: AdminClient | None = None
        self._stream: IndexStream | None = None
        self._closed = False
        self._loop = Loop("index watch", RETRY_S, self._turn, bound_s=STREAM_S + SILENCE_S).start()

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
        return self._loop.problem()

    # ------------------------------------------------------------------ the loop

    def _turn(self) -> None:
        try:
            self._follow()
            self._error = ""
        except KVError as error:
            self._error = str(error)
            self._drop_admin()

    def _follow(self) -> None:
        while not self._closed:
            if self._admin is None:
                self._admin = self._connect()
            with self._lock:
                mirror = self._mirror
                epoch, sequence = (mirror.epoch, mirror.sequence) if mirror.resumable else (0, 0)
            self._stream = self._admin.watch_index(
                groups=self._groups, salts=self._salts, epoch=epoch, sequence=sequence, timeout_s=STREAM_S
            )
            if self._closed:
                self._stream.cancel()
            for message in self._stream:
                with self._lock:
                    self._mirror.apply(message)
                    self._heard_at = time.monotonic()
                    self._error = ""
                    self._lock.notify_all()
            return

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
        self._drop_admin()

    def __enter__(self) -> IndexWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
