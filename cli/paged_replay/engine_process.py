"""A process with one paged engine: prompts come over a pipe, first tokens and results go back.

One thread reads the pipe, the main thread steps the engine. The process ends when it is told to finish, or when
the coordinator goes away.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque

import msgspec

from kvstrata.cli.paged_replay.messages import KINDS, Begin, FirstToken, Prompt, Ready, Served, Summary, pack, unpack
from kvstrata.cli.paged_replay.stopwatches import TimedEngine
from kvstrata.cli.replay.messages import Finish, Message, Pipe
from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.outputs import RequestOutput
from kvstrata.engine_adapter.paged.request import SamplingParams
from kvstrata.proto.errors import KVError, ProtocolError, Unavailable
from kvstrata.proto.logs import get_logger

BEGIN_S = 30.0
SEND_S = 60.0
#: An engine may have nothing to do for as long as the others' requests take.
COORDINATOR_SILENCE_S = 4 * 3600.0
WAIT_S = 0.5
#: After the last request: time for stores under way to end.
DRAIN_S = 10.0

_log = get_logger(__name__)


class Inbox:
    """What the coordinator sent, with the moment it came; filled by a thread of its own."""

    def __init__(self, pipe: Pipe, engine: TimedEngine) -> None:
        self._pipe = pipe
        self._engine = engine
        self._messages: deque[tuple[float, Message]] = deque()
        self.gone = ""  #: why nothing comes any more
        self._thread = threading.Thread(target=self._read, name="replay-inbox", daemon=True)
        self._thread.start()

    def take(self) -> list[tuple[float, Message]]:
        taken = []
        while self._messages:
            taken.append(self._messages.popleft())
        return taken

    def _read(self) -> None:
        try:
            while True:
                message = self._pipe.receive_any(COORDINATOR_SILENCE_S)
                self._messages.append((time.monotonic(), message))
                self._engine.wake()
                if isinstance(message, Finish):
                    return
        except (Unavailable, ProtocolError) as error:
            self.gone = str(error)
            self._engine.wake()


class Server:
    """Steps the engine for what comes in."""

    def __init__(self, engine: TimedEngine, begin: Begin, inbox: Inbox, out: Pipe) -> None:
        self._engine = engine
        self._spans = engine.spans
        self._begin = begin
        self._inbox = inbox
        self._out = out
        self._outputs: dict[str, list[int]] = {}
        self._finish_by: float | None = None

    def run(self) -> int:
        """Serve until told to finish (0), or the coordinator is gone (1)."""
        while not self._done():
            for at, message in self._inbox.take():
                self._take(at, message)
            if self._engine.has_work:
                for output in self._engine.step():
                    self._deliver(output)
            self._engine.wait(WAIT_S)
            if self._inbox.gone:
                _log.warning("coordinator_gone", engine=self._begin.engine, error=self._inbox.gone)
                return 1
        self._out.send(Summary(self._begin.engine, counters(self._engine.stats())), SEND_S)
        return 0

    def _done(self) -> bool:
        if self._finish_by is None:
            return False
        return not self._engine.has_work or time.monotonic() > self._finish_by

    def _take(self, at: float, message: Message) -> None:
        if isinstance(message, Finish):
            self._finish_by = time.monotonic() + DRAIN_S
            return
        if not isinstance(message, Prompt):
            raise ProtocolError(f"expected a prompt, got {message.kind!r}")
        request_id = str(message.index)
        self._spans.received(request_id, at)
        self._outputs[request_id] = []
        try:
            self._engine.add_request(
                request_id,
                unpack(message.body),
                SamplingParams(max_tokens=message.max_tokens, ignore_eos=True),
                cache_salt=self._begin.salt,
            )
        except KVError as error:
            self._end(request_id, RequestOutput(request_id=request_id, new_token_ids=[], error=str(error)))

    def _deliver(self, output: RequestOutput) -> None:
        tokens = self._outputs[output.request_id]
        if output.new_token_ids and not tokens:
            self._spans.first_token(output.request_id)
            self._out.send(FirstToken(int(output.request_id)), SEND_S)
        tokens.extend(output.new_token_ids)
        if output.finish_reason is not None:
            self._end(output.request_id, output)

    def _end(self, request_id: str, output: RequestOutput) -> None:
        span = self._spans.take(request_id)
        ended_well = output.finish_reason in ("stop", "length")
        first_token_at = self._spans.clock() if span.first_token_at is None else span.first_token_at
        self._out.send(
            Served(
                index=int(request_id),
                prompt_tokens=output.num_prompt_tokens,
                local_tokens=output.num_local_cached_tokens,
                external_tokens=output.num_external_cached_tokens,
                lookup_s=span.lookup_s,
                load_s=span.load_s,
                compute_s=span.compute_s,
                engine_s=first_token_at - span.received_at,
                error="" if ended_well else output.error or f"it ended with {output.finish_reason!r}",
                body=pack(self._outputs.pop(request_id)),
            ),
            SEND_S,
        )


def counters(stats: object) -> dict[str, float]:
    """Numbers of nested records by dotted name."""
    found: dict[str, float] = {}
    plain = msgspec.to_builtins(stats)
    pending = [("", plain)]
    while pending:
        prefix, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{prefix}.{name}" if prefix else str(name), inner) for name, inner in value.items()]
        elif isinstance(value, int | float):
            found[prefix] = float(value)
    return found


def run(stream: socket.socket) -> int:
    """Serve the coordinator at the other end of ``stream``; returns the exit code."""
    # Two ends of one socket: the reading thread's deadline must not become the sender's.
    pipe, out = Pipe(stream, KINDS), Pipe(stream.dup(), KINDS)
    begin = pipe.receive(Begin, BEGIN_S)
    try:
        engine = TimedEngine.create(msgspec.convert(begin.config, EngineConfig))
    except (KVError, msgspec.ValidationError) as error:
        out.send(Ready(begin.engine, error=f"{type(error).__name__}: {error}"), SEND_S)
        return 1
    assert isinstance(engine, TimedEngine)  # create() makes what it is called on
    try:
        kv = engine.executor.kv_config
        out.send(
            Ready(
                begin.engine,
                num_blocks=kv.num_blocks,
                block_bytes=kv.block_bytes,
                aligned_tokens=kv.aligned_tokens,
                max_model_len=engine.executor.max_model_len,
            ),
            SEND_S,
        )
        return Server(engine, begin, Inbox(pipe, engine), out).run()
    except Unavailable as error:
        _log.warning("coordinator_gone", engine=begin.engine, error=str(error))
        return 1
    finally:
        engine.close()


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    sys.exit(run(socket.socket(fileno=int(sys.argv[1]))))
