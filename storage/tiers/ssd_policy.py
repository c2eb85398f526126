"""When a node writes blocks to its SSDs: a setting, apart from what carries it out so that it imports nothing."""

from __future__ import annotations

from enum import Enum


class SsdPolicy(Enum):
    """When blocks are written to SSD."""

    DEMOTE = "demote"  #: in the background, the coldest first, before DRAM is full
    WRITE_THROUGH = "write-through"  #: each at once; the writer's answer says that it is durable
    OFF = "off"  #: never; what is there can be read
