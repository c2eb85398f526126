"""One socket, framed: buffered reads of header and message, gathered writes, raw bytes in place.

Used by both ends of every channel. Not thread-safe for reads; writes take the stream's own lock, so
that a progress frame never lands inside another frame.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from kvstrata.proto import wire
from kvstrata.proto.errors import ProtocolError, Unavailable

#: Buffers in one sendmsg or recvmsg_into (IOV_MAX on Linux).
IOVECS_MAX = 1024
#: Descriptors that may travel with one frame (SCM_MAX_FD is 253).
FDS_MAX = 128
READ_BUFFER_BYTES = 1 << 16
#: Bytes of one recvmsg_into, so that a caller can work on them while they are in cache.
RAW_STEP_BYTES = 4 << 20


_FDS_BYTES: Final = socket.CMSG_LEN(FDS_MAX * array.array("i").itemsize)

B = TypeVar("B")


class Silence(Exception):
    """Nothing arrived for the socket's silence bound. Internal: owners turn it into their own meaning."""


class Disconnected(Unavailable):
    """The stream ended or broke."""


class Silent(Unavailable):
    """The peer said nothing for the silence bound: dead, stopped or cut off."""


class Late(Unavailable):
    """The caller's deadline passed while the peer was still alive and at work."""


class Frame(NamedTuple):
    """A header and its message. Raw bytes, if any, are still in the stream."""

    kind: int
    request: int
    message: bytes
    raw_bytes: int


