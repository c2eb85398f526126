"""The routes, and what is around each: the key, the size of bodies, errors as clients read them."""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvstrata.engine_adapter.serve.chat import ChatJob
from kvstrata.engine_adapter.serve.completions import CompletionJob
from kvstrata.engine_adapter.serve.errors import ApiError, from_engine, invalid
from kvstrata.engine_adapter.serve.prompts import chat_prompt, completion_prompts
from kvstrata.engine_adapter.serve.requests import DetokenizeRequest, TokenizeRequest, parse
from kvstrata.engine_adapter.serve.responses import ModelCard, ModelList, Text, Tokens
from kvstrata.engine_adapter.serve.service import Service
from kvstrata.engine_adapter.serve.stream import CLIENT_GONE, start_stream, unless_disconnected
from kvstrata.engine_adapter.serve.token_text import token_text
from kvstrata.proto.errors import KVError
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.tracing import TRACE_CHARACTERS_MAX

log = get_logger(__name__)

BODY_BYTES_MAX: Final = 32 << 20
#: A body must be there within this, however slowly it trickles.
BODY_S: Final = 60.0
#: What a yes or no in a query may be.
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}

Handler = Callable[[Request], Awaitable[Response]]
MakeJob = Callable[[Service, bytes, str, str], CompletionJob | ChatJob]


@dataclass(frozen=True, slots=True)
class AppOptions:
    """``api_key`` empty: everybody may ask. ``allow_reset``: ``POST /reset_prefix_cache`` is there.
    ``ignore_traceparent``: clients do not decide whether their requests are traced, nor in which trace."""

    api_key: str = ""
    allow_reset: bool = False
    ignore_traceparent: bool = False


class Routes:
    """One method a route."""

    def __init__(self, service: Service, *, ignore_traceparent: bool) -> None:
        self._service = service
        self._ignore_traceparent = ignore_traceparent

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionJob)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatJob)

    async def _generate(self, request: Request, make: MakeJob) -> Response:
        response_id = uuid.uuid4().hex
        given = "" if self._ignore_traceparent else request.headers.get("traceparent", "")
        trace = given[:TRACE_CHARACTERS_MAX]
        job = await asyncio.to_thread(make, self._service, await read_body(request), response_id, trace)
        headers = {"x-request-id": response_id}
        if job.request.stream:
            return await start_stream(request, job.events(), headers)
        answer = await unless_disconnected(request, job.answer())
        return Response(answer, headers=headers, media_type="application/json")

    async def models(self, _: Request) -> Response:
        return _json(ModelList(data=[self._card()]))

    async def model(self, request: Request) -> Response:
        self._service.model.refuse_other(request.path_params["name"])
        return _json(self._card())

    async def tokenize(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(self._tokenized, await read_body(request)))

    async def detokenize(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(self._detokenized, await read_body(request)))

    # Plain functions below: they may take the engine's lock, so they run in threads and not in the event loop.
    def reset_prefix_cache(self, request: Request) -> Response:
        said = request.query_params.get("reset_external", "false").lower()
        if said not in _FLAGS:
            raise invalid(f"reset_external is {said!r}: true or false", "reset_external")
        if not self._service.engine.reset_prefix_cache(reset_external=_FLAGS[said]):
            raise ApiError(409, "blocks are in use: try again when no request runs", code="cache_in_use")
        return Response(status_code=200)

    def metrics(self, request: Request) -> Response:
        page, content_type = self._service.metrics.exposition(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    def health(self, _: Request) -> Response:
        health = self._service.engine.health()
        return JSONResponse(dict(health), status_code=200 if health.get("healthy") else 503)

    def ready(self, _: Request) -> Response:
        problem = self._service.problem
        return PlainTextResponse((problem or "ready") + "\n", status_code=503 if problem else 200)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": version("kvstrata")})

    def _card(self) -> ModelCard:
        model = self._service.model
        return ModelCard(id=model.name, created=model.created, max_model_len=model.max_model_len)

    def _tokenized(self, body: bytes) -> Tokens:
        request = parse(body, TokenizeRequest)
        model = self._service.model
        model.refuse_other(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("send either prompt or messages", "prompt")
        if request.messages is not None:
            tokens = chat_prompt(request.messages, model.tokenizer)
        else:
            tokens = model.tokenizer.encode(request.prompt or "")
        texts = [token_text(model.tokenizer, token) for token in tokens] if request.return_token_strs else None
        return Tokens(count=len(tokens), max_model_len=model.max_model_len, tokens=tokens, token_strs=texts)

    def _detokenized(self, body: bytes) -> Text:
        request = parse(body, DetokenizeRequest)
        model = self._service.model
        model.refuse_other(request.model)
        if not request.tokens:
            return Text("")
        completion_prompts(list(request.tokens), model.tokenizer)  # refuses what is no token
        return Text(model.tokenizer.decode(request.tokens))


def serve_app(service: Service, options: AppOptions) -> Starlette:
    """The ASGI application."""
    routes = Routes(service, ignore_traceparent=options.ignore_traceparent)

    def guarded(path: str, handler: Handler, method: str) -> Route:
        async def checked(request: Request) -> Response:
            check_key(request, options.api_key)
            return await handler(request)

        return Route(path, checked, methods=[method])

    async def reset(request: Request) -> Response:
        return await asyncio.to_thread(routes.reset_prefix_cache, request)

    paths = [
        guarded("/v1/completions", routes.completions, "POST"),
        guarded("/v1/chat/completions", routes.chat, "POST"),
        guarded("/v1/models", routes.models, "GET"),
        guarded("/v1/models/{name:path}", routes.model, "GET"),
        guarded("/tokenize", routes.tokenize, "POST"),
        guarded("/detokenize", routes.detokenize, "POST"),
        Route("/health", routes.health),
        Route("/readyz", routes.ready),
        Route("/metrics", routes.metrics),
        Route("/version", routes.version),
    ]
    if options.allow_reset:
        paths.append(guarded("/reset_prefix_cache", reset, "POST"))
    handlers = {
        ApiError: _refused,
        KVError: _engine_refused,
        HTTPException: _http,
        ClientDisconnect: _left,
        Exception: _failed,
    }
    return Starlette(routes=paths, exception_handlers=handlers)


async def read_body(request: Request) -> bytes:
    """The whole body. Raises :class:`ApiError`: 413 past ``BODY_BYTES_MAX``, 408 past ``BODY_S``."""
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request)
    except TimeoutError as error:
        raise ApiError(408, f"the body was not there after {BODY_S:.0f} s") from error


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > BODY_BYTES_MAX:
        raise _too_large()
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise _too_large()
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {BODY_BYTES_MAX} bytes", code="request_too_large")


def check_key(request: Request, api_key: str) -> None:
    """Raise 401 unless the request bears the key, where there is one."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if api_key and not (scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), api_key.encode())):
        raise ApiError(401, "send the server's API key as 'Authorization: Bearer KEY'", code="invalid_api_key")


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _engine_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, KVError)
    return from_engine(error).response()


async def _http(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, no such method."""
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()


async def _left(_: Request, error: Exception) -> Response:
    return ApiError(CLIENT_GONE, "the client closed the connection").response()


async def _failed(request: Request, error: Exception) -> Response:
    log.error("request failed", path=request.url.path, exc_info=error)
    return ApiError(500, "the server failed on this request: see its log", code="internal_error").response()
