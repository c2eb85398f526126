"""``kvstrata serve`` as a process: ready line, signals, an end that lets answers finish."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.engine import Engine
from kvstrata.engine_adapter.paged.engine_loop import EngineLoop
from kvstrata.engine_adapter.serve.app import AppOptions, serve_app
from kvstrata.engine_adapter.serve.metrics import ServeMetrics
from kvstrata.engine_adapter.serve.served_model import ServedModel
from kvstrata.engine_adapter.serve.service import Service
from kvstrata.proto.errors import ConfigError
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.security.checks import check_pair
from kvstrata.transfer.security.tls import ServerTls
from kvstrata.transfer.traces import BY_ENVIRONMENT, TraceOptions, open_traces
from kvstrata.transfer.web import WebServer

log = get_logger(__name__)

CONNECTIONS_MAX: Final = 4096
#: An aborted request's client has its answer within this.
ABORT_S: Final = 2.0
ENGINE_CLOSE_S: Final = 10.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """``model_name``: what clients call the model. ``grace_s``: how long answers may go on after SIGTERM. With
    ``tls_cert`` and ``tls_key``, files in PEM, HTTP is served by TLS alone."""

    engine: EngineConfig
    listen: str
    model_name: str
    api_key: str = ""
    allow_reset: bool = False
    ignore_traceparent: bool = False
    grace_s: float = 10.0
    traces: TraceOptions = BY_ENVIRONMENT
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def validated(self) -> ServeConfig:
        if not self.model_name:
            raise ConfigError("the served model's name is empty: leave --served-model-name out, or name it")
        check_pair(self.tls_cert, self.tls_key)
        return self


class _LateApp:
    """Stands for the application while the engine starts: the port is taken, and refused if in use, before that."""

    app: Starlette | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None, "served before the engine was there"
        await self.app(scope, receive, send)


class _Stop:
    """SIGTERM and SIGINT as an event. A second one does not hurry a stop: it is bounded."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._received = 0
        self._before = [signal.signal(number, self._on_signal) for number in _SIGNALS]

    def wait(self) -> str:
        """The signal's name, once there is one."""
        self._asked.wait()
        return signal.Signals(self._received).name

    def restore(self) -> None:
        for number, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._received = number
        self._asked.set()


def run(config: ServeConfig, on_ready: Callable[[dict[str, Any]], None]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Call from the main thread.

    ``on_ready`` gets the ready line's fields once requests are answered, with or without a pool in reach. Raises
    :class:`ConfigError` and :class:`InvalidArgument` when it cannot start. An engine that dies leaves the server
    up, answering 503, for whoever watches ``/health``.
    """
    config.validated()
    with contextlib.ExitStack() as stack:
        stop = _Stop()
        stack.callback(stop.restore)
        front = _LateApp()
        tls = None
        if config.tls_cert is not None and config.tls_key is not None:
            tls = ServerTls(config.tls_cert, config.tls_key)
        web = WebServer(front, config.listen, requests_max=CONNECTIONS_MAX, tls=tls)
        stack.callback(web.stop)
        _trace(config, stack)
        loop = EngineLoop(Engine.create(config.engine))
        stack.callback(loop.close, ENGINE_CLOSE_S)
        stack.callback(web.stop)  # runs first: nothing is submitted to an engine that closes
        _serve(config, loop, front, web, on_ready, stop)
    return 0


def _trace(config: ServeConfig, stack: contextlib.ExitStack) -> None:
    """Spans of the pool's client in this process; ranks that are processes of their own send none."""
    traces = open_traces(config.traces.validated(), "kvstrata-engine", config.engine.name or config.model_name)
    if traces is not None:
        loops = Loops()
        stack.callback(loops.stop)
        traces.start(loops)
        stack.callback(traces.stop)


def _serve(
    config: ServeConfig,
    loop: EngineLoop,
    front: _LateApp,
    web: WebServer,
    on_ready: Callable[[dict[str, Any]], None],
    stop: _Stop,
) -> None:
    model = ServedModel(
        name=config.model_name,
        max_model_len=loop.max_model_len,
        tokenizer=loop.tokenizer,
        created=int(time.time()),
    )
    service = Service(loop, model, ServeMetrics(model.name, loop.stats), config.engine.step.max_waiting)
    options = AppOptions(config.api_key, config.allow_reset, config.ignore_traceparent)
    front.app = serve_app(service, options)
    web.start()
    on_ready(_facts(config, model, web) | loop.kv_events)
    log.info("engine stops", signal=stop.wait(), in_progress=service.num_active)
    # Still listening, so that a load balancer reads /readyz and clients a 503 with its reason.
    service.drain()
    if not service.wait_idle(config.grace_s):
        log.warning("answers cut", requests=service.num_active, after_s=config.grace_s)
        service.abort_all()
        service.wait_idle(ABORT_S)


def _facts(config: ServeConfig, model: ServedModel, web: WebServer) -> dict[str, Any]:
    return {
        "event": "ready",
        "role": "engine",
        "http": web.address,
        "model": model.name,
        "max_model_len": model.max_model_len,
        "pool": config.engine.pool.masters,
        "pid": os.getpid(),
    }
