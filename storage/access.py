"""What each HTTP route of a node needs, where tokens are on."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from kvstrata.transfer.security.access import Access, touch_salts
from kvstrata.transfer.security.http_guard import HttpRules
from kvstrata.transfer.security.rights import Rights, Role


def _tenants(rights: Rights, request: Request) -> None:
    for salt in request.query_params.getlist("salt") or (None,):
        touch_salts(rights, salt)


#: By method and the first part of the path. One that is not here is not served.
ROUTES: Final[HttpRules] = {
    ("GET", "healthz"): Access(None, open=True),
    ("GET", "readyz"): Access(None, open=True),
    ("GET", "metrics"): Access(Role.READ),
    ("GET", "tenants"): Access(Role.READ, _tenants),
}
