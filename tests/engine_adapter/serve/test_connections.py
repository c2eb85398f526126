"""Clients that leave, that do not read, that come too late: what they asked for ends in the engine too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from kvstrata.engine_adapter.serve.errors import ApiError
from kvstrata.engine_adapter.serve.stream import EventStream

Message = dict[str, Any]


class Connection:
    """An ASGI connection: what the server sends is kept, and the client can go away or stop reading."""

    def __init__(self, path: str, body: dict[str, object]) -> None:
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("engine", 80),
            "client": ("test", 1),
        }
        self._body = json.dumps(body).encode()
        self._asked = False
        self.gone = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.sent: list[Message] = []
        self.something = asyncio.Event()

    async def receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reading.wait()
        self.sent.append(message)
        self.something.set()

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def until(condition: Callable[[], bool]) -> None:
    """Let tasks and threads get on; every round is a turn of the event loop."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def served(bench: Any, body: dict[str, object], client: Callable[[Connection], Awaitable[None]]) -> Connection:
    """Run one request with ``client`` beside it; the request must end by itself after that."""

    async def both() -> Connection:
        connection = Connection("/v1/completions", {"prompt": "hi", "max_tokens": 100, **body})
        serving = asyncio.ensure_future(bench.app(connection.scope, connection.receive, connection.send))
        await client(connection)
        async with asyncio.timeout(5):
            await serving
        return connection

    return asyncio.run(both())


def test_a_client_that_leaves_before_the_answer_aborts_it(bench: Any) -> None:
    bench.engine.hold = True

    for stream in (False, True):
        count = len(bench.engine.aborted)

        async def leave(connection: Connection) -> None:
            await until(lambda: bench.service.num_active == 1)
            connection.gone.set()

        connection = served(bench, {"stream": stream}, leave)
        assert bench.engine.aborted[count:] == list(bench.engine.callbacks)[-1:]
        assert bench.service.num_active == 0 and connection.sent[0]["status"] == 499


def test_a_client_that_leaves_in_the_middle_of_a_stream_aborts_it(bench: Any) -> None:
    bench.engine.hold = True

    async def read_one_and_leave(connection: Connection) -> None:
        await until(lambda: bool(bench.engine.callbacks))
        bench.engine.give(next(iter(bench.engine.callbacks)), [65], None)
        await until(lambda: "A" in connection.text)
        connection.gone.set()

    connection = served(bench, {"stream": True}, read_one_and_leave)
    assert bench.engine.aborted == list(bench.engine.callbacks) and bench.service.num_active == 0
    assert connection.sent[0]["status"] == 200 and "[DONE]" not in connection.text


def test_outputs_after_the_client_left_go_nowhere(bench: Any) -> None:
    bench.engine.hold = True

    async def leave(connection: Connection) -> None:
        await until(lambda: bench.service.num_active == 1)
        connection.gone.set()

    served(bench, {"stream": True}, leave)
    request_id = next(iter(bench.engine.callbacks))
    bench.engine.give(request_id, [65], "abort")  # from a thread whose event loop is closed by now


def test_a_batch_that_is_left_is_aborted_whole(bench: Any) -> None:
    bench.engine.hold = True

    async def leave(connection: Connection) -> None:
        await until(lambda: len(bench.engine.callbacks) == 3)
        connection.gone.set()

    served(bench, {"prompt": ["a", "b", "c"]}, leave)
    assert sorted(bench.engine.aborted) == sorted(bench.engine.callbacks)


def test_a_client_that_does_not_read_is_dropped() -> None:
    closed = []

    async def events() -> Any:
        try:
            while True:
                await asyncio.sleep(0)
                yield b"{}"
        finally:
            closed.append(True)

    async def serve() -> Connection:
        connection = Connection("/", {})
        await connection.receive()
        stream = events()
        response = EventStream(await anext(stream), stream, {}, stall_s=0.01)
        serving = asyncio.ensure_future(response(connection.scope, connection.receive, connection.send))
        await until(lambda: len(connection.sent) > 3)
        connection.reading.clear()
        async with asyncio.timeout(5):
            await serving
        return connection

    connection = asyncio.run(serve())
    assert closed == [True] and "[DONE]" not in connection.text


def test_a_client_may_leave_at_any_turn_of_the_event_loop() -> None:
    """An engine that always has something to say: only the client's leaving ends the stream."""

    over = False

    async def events() -> Any:
        while not over:
            await asyncio.sleep(0)
            yield b"{}"

    async def leave_after(turns: int) -> None:
        connection = Connection("/", {})
        await connection.receive()
        stream = events()
        response = EventStream(await anext(stream), stream, {})
        serving = asyncio.ensure_future(response(connection.scope, connection.receive, connection.send))
        for _ in range(turns):
            await asyncio.sleep(0)
        connection.gone.set()
        for _ in range(50):
            await asyncio.sleep(0)
        noticed.append(serving.done())
        nonlocal over
        over = True  # so that a test that fails ends, too

    noticed: list[bool] = []
    for turns in range(40):
        over = False
        asyncio.run(leave_after(turns))
    assert all(noticed), f"left after {noticed.index(False)} turns, and nobody noticed"


def test_an_error_after_the_first_event_is_the_last_one() -> None:
    async def events() -> Any:
        yield b'{"a":1}'
        raise ApiError(503, "gone")

    async def serve() -> str:
        connection = Connection("/", {})
        await connection.receive()
        stream = events()
        await EventStream(await anext(stream), stream, {})(connection.scope, connection.receive, connection.send)
        return connection.text

    first, error, done, end = asyncio.run(serve()).split("\n\n")
    assert first == 'data: {"a":1}' and '"gone"' in error and (done, end) == ("data: [DONE]", "")


def test_a_stop_ends_what_runs_with_what_there_is(bench: Any) -> None:
    bench.engine.hold = True

    async def stop(connection: Connection) -> None:
        await until(lambda: bool(bench.engine.callbacks))
        request_id = next(iter(bench.engine.callbacks))
        bench.engine.give(request_id, list(b"par"), None)
        bench.service.drain()
        assert not await asyncio.to_thread(bench.service.wait_idle, 0.0)
        bench.service.abort_all()
        assert bench.engine.aborted == [request_id]
        bench.engine.give(request_id, [], "abort")
        assert await asyncio.to_thread(bench.service.wait_idle, 5.0)

    choice = json.loads(served(bench, {}, stop).text)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("par", "abort")
