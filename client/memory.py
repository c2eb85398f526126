"""The memory a client has registered: named by regions, until unregistered or the client's end."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.gpu.memory import Buffer, device_memory
from kvstrata.transfer.regions import BlockView, Region, flat_bytes, shareable
from kvstrata.transfer.select import TransportChoice


class RegisteredMemory:
    """Thread-safe. Regions keep their buffers alive; closing one moves no bytes."""

    def __init__(self, choice: TransportChoice) -> None:
        self._choice = choice
        self._regions: dict[int, Region] = {}
        self._lock = threading.Lock()

    def register(self, buffer: Any, *, staged: bool = False) -> Region:
        """Name a caller's memory, the host's or a device's; several allocations of one device as one region.
        ``staged``: transports hear nothing of a device's, so that all of it goes by way of the host.

        Raises :class:`InvalidArgument` when it cannot be named, :class:`Unavailable` when nothing here reaches the
        device.
        """
        found = _device_buffers(buffer)
        if not found:
            return self._keep(Region(flat_bytes(buffer), buffer))
        memory = found[0].memory
        runtime = self._choice.staging.ring(memory).runtime
        for stream in {each.stream for each in found if each.stream is not None}:
            runtime.follow(stream)
        extents = [(each.address, each.nbytes) for each in found]
        owner = [each.owner for each in found]
        region = Region.spanning(memory, extents, owner, writable=all(each.writable for each in found))
        return self._keep(region, known_to_transports=not staged)

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

    def ordered(self, blocks: BlockView) -> BlockView:
        """Device memory as it will be after what the calling thread's current stream has queued by now, for a call
        that other threads carry out. Blocks of host memory, or with a mark of their own, are as they were."""
        memory = blocks.region.memory
        if memory.on_host or blocks.after is not None:
            return blocks
        return blocks.coming_after(self._choice.staging.mark(memory))

    def totals(self) -> dict[str, object]:
        """{"count": regions, "bytes": their sum, "device_bytes": those on each device, as {"cuda:0": bytes}}."""
        with self._lock:
            regions = list(self._regions.values())
        devices: defaultdict[str, int] = defaultdict(int)
        for region in regions:
            if not region.memory.on_host:
                devices[region.memory.spelled()] += _size(region)
        return {"count": len(regions), "bytes": sum(map(_size, regions)), "device_bytes": dict(devices)}

    def staging(self) -> dict[str, dict[str, object]]:
        """Pinned memory between each device and the host, see :meth:`Staging.health`."""
        return self._choice.staging.health()

    def problems(self) -> list[str]:
        """Why device memory cannot be reached, for each such device."""
        return self._choice.staging.problems()

    def close(self) -> None:
        """Close all; nodes forget them with the session."""
        with self._lock:
            regions, self._regions = list(self._regions.values()), {}
        for region in regions:
            region.close()

    def _keep(self, region: Region, *, known_to_transports: bool = True) -> Region:
        with self._lock:
            self._regions[region.id] = region
        if known_to_transports:
            self._choice.register(region)
        return region


def _device_buffers(buffer: Any) -> list[Buffer]:
    """What of ``buffer`` is device memory: itself, or all members of a list; empty when it is the host's."""
    if not isinstance(buffer, list | tuple):
        found = device_memory(buffer)
        return [] if found is None else [found]
    buffers = [each if isinstance(each, Buffer) else device_memory(each) for each in buffer]
    known = [each for each in buffers if each is not None]
    if not known or len(known) < len(buffers) or len({each.memory for each in known}) > 1:
        raise InvalidArgument("a list of buffers is registered as one only when all are on the same device")
    return known


def _size(region: Region) -> int:
    return sum(nbytes for _, nbytes in region.extents)
