"""From logits to a token. A draw depends on (seed, position, logits) only.

So it is the same whatever else is in the batch, and again after a preemption: the random number of a position
comes from a counter-based generator (Philox), keyed by the seed, with the position as its counter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.paged.model.rows import F32
from kvstrata.engine_adapter.paged.outputs import TokenLogprobs
from kvstrata.engine_adapter.paged.request import SamplingParams

_F64 = npt.NDArray[np.float64]


def sample(logits: F32, params: SamplingParams, position: int) -> int:
    """The token at ``position``, from the logits [vocab] of the token before it.

    Greedy when the temperature is 0; of equal logits the lowest id. A logit that is not a number counts as the
    smallest.
    """
    if params.temperature == 0.0:
        return int(np.argmax(_ordered(logits)))
    row = _ordered(logits).astype(np.float64)
    scaled = (row - row.max()) / params.temperature
    candidates = _candidates(row, scaled, params)
    chances = np.cumsum(_softmax(scaled[candidates]))
    drawn = uniform(params.seed, position) * chances[-1]
    # side="right": a token of chance 0 is never drawn, not even by 0.0.
    return int(candidates[min(int(np.searchsorted(chances, drawn, side="right")), len(candidates) - 1)])


def uniform(seed: int, position: int) -> float:
    """The random number of a position, in [0, 1)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def log_probabilities(logits: F32, token_id: int, top: int) -> TokenLogprobs:
    """Of the sampled token and of the ``top`` likeliest (ties: lowest id), by the model alone: temperature 1."""
    row = _ordered(logits).astype(np.float64)
    likeliest = _largest(row, min(top, len(row)))
    logs = row - row.max()
    logs -= np.log(np.exp(logs).sum())
    return TokenLogprobs(float(logs[token_id]), [(int(index), float(logs[index])) for index in likeliest])


def _ordered(logits: F32) -> F32:
    """Finite values: NaN as the smallest, infinities as the largest and smallest numbers there are."""
    return logits if np.isfinite(logits).all() else np.nan_to_num(logits, nan=float(np.finfo(np.float32).min))


def _softmax(row: _F64) -> _F64:
    exponents = np.exp(row - row.max())
    return np.asarray(exponents / exponents.sum(), dtype=np.float64)


def _largest(row: _F64, count: int) -> npt.NDArray[np.int64]:
    """Indices of the largest ``count``, largest first, of equal ones the lowest index first."""
    if count == 0:
        return np.empty(0, np.int64)
    bound = np.partition(row, len(row) - count)[len(row) - count]
    kept = np.flatnonzero(row >= bound)
    return kept[np.argsort(-row[kept], kind="stable")][:count].astype(np.int64)


def _candidates(row: _F64, scaled: _F64, params: SamplingParams) -> npt.NDArray[np.int64]:
    """Token ids that may be drawn: the ``top_k`` likeliest, of these the fewest that reach ``top_p`` together.

    Ranked by the logits themselves: scaling may round two of them to one number.
    """
    limit = min(params.top_k or len(scaled), len(scaled))
    if limit == len(scaled) and params.top_p >= 1.0:
        return np.arange(len(scaled))
    likeliest = _largest(row, limit)
    if params.top_p >= 1.0:
        return likeliest
    reached = np.cumsum(_softmax(scaled[likeliest]))
    return likeliest[: int(np.searchsorted(reached, params.top_p)) + 1]
