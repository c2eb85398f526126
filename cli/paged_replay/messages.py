"""What the coordinator and a paged engine's process say to each other, over the replay's pipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstrata.cli.replay.messages import Finish, Message, kinds_of

#: Token ids travel as little-endian unsigned 32-bit integers.
TOKEN_DTYPE = np.dtype("<u4")

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """First frame to an engine: its number, its ``EngineConfig`` as plain data, and the salt of every request."""

    kind: ClassVar[str] = "begin"
    engine: int
    config: dict[str, Any]
    salt: str


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The model is loaded and the cache allocated. ``error`` says why not, empty when it is.

    ``num_blocks`` in all groups, of ``block_bytes`` each; ``aligned_tokens``: hits are multiples of it.
    """

    kind: ClassVar[str] = "ready"
    engine: int
    error: str = ""
    num_blocks: int = 0
    block_bytes: int = 0
    aligned_tokens: int = 0
    max_model_len: int = 0


@dataclass(frozen=True, slots=True)
class Prompt(Message):
    """One request; ``body`` is its token ids. Exactly ``max_tokens`` are generated, greedily."""

    kind: ClassVar[str] = "prompt"
    index: int
    max_tokens: int
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class FirstToken(Message):
    """The first token of a request is there."""

    kind: ClassVar[str] = "first_token"
    index: int


@dataclass(frozen=True, slots=True)
class Served(Message):
    """The end of a request; ``body`` is the generated token ids. A non-empty ``error`` is a failed request.

    Seconds are the engine's own, from receiving the request to its first token: ``lookup_s`` waiting for the
    pool's answer, ``load_s`` for a load, ``compute_s`` in steps that computed for it, ``engine_s`` in all. The
    rest of ``engine_s`` it waited for other requests' steps.
    """

    kind: ClassVar[str] = "served"
    index: int
    prompt_tokens: int = 0
    local_tokens: int = 0
    external_tokens: int = 0
    lookup_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    engine_s: float = 0.0
    error: str = ""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Summary(Message):
    """The last frame of an engine: its counters by dotted name."""

    kind: ClassVar[str] = "summary"
    engine: int
    counters: dict[str, float] = field(default_factory=dict)


KINDS = kinds_of(Begin, Ready, Prompt, FirstToken, Served, Summary, Finish)


def pack(tokens: Tokens | list[int]) -> bytes:
    """Token ids as they travel."""
    return np.asarray(tokens, dtype=TOKEN_DTYPE).tobytes()


def unpack(body: bytes) -> list[int]:
    """Token ids from the wire."""
    tokens: list[int] = np.frombuffer(body, dtype=TOKEN_DTYPE).tolist()
    return tokens
