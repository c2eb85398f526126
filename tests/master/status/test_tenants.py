"""Tenants of the document: read node by node, bounded; and what was refused lately, past the bound too."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstrata.master.hub import Hub
from kvstrata.master.messages import TenantPolicy, TenantUsage
from kvstrata.master.state import MasterState
from kvstrata.master.status import sampler as sampler_module
from kvstrata.master.status import tenants
from kvstrata.master.status.sampler import Sampler
from kvstrata.master.views import Views

NODES = 3


class Leader:
    """A hub over a state that is put together; it counts how often its lock was held."""

    def __init__(self, usage: dict[str, TenantUsage], policies: dict[str, TenantPolicy]) -> None:
        member = SimpleNamespace(usage=usage, session=1)
        self.quotas = SimpleNamespace(
            nodes={f"n{number}": member for number in range(NODES)},
            policies=policies,
            tenants=list,
            fallback=TenantPolicy("named"),
            denies=False,
        )
        self.reads = 0

    def read(self, question: Any) -> Any:
        self.reads += 1
        return question(SimpleNamespace(leading=True, quotas=self.quotas), 0.0)


def test_usage_is_read_a_node_at_a_time_and_named_tenants_are_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "LOOKED_MAX", 10)
    usage = {f"user-{number}": TenantUsage(f"user-{number}", 5, 0) for number in range(50)}
    usage["named"] = TenantUsage("named", 7, 0)
    leader = Leader(usage, {"named": TenantPolicy("named")})
    held = tenants.held(cast(Hub, leader))
    assert held is not None and leader.reads == 1 + NODES
    assert all(len(rows) == 11 for rows in held.usages)
    totals = tenants.used(held.usages)
    assert totals["named"] == (7 * NODES, 0) and totals["user-0"] == (5 * NODES, 0) and len(totals) == 10
    usage["user-1"] = TenantUsage("user-1", 100, 0)
    assert tenants.used(held.usages) == totals, "a copy"


def sampler_of(
    monkeypatch: pytest.MonkeyPatch, tenants_of: Callable[[], dict[str, int]], clock: Callable[[], float]
) -> Sampler:
    """Of a leader whose tenants were refused so many bytes."""
    state = MasterState(0.0, random.Random(1))
    monkeypatch.setattr(
        state.quotas, "tenants", lambda: [(salt, SimpleNamespace(refused=n)) for salt, n in tenants_of().items()]
    )
    monkeypatch.setattr(type(state), "leading", property(lambda self: True))
    hub = SimpleNamespace(
        metrics=SimpleNamespace(counted=dict),
        read=lambda question: question(state, 0.0),
        leads=lambda: (True, ""),
        events=SimpleNamespace(extend=lambda happenings, at: None),
    )
    views = SimpleNamespace(health=lambda: SimpleNamespace(refused_versions={}, problems=[]))
    return Sampler(cast(Hub, hub), cast(Views, views), lambda: None, clock=clock)  # type: ignore[arg-type, return-value]


def test_refusals_of_tenants_past_the_bound_are_not_said_to_be_of_this_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "REFUSED_MAX", 2)
    sampler = sampler_of(monkeypatch, lambda: {"a": 0, "b": 10, "c": 20, "d": 30}, lambda: 0.0)
    sampler.turn()
    assert sampler.refused_lately({"b": 15, "c": 20, "d": 30}) == {"b": 5, "c": 0}


def test_tenants_are_gone_through_only_when_their_refusals_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, now = [0], [0.0]

    def refused() -> dict[str, int]:
        asked[0] += 1
        return {"a": asked[0]}

    sampler = sampler_of(monkeypatch, refused, lambda: now[0])
    for turn in range(11):
        now[0] = 2.0 * turn
        sampler.turn()
    assert asked[0] == 3, "at 0, 10 and 20 s"
    assert sampler.refused_lately({"a": 5}) == {"a": 4}
