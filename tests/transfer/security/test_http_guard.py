"""The guard of HTTP: what is not in its rules is not there, and who shows a certificate needs no token."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvstrata.proto import channel_pb2 as pb
from kvstrata.transfer.security.access import Access, Gate
from kvstrata.transfer.security.http_guard import HttpGuard, rights_in
from kvstrata.transfer.security.rights import Role
from kvstrata.transfer.security.ticket_route import Paces, ticket_route
from kvstrata.transfer.security.tickets import TicketKeys
from kvstrata.transfer.security.tokens import TokenFile, digest, new_token

KEYS = TicketKeys({"a": os.urandom(32)}, "a")
RULES = {
    ("GET", ""): Access(None, open=True),
    ("GET", "who"): Access(Role.READ),
    ("POST", "ticket"): Access(None),
}


@pytest.fixture
def token() -> str:
    return new_token()


@pytest.fixture
def gate(tmp_path: Path, token: str) -> Gate:
    rows = [
        {"name": "reader", "sha256": digest(token), "role": "read"},
        {"name": "certified", "certificate": "somebody", "role": "read"},
    ]
    (tmp_path / "tokens").write_text(yaml.safe_dump(rows))
    return Gate(TokenFile(tmp_path / "tokens"))


def ask(app: Any, method: str, path: str, token: str = "", names: tuple[str, ...] = ()) -> httpx.Response:
    """One request, by somebody whose certificate has these common names."""

    async def certified(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {"certificate": names}}, receive, send)

    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(certified), base_url="http://x") as client:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            return await client.request(method, path, headers=headers)

    return asyncio.run(asked())


def guarded(gate: Gate, paces: Paces | None = None) -> HttpGuard:
    def who(request: Request) -> PlainTextResponse:
        return PlainTextResponse(rights_in(request).subject)

    routes = [Route(path, who) for path in ("/", "/who", "/secret")]
    return HttpGuard(Starlette(routes=[*routes, ticket_route(gate, lambda: KEYS, paces)]), gate, RULES)


def test_who_asks_is_known_by_token_or_certificate(gate: Gate, token: str) -> None:
    app = guarded(gate)
    assert ask(app, "GET", "/who", token).text == "reader"
    assert ask(app, "GET", "/who", names=("somebody",)).text == "certified"
    assert ask(app, "GET", "/who", token, ("somebody",)).text == "reader"
    assert ask(app, "GET", "/who", new_token(), ("somebody",)).status_code == 401
    assert ask(app, "GET", "/who", names=("nobody",)).status_code == 401
    assert ask(app, "GET", "/", names=("nobody",)).status_code == 200
    assert ask(app, "GET", "/", names=("somebody",)).text == "certified"
    assert ask(app, "GET", "/").text == ""
    assert ask(app, "GET", "/", new_token()).status_code == 401


def test_who_has_shown_nothing_that_is_good_keeps_no_connection(gate: Gate, token: str) -> None:
    app = guarded(gate)
    for path, shown in (("/", ""), ("/who", ""), ("/who", new_token()), ("/secret", "")):
        assert ask(app, "GET", path, shown).headers["connection"] == "close"
    assert ask(app, "DELETE", "/ticket").headers["connection"] == "close"
    assert "connection" not in ask(app, "GET", "/who", token).headers
    assert "connection" not in ask(app, "GET", "/", names=("somebody",)).headers


def test_a_route_that_the_application_has_and_the_rules_do_not_is_not_there(gate: Gate, token: str) -> None:
    app = guarded(gate)
    assert ask(app, "GET", "/secret", token).status_code == 404
    assert ask(app, "DELETE", "/who", token).status_code == 405
    assert ask(app, "OPTIONS", "/who").status_code == 401


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_what_is_not_http_does_not_get_to_the_application(gate: Gate, token: str, kind: str) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was asked")

    async def nobody(*_: Any) -> Any:
        raise AssertionError("there is nothing to be said or heard")

    scope = {"type": kind, "path": "/who", "headers": [(b"authorization", f"Bearer {token}".encode())]}
    asyncio.run(HttpGuard(application, gate, RULES)(scope, nobody, nobody))


def test_tickets_are_not_given_without_end(gate: Gate, token: str) -> None:
    app = guarded(gate, Paces(per_s=1e-3, burst=2))
    answers = [ask(app, "POST", "/ticket", token) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert pb.TicketClaims.FromString(pb.Ticket.FromString(answers[0].content).claims).subject == "reader"
    assert answers[2].headers["retry-after"] == "1" and "keep the one" in answers[2].json()["error"]
    assert gate.refused()["throttled"] == 2
