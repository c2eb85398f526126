"""A master's HTTP server: the application, and tickets where those are on."""

from __future__ import annotations

from starlette.applications import Starlette

from kvstrata.master.access import ROUTES
from kvstrata.transfer.security.guarded_web import guarded_server
from kvstrata.transfer.security.opened import Security
from kvstrata.transfer.security.ticket_route import ticket_route
from kvstrata.transfer.web import WebServer


def serve_http(application: Starlette, address: str, security: Security) -> WebServer:
    """Serves ``application``, and tickets to who shows a token. The caller starts it. Raises :class:`ConfigError` when
    the address cannot be bound."""
    if security.gate is not None and security.key_file is not None:
        application.router.routes.append(ticket_route(security.gate, security.key_file.keys))
    return guarded_server(application, address, security, ROUTES)
