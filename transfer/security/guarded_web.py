"""A daemon's HTTP server: its application, behind tokens and TLS where those are on."""

from __future__ import annotations

from starlette.types import ASGIApp

from kvstrata.transfer.security.http_guard import HttpGuard, HttpRules
from kvstrata.transfer.security.opened import Security
from kvstrata.transfer.web import WebServer


def guarded_server(app: ASGIApp, address: str, security: Security, rules: HttpRules) -> WebServer:
    """Binds now, so that a port in use is known at once; the caller starts it. With tokens on, ``rules`` are all that
    can be asked. Raises :class:`ConfigError` when the address cannot be bound."""
    guarded = app if security.gate is None else HttpGuard(app, security.gate, rules)
    return WebServer(guarded, address, tls=security.tls)
