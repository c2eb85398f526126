"""What each gRPC call and each HTTP route of a master needs, where tokens are on: all of it, in two tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvstrata.master.status.pages import PUBLIC
from kvstrata.transfer.security.access import Access, touch_groups, touch_salts
from kvstrata.transfer.security.http_guard import HttpRules
from kvstrata.transfer.security.rights import Rights, Role


def _named(rights: Rights, request: Any) -> None:
    rights.touch(request.salt, request.spec.group)


def _scope(rights: Rights, request: Any) -> None:
    touch_salts(rights, None if request.any_salt else request.salt)
    touch_groups(rights, request.group or None)


def _explained(rights: Rights, request: Any) -> None:
    # A request's name does not say whose it is.
    touch_salts(rights, request.salt if request.HasField("salt") and not request.request else None)
    touch_groups(rights, request.group or None)


def _group(rights: Rights, request: Any) -> None:
    rights.touch_group(request.group)


def _tenants(rights: Rights, request: Any) -> None:
    for salt in request.salts or (None,):
        touch_salts(rights, salt)


def _policy(rights: Rights, request: Any) -> None:
    touch_salts(rights, None if request.is_default else request.policy.salt)


def _replicas(rights: Rights, request: Any) -> None:
    if request.HasField("salt"):
        rights.touch_salt(request.salt)
    else:
        touch_groups(rights, request.group or None)


def _removed_tenant(rights: Rights, request: Any) -> None:
    rights.need(Role.ADMIN if request.drop_blocks else Role.OPERATE)
    rights.touch_salt(request.salt)


#: By the rpc's name. One that is not here is refused to everybody.
RPCS: Final[Mapping[str, Access]] = {
    "Sync": Access(Role.NODE),
    "LookupBlocks": Access(Role.CLIENT, _named),
    "PlaceBlocks": Access(Role.CLIENT, _named),
    "RemoveBlocks": Access(Role.CLIENT, _named),
    "ListNodes": Access(Role.READ),
    "ListClients": Access(Role.READ),
    "ListNamespaces": Access(Role.READ),
    "ListMasters": Access(Role.READ),
    "ListReplicas": Access(Role.READ),
    "ListTenants": Access(Role.READ, _tenants),
    "ListBlocks": Access(Role.READ, _scope),
    "Explain": Access(Role.READ, _explained),
    "Health": Access(Role.READ),
    "WatchIndex": Access(Role.READ),  # what it may not touch it does not hear of
    "Route": Access(Role.READ, _named),
    "SetTenant": Access(Role.OPERATE, _policy),
    "SetReplicas": Access(Role.OPERATE, _replicas),
    "DrainNode": Access(Role.OPERATE),
    "RemoveTenant": Access(Role.OPERATE, _removed_tenant),
    "BumpEpoch": Access(Role.ADMIN, _group, may_reset=True),
    "DropBlocks": Access(Role.ADMIN, _scope),
    "RemoveNode": Access(Role.ADMIN),
}

#: By method and the first part of the path. One that is not here is not served.
ROUTES: Final[HttpRules] = {
    ("GET", "healthz"): Access(None, open=True),
    ("GET", "readyz"): Access(None, open=True),
    ("GET", "metrics"): Access(Role.READ),
    ("GET", "quota"): Access(Role.READ),
    ("PUT", "quota"): Access(Role.OPERATE),
    ("DELETE", "quota"): Access(Role.OPERATE),
    ("POST", "ticket"): Access(None),
    ("GET", "status.json"): Access(Role.READ),
    ("GET", "events.json"): Access(Role.READ),
    **{("GET", path.removeprefix("/")): Access(None, open=True) for path in PUBLIC},
}
