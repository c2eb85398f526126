"""What operators ordered, as events: quotas, epochs, drops, drains, replicas, and by whose token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstrata.master.status.events import Happening, Severity
from kvstrata.master.status.salts import shown
from kvstrata.proto import control_pb2 as control
from kvstrata.transfer.security.access import CALLER

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def tenant_set(policy: control.TenantPolicy, before: control.TenantPolicy) -> Happening:
    """A tenant has a policy from now on."""
    return _ordered(
        "tenant.policy", f"tenant {shown(policy.salt, named=True)}: {_changes(policy, before)}", policy.salt
    )


def default_set(policy: control.TenantPolicy, before: control.TenantPolicy, deny: bool) -> Happening:
    """Tenants without a policy have this one."""
    what = "they may store nothing" if deny else _changes(policy, before)
    return _ordered("tenant.policy", f"tenants without a policy: {what}")


def tenant_removed(salt: str, *, named: bool) -> Happening:
    """A tenant's policy is taken away. ``named``: it had one."""
    name = shown(salt, named=named)
    return _ordered("tenant.policy", f"tenant {name} has no policy of its own any more", salt if named else "")


def epoch_bumped(group: str, epoch: int, blocks: int) -> Happening:
    """A group's weights have changed."""
    return _ordered("content.epoch", f"weight epoch {epoch} of {group} began: {blocks} blocks are of the past")


def dropped(group: str, salt: str | None, blocks: int, *, named: bool) -> Happening:
    """A scope's blocks are gone. ``named``: the tenant has a policy, and may be called by its name."""
    whose = "every tenant" if salt is None else f"tenant {shown(salt, named=named)}"
    where = group or "every namespace"
    return _ordered("content.dropped", f"dropped {blocks} blocks of {whose} in {where}", severity=Severity.WARNING)


def replicas_set(group: str, salt: str | None, count: int, *, named: bool) -> Happening:
    """So many replicas from now on; 0: the number is taken away."""
    whose = f"tenant {shown(salt, named=named)}" if salt is not None else group or "all that has no number of its own"
    what = f"{count} replicas" if count else "its number of replicas is taken away"
    return _ordered("replicas", f"{whose}: {what}")


def _ordered(kind: str, text: str, about: str = "", severity: Severity = Severity.NOTICE) -> Happening:
    by = CALLER.get().subject
    return Happening(kind, f"{text}, by {by}" if by else text, severity, shown(about, named=True) if about else "")


def _changes(policy: control.TenantPolicy, before: control.TenantPolicy) -> str:
    fields = (
        ("dram_limit", "memory"),
        ("ssd_limit", "SSD"),
        ("dram_floor", "memory floor"),
        ("ssd_floor", "SSD floor"),
    )
    told = list(_told(policy, before, fields))
    return ", ".join(told) or "its policy is as it was"


def _told(
    policy: control.TenantPolicy, before: control.TenantPolicy, fields: Iterable[tuple[str, str]]
) -> Iterable[str]:
    for name, words in fields:
        now, was = _amount(policy, name), _amount(before, name)
        if now != was:
            yield f"{words} {now} (was {was})"


def _amount(policy: control.TenantPolicy, name: str) -> str:
    if name.endswith("limit") and not policy.HasField(name):
        return "without limit"
    value, unit = float(getattr(policy, name)), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"
