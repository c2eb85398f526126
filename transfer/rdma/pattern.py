"""Bytes that both ends of a rail know: every 8 of them depend on a seed and on where they are.

A piece that came from elsewhere, out of order, late or not at all shows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import InvalidArgument

Bytes = npt.NDArray[np.uint8]

WORD_BYTES: Final = 8
#: Odd, with bits all over: one step away no bit stays by rule. Wire format, with the mixing below.
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xBF58476D1CE4E5B9)
_MASK: Final = (1 << 64) - 1


def pattern(seed: int, nbytes: int) -> Bytes:
    """u8[nbytes] of 64-bit ``seed``. Raises :class:`InvalidArgument` for a size that is not a multiple of 8."""
    if nbytes < 0 or nbytes % WORD_BYTES:
        raise InvalidArgument(f"a pattern of {nbytes} bytes: give a multiple of {WORD_BYTES}")
    words = np.arange(1, nbytes // WORD_BYTES + 1, dtype=np.uint64)
    words *= _STEP
    words += np.uint64(seed & _MASK)
    words ^= words >> np.uint64(30)
    words *= _MIX
    words ^= words >> np.uint64(27)
    return words.view(np.uint8)


def mismatch(found: Bytes, seed: int) -> str:
    """What of ``found`` (flat u8) is not the pattern of ``seed``, for people; "" when all of it is."""
    expected = pattern(seed, found.nbytes)
    wrong = np.flatnonzero(found != expected)
    if not len(wrong):
        return ""
    first = int(wrong[0])
    came, sent = (side[first : first + WORD_BYTES].tobytes().hex() for side in (found, expected))
    return f"{len(wrong)} of {found.nbytes} bytes are not what was sent: at {first} came {came} for {sent}"
