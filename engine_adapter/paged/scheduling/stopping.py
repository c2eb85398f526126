"""When a request ends, and what its caller is told: status to finish reason."""

from __future__ import annotations

from typing import Final

from kvstrata.engine_adapter.paged.request import Request, RequestStatus

FINISH_REASONS: Final = {
    RequestStatus.STOPPED: "stop",
    RequestStatus.LENGTH: "length",
    RequestStatus.ABORTED: "abort",
    RequestStatus.REJECTED: "error",
}


def stop_status(request: Request, max_model_len: int) -> RequestStatus | None:
    """Whether the request's last token ends it, and how. A stop token wins over a length reached with it."""
    params, last = request.sampling, request.token_ids[-1]
    if last in params.stop_token_ids or (last == request.eos_token_id and not params.ignore_eos):
        return RequestStatus.STOPPED
    if request.num_output_tokens >= params.max_tokens or request.num_tokens >= max_model_len:
        return RequestStatus.LENGTH
    return None
