"""The stated cost model: what a request costs an engine, in virtual seconds.

The figures stand for a dense 70 B model with grouped-query attention on one 8-GPU server at half of its
peak: 140 GFLOP a token in the weights, 2.6 MFLOP a (token, context token) pair in attention, 4 PFLOP/s
useful; KV of 320 KiB a token in bf16, loaded over one 400 Gb/s link at 80 % of its rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Rates are a second of virtual time; tokens are prompt tokens."""

    prefill_tokens_s: float = 28_000.0
    attention_pairs_s: float = 1.5e9
    decode_tokens_s: float = 50.0
    load_bytes_s: float = 40e9
    kv_bytes_a_token: int = 320 << 10

    def prefill_s(self, context_tokens: int, new_tokens: int) -> float:
        """Compute ``new_tokens`` behind ``context_tokens`` that are in the cache; attention is the quadratic term."""
        pairs = new_tokens * (context_tokens + new_tokens / 2)
        return new_tokens / self.prefill_tokens_s + pairs / self.attention_pairs_s

    def load_s(self, tokens: int) -> float:
        """Bring the KV of ``tokens`` from the pool into the engine."""
        return tokens * self.kv_bytes_a_token / self.load_bytes_s

    def decode_s(self, tokens_out: int) -> float:
        return tokens_out / self.decode_tokens_s

    def stated(self) -> dict[str, float]:
        """The figures, for a report."""
        return {
            "prefill_tokens_s": self.prefill_tokens_s,
            "attention_pairs_s": self.attention_pairs_s,
            "decode_tokens_s": self.decode_tokens_s,
            "load_bytes_s": self.load_bytes_s,
            "kv_bytes_a_token": float(self.kv_bytes_a_token),
        }
