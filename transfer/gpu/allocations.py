"""What of a device's memory has to be registered for direct access: whole allocations.

Drivers export memory by allocation (dma-buf takes its base), and libraries that cache registrations would make a new
one for each part of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstrata.transfer.gpu.runtime import Runtime


def whole_allocations(runtime: Runtime, extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(base, bytes) of all allocations that ``extents`` (address, bytes) lie in: ascending, each once.

    Raises :class:`InvalidArgument` when a byte lies in none, :class:`Unavailable` when the driver does not say.
    """
    found: dict[int, int] = {}
    for address, nbytes in extents:
        at = address
        while at < address + nbytes:
            base, size = runtime.allocation(at)
            found[base] = size
            at = base + size
    return sorted(found.items())
