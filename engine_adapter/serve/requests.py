"""Bodies of requests. Fields that no client of ours means are ignored, wrong types and ranges are refused.

What would change the answer and is not supported (``n`` above 1, penalties, JSON mode...) is refused by name: an
answer that silently lacks what was asked for is worse than none.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvstrata.engine_adapter.serve.errors import ApiError, invalid
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import check_salt

STOPS_MAX: Final = 16
STOP_CHARACTERS_MAX: Final = 1024
LOGPROBS_MAX: Final = 20

Positive = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
Stop = Annotated[str, Meta(min_length=1, max_length=STOP_CHARACTERS_MAX)]
Stops = Annotated[list[Stop], Meta(max_length=STOPS_MAX)]
Alternatives = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: object = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat have in common. ``null`` stands for the default everywhere."""

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  #: 0 and -1: all tokens
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = None  #: the tenant: KV is shared only between requests with the same one
    # Not supported: see _NEUTRAL.
    n: object = None
    best_of: object = None
    echo: object = None
    suffix: object = None
    presence_penalty: object = None
    frequency_penalty: object = None
    repetition_penalty: object = None
    logit_bias: object = None
    min_p: object = None
    min_tokens: object = None
    use_beam_search: object = None
    prompt_logprobs: object = None
    response_format: object = None
    structured_outputs: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None
    tool_choice: object = None
    function_call: object = None
    functions: object = None
    audio: object = None
    modalities: object = None
    include_stop_str_in_output: object = None
    prompt_embeds: object = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event that holds the usage."""
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """``POST /v1/completions``. ``prompt``: text, tokens, or a list of either."""

    prompt: str | list[str | int | list[TokenId]]
    logprobs: Alternatives | None = None  #: likeliest alternatives a token; 0: the chosen token alone


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: object = None


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: a ``prompt``, or chat ``messages`` as they would be rendered."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[TokenId]
    model: str | None = None


#: Values of unsupported fields that ask for nothing.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tool_choice": ("none", "auto"),  # "auto" leaves the choice to the model, which never makes it
    "function_call": ("none", "auto"),
    "functions": ([],),
    "audio": (),
    "modalities": (["text"],),
    "include_stop_str_in_output": (False,),
    "prompt_embeds": (),
}

R = TypeVar("R", CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest)


def parse(body: bytes, kind: type[R]) -> R:
    """The request in ``body``; raises :class:`ApiError` (400) that names the field and what it should be."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(str(error), param=_field(str(error))) from error
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from error
    if isinstance(request, GenerationRequest):
        _refuse_unsupported(request)
        _check_salt(request)
    if isinstance(request, ChatCompletionRequest) and request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return request


def _refuse_unsupported(request: GenerationRequest) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise _unsupported(name)
    if request.stream_options is None:
        return
    if not request.stream:
        raise invalid("stream_options is for streams: set stream to true, or leave it out", "stream_options")
    if request.stream_options.continuous_usage_stats:
        raise _unsupported("stream_options.continuous_usage_stats")


def _unsupported(name: str) -> ApiError:
    return invalid(f"{name} with this value is not supported: leave it out", name, "unsupported_parameter")


def _check_salt(request: GenerationRequest) -> None:
    try:
        check_salt(request.cache_salt or "")
    except InvalidArgument as error:
        raise invalid(str(error), "cache_salt") from error


def _field(message: str) -> str | None:
    """The field a validation error is about: ``at `$.stop[0]``` or ``missing required field `prompt```."""
    found = re.search(r"`\$\.([^`]+)`$|required field `([^`]+)`", message)
    return (found[1] or found[2]) if found else None
