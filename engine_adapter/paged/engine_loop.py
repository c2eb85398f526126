"""An engine turned by a thread of its own: requests come from any thread, outputs go out on this one."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvstrata.engine_adapter.paged.engine import Engine
from kvstrata.engine_adapter.paged.outputs import RequestOutput
from kvstrata.engine_adapter.paged.request import Request, SamplingParams
from kvstrata.engine_adapter.paged.stats import EngineStats
from kvstrata.engine_adapter.paged.text.tokenizer import Tokenizer
from kvstrata.proto.errors import Busy, Closed, KVError, Unavailable
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

#: Orders (new requests, aborts, resets) that the engine's thread has not taken yet; more are refused (Busy).
INBOX_MAX: Final = 4096
#: A turn without work lasts so long at most.
IDLE_S: Final = 0.5
#: An idle engine takes a step so often all the same, to hear how its ranks and the pool are.
LISTEN_S: Final = 1.0
#: A step that takes longer than this counts as stuck.
STUCK_S: Final = 120.0
#: How long a caller of ``reset_prefix_cache`` waits for its turn.
RESET_S: Final = 30.0
#: What :meth:`EngineLoop.close` gives the step under way and the engine's own close, beyond its deadline.
CLOSE_S: Final = 30.0

OnOutput = Callable[[RequestOutput], None]


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    on_output: OnOutput


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(slots=True)
class _Reset:
    done: threading.Event
    external: bool = False
    worked: bool = False


_Order = _Submit | _Abort | _Reset


class EngineLoop:
    """Owns ``engine``, from now until :meth:`close`. All methods are thread-safe.

    An exception in the engine ends the loop: every request ends with ``finish_reason`` "error", later ones are
    refused (:class:`Unavailable`), and :meth:`health` says why.
    """

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_model_len = engine.max_model_len
        self.tokenizer: Tokenizer = engine.tokenizer
        self.kv_events = engine.kv_events
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._inbox: deque[_Order] = deque()
        self._state: Literal["open", "closing", "ended"] = "open"
        self._problem = ""
        self._drain_until: float = 0.0
        self._callbacks: dict[str, OnOutput] = {}
        self._stats = engine.stats()
        self._problems = engine.problems()
        self._beat = self._stepped = clock()
        self._ids = itertools.count()
        self._prefix = uuid.uuid4().hex[:8]
        self._thread = threading.Thread(target=self._run, name="kvstrata-engine", daemon=True)
        self._thread.start()

    # -- any thread

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        cache_salt: str = "",
        extra_keys: Sequence[str] = (),
        trace: str = "",
        request_id: str | None = None,
        on_output: OnOutput,
    ) -> str:
        """Queue a request and return its id. Its outputs go to ``on_output``, on the engine's thread, which must
        not block; the last one, and only it, has a ``finish_reason``.

        Raises :class:`InvalidArgument` for what no engine could serve, :class:`Busy` while the inbox is full,
        :class:`Unavailable` from an engine that has ended, :class:`Closed` after :meth:`close`. What only the
        engine's thread can tell (an id in use, a full queue, a length that does not fit) is an output with
        ``finish_reason`` "error".
        """
        request_id = request_id if request_id is not None else f"{self._prefix}-{next(self._ids)}"
        request = self._engine.make_request(
            request_id, prompt_token_ids, sampling, cache_salt=cache_salt, extra_keys=extra_keys, trace=trace
        )
        self._order(_Submit(request, on_output))
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request: its last output says "abort". Nothing for one that has ended, or never was."""
        with self._lock:  # never refused: it frees what others are refused for
            if self._state == "ended":
                return
            self._inbox.append(_Abort(request_id))
        self._engine.wake()

    def reset_prefix_cache(self, *, reset_external: bool = False) -> bool:
        """See :meth:`Engine.reset_prefix_cache`. Waits for the step under way."""
        order = _Reset(threading.Event(), reset_external)
        self._order(order)
        if not order.done.wait(RESET_S):
            raise Unavailable(f"the engine's step did not end within {RESET_S:.0f} s")
        return order.worked

    def stats(self) -> EngineStats:
        """As of the end of the last turn: what an output reported is in it."""
        return self._stats

    def health(self) -> dict[str, object]:
        """``healthy``: it serves; the ``problem`` if not; ``age_s`` since the loop last came round. ``problems`` are
        those of the connector's threads: the engine serves without the pool then."""
        age_s = self._clock() - self._beat
        problem = self._problem
        if not problem and self._state != "open":
            problem = "closed"
        elif not problem and not self._thread.is_alive():
            problem = "the engine's thread is dead"
        elif not problem and age_s > STUCK_S:
            problem = f"the engine's step has taken {age_s:.0f} s"
        stats = self._stats
        return {
            "healthy": not problem,
            "problem": problem,
            "problems": self._problems,
            "age_s": age_s,
            "running": stats.running,
            "waiting": stats.waiting,
            "loading": stats.loading,
        }

    def close(self, deadline_s: float = 0.0) -> None:
        """Refuse new requests, let those under way end within ``deadline_s`` seconds, abort the rest, and close
        the engine. Returns when its thread has ended, or is stuck in a step for ``CLOSE_S`` more; idempotent."""
        with self._lock:
            if self._state == "open":
                self._state = "closing"
                self._drain_until = self._clock() + deadline_s
        self._engine.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(deadline_s + CLOSE_S)
            if self._thread.is_alive():
                log.error("the engine's step does not end: its thread is left behind", age_s=self._clock() - self._beat)

    def _order(self, order: _Submit | _Reset) -> None:
        with self._lock:
            if self._problem:
                raise Unavailable(f"the engine has ended: {self._problem}")
            if self._state != "open":
                raise Closed("the engine is closed")
            if len(self._inbox) >= INBOX_MAX:
                raise Busy(f"{INBOX_MAX} orders wait for the engine: try again later")
            self._inbox.append(order)
        self._engine.wake()

    # -- the engine's thread

    def _run(self) -> None:
        try:
            while self._turn():
                self._beat = self._clock()
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"
            log.error("the engine has ended", exc_info=True)
        finally:
            self._wind_up()

    def _turn(self) -> bool:
        """Orders, then a step if there is work, else a wait. False: closed, and nothing is left to do."""
        for order in self._take_orders():
            self._obey(order)
        if self._state == "closing" and self._closed():
            return False
        now = self._clock()
        if self._engine.has_work or now - self._stepped >= LISTEN_S:
            self._stepped = now
            outputs = self._engine.step()
            self._stats, self._problems = self._engine.stats(), self._engine.problems()
            for output in outputs:
                self._deliver(output)
        self._engine.wait(self._patience_s())
        return True

    def _take_orders(self) -> list[_Order]:
        with self._lock:
            orders = list(self._inbox)
            self._inbox.clear()
        return orders

    def _obey(self, order: _Order) -> None:
        match order:
            case _Submit(request=request, on_output=on_output):
                self._enqueue(request, on_output)
            case _Abort(request_id=request_id):
                self._engine.abort(request_id)
            case _Reset():
                order.worked = self._engine.reset_prefix_cache(reset_external=order.external)
                order.done.set()

    def _enqueue(self, request: Request, on_output: OnOutput) -> None:
        if request.request_id in self._callbacks:
            self._tell(on_output, _error(request.request_id, f"request id {request.request_id!r} is in use"))
            return
        try:
            self._engine.enqueue(request)
        except KVError as error:
            self._tell(on_output, _error(request.request_id, str(error)))
            return
        self._callbacks[request.request_id] = on_output

    def _deliver(self, output: RequestOutput) -> None:
        last = output.finish_reason is not None
        on_output = self._callbacks.pop(output.request_id, None) if last else self._callbacks.get(output.request_id)
        if on_output is not None and not self._tell(on_output, output) and not last:
            self._callbacks.pop(output.request_id, None)
            self._engine.abort(output.request_id)

    def _tell(self, on_output: OnOutput, output: RequestOutput) -> bool:
        """A caller's callback that raises loses its own request, and nobody else's."""
        try:
            on_output(output)
        except Exception:
            log.error("a request's callback raised", request=output.request_id, exc_info=True)
            return False
        return True

    def _closed(self) -> bool:
        """Whether nothing is under way any more. Past the deadline, requests are aborted and stores left behind."""
        if self._clock() < self._drain_until:
            return not self._engine.has_work
        for request_id in self._engine.scheduler.request_ids:
            self._engine.abort(request_id)
        return not self._engine.scheduler.has_unfinished

    def _patience_s(self) -> float:
        if self._state != "closing":
            return IDLE_S
        return min(IDLE_S, max(0.0, self._drain_until - self._clock()))

    def _wind_up(self) -> None:
        """Nobody is left waiting: whatever ended the loop, every request and every order gets its end."""
        with self._lock:
            self._state = "ended"
            orders = list(self._inbox)
            self._inbox.clear()
        waiting = list(self._callbacks.items())
        self._callbacks.clear()
        for order in orders:
            if isinstance(order, _Submit):
                waiting.append((order.request.request_id, order.on_output))
            elif isinstance(order, _Reset):
                order.done.set()
        for request_id, on_output in waiting:
            self._tell(on_output, _error(request_id, self._problem or "the engine is closed"))
        try:
            self._engine.close()
        except Exception as error:
            self._problem = self._problem or f"close: {type(error).__name__}: {error}"
            log.error("the engine did not close", exc_info=True)


def _error(request_id: str, text: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, new_token_ids=[], finish_reason="error", error=text)
