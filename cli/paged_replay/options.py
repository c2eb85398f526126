"""What a replay on the bundled paged engine is asked to do. Checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from kvstrata.cli.replay.options import ENGINES_MAX, NODES_MAX, Routing
from kvstrata.proto.errors import ConfigError

CaseName = Literal["none", "private", "pool"]

#: A node's slabs and tables need some room before it can hold a block.
POOL_NODE_BYTES_MIN: Final = 8 << 20
CONCURRENCY_MAX: Final = 1024
BPE_TOKENS_MIN, BPE_TOKENS_MAX = 300, 200_000


@dataclass(frozen=True, slots=True)
class PagedOptions:
    """Units are in the names. ``trace`` None is the seeded generator, ``masters`` None starts a pool of our own.

    ``tokenizer``: ``bytes``, ``bpe:N`` (trained on the trace's own text) or a ``tokenizer.json`` file.
    ``kv_bytes`` is each engine's own KV memory; ``pool_bytes`` None is twice that of all engines together.
    ``concurrency`` sessions are active at once. ``faults`` is the share of blocks whose load is made to fail.
    Raises :class:`ConfigError`.
    """

    trace: Path | None = None
    agent: str | None = None
    sessions: int | None = None
    engines: int = 4
    nodes: int = 2
    routing: Routing = "round-robin"
    concurrency: int = 1
    model: str = "13m"
    tokenizer: str = "bytes"
    block_tokens: int = 16
    output_tokens: int = 16
    max_prompt_tokens: int = 24_576
    kv_bytes: int = 1 << 30
    pool_bytes: int | None = None
    cases: tuple[CaseName, ...] = ("private", "pool")
    think_cap_s: float = 0.0
    faults: float = 0.0
    seed: int = 0
    masters: str | None = None

    def __post_init__(self) -> None:
        for what, value, low, high in (
            ("engines", self.engines, 1, ENGINES_MAX),
            ("nodes", self.nodes, 1, NODES_MAX),
            ("concurrency", self.concurrency, 1, CONCURRENCY_MAX),
            ("block_tokens", self.block_tokens, 1, 4096),
            ("output_tokens", self.output_tokens, 1, 1 << 20),
            ("max_prompt_tokens", self.max_prompt_tokens, 1, 1 << 24),
            ("kv_memory", self.kv_bytes, 1, 1 << 50),
            ("pool_bytes", self.pool_bytes_all, POOL_NODE_BYTES_MIN * self.nodes, 1 << 50),
            ("think_cap", self.think_cap_s, 0, 1e9),
            ("faults", self.faults, 0, 1),
            ("seed", self.seed, 0, (1 << 63) - 1),
            ("sessions", self.sessions or 1, 1, 1 << 31),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{what} is {value}: it must be between {low} and {high}")
        if self.routing not in get_args(Routing):
            raise ConfigError(f"routing is {self.routing!r}: choose round-robin or sticky")
        self._check_cases()
        self._check_tokenizer()

    @property
    def pool_bytes_all(self) -> int:
        """Memory of all storage nodes of a pool of our own."""
        if self.pool_bytes is not None:
            return self.pool_bytes
        return max(POOL_NODE_BYTES_MIN * self.nodes, 2 * self.engines * self.kv_bytes)

    @property
    def bpe_tokens(self) -> int:
        """Vocabulary to train; 0 when the tokenizer is not ``bpe:N``."""
        kind, colon, number = self.tokenizer.partition(":")
        return int(number) if kind == "bpe" and colon and number.isdigit() else 0

    def _check_cases(self) -> None:
        unknown = [case for case in self.cases if case not in get_args(CaseName)]
        if unknown or not self.cases or len(set(self.cases)) != len(self.cases):
            raise ConfigError(f"cases are {','.join(self.cases)!r}: name each of none, private, pool once at most")

    def _check_tokenizer(self) -> None:
        if self.tokenizer.startswith("bpe"):
            if not BPE_TOKENS_MIN <= self.bpe_tokens <= BPE_TOKENS_MAX:
                raise ConfigError(
                    f"tokenizer is {self.tokenizer!r}: write bpe:N with N from {BPE_TOKENS_MIN} to {BPE_TOKENS_MAX}"
                )
        elif self.tokenizer != "bytes" and not Path(self.tokenizer).is_file():
            raise ConfigError(f"tokenizer is {self.tokenizer!r}: write bytes, bpe:N, or a tokenizer.json that is there")
