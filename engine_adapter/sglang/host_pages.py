"""Where pages lie in SGLang's host memory, and what makes their bytes interchangeable.

A host pool is asked for the pieces of a page (``get_page_buffer_meta``): one K and one V in page-first layouts, a K
and a V for each layer in the layer-first one, one for a latent (MLA). In the order it gives them they are a block of
the pool, so the block's bytes differ by layout, and the layout is part of the fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.connector.fingerprint import fingerprint_text
from kvstrata.engine_adapter.sglang.page_keys import HASH_BYTES
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import Namespace

#: Raise it when the order of the bytes in a pool block changes.
PAGES_VERSION: Final = 1
#: How SGLang names a page; see page_keys.py.
HASH_SCHEME: Final = "sglang/sha256/32"


class Indices(Protocol):
    """Token slots in host memory, ``page_size`` for each page: a tensor or an array of integers."""

    def __len__(self) -> int: ...
    def tolist(self) -> list[int]: ...


class HostPool(Protocol):
    """What is used of SGLang's ``HostKVCache``."""

    page_size: int
    layout: str
    dtype: object
    start_layer: int
    end_layer: int

    def get_page_buffer_meta(self, indices: Indices) -> tuple[Sequence[int], Sequence[int]] | None:
        """Addresses and sizes in bytes of all pieces, page by page."""


class StorageConfig(Protocol):
    """What is used of SGLang's ``HiCacheStorageConfig``."""

    model_name: str | None
    is_mla_model: bool
    tp_rank: int
    tp_size: int
    attn_cp_rank: int
    attn_cp_size: int


class HostPages:
    """The pages of one host pool. ``base`` is the address of its buffer, ``page`` the slots of any one page."""

    def __init__(self, pool: HostPool, base: int, page: Indices) -> None:
        self._pool, self._base = pool, base
        self.page_tokens = pool.page_size
        sizes = self.offsets(page)[0, :, 1]
        self.pieces = len(sizes)
        self.block_bytes = int(sizes.sum())

    def offsets(self, indices: Indices) -> npt.NDArray[np.int64]:
        """int64 [pages, pieces, 2]: (byte offset in the buffer, length). Raises :class:`InvalidArgument`."""
        pages, rest = divmod(len(indices), self.page_tokens)
        if rest or not pages:
            raise InvalidArgument(f"{len(indices)} slots are no whole pages of {self.page_tokens}")
        addresses, sizes = self._pool.get_page_buffer_meta(indices) or ((), ())
        if not addresses or len(addresses) % pages or len(addresses) != len(sizes):
            raise InvalidArgument(f"the host pool names {len(addresses)} pieces for {pages} pages")
        table = np.empty((len(addresses), 2), np.int64)
        table[:, 0] = np.asarray(addresses, np.int64) - self._base
        table[:, 1] = sizes
        return table.reshape(pages, -1, 2)

    def namespace(self, config: StorageConfig, name: str) -> Namespace:
        """The pool's namespace of these pages. ``name`` stands for the model's, where it is not empty.

        Ranks that hold other heads are its shards; what ranks hold alike (MLA) is one shard, whatever their number.
        Raises :class:`InvalidArgument` when the bytes could be taken for others.
        """
        model = name or config.model_name
        if not model:
            raise InvalidArgument('the engine names no model: name one in "namespace"')
        kv = str(self._pool.dtype)
        if kv.endswith("int8") and not name:
            raise InvalidArgument(
                f"the KV is kept as {kv}, which does not say in which 8-bit format: name model and format "
                '(say "MODEL fp8_e4m3") in "namespace"'
            )
        alike = config.is_mla_model
        group = fingerprint_text(
            ("engine", "sglang"),
            ("model", model),
            ("kv", kv),
            ("pages", str(PAGES_VERSION)),
            ("hash", HASH_SCHEME),
            ("layout", f"{type(self._pool).__name__}/{self._pool.layout}"),
            ("page", f"{self.page_tokens} tokens, {self.block_bytes} bytes, {self.pieces} pieces"),
            ("layers", f"{self._pool.start_layer}-{self._pool.end_layer}"),
            ("cp", f"{config.attn_cp_rank} of {config.attn_cp_size}"),
            ("tp", "alike" if alike else str(config.tp_size)),
        )
        return Namespace(
            group,
            self.block_bytes,
            self.page_tokens,
            HASH_BYTES,
            shard=0 if alike else config.tp_rank,
            shard_count=1 if alike else config.tp_size,
        ).validated()
