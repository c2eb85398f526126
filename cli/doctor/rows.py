"""What a check says, and many checks at once: each bounded in time, none able to stop the others."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


class Verdict(enum.StrEnum):
    """Only a problem makes the exit code 1."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Row:
    """One finding: what was looked at, what was found, and what to do where it is not well."""

    area: str
    what: str
    verdict: Verdict
    found: str
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Check:
    """``look`` may take up to ``bound_s`` seconds; later rows of it are not waited for."""

    area: str
    what: str
    look: Callable[[], Iterable[Row]]
    bound_s: float = 10.0


def run(checks: Sequence[Check]) -> list[Row]:
    """All checks side by side, rows in the order of checks. What a check cannot say in time is a problem of its own."""
    started = time.monotonic()
    going = [_Going(check) for check in checks]
    rows: list[Row] = []
    for one in going:
        rows.extend(one.rows(started))
    return rows


class _Going:
    """A check in a thread of its own, which does not keep the process from ending."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._rows: list[Row] | None = None
        self._thread = threading.Thread(target=self._run, name=f"doctor-{check.area}-{check.what}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        check = self._check
        try:
            self._rows = list(check.look())
        except Exception as error:  # noqa: BLE001 - shown as a row: one broken check must not hide the others
            found = f"the check itself failed: {type(error).__name__}: {error}"
            self._rows = [Row(check.area, check.what, Verdict.PROBLEM, found, "report this as a bug of kvstrata")]

    def rows(self, started: float) -> list[Row]:
        check = self._check
        self._thread.join(max(0.0, started + check.bound_s - time.monotonic()))
        if self._rows is not None:
            return self._rows
        found = f"no answer within {check.bound_s:g} s"
        return [Row(check.area, check.what, Verdict.PROBLEM, found, "look for a device or a process that hangs")]
