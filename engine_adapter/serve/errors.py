"""Errors as OpenAI clients read them: ``{"error": {"message", "type", "param", "code"}}`` and an HTTP status."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response

from kvstrata.proto.errors import Busy, Closed, InvalidArgument, KVError, Refused, Unavailable

#: What a client should wait before it tries again, after 429 and 503.
RETRY_AFTER_S: Final = 1
#: The key is what clients switch on, so the names are OpenAI's.
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Raised anywhere below a route; the application answers with :meth:`response`.

    ``param`` names the field of the request that is wrong, ``code`` a stable name of the problem.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """The JSON object, as an answer and as an event in a stream."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request as it stands will never be served; ``message`` says what to change."""
    return ApiError(400, message, param=param, code=code)


def from_engine(error: KVError) -> ApiError:
    """What the engine refused or could not do, by class."""
    if isinstance(error, Busy):
        return ApiError(429, f"the engine is busy: {error}", code="engine_busy")
    if isinstance(error, (Unavailable, Closed)):
        return ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, (InvalidArgument, Refused)):
        return invalid(str(error))
    return ApiError(500, str(error))
