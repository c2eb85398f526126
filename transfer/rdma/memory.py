"""A client's memory as its agent knows it: registered regions, and scratch for what is read beside blocks."""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import Busy, Closed, Unavailable
from kvstrata.transfer.frames import Late
from kvstrata.transfer.gpu.allocations import whole_allocations
from kvstrata.transfer.gpu.runtimes import runtime_of
from kvstrata.transfer.rdma.engine import Job, NotInTime, RailEngine, Registration
from kvstrata.transfer.rdma.pattern import pattern
from kvstrata.transfer.regions import Region

#: The smallest piece of scratch; larger ones are powers of two.
SCRATCH_BYTES: Final = 64 << 10
#: All scratch of a client, that of transfers which have not settled included.
SCRATCH_BYTES_MAX: Final = 64 << 20

Bytes = npt.NDArray[np.uint8]


class Scratch:
    """Registered memory of the library's own: ``bytes`` u8[at least what was asked for], ``address``."""

    __slots__ = ("address", "bytes", "registration")

    def __init__(self, flat: Bytes, registration: Registration) -> None:
        self.bytes = flat
        self.address = int(flat.ctypes.data)
        self.registration = registration


@dataclass(frozen=True, slots=True)
class Pattern:
    """Known bytes, for nodes to read: those of ``seed``."""

    region: Region
    seed: int


class LocalMemory:
    """Thread-safe. Regions are registered once, whole; they stay known until :meth:`forget`."""

    def __init__(self, engine: RailEngine) -> None:
        self._engine = engine
        #: Held while a region is registered, which may take a minute.
        self._making = threading.Lock()
        #: Around the fields below, never while the engine is asked: its thread takes it when a transfer ends.
        self._lock = threading.Lock()
        self._registered: dict[int, tuple[Registration, ...]] = {}
        self._refused: dict[int, str] = {}
        self._free: defaultdict[int, list[Scratch]] = defaultdict(list)
        self._scratch_bytes = 0
        self._patterns: dict[int, Pattern] = {}

    def known(self, region: Region) -> bool:
        return region.id in self._registered

    def of(self, region: Region) -> tuple[Registration, ...]:
        """Its registrations, one an extent, on a device one an allocation; made when new, which may take a minute.

        Raises :class:`Unavailable`, with what to do; :class:`Closed` when it is closed by then.
        What was refused is not tried again: that takes long, and what it lacks does not come by itself.
        """
        found = self._registered.get(region.id)
        if found is not None:
            return found
        region.check_open()
        with self._making:
            found = self._made_before(region)
            return self._keep(region, self._made(region)) if found is None else found

    def _made_before(self, region: Region) -> tuple[Registration, ...] | None:
        with self._lock:
            region.check_open()
            if region.id in self._refused:
                raise Unavailable(self._refused[region.id])
            return self._registered.get(region.id)

    def _made(self, region: Region) -> tuple[Registration, ...]:
        made: list[Registration] = []
        try:
            for address, nbytes in _to_register(region):
                made.append(self._engine.register(address, nbytes, region.memory))
        except BaseException as error:
            for registration in made:
                registration.close()
            if isinstance(error, Unavailable) and not isinstance(error, NotInTime):
                with self._lock:
                    if not region.closed:
                        self._refused[region.id] = str(error)
            raise
        return tuple(made)

    def _keep(self, region: Region, made: tuple[Registration, ...]) -> tuple[Registration, ...]:
        """A region is closed before it is forgotten: what was made too late for that is undone here."""
        with self._lock:
            if not region.closed:
                self._registered[region.id] = made
                return made
        for registration in made:
            registration.close()
        raise Closed("the region was unregistered")

    def forget(self, region: Region) -> None:
        """Deregistered once no transfer names it any more. Safe twice. Waits for no registration."""
        with self._lock:
            self._refused.pop(region.id, None)
            registrations = self._registered.pop(region.id, ())
        for registration in registrations:
            registration.close()

    def pattern(self, nbytes: int) -> Pattern:
        """The same for every node that reads so many bytes; it stays, so that no late read finds it gone."""
        with self._lock:
            known = self._patterns.get(nbytes)
            if known is None:
                seed = secrets.randbits(63)
                flat = pattern(seed, nbytes)
                known = self._patterns[nbytes] = Pattern(Region(flat, flat), seed)
            return known

    # ------------------------------------------------------------------ scratch

    def scratch(self, nbytes: int, deadline: float) -> Scratch:
        """Give it back by :meth:`put_back`. Raises :class:`Busy` past the bound, :class:`Unavailable`.

        A new piece waits for the agent, which may be registering others' memory: :class:`Late` at ``deadline``.
        """
        size = max(SCRATCH_BYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
            if self._scratch_bytes + size > SCRATCH_BYTES_MAX:
                raise Busy(f"{self._scratch_bytes} bytes of scratch are in use by transfers that have not settled")
            self._scratch_bytes += size
        flat = np.zeros(size, np.uint8)
        try:
            left_s = max(0.0, deadline - time.monotonic())
            return Scratch(flat, self._engine.register(flat.ctypes.data, size, within_s=left_s))
        except BaseException as error:
            with self._lock:
                self._scratch_bytes -= size
            if isinstance(error, NotInTime):
                raise Late(f"scratch memory was not registered in time: {error}") from error
            raise

    def put_back(self, scratch: Scratch, job: Job | None) -> None:
        """Free it, once ``job``, if there is one, has settled."""
        if job is None:
            self._freed(scratch)
        else:
            job.then(partial(self._freed, scratch))

    def _freed(self, scratch: Scratch) -> None:
        with self._lock:
            self._free[len(scratch.bytes)].append(scratch)

    def health(self) -> dict[str, object]:
        with self._lock:
            free = sum(size * len(pieces) for size, pieces in self._free.items())
            return {
                "registered": len(self._registered),
                "not_registered": sorted(set(self._refused.values())),
                "scratch_bytes_in_use": self._scratch_bytes - free,
            }


def _to_register(region: Region) -> Sequence[tuple[int, int]]:
    """(address, bytes)."""
    if region.memory.on_host:
        return region.extents
    return whole_allocations(runtime_of(region.memory), region.extents)
