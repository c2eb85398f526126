"""A master's HTTP server: the application, behind tokens and TLS where those are on."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette

from kvstrata.master.access import ROUTES
from kvstrata.transfer.security.http_guard import HttpGuard
from kvstrata.transfer.security.opened import Security
from kvstrata.transfer.security.ticket_route import ticket_route
from kvstrata.transfer.security.tickets import TicketKeys
from kvstrata.transfer.web import WebServer


def serve_http(
    application: Starlette,
    address: str,
    security: Security,
    keys: Callable[[], TicketKeys] | None,
) -> WebServer:
    """Serves ``application``, and tickets if there are ``keys``. The caller starts it. Raises :class:`ConfigError` when
    the address cannot be bound."""
    gate = security.gate
    if gate is None:
        return WebServer(application, address, tls=security.tls)
    if keys is not None:
        application.router.routes.append(ticket_route(gate, keys))
    return WebServer(HttpGuard(application, gate, ROUTES), address, tls=security.tls)
