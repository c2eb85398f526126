"""HTTP for quotas, in the shape that LMCache's API has, with ours beside it.

``PUT /quota/{salt}`` gives a tenant its policy, whole: ``{"limit_gb": 200}``, or ours: ``dram_limit``,
``ssd_limit``, ``dram_floor``, ``ssd_floor`` in bytes or as ``"200GiB"``; a limit that is absent, null or
``"none"`` is none. ``limit_gb`` is the DRAM limit in GiB. ``GET`` and ``DELETE`` name one tenant, ``GET
/quota`` lists all. ``?dry_run=true`` changes nothing. The empty salt is called ``_default_salt``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvstrata.master.tenants.answers import Tenants
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import Forbidden, InvalidArgument, KVError, Retryable
from kvstrata.transfer.security.access import touch_salts
from kvstrata.transfer.security.http_guard import rights_in

#: How a path names the tenant whose salt is empty.
EMPTY_SALT: Final = "_default_salt"
BODY_BYTES_MAX: Final = 64 << 10
GIB: Final = 1 << 30
_LIMITS: Final = ("dram_limit", "ssd_limit")
_FLOORS: Final = ("dram_floor", "ssd_floor")
_UNITS: Final = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for base, unit in ((1024, "IB"), (1000, "B"))
    for power, prefix in enumerate(("K", "M", "G", "T", "P"), start=1)
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def routes(tenants: Tenants) -> list[Route]:
    """Routes for an ASGI application."""

    async def one(request: Request) -> Response:
        name = request.path_params["salt"]
        salt = "" if name == EMPTY_SALT else name
        rights = rights_in(request)
        if (refused := _refusal(lambda: rights.touch_salt(salt))) is not None:
            return refused
        if request.method == "PUT":
            body = await _body(request)
            return await _answer(lambda: _put(tenants, salt, body, _dry(request)))
        if request.method == "DELETE":
            return await _answer(lambda: _delete(tenants, salt, _dry(request)))
        return await _answer(lambda: _get(tenants, salt))

    async def all_of_them(request: Request) -> Response:
        rights = rights_in(request)
        if (refused := _refusal(lambda: touch_salts(rights, None))) is not None:
            return refused
        return await _answer(lambda: (200, _listed(tenants.list(control.TenantQuery()))))

    return [
        Route("/quota", all_of_them, methods=["GET"]),
        Route("/quota/{salt:path}", one, methods=["GET", "PUT", "DELETE"]),
    ]


def _refusal(touch: Callable[[], None]) -> Response | None:
    try:
        touch()
    except Forbidden as error:
        return JSONResponse({"error": str(error)}, status_code=403)
    except InvalidArgument as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    return None


async def _answer(work: Callable[[], tuple[int, dict[str, object]]]) -> Response:
    try:
        status, body = await run_in_threadpool(work)
    except KVError as error:
        status = 400 if isinstance(error, InvalidArgument) else 503 if isinstance(error, Retryable) else 500
        body = {"error": str(error)}
    return JSONResponse(body, status_code=status)


async def _body(request: Request) -> bytes:
    """The body, of which one that is too long is read no further."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_BYTES_MAX:
            break
    return body


def _dry(request: Request) -> bool:
    return request.query_params.get("dry_run", "").lower() in ("1", "true", "yes")


# ---------------------------------------------------------------------- the verbs


def _put(tenants: Tenants, salt: str, body: bytes, dry_run: bool) -> tuple[int, dict[str, object]]:
    policy = _policy(salt, body)
    changed = tenants.set(control.TenantSet(policy=policy, dry_run=dry_run))
    return 200, row_json(changed.after) | {
        "status": "dry run" if dry_run else "ok",
        "before": row_json(changed.before),
        "warnings": list(changed.warnings),
    }


def _get(tenants: Tenants, salt: str) -> tuple[int, dict[str, object]]:
    row = tenants.row(salt)
    if not row.defined and not row.dram_bytes and not row.ssd_bytes:
        return 404, {"error": f"tenant {salt!r} has no policy and uses nothing", "cache_salt": salt, "exists": False}
    return 200, row_json(row)


