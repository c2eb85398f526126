"""``POST /ticket``: a ticket for the channel, for a token or a certificate."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvstrata.transfer.security.access import Gate
from kvstrata.transfer.security.http_guard import rights_in
from kvstrata.transfer.security.rates import Account, Bounds
from kvstrata.transfer.security.tickets import TicketKeys, issue

#: Of one address. Each process behind it needs one in five minutes.
TICKETS_S: Final = 10.0
BURST: Final = 200
ADDRESSES_MAX: Final = 4096
PROTOBUF: Final = "application/x-protobuf"


class Paces:
    """How fast each address asks, of the last ``ADDRESSES_MAX`` that did. Time comes in, in monotonic seconds."""

    def __init__(self, per_s: float = TICKETS_S, burst: int = BURST) -> None:
        self._bounds = Bounds(requests_s=per_s, burst=burst)
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def take(self, address: str, now: float) -> bool:
        """False when it asked for too much."""
        account = self._accounts.pop(address, None) or Account(self._bounds, now)
        self._accounts[address] = account
        if len(self._accounts) > ADDRESSES_MAX:
            self._accounts.popitem(last=False)
        return account.take(now)


def ticket_route(gate: Gate, keys: Callable[[], TicketKeys], paces: Paces | None = None) -> Route:
    """A ticket with the rights of whoever asks; the guard in front has found out who that is."""
    bounds = paces or Paces()

    async def ticket(request: Request) -> Response:
        address = request.client.host if request.client is not None else ""
        if not bounds.take(address, time.monotonic()):
            gate.count("throttled")
            text = {"error": f"more than {TICKETS_S:g} tickets a second from {address}: keep the one that you got"}
            return JSONResponse(text, 429, {"retry-after": "1"})
        body = issue(keys(), rights_in(request), time.time()).SerializeToString()
        return Response(body, 200, {"cache-control": "no-store"}, PROTOBUF)

    return Route("/ticket", ticket, methods=["POST"])
