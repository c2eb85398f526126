"""HTTP of the status page: ``/`` with its two files, ``/status.json`` and ``/events.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvstrata.master.status.document import SCHEMA, StatusDocument
from kvstrata.master.status.events import EVENTS_MAX, Events

_STATIC: Final = Path(__file__).parent / "static"
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/sections.js": ("sections.js", "text/javascript; charset=utf-8"),
    "/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
#: What may be had without a token, where tokens are on: files that hold nothing of the pool.
PUBLIC: Final = frozenset(_FILES)
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


def routes(document: StatusDocument, events: Events) -> list[Route]:
    """To be served below any prefix: the page names its files and its data by relative addresses."""

    async def status(_: Request) -> Response:
        return _json(await run_in_threadpool(document.encoded))

    async def recent(request: Request) -> Response:
        asked = request.query_params.get("since", "0")
        if not (asked.isascii() and asked.isdigit() and len(asked) < 20):
            text = json.dumps({"error": "since is the sequence number of the last event seen, a whole number"})
            return _json(text.encode(), 400)
        since = int(asked)
        # A number that is ahead of ours is of another start of the master: the reader begins anew.
        found = events.since(since if since <= events.seq else 0)
        body = {
            "schema": SCHEMA,
            "seq": events.seq,
            "oldest": events.oldest(),
            "bound": EVENTS_MAX,
            "events": [event.plain() for event in found],
        }
        return _json(json.dumps(body).encode("ascii"))

    files = [Route(path, _file(*found), methods=["GET"]) for path, found in _FILES.items()]
    return [*files, Route("/status.json", status), Route("/events.json", recent)]


def _json(body: bytes, code: int = 200) -> Response:
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(body, code, headers, "application/json")


def _file(name: str, kind: str) -> Endpoint:
    body = (_STATIC / name).read_bytes()

    async def serve(_: Request) -> Response:
        return Response(body, 200, _HEADERS, kind)

    return serve