def _delete(tenants: Tenants, salt: str, dry_run: bool) -> tuple[int, dict[str, object]]:
    if not tenants.row(salt).defined:
        return 404, {"error": f"tenant {salt!r} has no policy", "cache_salt": salt, "exists": False}
    changed = tenants.remove(control.TenantRemove(salt=salt, dry_run=dry_run))
    return 200, row_json(changed.after) | {
        "status": "dry run" if dry_run else "removed",
        "warnings": list(changed.warnings),
    }


def _listed(listed: control.TenantList) -> dict[str, object]:
    return {
        "users": {row.policy.salt or EMPTY_SALT: row_json(row) for row in listed.tenants},
        "default": _amounts(listed.fallback) | {"deny": listed.fallback_denies},
        "dram_bytes": listed.dram_bytes,
        "ssd_bytes": listed.ssd_bytes,
        "left_out": listed.left_out,
    }


def row_json(row: control.TenantRow) -> dict[str, object]:
    """One tenant. ``limit_gb`` null: no limit."""
    limit = row.policy.dram_limit / GIB if row.policy.HasField("dram_limit") else None
    return {
        "cache_salt": row.policy.salt,
        "exists": row.defined,
        "limit_gb": limit,
        "current_usage_gb": row.dram_bytes / GIB,
        **_amounts(row.policy),
        "dram_bytes": row.dram_bytes,
        "ssd_bytes": row.ssd_bytes,
        "blocks": row.blocks,
        "nodes": {
            node.node_id: {"dram_bytes": node.usage.dram_bytes, "ssd_bytes": node.usage.ssd_bytes} for node in row.nodes
        },
    }


def _amounts(policy: control.TenantPolicy) -> dict[str, object]:
    limits: dict[str, object] = {
        name: getattr(policy, name) if policy.HasField(name) else None for name in ("dram_limit", "ssd_limit")
    }
    return limits | {"dram_floor": policy.dram_floor, "ssd_floor": policy.ssd_floor}


# ---------------------------------------------------------------------- reading a policy


def _policy(salt: str, body: bytes) -> control.TenantPolicy:
    """Raises :class:`InvalidArgument` that names the field and what it was."""
    if len(body) > BODY_BYTES_MAX:
        raise InvalidArgument(f"a quota has more than {BODY_BYTES_MAX} bytes")
    try:
        fields = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"a quota is a JSON object: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidArgument(f"a quota is a JSON object, not {type(fields).__name__}")
    unknown = sorted(set(fields) - {"limit_gb", *_LIMITS, *_FLOORS})
    if unknown or not fields:
        raise InvalidArgument(
            f"{', '.join(map(repr, unknown)) or 'nothing'} given: a quota has limit_gb, or dram_limit, ssd_limit, "
            "dram_floor, ssd_floor"
        )
    if "limit_gb" in fields and "dram_limit" in fields:
        raise InvalidArgument("limit_gb and dram_limit are the same limit: give one of them")
    policy = control.TenantPolicy(salt=salt)
    if fields.get("limit_gb") is not None:
        policy.dram_limit = _bytes("limit_gb", fields["limit_gb"], GIB)
    for name in _LIMITS:
        if fields.get(name) not in (None, "none"):
            setattr(policy, name, _bytes(name, fields[name], 1))
    for name in _FLOORS:
        if fields.get(name) is not None:
            setattr(policy, name, _bytes(name, fields[name], 1))
    return policy


def _bytes(name: str, value: object, unit: int) -> int:
    """Whole bytes of a number of ``unit``, or of text such as ``"200GiB"``."""
    number: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value * unit if isinstance(value, int) or math.isfinite(value) else None
    elif isinstance(value, str) and unit == 1:
        found = _SIZE.fullmatch(value)
        scale = _UNITS.get(found[2].upper()) if found else None
        number = None if found is None or scale is None else float(found[1]) * scale
    if number is None or not 0 <= number < 1 << 63:
        raise InvalidArgument(
            f"{name} is {value!r}: not a size of 0 or more" + (", such as 200GiB" if unit == 1 else "")
        )
    return int(number)
