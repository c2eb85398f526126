"""The memory a client has registered: named by regions, until unregistered or the client's end."""

from __future__ import annotations

import threading
from typing import Any

from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.regions import Region, flat_bytes, shareable
from kvstrata.transfer.select import TransportChoice


class RegisteredMemory:
    """Thread-safe. Regions keep their buffers alive; closing one moves no bytes."""

    def __init__(self, choice: TransportChoice) -> None:
        self._choice = choice
        self._regions: dict[int, Region] = {}
        self._lock = threading.Lock()

    def register(self, buffer: Any) -> Region:
        """Name a caller's memory; raises :class:`InvalidArgument` when it cannot be named."""
        return self._keep(Region(flat_bytes(buffer), buffer))

    def allocate(self, nbytes: int) -> Region:
        """New zeroed memory that a node on this host can map."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
            raise InvalidArgument(f"nbytes is {nbytes!r}: expected a positive integer")
        flat, mapping, fd = shareable(nbytes)
        return self._keep(Region(flat, mapping, fd))

    def unregister(self, region: Region) -> None:
        """Safe twice; raises :class:`InvalidArgument` for another client's region."""
        with self._lock:
            known = self._regions.pop(region.id, None)
        if known is None:
            if not region.closed:
                raise InvalidArgument("the region belongs to another client")
            return
        region.close()
        self._choice.unregister(region)

    def totals(self) -> dict[str, int]:
        """{"count": regions, "bytes": their sum}."""
        with self._lock:
            return {"count": len(self._regions), "bytes": sum(region.nbytes for region in self._regions.values())}

    def close(self) -> None:
        """Close all; nodes forget them with the session."""
        with self._lock:
            regions, self._regions = list(self._regions.values()), {}
        for region in regions:
            region.close()

    def _keep(self, region: Region) -> Region:
        with self._lock:
            self._regions[region.id] = region
        self._choice.register(region)
        return region