class FrameStream:
    """Frames over one connected stream socket.

    ``silence_s`` bounds how long one read or write may make no progress; it is the kernel's own
    timeout, so the fast path costs no extra call. ``passes_fds`` makes reads accept descriptors.
    """

    def __init__(self, sock: socket.socket, silence_s: float, *, passes_fds: bool = False) -> None:
        self.sock = sock
        self.send_lock = threading.Lock()
        self.fds: list[int] = []
        self.passes_fds = passes_fds
        self.raw_left = 0
        self.message_bytes_max = wire.MESSAGE_BYTES_MAX
        self._hurried_until: float | None = None
        self._buffer = bytearray(READ_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        sock.setblocking(True)
        self.set_silence(silence_s)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_silence(self, silence_s: float) -> None:
        whole = int(silence_s)
        value = struct.pack("@ll", whole, max(1, int((silence_s - whole) * 1e6)))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def hurry(self, until: float, message_bytes_max: int) -> None:
        """All that is read must have come by ``until`` (monotonic seconds), however it trickles, and is small."""
        self._hurried_until = until
        self.message_bytes_max = message_bytes_max

    def at_ease(self, silence_s: float) -> None:
        """The end of :meth:`hurry`."""
        self._hurried_until = None
        self.message_bytes_max = wire.MESSAGE_BYTES_MAX
        self.set_silence(silence_s)

    # ------------------------------------------------------------------ writing

    def send(
        self,
        kind: int,
        request: int,
        message: bytes = b"",
        raw: Sequence[memoryview] = (),
        fds: Sequence[int] = (),
    ) -> None:
        """Write one frame. Raises :class:`Unavailable` when the peer is gone or takes nothing."""
        raw_bytes = sum(view.nbytes for view in raw) if raw else 0
        head = wire.encode_header(kind, request, len(message), raw_bytes) + message
        try:
            with self.send_lock:
                if fds:
                    self._send_with_fds(head, fds)
                elif raw:
                    self._send_gathered([memoryview(head), *raw])
                elif (sent := self.sock.send(head)) < len(head):
                    self._send_rest(head, sent)
        except OSError as error:
            raise _lost(error) from error

    def send_if_idle(self, kind: int) -> None:
        """Write one empty frame, or nothing when another frame is on its way or there is no room."""
        if not self.send_lock.acquire(blocking=False):
            return
        try:
            head = wire.encode_header(kind, 0, 0)
            if self.sock.send(head, socket.MSG_DONTWAIT) < len(head):
                self.sock.shutdown(socket.SHUT_RDWR)  # half a frame went out: the stream cannot go on
        except BlockingIOError:
            return  # a reader that far behind needs no sign of life
        except OSError as error:
            raise _lost(error) from error
        finally:
            self.send_lock.release()

    def _send_rest(self, data: bytes, sent: int) -> None:
        view = memoryview(data)
        while sent < len(data):
            sent += self.sock.send(view[sent:])

    def _send_gathered(self, views: list[memoryview]) -> None:
        index, offset = 0, 0
        while index < len(views):
            batch = views[index : index + IOVECS_MAX]
            if offset:
                batch[0] = batch[0][offset:]
            sent = self.sock.sendmsg(batch)
            index, offset = advance(views, index, offset, sent)

    def _send_with_fds(self, head: bytes, fds: Sequence[int]) -> None:
        assert len(fds) <= FDS_MAX
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self._send_rest(head, self.sock.sendmsg([head], rights))

    # ------------------------------------------------------------------ reading

    def receive(self, deadline: float | None = None, *, within_s: float | None = None) -> Frame:
        """Read the next header and message; once begun it must be whole ``within_s`` later.

        Raises :class:`Silence` when nothing arrived within the silence bound, :class:`Unavailable`
        at end of stream or past ``deadline`` (monotonic seconds), :class:`ProtocolError` on garbage.
        """
        if self.raw_left:
            raise ProtocolError(f"{self.raw_left} raw bytes of the last frame were not read")
        while self._end - self._start < wire.HEADER_BYTES:
            self._fill(deadline)
            if deadline is None and within_s is not None and self._end - self._start < wire.HEADER_BYTES:
                deadline = time.monotonic() + within_s
        kind, request, message_bytes, raw_bytes = wire.decode_header(self._buffer, self._start)
        if message_bytes > self.message_bytes_max:
            raise ProtocolError(f"message of {message_bytes} bytes: the bound here is {self.message_bytes_max}")
        start = self._start = self._start + wire.HEADER_BYTES
        if start + message_bytes <= self._end:  # most often it came with its header
            self._start += message_bytes
            message = bytes(self._view[start : self._start])
        else:
            if deadline is None and within_s is not None:
                deadline = time.monotonic() + within_s
            message = self._take(message_bytes, deadline)
        self.raw_left = raw_bytes
        return tuple.__new__(Frame, (kind, request, message, raw_bytes))  # a fraction of a named tuple's own call

    def spin(self, spin_s: float) -> bool:
        """Poll for the first bytes of an answer for at most ``spin_s``; reads what is there. False: nothing was."""
        if self._end > self._start:
            return True
        until = time.perf_counter() + spin_s
        while True:
            try:
                self._start, self._end = 0, self.sock.recv_into(self._view, 0, socket.MSG_DONTWAIT)
                return True
            except BlockingIOError:
                if time.perf_counter() > until:
                    return False
            except OSError as error:
                raise _lost(error) from error

    def mid_frame(self) -> bool:
        """True when part of a frame has been read and the rest has not come."""
        return self._end > self._start

    def receive_raw(
        self,
        views: Sequence[memoryview],
        deadline: float | None = None,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """Fill ``views`` in order with the frame's raw bytes; ``filled(i)`` is called as each is full.

        The views' total length must not exceed the raw bytes left. Raises like :meth:`receive`.
        """
        total = sum([view.nbytes for view in views])
        if total > self.raw_left:
            raise ProtocolError(f"{total} raw bytes wanted, {self.raw_left} are in the frame")
        index, offset = 0, 0
        while index < len(views):
            got = self._raw_into(views, index, offset, deadline)
            self.raw_left -= got
            before = index
            index, offset = advance(views, index, offset, got)
            if filled is not None:
                for position in range(before, index):
                    filled(position)

    def skip_raw(self, deadline: float | None = None) -> None:
        """Read and forget the frame's remaining raw bytes."""
        scratch = memoryview(bytearray(min(self.raw_left, 1 << 20)))
        while self.raw_left:
            self.receive_raw([scratch[: min(self.raw_left, scratch.nbytes)]], deadline)

    def _raw_into(self, views: Sequence[memoryview], index: int, offset: int, deadline: float | None) -> int:
        buffered = self._end - self._start
        if buffered:
            first = views[index][offset:]
            count = min(buffered, first.nbytes)
            first[:count] = self._view[self._start : self._start + count]
            self._start += count
            return count
        batch: list[memoryview] = []
        room = RAW_STEP_BYTES
        for view in views[index : index + IOVECS_MAX]:
            piece = view[offset:] if offset and not batch else view
            batch.append(piece[:room] if piece.nbytes > room else piece)
            room -= piece.nbytes
            if room <= 0:
                break
        return self._read(self._recv_gathered, batch, deadline)

    def _recv_gathered(self, batch: list[memoryview]) -> int:
        return self.sock.recvmsg_into(batch)[0]

    def _take(self, count: int, deadline: float | None) -> bytes:
        buffered = self._end - self._start
        if count <= READ_BUFFER_BYTES:
            while self._end - self._start < count:
                self._fill(deadline)
            taken = bytes(self._view[self._start : self._start + count])
            self._start += count
            return taken
        whole = bytearray(count)
        view = memoryview(whole)
        view[:buffered] = self._view[self._start : self._end]
        self._start = self._end = 0
        done = buffered
        while done < count:
            done += self._read(self.sock.recv_into, view[done:], deadline)
        return bytes(whole)

    def _fill(self, deadline: float | None) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == READ_BUFFER_BYTES or self._start > READ_BUFFER_BYTES // 2:
            kept = self._end - self._start
            self._view[:kept] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, kept
        receive = self._recv_with_fds if self.passes_fds else self.sock.recv_into
        self._end += self._read(receive, self._view[self._end :] if self._end else self._view, deadline)

    def _recv_with_fds(self, room: memoryview) -> int:
        count, ancillary, _, _ = self.sock.recvmsg_into([room], _FDS_BYTES, socket.MSG_CMSG_CLOEXEC)
        if not ancillary:
            return count
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                rights = array.array("i")
                rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
                self.fds.extend(rights)
        if len(self.fds) > FDS_MAX:
            self.close_fds()
            raise ProtocolError(f"more than {FDS_MAX} descriptors came with one frame")
        return count

    def _read(self, read: Callable[[B], int], into: B, deadline: float | None) -> int:
        if self._hurried_until is not None:
            left = self._hurried_until - time.monotonic()
            if left <= 0:
                raise Late("it did not all come in time")
            self.set_silence(left)
        try:
            count = read(into)
        except BlockingIOError as error:
            raise Silence from error
        except OSError as error:
            raise _lost(error) from error
        if count == 0:
            raise Disconnected("the peer closed the connection")
        if deadline is not None and time.monotonic() > deadline:
            raise Late("the deadline passed while the answer was arriving")
        return count

    # ------------------------------------------------------------------ end

    def take_fds(self) -> list[int]:
        """Descriptors received so far; they belong to the caller now."""
        taken, self.fds = self.fds, []
        return taken

    def close_fds(self) -> None:
        """Close descriptors received and not taken."""
        for fd in self.take_fds():
            os.close(fd)

    def close(self) -> None:
        """Shut down and close; safe twice, and from another thread."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.close_fds()


def advance(views: Sequence[memoryview], index: int, offset: int, count: int) -> tuple[int, int]:
    """Move ``count`` bytes on from (index, offset) over ``views``; empty views are stepped over."""
    end = len(views)
    while index < end:
        left = views[index].nbytes - offset
        if count < left:
            return index, offset + count
        count -= left
        index, offset = index + 1, 0
    return index, 0


def _lost(error: OSError) -> Unavailable:
    if isinstance(error, BlockingIOError):
        return Silent("the peer takes no bytes")
    return Disconnected(f"the connection broke: {error.strerror or error}")
