"""The copy of policies that a node keeps for its masters. Sans-IO.

What a leader has in its state store of policies means nothing to a node, which works by its shares. It keeps the rows
all the same, and shows them when it attaches: a leader whose store was lost, and which never read what an earlier one
wrote last, has them from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import ConfigError


@dataclass(slots=True)
class PolicyCopy:
    """``rows`` are values by kind and name; ``as_of`` is the number of the last order in them, 0 for no copy."""

    cluster_id: str = ""
    as_of: int = 0
    rows: dict[tuple[str, str], str] = field(default_factory=dict)

    def take(self, message: control.PolicyCopy) -> None:
        """What the leader says: the whole, or the rows that changed."""
        if message.whole:
            self.rows.clear()
        for row in message.rows:
            if row.value:
                self.rows[row.kind, row.name] = row.value
            else:
                self.rows.pop((row.kind, row.name), None)
        self.cluster_id, self.as_of = message.cluster_id, message.as_of

    def forget(self) -> None:
        """A leader is obeyed that gives no copy: this one grows old."""
        self.cluster_id, self.as_of = "", 0
        self.rows.clear()

    def message(self) -> control.PolicyCopy | None:
        """For the attach message; None when there is nothing to show."""
        if not self.as_of:
            return None
        rows = [control.PolicyRow(kind=kind, name=name, value=value) for (kind, name), value in self.rows.items()]
        return control.PolicyCopy(cluster_id=self.cluster_id, as_of=self.as_of, whole=True, rows=rows)

    # ------------------------------------------------------------------ over a restart

    def to_json(self) -> dict[str, object]:
        rows = [[kind, name, value] for (kind, name), value in self.rows.items()]
        return {"cluster_id": self.cluster_id, "as_of": self.as_of, "rows": rows}

    @classmethod
    def from_json(cls, saved: Mapping[str, object]) -> PolicyCopy:
        """Raises :class:`ConfigError` for what :meth:`to_json` never gave."""
        cluster_id, as_of, rows = saved.get("cluster_id"), saved.get("as_of"), saved.get("rows")
        if not isinstance(cluster_id, str) or type(as_of) is not int or not 0 <= as_of < 1 << 64:
            raise ConfigError("the copy of policies names no cluster and no order")
        if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
            raise ConfigError("the copy of policies has rows that are none")
        return cls(cluster_id, as_of, {(kind, name): value for kind, name, value in rows})


def _is_row(row: object) -> bool:
    return isinstance(row, list) and len(row) == 3 and all(isinstance(part, str) for part in row)
