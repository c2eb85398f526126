"""How many replicas blocks are to have: a tenant's own number, else its namespace's, else the default."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvstrata.master.messages import SaveReplicas
from kvstrata.proto.errors import Busy, InvalidArgument

REPLICAS_MAX: Final = 8
RULES_MAX: Final = 10_000
_Key = tuple[str, str | None]
_DEFAULT: Final[_Key] = ("", None)


class Rules:
    """Durable: each change is given to ``emit`` as a :class:`SaveReplicas`."""

    def __init__(self, emit: Callable[[SaveReplicas], None]) -> None:
        self._emit = emit
        self._counts: dict[_Key, int] = {}

    def load(self, saved: Iterable[SaveReplicas]) -> None:
        """What is durable, in place of all that was known."""
        self._counts = {(rule.group, rule.salt): min(rule.count, REPLICAS_MAX) for rule in saved if rule.count}

    @property
    def fallback(self) -> int:
        """Replicas of blocks that no rule names."""
        return self._counts.get(_DEFAULT, 1)

    @property
    def any(self) -> bool:
        """Whether anything is to have more than one replica."""
        return any(count > 1 for count in self._counts.values())

    def wanted(self, group: str, salt: str) -> int:
        """Replicas that a tenant's blocks of a namespace group are to have."""
        own = self._counts.get(("", salt))
        if own is None:
            own = self._counts.get((group, None)) if group else None
        return self.fallback if own is None else own

    def set(self, group: str, salt: str | None, count: int) -> None:
        """From now on ``count`` replicas; 0 takes a rule away.

        Raises :class:`InvalidArgument`, and :class:`Busy` at the bound of rules.
        """
        if group and salt is not None:
            raise InvalidArgument("a number of replicas is a tenant's or a namespace's: name one of the two")
        if not 0 <= count <= REPLICAS_MAX:
            raise InvalidArgument(f"blocks have 1 to {REPLICAS_MAX} replicas (0 takes a rule away), not {count}")
        key = (group, salt)
        if count and key not in self._counts and len(self._counts) >= RULES_MAX:
            raise Busy(f"{RULES_MAX} tenants and namespaces have their own number of replicas, which is the bound")
        if count == self._counts.get(key, 0):
            return
        if count:
            self._counts[key] = count
        else:
            del self._counts[key]
        self._emit(SaveReplicas(group, salt, count))

    def rows(self) -> list[SaveReplicas]:
        """All that are set, the default's included."""
        return [SaveReplicas(group, salt, count) for (group, salt), count in self._counts.items()]

    def check(self) -> None:
        assert len(self._counts) <= RULES_MAX
        for (group, salt), count in self._counts.items():
            assert 1 <= count <= REPLICAS_MAX and not (group and salt is not None)
