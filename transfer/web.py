"""An ASGI application on one address, in a thread of its own: how every daemon serves HTTP.

The socket is bound before the thread starts, so that a port in use is the caller's error and not a
dead thread, and port 0 has its real number at once.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from kvstrata.proto.errors import ConfigError, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.identity import parse_address
from kvstrata.transfer.security.tls import ServerTls
from kvstrata.transfer.server import bind_advice
from kvstrata.transfer.web_protocol import BoundedLoop, bounded_protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    App = Callable[[Any, Any, Any], Awaitable[None]]

log = get_logger(__name__)

START_S: Final = 5.0
CONCURRENT_REQUESTS_MAX: Final = 128
BACKLOG: Final = 128
KEEP_ALIVE_S: Final = 5
#: Requests in progress at a stop get this long before their connections are cut.
GRACE_S: Final = 1


class WebServer:
    """Serves ``app`` on ``HOST:PORT``; ``address`` is the real one (port 0 picks a free port).

    Raises :class:`ConfigError` when it cannot bind. The application must not block its event loop: hand
    slow work to a thread. Past ``requests_max`` connections or requests the answer is 503. With ``tls``
    nobody is served without it.
    """

    def __init__(
        self, app: App, address: str, *, requests_max: int = CONCURRENT_REQUESTS_MAX, tls: ServerTls | None = None
    ) -> None:
        self._socket = _bound(address)
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=bounded_protocol(max(1, requests_max // 2)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=requests_max,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        config.load()
        config.ssl = None if tls is None else tls.reloading_context()
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="kvstrata-http", daemon=True)

    def start(self) -> WebServer:
        """Serve; returns once requests are answered. Raises :class:`Unavailable` after ``START_S``."""
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self._socket.close()
                raise Unavailable(f"the HTTP server on {self.address} did not start: see the log")
            time.sleep(0.005)
        return self

    def problem(self) -> str:
        """Why HTTP is not served although it should be, or an empty string."""
        dead = not self._thread.is_alive() and not self._server.should_exit
        return "http: its thread is dead" if dead else ""

    def stop(self, timeout_s: float = 2.0) -> None:
        """End within ``timeout_s``: requests in progress get what is left of it. Safe twice."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(0.5)
        self._socket.close()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=BoundedLoop) as runner:
                runner.run(self._server.serve(sockets=[self._socket]))
        except Exception:  # uvicorn's own, not a request's: health must show that HTTP is gone
            log.error("http server failed", address=self.address, exc_info=True)


def _bound(address: str) -> socket.socket:
    family, where = parse_address(address)
    if family == socket.AF_UNIX:
        raise ConfigError(f"{address}: HTTP is served on HOST:PORT")
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(bind_advice(address, error)) from error
    return listener
