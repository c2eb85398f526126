"""What a state store is: policy that outlives the masters, and the lease that says which of them leads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvstrata.master.messages import Save
from kvstrata.master.saved import Saved
from kvstrata.proto.errors import Retryable


class Deposed(Retryable):
    """A write of a leader whose epoch the store has seen the end of. Nothing of it was taken."""


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """Who leads, in which epoch. ``master_id`` is new at each start of a process; endpoints are ``HOST:PORT``."""

    master_id: str
    epoch: int = 0
    channel: str = ""
    grpc: str = ""
    http: str = ""


class StateStore(Protocol):
    """Thread-safe. Errors while running are :class:`Unavailable`: the caller may try again. Every call is bounded."""

    #: Whether several masters may use it at once. One that is not shared has its only master as leader.
    shared: bool

    def cluster_id(self) -> str:
        """Made once, when the store is new."""
        ...

    def load(self) -> Saved:
        """Everything durable."""
        ...

    def save(self, writes: Iterable[Save], epoch: int = 0) -> None:
        """Make all of ``writes`` durable, or none. Raises :class:`Unavailable`; :class:`Deposed` when the store
        knows a leader epoch greater than ``epoch`` (0: not fenced)."""
        ...

    def revision(self) -> int:
        """Grows with each save. Less than was seen before: the store has lost data."""
        ...

    def campaign(self, me: LeaderRecord, ttl_ms: int) -> LeaderRecord:
        """Take the lease if nobody has it, or renew it if ``me`` has; returns who leads now.

        A lease that is taken anew gets the epoch ``1 + max(what the store has seen, me.epoch)``: ``me.epoch`` is
        the greatest that this master has heard of from anybody. Epochs never repeat while the store, or any node
        that reports one, lives.
        """
        ...

    def resign(self, me: LeaderRecord) -> None:
        """Give the lease up if ``me`` has it, so that the next master need not wait for its end."""
        ...

    def leader(self) -> LeaderRecord | None:
        """Who leads; None when nobody does."""
        ...

    def masters(self) -> list[LeaderRecord]:
        """Every master that has called :meth:`announce` lately (an epoch of 0: it does not lead)."""
        ...

    def announce(self, me: LeaderRecord, ttl_ms: int) -> None:
        """Be in :meth:`masters` for ``ttl_ms``."""
        ...

    def close(self) -> None: ...
