"""Tokens on HTTP: an ASGI application that lets requests through to another one when they may pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata.proto.errors import Forbidden, Unauthenticated
from kvstrata.transfer.security.access import Access, Gate
from kvstrata.transfer.security.rights import EVERYTHING, Rights, Role

#: (method, first part of the path) -> what it needs.
HttpRules = Mapping[tuple[str, str], Access]
#: For requests that need nothing and have shown nothing.
NOBODY: Final = Rights("", Role.CLIENT)
_KEY: Final = "kvstrata_rights"


def rights_in(request: Request) -> Rights:
    """Of whoever asks; everything where tokens are off."""
    rights = request.scope.get(_KEY, EVERYTHING)
    assert isinstance(rights, Rights)
    return rights


class HttpGuard:
    """``rules`` are all that can be asked: what is not in them is not there, whatever ``app`` may serve.

    Who has shown nothing, or is refused, keeps no connection.
    """

    def __init__(self, app: ASGIApp, gate: Gate, rules: HttpRules) -> None:
        self._app = app
        self._gate = gate
        self._rules = rules
        self._parts = {part for _, part in rules}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        path = scope["path"]
        part = path if path.startswith("//") else path.removeprefix("/").partition("/")[0]
        answer = send
        send = _closing(send)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        access = self._rules.get((method, part))
        try:
            scope[_KEY] = self._rights(access, request)
        except Unauthenticated as error:
            headers = {"www-authenticate": 'Bearer realm="kvstrata"'}
            await JSONResponse({"error": str(error)}, 401, headers)(scope, receive, send)
            return
        except Forbidden as error:
            await JSONResponse({"error": str(error)}, 403)(scope, receive, send)
            return
        if scope[_KEY] is not NOBODY:
            send = answer
        if access is not None:
            await self._app(scope, receive, send)
        elif part in self._parts:
            allowed = ", ".join(sorted(name for name, at in self._rules if at == part))
            told = {"error": f"/{part} knows {allowed} only"}
            await JSONResponse(told, 405, {"allow": allowed})(scope, receive, send)
        else:
            await JSONResponse({"error": "there is nothing here"}, 404)(scope, receive, send)

    def _rights(self, access: Access | None, request: Request) -> Rights:
        shown = request.headers.get("authorization")
        names = tuple(request.scope.get("state", {}).get("certificate", ()))
        if access is None:
            return self._gate.holder(shown, names).rights
        if access.open and shown is None and not self._gate.knows(names):
            return NOBODY
        return self._gate.admit(access, shown, names, request)


def _closing(send: Send) -> Send:
    """As ``send``, and the connection ends with the answer."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return closing
