"""A master's HTTP server: the application, behind tokens and TLS where those are on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.routing import Route

from kvstrata.master.access import ROUTES
from kvstrata.transfer.security.http_guard import HttpGuard
from kvstrata.transfer.security.opened import Security
from kvstrata.transfer.security.ticket_route import ticket_route
from kvstrata.transfer.security.tickets import TicketKeys
from kvstrata.transfer.web import WebServer


def serve_http(
    application: Callable[[Sequence[Route]], Starlette],
    address: str,
    security: Security,
    keys: Callable[[], TicketKeys] | None,
) -> WebServer:
    """``application`` is given the routes that security adds. ``keys`` None: no tickets are issued. The caller starts
    it. Raises :class:`ConfigError` when the address cannot be bound."""
    gate = security.gate
    if gate is None:
        return WebServer(application(()), address, tls=security.tls)
    app = application([ticket_route(gate, keys)] if keys is not None else [])
    return WebServer(HttpGuard(app, gate, ROUTES), address, tls=security.tls)
