"""Why is it not here: verdicts on blocks and on requests, and misses counted by reason, exactly."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from kvstrata.master import messages as m
from kvstrata.master.content import lookups as lookups_module
from kvstrata.master.content.advice import LOADS, STORES, TEXTS
from kvstrata.master.content.explain import Explanation, explain_block, explain_request
from kvstrata.master.content.lookups import Asked, RequestLog
from kvstrata.master.content.misses import COUNTED, MissReason
from kvstrata.master.daemon import Master
from kvstrata.master.saved import Saved
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import control_pb2_grpc
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, Departure, Tier
from kvstrata.proto.wire import Kind
from tests.master.world import NS, SALT, World, hashes

Make = Callable[..., Any]


def why(world: World, number: int, group: str = NS.group, salt: str | None = SALT) -> Explanation:
    return explain_block(world.state, hashes(number), group, salt, world.now)


def ask(world: World, request: str, *numbers: int) -> None:
    """A named lookup, as the hub makes it."""
    opened, _ = world.state.open_namespace(NS)
    world.state.questions.note_lookup(
        request, opened, SALT, fold(hashes(*numbers), 16), world.lookup(*numbers), world.now
    )


def test_every_reason_has_a_text_and_a_label() -> None:
    assert set(TEXTS) == set(MissReason)
    assert len({reason.label for reason in MissReason}) == len(MissReason)


def test_present_says_where_in_both_tiers() -> None:
    world = World()
    session = world.up(1)
    world.delta(session, 1, add=[1], tier=Tier.SSD)
    told = why(world, 1)
    assert (told.verdict, told.where) == ("present", ("n/dram", "n/ssd")) and "n/ssd" in told.text
    world.delta(session, 2, remove=[1], reason=Departure.ROOM)
    assert (why(world, 1).verdict, why(world, 1).where) == ("present", ("n/ssd",))


def test_an_eviction_names_its_rule_its_time_and_whose_need_it_was() -> None:
    world = World()
    session = world.up(1, 2)
    world.delta(session, 1, remove=[1], reason=Departure.ROOM, cause="greedy")
    world.delta(session, 2, remove=[2], reason=Departure.QUOTA, cause=SALT)
    world.now += 42
    told = why(world, 1)
    assert told.verdict == "evicted_room" and told.text.startswith("42 s ago at node n, for tenant 'greedy': ")
    assert [line.cause for line in told.story if line.reason is MissReason.EVICTED_ROOM] == ["greedy"]
    assert why(world, 2).verdict == "evicted_quota" and "tenant set --dram" in why(world, 2).text


def test_what_the_chronicle_forgot_is_still_known_by_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.master.content.chronicle.RECORDS_MAX", 3)
    world = World()
    session = world.up(1)
    world.tell(m.Tick())
    world.delta(session, 1, remove=[1], reason=Departure.ROOM)
    for seq in range(2, 6):
        world.delta(session, seq, add=[seq])
    world.now += 5
    world.tell(m.Tick())
    told = why(world, 1)
    assert told.verdict == "evicted_room" and told.text.startswith("between 0 s and 5 s ago: ")


def test_lost_removed_dropped_and_of_past_weights() -> None:
    world = World()
    session = world.up(1, 2, 3)
    world.remove(1)
    assert why(world, 1).verdict == "removed"
    world.tell(m.Heartbeat("n", 1, dying=True))
    assert why(world, 2).verdict == "node_lost"
    session = world.attach(incarnation=2)
    world.snapshot(session, 0, 3)
    assert (why(world, 2).verdict, why(world, 3).verdict) == ("node_lost", "present")
    world.bump()
    assert why(world, 3).verdict == "epoch" and "0 s ago" in why(world, 3).text
    assert "weight epoch 1 began" in [line.what for line in why(world, 3).story]
    world.delta(session, 1, add=[4], epoch=1)
    world.drop("", SALT)
    assert why(world, 4).verdict == "dropped"
    assert why(world, 9).verdict == "never_stored"


def test_under_way_refused_and_not_had() -> None:
    world = World()
    session = world.up(1)
    world.place(5)
    assert why(world, 5).verdict == "in_flight"
    world.miss(5, seq=0)  # its writer's node refused it
    assert why(world, 5).verdict == "refused_at_store"
    world.place(5)
    world.delta(session, 1, add=[5])
    world.delta(session, 2, remove=[5], reason=Departure.QUOTA)
    assert why(world, 5).verdict == "evicted_quota", "what happened last counts"
    world.miss(1, seq=7)
    assert why(world, 1).verdict == "load_failed" and why(world, 1).where == ("n/hidden",)


@pytest.mark.parametrize("status", sorted(STORES))
def test_a_refused_store_says_which_refusal(status: BlockStatus) -> None:
    world = World()
    world.up()
    world.place(5)
    world.miss(5, seq=0, status=status, at_store=True)
    told = why(world, 5)
    assert told.verdict == "refused_at_store" and told.text == f"0 s ago at node n: {STORES[status]}"
    assert told.story[-1].what == f"not stored: {status.name.lower()}"


@pytest.mark.parametrize("status", sorted(LOADS))
def test_a_failed_load_says_which_failure_and_hides_only_what_is_gone(status: BlockStatus) -> None:
    world = World()
    world.up(1, 2)
    ask(world, "r", 1, 2)
    world.place(7)
    world.miss(1, 7, seq=9, status=status)
    told = explain_request(world.state, "r", world.now)
    assert told.verdict == "load_failed" and LOADS[status] in told.text
    gone = status in (BlockStatus.EVICTED, BlockStatus.READ_ERROR)
    assert world.found(1, 2) == ([2] if gone else [1, 2])
    assert (why(world, 7).verdict == "in_flight") != gone, "another writer may still bring it"


def test_a_failed_load_is_told_when_its_node_has_left_or_has_told_of_it_itself() -> None:
    world = World()
    session = world.up(1, 2)
    ask(world, "evicted", 1)
    world.delta(session, 1, remove=[1], reason=Departure.QUOTA)
    world.miss(1, seq=1, status=BlockStatus.EVICTED)
    told = explain_request(world.state, "evicted", world.now)
    assert told.verdict == "load_failed" and LOADS[BlockStatus.EVICTED] in told.text
    assert why(world, 1).verdict == "evicted_quota", "of the block, it is how it left that counts"
    ask(world, "lost", 2)
    world.tell(m.LinkLost(session))
    world.miss(2, seq=0, status=BlockStatus.NODE_LOST)
    assert LOADS[BlockStatus.NODE_LOST] in explain_request(world.state, "lost", world.now).text


def test_a_store_that_a_later_one_made_up_for_is_no_reason() -> None:
    world = World()
    session = world.up()
    world.miss(5, seq=0, status=BlockStatus.FULL, at_store=True)
    world.delta(session, 1, add=[5])
    assert why(world, 5).verdict == "present"


def test_a_node_that_may_not_be_read() -> None:
    world = World()
    world.up(1)
    world.wait(4.0)
    assert why(world, 1).verdict == "unroutable" and why(world, 1).where == ("n/dram",)


def test_the_same_hash_under_another_tenant_or_fingerprint() -> None:
    world = World()
    session = world.up()
    other = Namespace("other-model", 4096, 16)
    world.tell(m.DeltaBatch(session, 1, (m.Change(True, other, SALT, 0, hashes(1)),)))
    world.group()
    told = why(world, 1)
    assert (told.verdict, told.elsewhere) == ("other_fingerprint", (f"tenant '{SALT}' in namespace 'other-model'",))
    world.delta(session, 2, add=[1], salt="neighbour")
    told = why(world, 1)
    assert told.verdict == "other_salt" and len(told.elsewhere) == 2
    anywhere = explain_block(world.state, hashes(1), "", None, world.now)
    assert (anywhere.verdict, anywhere.elsewhere) == ("present", ())


def test_a_missing_sister_shard() -> None:
    world = World()
    session = world.up()
    shards = [Namespace("tp", 4096, 16, shard=shard, shard_count=2) for shard in range(2)]
    world.tell(m.DeltaBatch(session, 1, (m.Change(True, shards[0], SALT, 0, hashes(1)),)))
    told = why(world, 1, "tp")
    assert (told.verdict, told.where) == ("shard_missing", ("n/dram (shard 0)",))
    world.tell(m.DeltaBatch(session, 2, (m.Change(True, shards[1], SALT, 0, hashes(1)),)))
    assert why(world, 1, "tp").verdict == "present"


def test_hashes_and_requests_that_nobody_can_know() -> None:
    world = World()
    world.up(1)
    with pytest.raises(InvalidArgument, match="20 bytes"):
        explain_block(world.state, bytes(20), NS.group, None, world.now)
    with pytest.raises(InvalidArgument, match="no namespace group"):
        explain_block(world.state, bytes(16), "unknown", None, world.now)
    with pytest.raises(InvalidArgument, match="'r1'"):
        explain_request(world.state, "r1", world.now)


def test_a_hash_of_nobody_in_particular_is_looked_for_in_many_tables_and_read_of_in_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    session = world.up()
    for seq in range(1, 101):
        world.delta(session, seq, add=[1 if seq == 50 else 2], salt=f"t{seq}")
    read: list[object] = []
    story = world.state.chronicle.story
    monkeypatch.setattr(world.state.chronicle, "story", lambda *about: read.append(about) or story(*about))
    told = explain_block(world.state, hashes(1), "", None, world.now)
    assert (told.verdict, told.salt, len(read)) == ("present", "t50", 1)
    assert [line.what for line in told.story if "dram" in line.what] == ["added (dram)"]


# ---------------------------------------------------------------------- requests


def test_a_request_is_told_the_block_at_which_its_prefix_ended() -> None:
    world = World()
    session = world.up(1, 2, 3, 4)
    world.delta(session, 1, remove=[3], reason=Departure.QUOTA, cause=SALT)
    ask(world, "r1", 1, 2, 3, 4)
    world.now += 10
    told = explain_request(world.state, "r1", world.now)
    assert (told.verdict, told.asked, told.hit, told.block) == ("evicted_quota", 4, 2, hashes(3))
    assert "2 of 4 blocks were found 10 s ago; block 2 ended the prefix" in told.text
    assert (told.group, told.salt) == (NS.group, SALT)
    world.delta(session, 2, add=[3])
    told = explain_request(world.state, "r1", world.now)
    assert told.verdict == "evicted_quota" and "Now: present" in told.text, "what was so then is what was asked"


def test_a_request_whose_blocks_were_all_there_or_were_not_had() -> None:
    world = World()
    world.up(1, 2)
    ask(world, "whole", 1, 2)
    assert explain_request(world.state, "whole", world.now).verdict == "partial_block"
    world.now += 1
    world.miss(2, seq=9)
    told = explain_request(world.state, "whole", world.now)
    assert (told.verdict, told.block) == ("load_failed", hashes(2)) and "node n" in told.text
    ask(world, "later", 1, 2)
    assert explain_request(world.state, "later", world.now).hit == 1


def test_a_request_of_another_tenant_or_of_past_weights() -> None:
    world = World()
    session = world.up()
    world.delta(session, 1, add=[1], salt="neighbour")
    ask(world, "r", 1)
    assert explain_request(world.state, "r", world.now).verdict == "other_salt"
    world.bump()
    assert explain_request(world.state, "r", world.now).asked == 1
    opened, _ = world.state.open_namespace(NS)
    stale = world.lookup(1, epoch=0)
    world.state.questions.note_lookup("stale", opened, SALT, fold(hashes(1), 16), stale, world.now)
    assert explain_request(world.state, "stale", world.now).verdict == "epoch"


def test_the_log_of_requests_is_bounded_and_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "REQUESTS_MAX", 3)
    monkeypatch.setattr(lookups_module, "KEYS_MAX", 10)
    log = RequestLog()

    def note(name: str, blocks: int) -> None:
        keys = np.zeros((blocks, 2), dtype=np.uint64)
        log.note(Asked(name, "g", (0, 0, ""), keys, 0, None, 0.0))  # type: ignore[arg-type]
        log.check()

    for name in ("a", "b", "a", "c", "d"):
        note(name, 1)
    assert [log.find(name) is not None for name in "abcd"] == [True, False, True, True]
    note("e", 9)
    assert [log.find(name) is not None for name in "acde"] == [False, False, True, True]
    note("f", 99)
    assert len(log) == 1 and log.find("f") is not None


# ---------------------------------------------------------------------- counting


def test_blocks_asked_are_those_found_and_misses_by_reason() -> None:
    world = World()
    session = world.up(1, 2, 3, 4, 5, 6, 7)
    for seq, (block, reason) in enumerate(zip(range(1, 5), (1, 2, 9, 99), strict=True), 1):
        world.delta(session, seq, remove=[block], reason=reason)
    world.remove(5)
    world.place(8)
    world.miss(6, seq=99)
    answer = world.lookup(*range(1, 10))
    counts = {MissReason(reason): int(n) for reason, n in enumerate(answer.misses()) if n}
    assert counts == {
        MissReason.EVICTED_ROOM: 1,
        MissReason.EVICTED_QUOTA: 1,
        MissReason.HINTED: 1,
        MissReason.EVICTED: 1,
        MissReason.REMOVED: 1,
        MissReason.LOAD_FAILED: 1,
        MissReason.IN_FLIGHT: 1,
        MissReason.NEVER_STORED: 1,
    }
    assert int(answer.found.present.sum()) + sum(counts.values()) == 9


def test_not_yet_is_a_reason() -> None:
    world = World(Saved(nodes=(m.SaveNode("away", 1 << 30, 0, False),)))
    world.up(1)
    assert world.reasons(1, 2, 3) == [MissReason.NOT_YET] * 2


@pytest.fixture
def stub(master: Master, closing: Make) -> Any:
    return control_pb2_grpc.MasterStub(closing(grpc.insecure_channel(master.endpoints.grpc)))


def test_counters_add_up_over_the_wire(master: Master, node: Make, client: Any, stub: Any) -> None:
    holder = node("a")
    holder.blocks = os.urandom(16 * 4)
    holder.attach()
    holder.seq += 1
    gone = control.Change(
        spec=NS.to_spec(), salt="", hashes=holder.blocks[16:32], reason=Departure.QUOTA, cause="tenant"
    )
    on_ssd = control.Change(added=True, spec=NS.to_spec(), salt="", tier=Tier.SSD, hashes=holder.blocks[32:48])
    moved = control.Change(spec=NS.to_spec(), salt="", hashes=holder.blocks[32:48], reason=Departure.ROOM)
    holder.say(delta=control.Delta(seq=holder.seq, changes=[gone, on_ssd, moved]))
    holder.hear("ack")
    client.open()
    request = pb.Lookup(ns=client.handle, hashes=holder.blocks + os.urandom(32), request="r1")
    client.ask(Kind.LOOKUP, request, pb.LookupOk, Kind.LOOKUP_OK)
    value = master.hub.metrics.registry.get_sample_value
    hits = {tier.name.lower(): value("kvstrata_master_block_hits_total", {"tier": tier.name.lower()}) for tier in Tier}
    misses = {r.label: value("kvstrata_master_block_misses_total", {"reason": r.label}) for r in COUNTED}
    assert {tier: count for tier, count in hits.items() if count} == {"dram": 2, "ssd": 1}
    assert {label: count for label, count in misses.items() if count} == {"evicted_quota": 1, "never_stored": 2}
    assert value("kvstrata_master_blocks_asked_total") == 6
    told = stub.Explain(control.ExplainQuery(request="r1"))
    assert (told.verdict, told.asked, told.hit, told.hash) == ("evicted_quota", 6, 1, holder.blocks[16:32])
    assert [line.node_id for line in told.story] and "for tenant 'tenant'" in told.story[-1].what
    assert all(line.age_seconds >= 0 for line in told.story)
    told = stub.Explain(control.ExplainQuery(hash=holder.blocks[32:48]))
    assert (told.verdict, list(told.where), told.group) == ("present", ["a/ssd"], "model")


@pytest.mark.parametrize(
    "query",
    [
        control.ExplainQuery(),
        control.ExplainQuery(request="r", hash=bytes(16)),
        control.ExplainQuery(hash=b"x"),
        control.ExplainQuery(hash=bytes(16), group="unknown"),
        control.ExplainQuery(request="unheard"),
    ],
)
def test_queries_that_make_no_sense(stub: Any, query: control.ExplainQuery) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.Explain(query)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and refused.value.details()
