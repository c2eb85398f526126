"""In which order a tenant's blocks leave: a setting, apart from the orders so that it imports nothing."""

from __future__ import annotations

from enum import Enum


class EvictionOrder(Enum):
    """What leaves first when a tenant, or the node, must give room."""

    SEGMENTED = "segmented"  #: what was used once, as far as that is measured to hit more than LRU
    LRU = "lru"  #: what has not been used for longest
