"""Load or recompute: what was measured of loads and of prefill decides how many of the pool's tokens to load.

``auto`` loads while loading is faster than computing, or while one of the two is not known. A load that would pass
the deadline is cut to what fits. Where computing is faster nothing is loaded, but for an exploration now and then,
so that one slow moment does not end loading for good. While the pool is absent nothing is loaded, whatever the
policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvstrata.engine_adapter.connector.config import LoadPolicy
from kvstrata.engine_adapter.connector.layering import LoadBeside

#: Weight that older loads keep with each new one: about the last ten matter.
LOAD_DECAY: Final = 0.9
#: The same for prefill, by seconds measured: about the last ten seconds matter.
PREFILL_DECAY_S: Final = 10.0
#: Share of the deadline that a load may be planned to take.
DEADLINE_SHARE: Final = 0.8
#: An exploration comes after at least this many decisions to compute ...
EXPLORE_DECISIONS: Final = 8
#: ... this much time, and so much time that explorations take at most a tenth of it.
EXPLORE_EVERY_S: Final = 1.0
EXPLORE_TIME_FACTOR: Final = 10.0
#: Weight of the newest load in the share of tokens that loads bring.
YIELD_WEIGHT: Final = 0.2


class Decision(IntEnum):
    """Why so many tokens are loaded."""

    ALL = 0
    PART = 1  #: cut to what the deadline allows
    COMPUTE = 2  #: computing is faster
    EXPLORE = 3  #: computing seems faster; loaded to see whether that still holds
    OFF = 4  #: by configuration, or the pool is absent


@dataclass(frozen=True, slots=True)
class Choice:
    """``tokens`` to load of those that the pool has."""

    tokens: int
    decision: Decision


class LoadSeconds:
    """Seconds a load takes as ``latency_s + bytes / bandwidth``: least squares, where newer loads weigh more."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self._weight = LOAD_DECAY * self._weight + 1.0
        self._x = LOAD_DECAY * self._x + nbytes
        self._y = LOAD_DECAY * self._y + seconds
        self._xx = LOAD_DECAY * self._xx + float(nbytes) * nbytes
        self._xy = LOAD_DECAY * self._xy + nbytes * seconds

    @property
    def known(self) -> bool:
        return self._weight > 0.0

    def line(self) -> tuple[float, float]:
        """(latency in seconds, seconds a byte), neither below 0. Loads of one size only: all is bandwidth."""
        if not self.known:
            return 0.0, 0.0
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance > 1e-4 * x * x:
            slope = (self._xy / self._weight - x * y) / variance
            if slope <= 0.0:
                return y, 0.0
            if (latency := y - slope * x) >= 0.0:
                return latency, slope
        return (0.0, y / x) if x else (y, 0.0)


class LoadOrCompute:
    """Decides for one engine. ``deadline_s``: a load ends by then. ``aligned_tokens``: loads are multiples of it."""

    def __init__(
        self, policy: LoadPolicy, deadline_s: float, aligned_tokens: int, layered: LoadPolicy = "never"
    ) -> None:
        self.policy = policy
        self.pool_ready = True  # until a worker says otherwise: the first loads find out
        self.load_seconds = LoadSeconds()
        self.load_yield = 1.0
        self.beside = LoadBeside(layered)
        self._deadline_s = deadline_s
        self._aligned = aligned_tokens
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0
        self._computed_since = 0
        self._explore_at = 0.0

    @property
    def prefill_tokens_s(self) -> float:
        """Tokens a second, 0 while nothing was measured."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else 0.0

    def choose(self, external_tokens: int, nbytes: int, now: float) -> Choice:
        """How many of ``external_tokens`` to load, whose blocks are ``nbytes`` on one rank. Aligned."""
        if self.policy == "never" or not self.pool_ready or external_tokens <= 0:
            return Choice(0, Decision.OFF)
        if self.policy == "always" or not self.load_seconds.known:
            return Choice(external_tokens, Decision.ALL)
        latency, per_byte = self.load_seconds.line()
        per_token = per_byte * nbytes / external_tokens
        tokens = self._within_deadline(external_tokens, latency, per_token)
        if tokens and self._loading_wins(tokens, latency + tokens * per_token):
            return Choice(tokens, Decision.ALL if tokens == external_tokens else Decision.PART)
        return self._compute_or_explore(external_tokens, now)

    def layered(self, nbytes: int, rest_tokens: int) -> bool:
        """Whether a load of ``nbytes`` should run beside the step that computes the next ``rest_tokens``."""
        if not self.pool_ready or rest_tokens <= 0:
            return False
        latency, per_byte = self.load_seconds.line()
        rate = self.prefill_tokens_s
        return self.beside.choose(latency + nbytes * per_byte, rest_tokens / rate if rate else 0.0, self.load_yield)

    def _within_deadline(self, tokens: int, latency: float, per_token: float) -> int:
        left = DEADLINE_SHARE * self._deadline_s - latency
        if left <= 0.0:
            return 0
        if per_token * tokens <= left:
            return tokens
        return int(left / per_token) // self._aligned * self._aligned

    def _loading_wins(self, tokens: int, load_s: float) -> bool:
        rate = self.prefill_tokens_s
        return rate == 0.0 or load_s < self.load_yield * tokens / rate

    def _compute_or_explore(self, external_tokens: int, now: float) -> Choice:
        self._computed_since += 1
        if self._computed_since <= EXPLORE_DECISIONS or now < self._explore_at:
            return Choice(0, Decision.COMPUTE)
        self._computed_since = 0
        self._explore_at = now + EXPLORE_EVERY_S
        return Choice(external_tokens, Decision.EXPLORE)

    def load_ended(
        self, *, asked_tokens: int, loaded_tokens: int, nbytes: int, seconds: float, explored: bool, now: float
    ) -> None:
        """A load moved ``nbytes`` on its slowest rank in ``seconds``. An exploration outweighs all before it."""
        share = loaded_tokens / asked_tokens if asked_tokens else 1.0
        if explored:
            self.load_seconds.forget()
            self.load_yield = share
            self._explore_at = now + max(EXPLORE_EVERY_S, EXPLORE_TIME_FACTOR * seconds)
        else:
            self.load_yield += YIELD_WEIGHT * (share - self.load_yield)
        self.load_seconds.add(max(nbytes, 0), max(seconds, 0.0))

    def forward_done(self, tokens: int, seconds: float) -> None:
        """A step computed ``tokens`` prompt tokens in ``seconds``."""
        if tokens <= 0 or seconds <= 0.0:
            return
        keep = max(0.0, 1.0 - seconds / PREFILL_DECAY_S)
        self._prefill_tokens = keep * self._prefill_tokens + tokens
        self._prefill_seconds = keep * self._prefill_seconds + seconds

    def check(self) -> None:
        """Assert that estimates are finite and not negative."""
        latency, per_byte = self.load_seconds.line()
        assert 0.0 <= latency < float("inf") and 0.0 <= per_byte < float("inf"), (latency, per_byte)
        assert 0.0 <= self.load_yield <= 1.0, self.load_yield
        assert self._computed_since >= 0
        self.beside.check()
        assert (self._prefill_tokens > 0.0) == (self._prefill_seconds > 0.0)
