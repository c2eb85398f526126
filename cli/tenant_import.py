"""From the policies that a master has to those of a file: what changes, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.cli.salts import shown
from kvstrata.cli.tenant_file import Policies
from kvstrata.cli.tenant_policy import Policy
from kvstrata.client.admin import AdminClient

DEFAULT = "(default)"


@dataclass(frozen=True, slots=True)
class Change:
    """Of one tenant, or of the default (``salt`` None). ``before`` or ``after`` None: no policy of its own."""

    salt: str | None
    before: Policy | None
    after: Policy | None
    denied: bool = False
    denies: bool = False

    @property
    def name(self) -> str:
        return DEFAULT if self.salt is None else shown(self.salt)

    def row(self) -> tuple[str, str, str]:
        """Name, before, after, for people."""
        return self.name, _text(self.before, self.denied), _text(self.after, self.denies)

    def freed(self) -> int:
        """Bytes of floors that it gives back (negative: that it needs)."""
        return (self.before.floors if self.before else 0) - (self.after.floors if self.after else 0)

    def apply(self, admin: AdminClient) -> list[str]:
        """Returns the master's warnings."""
        if self.salt is None:
            assert self.after is not None
            return list(admin.set_default(self.after.message(""), deny=self.denies).warnings)
        if self.after is None:
            return list(admin.remove_tenant(self.salt).warnings)
        return list(admin.set_tenant(self.after.message(self.salt)).warnings)


def changes(now: Policies, wanted: Policies, *, prune: bool) -> list[Change]:
    """In the order in which they can be made: floors are lowered before others are raised.

    Tenants that ``wanted`` does not name stay, unless ``prune``: then they lose their policies.
    """
    found = [
        Change(salt, now.tenants.get(salt), policy)
        for salt, policy in wanted.tenants.items()
        if now.tenants.get(salt) != policy
    ]
    if prune:
        found += [Change(salt, policy, None) for salt, policy in now.tenants.items() if salt not in wanted.tenants]
    if wanted.default is not None and (wanted.denies != now.denies or not _same_default(now, wanted)):
        found.append(Change(None, now.default, wanted.default, now.denies, wanted.denies))
    return sorted(found, key=lambda change: (-change.freed(), change.name))


def _same_default(now: Policies, wanted: Policies) -> bool:
    return wanted.denies or now.default == wanted.default


def _text(policy: Policy | None, denies: bool) -> str:
    if denies:
        return "deny"
    return "the default applies" if policy is None else policy.text()
