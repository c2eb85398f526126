"""What tensor-parallel ranks do together, as the model sees it."""

from __future__ import annotations

from typing import Protocol

from kvstrata.engine_adapter.paged.model.arrays import F32, Arrays


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
    """A single rank, wherever its arrays are."""

    rank = 0
    size = 1

    def all_reduce(self, array: F32) -> F32:
        return array


class ThroughHost:
    """Ranks whose arrays are on devices, meeting in the host's memory."""

    def __init__(self, inner: Collective, arrays: Arrays) -> None:
        self._inner, self._arrays = inner, arrays
        self.rank, self.size = inner.rank, inner.size

    def all_reduce(self, array: F32) -> F32:
        return self._arrays.to_device(self._inner.all_reduce(self._arrays.to_host(array)))


def collective_of(inner: Collective, arrays: Arrays) -> Collective:
    """The same ranks, for arrays of ``arrays``."""
    return inner if arrays.on_host or inner.size == 1 else ThroughHost(inner, arrays)
