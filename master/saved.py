"""What a state store has of the master's state."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.master import messages as m


@dataclass(frozen=True, slots=True)
class Saved:
    """What was durable when the master started."""

    nodes: tuple[m.SaveNode, ...] = ()
    groups: tuple[m.SaveGroup, ...] = ()
    tombstones: tuple[m.SaveTombstone, ...] = ()
    last_command: int = 0
    policies: tuple[m.TenantPolicy, ...] = ()
    fallback: m.SaveFallback | None = None
    grants: tuple[m.SaveGrants, ...] = ()
    scopes: tuple[m.SaveScope, ...] = ()
    replicas: tuple[m.SaveReplicas, ...] = ()
    revision: int = 0
    leader_epoch: int = 0  #: the greatest that the store has seen
