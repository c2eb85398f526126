"""Hashes as the directory knows them: 16 bytes each, whatever their length."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstrata.proto.keys import FOLDED_BYTES


def fold(packed: bytes | memoryview, hash_bytes: int) -> npt.NDArray[np.uint64]:
    """View packed hashes (16 to 32 bytes each) as u64[n, 2]; words past the second are XORed in.

    Two longer hashes with one fold make the directory name a node that then answers with a miss: the
    node compares whole hashes, so a fold can cost a round trip and never a wrong byte.
    """
    if hash_bytes == FOLDED_BYTES:
        return np.frombuffer(packed, dtype="<u8").reshape(-1, 2)
    octets = np.frombuffer(packed, dtype=np.uint8).reshape(-1, hash_bytes)
    padded = np.zeros((octets.shape[0], 2 * FOLDED_BYTES), dtype=np.uint8)
    padded[:, :hash_bytes] = octets
    words = padded.view("<u8")
    return np.ascontiguousarray(words[:, :2] ^ words[:, 2:])
