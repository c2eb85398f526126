"""Limits and floors as they travel: what a node's share and a cluster-wide policy of a tenant have in common."""

from __future__ import annotations

from typing import TypedDict

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.keys import check_salt


class Limits(TypedDict):
    """Bytes of one tenant by tier; a limit of None is none. Keys are the messages' field names."""

    salt: str
    dram_limit: int | None
    ssd_limit: int | None
    dram_floor: int
    ssd_floor: int


def limits_of(message: control.Share | control.TenantPolicy) -> Limits:
    """Raises :class:`InvalidArgument` for a salt that is too long. The other way: ``control.Share(**limits)``."""
    return Limits(
        salt=check_salt(message.salt),
        dram_limit=message.dram_limit if message.HasField("dram_limit") else None,
        ssd_limit=message.ssd_limit if message.HasField("ssd_limit") else None,
        dram_floor=message.dram_floor,
        ssd_floor=message.ssd_floor,
    )
