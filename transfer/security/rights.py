"""What somebody who has shown a token, or proved a ticket, may do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import translate
from typing import Final

from kvstrata.proto.errors import Forbidden, ForbiddenSalt, InvalidArgument
from kvstrata.proto.keys import check_group, check_salt

#: Patterns that one token may name, of each kind; and how long one may be.
PATTERNS_MAX: Final = 64
PATTERN_CHARS_MAX: Final = 256
#: Answers remembered for one ticket.
_REMEMBERED_MAX: Final = 4096


class Role(StrEnum):
    """``read`` < ``operate`` < ``admin`` are for people and scripts; ``client`` and ``node`` stand apart."""

    CLIENT = "client"  #: an engine: loads and stores blocks of its salts and namespaces
    NODE = "node"  #: a storage node: attaches, sends heartbeats, copies from other nodes
    READ = "read"  #: looks: health, lists, metrics
    OPERATE = "operate"  #: and changes what can be undone: quotas, replicas, drains
    ADMIN = "admin"  #: and destroys: drops, epochs, removals


#: What each role includes besides itself.
_INCLUDES: Final = {
    Role.CLIENT: frozenset({Role.CLIENT}),
    Role.NODE: frozenset({Role.NODE, Role.CLIENT}),
    Role.READ: frozenset({Role.READ}),
    Role.OPERATE: frozenset({Role.READ, Role.OPERATE}),
    Role.ADMIN: frozenset({Role.READ, Role.OPERATE, Role.ADMIN, Role.CLIENT}),
}


def includes(role: Role, other: Role) -> bool:
    """Whether who has ``role`` may do all that ``other`` is for."""
    return other in _INCLUDES[role]


@dataclass(frozen=True, slots=True)
class Rights:
    """Whoever it is, its role, and the tenants and namespaces it may touch (patterns with ``*`` and ``?``).

    ``expires`` is in Unix seconds; None: never. Raises :class:`InvalidArgument` for patterns that cannot be.
    """

    subject: str
    role: Role
    salts: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    expires: float | None = None
    _salts: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _groups: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _all: bool = field(init=False, repr=False, compare=False)
    _touched: dict[tuple[str, str], None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_salts", _any_of(self.salts))
        object.__setattr__(self, "_groups", _any_of(self.groups))
        object.__setattr__(self, "_all", "*" in self.salts and "*" in self.groups)

    @property
    def accountable(self) -> str:
        """Whose share of what there is a bounded number of it uses; "" for nodes, which act for all, and where tickets
        are off."""
        return "" if self.role is Role.NODE else self.subject

    def need(self, role: Role) -> None:
        """Raises :class:`Forbidden` unless this role is, or includes, ``role``."""
        if role not in _INCLUDES[self.role]:
            raise Forbidden(f"this needs the role {role}, and {self.subject or 'the asker'} has {self.role}")

    def has(self, role: Role) -> bool:
        return includes(self.role, role)

    def touch(self, salt: str, group: str) -> None:
        """Raises :class:`ForbiddenSalt` unless blocks of this tenant and namespace group may be touched, and
        :class:`InvalidArgument` for names that are too long to be any: those are neither looked at nor remembered.

        Looks at names alone, never at what is stored: a refusal does not tell whether anything is there.
        """
        if self._all or (salt, group) in self._touched:
            return
        self.touch_salt(salt)
        self.touch_group(group)
        if len(self._touched) < _REMEMBERED_MAX:
            self._touched[salt, group] = None

    def touch_salt(self, salt: str) -> None:
        """Raises :class:`ForbiddenSalt` unless this tenant may be touched, in some namespace group.

        Names that are too long: as :meth:`touch`.
        """
        if self._salts.match(check_salt(salt)) is None:
            raise ForbiddenSalt(f"{self.subject} may not touch this tenant")

    def touch_group(self, group: str) -> None:
        """Raises :class:`ForbiddenSalt` unless this namespace group may be touched, for some tenant.

        Names that are too long: as :meth:`touch`.
        """
        if self._groups.match(check_group(group)) is None:
            raise ForbiddenSalt(f"{self.subject} may not touch this namespace")

    def touch_all(self, *, salts: bool, groups: bool) -> None:
        """Raises :class:`ForbiddenSalt` unless every tenant, every namespace group, may be touched."""
        if salts and "*" not in self.salts:
            raise ForbiddenSalt(f"{self.subject} may touch some tenants only: name one of them")
        if groups and "*" not in self.groups:
            raise ForbiddenSalt(f"{self.subject} may touch some namespaces only: name one of them")


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    if len(patterns) > PATTERNS_MAX or any(len(each) > PATTERN_CHARS_MAX for each in patterns):
        raise InvalidArgument(f"at most {PATTERNS_MAX} patterns of {PATTERN_CHARS_MAX} characters each")
    if any("[" in each for each in patterns):
        raise InvalidArgument("patterns know * and ? only, no [...]")
    return re.compile("|".join(translate(each) for each in patterns) or r"(?!)")


#: Everything, for ever: what a process without tokens and tickets grants to all comers.
EVERYTHING: Final = Rights("", Role.ADMIN, ("*",), ("*",))
#: The same for peers on a channel without tickets: nodes are believed there by what they say they are.
ANY_PEER: Final = Rights("", Role.NODE, ("*",), ("*",))
