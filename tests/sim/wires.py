"""What simulated connections carry: a request and its answer, numbered, as the framed channel has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvstrata.proto.errors import KVError
from kvstrata.transfer.security.rights import ANY_PEER
from tests.sim.clock import Broken, Future, Process
from tests.sim.network import End

SILENCE_S = 0.25
PROGRESS_S = 0.1


@dataclass(frozen=True, slots=True)
class Hello:
    """Who answers. ``memory`` is what a client on the same host maps."""

    name: str
    incarnation: int = 0
    memory: Any = None


@dataclass(frozen=True, slots=True)
class Ask:
    """``numbers`` name the writes that a request is of: for the story, not for the server."""

    request: int
    kind: Any
    message: bytes
    raw: bytes = b""
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """``at`` is when the server did it, in the story's time."""

    request: int
    message: bytes
    raw: bytes = b""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    request: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The server is alive and at work."""


class Conn:
    """The asking side of a connection, after its hello."""

    def __init__(self, process: Process, end: End, hello: Hello) -> None:
        self.hello = hello
        self._process = process
        self._end = end
        self._asked: dict[int, Future] = {}
        self._last = 0
        self._heard_at = process.clock()
        end.said, end.closed = self._said, self._closed

    @property
    def open(self) -> bool:
        return self._end.wire.open

    def tell(self, kind: Any, message: bytes) -> None:
        """One way."""
        self._end.say(Ask(0, kind, message))

    def ask(self, kind: Any, message: bytes, seconds: float, raw: bytes = b"", numbers: tuple[int, ...] = ()) -> Future:
        """The future has an :class:`Answer`; it breaks with a failure's code, "silent", "late" or "lost"."""
        self._last += 1
        number, over = self._last, Future()
        self._asked[number] = over
        asked_at = self._process.clock()
        self._end.say(Ask(number, kind, message, raw, numbers))
        if not self.open:
            over.fail("lost")

        def look() -> None:
            if over.done:
                return
            now = self._process.clock()
            if now - asked_at >= seconds:
                self.close("late")
            elif now - max(asked_at, self._heard_at) >= SILENCE_S:
                self.close("silent")
            else:
                self._process.after(0.05, look)

        self._process.after(min(seconds, SILENCE_S), look)
        return over

    def close(self, why: str) -> None:
        self._end.close(why)
        self._closed(why)

    def _said(self, message: Any) -> None:
        self._heard_at = self._process.clock()
        if isinstance(message, Answer | Failure):
            over = self._asked.pop(message.request, None)
            if over is None:
                return
            if isinstance(message, Failure):
                over.fail(f"{message.code}: {message.text}")
            else:
                over.resolve(message)

    def _closed(self, why: str) -> None:
        waiting, self._asked = self._asked, {}
        for over in waiting.values():
            over.fail(why if why in ("late", "silent") else "lost")


def greeted(process: Process, end: End) -> Future:
    """The future has a :class:`Conn` once the server has said hello."""
    over = Future()

    def said(hello: Any) -> None:
        over.resolve(Conn(process, end, hello))

    end.said = said
    end.closed = over.fail
    process.after(SILENCE_S, lambda: over.fail("silent"))
    return over


class Session:
    """All connections of one client at one server; handlers see it as ``connection.owner``."""

    def __init__(self, key: bytes, name: str, boot_id: str, role: str = "client") -> None:
        self.key = key
        self.hello = SimpleNamespace(boot_id=boot_id, name=name, session=key, role=role)
        self.over = False
        self.connections: set[Any] = set()


class FakeConnection:
    """What a shipped handler needs of a server's connection. ``raw`` are the request's bytes."""

    local = False

    def __init__(self, owner: Session, raw: bytes = b"") -> None:
        self.owner = self.session = owner
        self.rights = ANY_PEER
        self._raw = raw

    def receive_raw(
        self, views: list[memoryview], deadline: Any = None, filled: Callable[[int], None] | None = None
    ) -> None:
        start = 0
        for index, view in enumerate(views):
            view[:] = self._raw[start : start + len(view)]
            start += len(view)
            if filled is not None:
                filled(index)

    def progress(self) -> None:
        """Told by the simulated server itself."""


def failure(request: int, error: KVError) -> Failure:
    return Failure(request, type(error).__name__, str(error))


def code_of(error: Broken) -> str:
    return str(error).split(":")[0]
