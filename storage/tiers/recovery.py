"""What a node finds on its SSDs when it starts: blocks of the last run, entered before anybody may ask.

The store says what is there and was not removed; here is decided what of it still counts. A slot's weight epoch
can be newer than what the node remembers, when its policies file was lost: the node was at that epoch once, so
it is again. Blocks of older epochs stay where they are, unnamed, until their slots are used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.proto.errors import KVError
from kvstrata.proto.logs import get_logger
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.ssd.base import Extent, ScanReport, SlotHeader, SsdStore
from kvstrata.storage.state import NodeState

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Recovery:
    """``blocks`` are readable again; ``stale`` were found and do not count any more. ``seconds`` in all."""

    blocks: int
    stale: int
    seconds: float
    scan: ScanReport

    @property
    def seconds_per_tb(self) -> float:
        """What the scan would take for 10^12 bytes of devices."""
        return self.scan.seconds / self.scan.device_bytes * 1e12 if self.scan.device_bytes else 0.0


@dataclass(frozen=True, slots=True)
class _Stretch:
    extent: Extent
    slot_bytes: int
    headers: Sequence[tuple[int, SlotHeader]]


def recover(store: SsdStore, state: NodeState, now: float) -> Recovery:
    """Scan the devices and enter what is there. Before the node serves: nothing else touches state or store."""
    assert state.ssd is not None
    started = time.perf_counter()
    stretches: list[_Stretch] = []
    scan = store.scan(lambda extent, slot_bytes, found: stretches.append(_Stretch(extent, slot_bytes, found)))
    for group, epoch in _epochs(stretches).items():
        state.set_epoch(group, epoch, now)
    stale = sum(_adopt(state, state.ssd, stretch) for stretch in stretches)
    return Recovery(state.ssd.settle(), stale, time.perf_counter() - started, scan)


def _epochs(stretches: Sequence[_Stretch]) -> dict[str, int]:
    epochs: dict[str, int] = {}
    for stretch in stretches:
        for _, header in stretch.headers:
            group = header.namespace.group
            epochs[group] = max(epochs.get(group, 0), header.epoch)
    return epochs


def _adopt(state: NodeState, ssd: Inventory, stretch: _Stretch) -> int:
    """Enter what counts of one extent; how many do not. An extent without any stays free."""
    wanted = [(slot, header) for slot, header in stretch.headers if _counts(state, ssd, stretch, header)]
    if not wanted:
        return len(stretch.headers)
    generation = max(header.generation for _, header in stretch.headers)
    ssd.arena.adopt(stretch.extent, stretch.slot_bytes, [slot for slot, _ in wanted], generation)
    unused: list[int] = []
    for slot, header in wanted:
        entry = state.entry(state.open_namespace(header.namespace)[0])
        shelf = ssd.shelf(entry, header.salt)
        block = ssd.adopt(
            shelf, stretch.extent, slot, header.hash, header.generation, header.checksum, header.index, header.parent
        )
        if block is None:
            unused.append(slot)
    if unused:
        ssd.arena.disown(stretch.extent, unused)
    return len(stretch.headers) - len(wanted) + len(unused)


def _counts(state: NodeState, ssd: Inventory, stretch: _Stretch, header: SlotHeader) -> bool:
    """Of the current weights, of a namespace this node can name, and of the size that its blocks have here."""
    try:
        handle, epoch = state.open_namespace(header.namespace)
    except KVError as error:  # more namespaces than a node knows
        log.warning("a block on SSD is of no use", reason=str(error))
        return False
    return header.epoch == epoch and ssd.slot_bytes(state.entry(handle)) == stretch.slot_bytes
