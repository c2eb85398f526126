"""Policies of all tenants in one YAML file, as ``kvstrata tenant export`` writes and ``import`` reads it::

default: {dram: 10GiB, ssd: none}        # salts without a policy of their own; or: default: deny
tenants:
  team-a: {dram: 200GiB, ssd: 2TiB, dram-floor: 20GiB}
  "": {dram: 1GiB}                       # the empty salt; what is not named is no limit, and no floor
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvstrata.cli.sizes import parse_size
from kvstrata.cli.tenant_policy import NOTHING, Limit, Policy, exact_size
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import ConfigError
from kvstrata.proto.keys import check_salt
from kvstrata.transfer.strict_yaml import StrictLoader

FILE_BYTES_MAX = 16 << 20
DENY = "deny"
_FIELDS = ("dram", "ssd", "dram-floor", "ssd-floor")


@dataclass(frozen=True, slots=True)
class Policies:
    """``default`` None: the file does not say. ``denies``: salts without a policy store nothing."""

    tenants: Mapping[str, Policy] = field(default_factory=dict)
    default: Policy | None = None
    denies: bool = False

    @classmethod
    def of(cls, listed: control.TenantList) -> Policies:
        """What a master has; tenants without a policy of their own are not in it."""
        tenants = {row.policy.salt: Policy.of(row.policy) for row in listed.tenants if row.defined}
        return cls(tenants, Policy.of(listed.fallback), listed.fallback_denies)


def dump(policies: Policies) -> str:
    """The file's text; :func:`load` gives the same policies back."""
    document: dict[str, Any] = {}
    if policies.denies:
        document["default"] = DENY
    elif policies.default is not None:
        document["default"] = _fields(policies.default)
    document["tenants"] = {salt: _fields(policies.tenants[salt]) for salt in sorted(policies.tenants)}
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=200)


def load(text: str, name: str) -> Policies:
    """Raises :class:`ConfigError` that says what is wrong where; ``name`` is the file's."""
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"{name} is larger than {FILE_BYTES_MAX} bytes: is it a file of tenants?")
    try:
        document = yaml.load(text, StrictLoader)
    except Exception as error:  # of any kind, as the loader says
        raise ConfigError(f"{name} is not YAML: {error}") from error
    if not isinstance(document, dict) or not document or set(document) - {"default", "tenants"}:
        raise ConfigError(f"{name}: expected a mapping with the keys 'tenants' and 'default'")
    tenants = document.get("tenants") or {}
    if not isinstance(tenants, dict):
        raise ConfigError(f"{name}: 'tenants' must be a mapping of salts to limits")
    read = {_salt(salt, name): _policy(values, f"{name}: tenant {salt!r}") for salt, values in tenants.items()}
    default = document.get("default")
    if default == DENY:
        return Policies(read, NOTHING, True)
    return Policies(read, None if default is None else _policy(default, f"{name}: 'default'"))


def _fields(policy: Policy) -> dict[str, str]:
    written = {"dram": str(policy.dram), "ssd": str(policy.ssd)}
    for key, floor in (("dram-floor", policy.dram_floor), ("ssd-floor", policy.ssd_floor)):
        if floor:
            written[key] = exact_size(floor)
    return written


def _salt(salt: object, name: str) -> str:
    if not isinstance(salt, str):
        raise ConfigError(f"{name}: {salt!r} is no text in YAML: put the salt in quotes")
    try:
        return check_salt(salt)
    except ValueError as error:
        raise ConfigError(f"{name}: tenant {salt!r}: {error}") from error


def _policy(values: object, where: str) -> Policy:
    if values is None:
        values = {}
    if not isinstance(values, dict) or set(values) - set(_FIELDS):
        raise ConfigError(f"{where}: expected a mapping of {', '.join(_FIELDS)}, not {values!r}")
    try:
        return Policy(
            Limit.parse(values.get("dram")),
            Limit.parse(values.get("ssd")),
            parse_size(values.get("dram-floor", 0)),
            parse_size(values.get("ssd-floor", 0)),
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
