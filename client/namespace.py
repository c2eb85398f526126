"""A namespace as one client opened it: the fingerprint, and the weight epoch its stores are made under."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstrata.proto.keys import Namespace


class EpochPin:
    """The weight epoch of a namespace when this client first heard of it; None until a master answered.

    It never moves: an engine that loaded older weights must not store under a newer epoch. Opening the
    namespace anew (``client.namespace``) makes a new pin.
    """

    __slots__ = ("epoch",)

    def __init__(self) -> None:
        self.epoch: int | None = None

    def learn(self, epoch: int) -> None:
        if self.epoch is None:
            self.epoch = epoch


@dataclass(frozen=True, slots=True, eq=False)
class PoolNamespace(Namespace):
    """What ``client.namespace`` returns. Equal to another exactly when the fingerprints are; the pin is apart."""

    pin: EpochPin = field(default_factory=EpochPin, repr=False)

    @property
    def epoch(self) -> int:
        """The pinned weight epoch as it goes into messages: 0 while no master has answered."""
        return self.pin.epoch or 0
