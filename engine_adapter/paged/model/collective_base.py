"""What tensor-parallel ranks do together, as the model sees it."""

from __future__ import annotations

from typing import Protocol

from kvstrata.engine_adapter.paged.model.rows import F32


class Collective(Protocol):
    """The ranks of one model. All call the same operations in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, array: F32) -> F32:
        """Sum over ranks, added in the order of ranks: every rank gets the same bits, whatever the timing.

        The result may be ``array`` itself. Raises :class:`kvstrata.proto.errors.KVError` when a rank is lost.
        """
        ...


class NoCollective:
    """A single rank."""

    rank = 0
    size = 1

    def all_reduce(self, array: F32) -> F32:
        return array
