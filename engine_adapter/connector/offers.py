"""Which blocks were offered to the pool lately, so that none is offered twice, and one that failed is tried again.

Sans-IO and bounded: what is forgotten may be offered again, and the pool then says that it has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Final, NamedTuple

#: Blocks remembered, the newest.
OFFERED_MAX: Final = 1 << 16
#: A block whose store failed so many times is offered again only for a request that looked it up later.
STORE_TRIES_MAX: Final = 3


class OfferKey(NamedTuple):
    """A block of one KV cache group. Its hash says the salt too."""

    group: int
    block_hash: bytes


class _State(IntEnum):
    IN_FLIGHT = 0  # an open job holds it
    STORED = 1
    FAILED = 2


@dataclass(slots=True)
class _Offer:
    state: _State
    moment: int
    tries: int


class OfferedBlocks:
    """Blocks by what became of them. *Moments* are numbers that grow with each event: see :meth:`moment`.

    ``limit``: blocks remembered beyond those in flight.
    """

    def __init__(self, limit: int = OFFERED_MAX) -> None:
        self._limit = limit
        self._offers: OrderedDict[OfferKey, _Offer] = OrderedDict()
        self._moment = 0
        self._in_flight = 0

    def moment(self) -> int:
        """Now, to compare a lookup with: what is stored after it, the lookup cannot know."""
        self._moment += 1
        return self._moment

    def wanted(self, key: OfferKey, looked_up: int) -> bool:
        """Whether to offer a block that a lookup asked at moment ``looked_up`` (0: none) did not find."""
        offer = self._offers.get(key)
        if offer is None:
            return True
        if offer.state is _State.STORED:
            return offer.moment < looked_up  # the pool has lost it since
        return offer.state is _State.FAILED and (offer.tries < STORE_TRIES_MAX or offer.moment < looked_up)

    def offered(self, keys: Iterable[OfferKey]) -> None:
        """They are in a store job from now on."""
        moment = self.moment()
        for key in keys:
            before = self._offers.pop(key, None)
            tries = before.tries if before is not None and before.state is _State.FAILED else 0
            self._offers[key] = _Offer(_State.IN_FLIGHT, moment, tries)
            self._in_flight += before is None or before.state is not _State.IN_FLIGHT

    def ended(self, keys: Sequence[OfferKey], done: bytes, *, blame: bool = True) -> None:
        """Their job is terminal; ``done``: one byte a key. ``blame`` False: a failure is not held against them."""
        moment = self.moment()
        for key, stored in zip(keys, done, strict=True):
            offer = self._offers.get(key)
            if offer is None or offer.state is not _State.IN_FLIGHT:
                continue
            self._in_flight -= 1
            offer.moment = moment
            offer.state = _State.STORED if stored else _State.FAILED
            if not stored:
                offer.tries += blame
        self._trim()

    def missing(self, keys: Iterable[OfferKey]) -> None:
        """A load found that the pool does not have them."""
        for key in keys:
            offer = self._offers.get(key)
            if offer is not None and offer.state is _State.STORED:
                del self._offers[key]

    def pool_returned(self) -> None:
        """The pool was away, and may have lost everything: only what is in flight is remembered."""
        for key in [key for key, offer in self._offers.items() if offer.state is not _State.IN_FLIGHT]:
            del self._offers[key]

    def in_flight(self) -> int:
        return self._in_flight

    def _trim(self) -> None:
        """Forget the oldest, but never one in flight: those are as many as the open jobs hold."""
        excess = len(self._offers) - self._in_flight - self._limit
        if excess <= 0:
            return
        idle = (key for key, offer in self._offers.items() if offer.state is not _State.IN_FLIGHT)
        for key in list(islice(idle, excess)):
            del self._offers[key]

    def __len__(self) -> int:
        return len(self._offers)

    def check(self) -> None:
        """Assert the bound, and that no moment lies in the future."""
        flying = sum(offer.state is _State.IN_FLIGHT for offer in self._offers.values())
        assert flying == self._in_flight and len(self._offers) - flying <= self._limit, (flying, len(self._offers))
        for key, offer in self._offers.items():
            assert 0 < offer.moment <= self._moment and offer.tries >= 0, (key, offer)
