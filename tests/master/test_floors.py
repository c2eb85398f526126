"""Floors that have no room show; long work on shares is done in steps."""

from __future__ import annotations

import pytest

from kvstrata.master import messages as m
from kvstrata.master.tenants import share_mail
from kvstrata.master.tenants.quotas import LEAVING_S, PAIRS_A_STEP, UNMET_SAID_S
from kvstrata.proto.status import Tier
from tests.master.quota_world import MIB, QuotaWorld

GIB = 1 << 30


def floors(w: QuotaWorld, salt: str) -> int:
    return sum(node.shares[salt].dram_floor for node in w.nodes.values() if node.session is not None)


def test_floors_that_do_not_fit_after_a_node_has_left_show_until_it_is_back() -> None:
    w = QuotaWorld({"n0": (10 * GIB, 0), "n1": (10 * GIB, 0)})
    w.set(m.TenantPolicy("t", None, None, 15 * GIB))
    w.set(m.TenantPolicy("u", 8 * GIB, None, GIB))
    for node_id in w.nodes:
        w.attach(node_id)
    w.settle(5)
    assert floors(w, "t") == 15 * GIB and not w.quotas.unmet("t", Tier.DRAM)
    assert dict(w.quotas.floors_missing) == {Tier.DRAM: 0, Tier.SSD: 0} and not w.reports

    w.stop("n1")
    w.settle(2 * UNMET_SAID_S - 5)
    missing = w.quotas.unmet("t", Tier.DRAM) + w.quotas.unmet("u", Tier.DRAM)
    assert missing == 16 * GIB - floors(w, "t") - floors(w, "u") >= 6 * GIB
    assert w.quotas.floors_missing[Tier.DRAM] == missing and not w.quotas.unmet("t", Tier.SSD)
    said = w.reports
    assert len(said) == 2, "at once, and now and then"
    assert said[0].fields["dram_bytes"] == missing and said[0].fields["ssd_bytes"] == 0

    w.attach("n1")
    w.settle(5)
    assert floors(w, "t") == 15 * GIB and not w.quotas.unmet("t", Tier.DRAM)
    w.settle(2 * UNMET_SAID_S)
    assert len(w.reports) == 2


def test_a_floor_that_is_given_up_is_not_missed() -> None:
    w = QuotaWorld({"n0": (10 * GIB, 0)})
    w.set(m.TenantPolicy("t", None, None, 12 * GIB))
    assert w.quotas.unmet("t", Tier.DRAM) == 12 * GIB
    w.set(m.TenantPolicy("t"))
    assert w.quotas.unmet("t", Tier.DRAM) == 0
    w.attach("n0")
    w.set(m.TenantPolicy("t", None, None, 12 * GIB))
    assert w.quotas.unmet("t", Tier.DRAM) == 2 * GIB
    w.set(m.TenantPolicy("t", None, None, 9 * GIB))
    assert w.quotas.unmet("t", Tier.DRAM) == 0
    w.set(m.TenantPolicy("t", None, None, 12 * GIB))
    w.quotas.remove_policy("t", w.now)
    assert w.quotas.floors_missing[Tier.DRAM] == 0
    w.quotas.check()


def test_a_node_that_stops_while_a_raise_waits_to_be_saved_is_saved_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = QuotaWorld({"n0": (10 * GIB, 0), "n1": (10 * GIB, 0)})
    w.set(m.TenantPolicy("t", 2 * GIB))
    for node_id in w.nodes:
        w.attach(node_id)
    w.settle(5)
    monkeypatch.setattr(share_mail, "ROWS_A_FLUSH", 1)  # one node a flush
    w.quotas.set_policy(m.TenantPolicy("t", 6 * GIB), w.now)
    waiting = [node_id for node_id, member in w.quotas.nodes.items() if member.rising]
    assert len(waiting) == 1
    w.stop(waiting[0])
    w.settle(5)
    assert not w.quotas.nodes[waiting[0]].rising and len(w.grants) == 2
    w.settle(LEAVING_S)
    other = "n1" if waiting == ["n0"] else "n0"
    assert w.granted("t")[other] == 6 * GIB, "all of it"


def test_raises_of_many_tenants_go_out_in_steps() -> None:
    w = QuotaWorld({f"n{number}": (10 * GIB, 0) for number in range(4)})
    tenants = [f"t{number}" for number in range(PAIRS_A_STEP // 2)]
    for salt in tenants:
        w.set(m.TenantPolicy(salt, 40 * MIB))
    for node_id in w.nodes:
        w.attach(node_id)
    w.settle(5)
    for salt in tenants:
        w.quotas.set_policy(m.TenantPolicy(salt, 10 * GIB), w.now)
    w.sent = []
    w.flush()
    told = [sum(len(message.shares) for message in w.sent)]
    while w.quotas.behind(w.now):
        w.sent = []
        w.quotas.step(w.now)
        told.append(sum(len(message.shares) for message in w.sent))
    assert max(told) <= PAIRS_A_STEP and sum(map(bool, told)) > 1, told
    w.settle(5)
    for salt in tenants:
        assert sum(limit or 0 for limit in w.granted(salt).values()) == 10 * GIB
