"""The scheduler side, rule by rule, with a scripted lookup client and an injected clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from kvstrata.engine_adapter.connector.base import (
    Computed,
    ConnectorMeta,
    ConnectorOutput,
    Job,
    JobKind,
    JobOutcome,
    LoadEnd,
    PoolState,
    SchedulerSide,
)
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.external_hits import LOOKUP_AGE_MAX_S
from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout
from kvstrata.engine_adapter.connector.lookups import LookupReason
from kvstrata.engine_adapter.connector.offers import STORE_TRIES_MAX
from kvstrata.engine_adapter.connector.scheduler_side import PoolSchedulerSide, make_scheduler_side
from tests.engine_adapter.connector.scheduler_fakes import (
    Clock,
    CountingHolder,
    FakeLookups,
    FakeRequest,
    full_layout,
    window_layout,
)


@dataclass
class Engine:
    """What stands around one scheduler side."""

    layout: PoolLayout = field(default_factory=full_layout)
    config: PoolConfig = field(default_factory=PoolConfig)
    clock: Clock = field(default_factory=Clock)
    holder: CountingHolder = field(default_factory=CountingHolder)
    lookups: FakeLookups = field(default_factory=FakeLookups)

    def __post_init__(self) -> None:
        self.side = PoolSchedulerSide(self.layout, self.config, self.lookups, self.holder, clock=self.clock)
        contract: SchedulerSide = self.side
        assert contract is self.side

    def match(self, request: FakeRequest, local: int = 0, have: int | None = None) -> int | None:
        """Queue it; the pool has its first ``have`` hash blocks (all by default)."""
        self.side.on_new_request(request)
        if self.lookups.open:
            self.lookups.answer(set(request.block_hashes[: len(request.block_hashes) if have is None else have]))
        found = self.side.get_num_new_matched_tokens(request, local)
        self.side.check()
        return found

    def load(self, request: FakeRequest, tokens: int, *tables: list[int]) -> Job:
        job_id = self.side.update_state_after_alloc(request, tables, tokens)
        meta = self.side.build_meta([])
        assert meta is not None and [job.job_id for job in meta.loads] == [job_id]
        self.side.check()
        return meta.loads[0]

    def step(self, request: FakeRequest, computed: int, *tables: list[int]) -> ConnectorMeta | None:
        meta = self.side.build_meta([Computed(request, lambda: tables, computed)])
        self.side.check()
        return meta

    def report(
        self, *jobs: Job, done: bytes | None = None, pool: PoolState = PoolState.READY, seconds: float = 0.01
    ) -> list[LoadEnd]:
        """Every rank reports these jobs."""
        outcomes = [
            JobOutcome(
                job_id=job.job_id,
                kind=job.kind,
                done=b"\1" * sum(len(g.block_ids) for g in job.groups) if done is None else done,
                bytes_moved=64,
                seconds=seconds,
            )
            for job in jobs
        ]
        ends = self.side.update_output([ConnectorOutput(outcomes=outcomes, pool=pool)] * self.layout.shard_count)
        self.side.check()
        return ends


def rows(meta: ConnectorMeta | None) -> list[tuple[int, int, list[int]]]:
    """(group, first index, block ids) of every store run."""
    return [(g.group, g.first_index, g.block_ids) for job in (meta.stores if meta else []) for g in job.groups]


# ------------------------------------------------------------------------------------------------ lookups and hits


def test_a_queued_request_is_looked_up_and_not_yet_is_an_answer() -> None:
    at = Engine()
    request = FakeRequest("r", 17, cache_salt="tenant")
    at.side.on_new_request(request)
    asked = at.lookups.asked[0]
    assert (asked.cache_salt, asked.prefetch, asked.request) == ("tenant", True, "r")
    assert asked.hashes == [b"".join(request.block_hashes)]
    assert at.side.get_num_new_matched_tokens(request, 0) is None
    at.lookups.answer(set(request.block_hashes))
    assert [at.side.get_num_new_matched_tokens(request, 0) for _ in range(3)] == [16, 16, 16]
    assert at.side.get_num_new_matched_tokens(request, 8) == 8  # local blocks were found since
    assert len(at.lookups.asked) == 1 and at.holder.held() == {} and at.side.jobs_pending() == 0
    stats = at.side.stats()
    assert (stats["queries"], stats["query_tokens"], stats["hit_tokens"]) == (1, 17, 16)


@pytest.mark.parametrize(("tokens", "expected"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_computed(tokens: int, expected: int) -> None:
    at = Engine()
    assert at.match(FakeRequest("r", tokens)) == expected
    assert len(at.lookups.asked) == (expected > 0)  # nobody waits for an answer that cannot help


def test_all_local_needs_no_answer() -> None:
    at = Engine()
    request = FakeRequest("r", 17)
    at.side.on_new_request(request)
    assert at.side.get_num_new_matched_tokens(request, 16) == 0


@pytest.mark.parametrize("reason", [reason for reason in LookupReason if reason is not LookupReason.ANSWERED])
def test_a_lookup_without_an_answer_is_no_hit(reason: LookupReason) -> None:
    at = Engine()
    request = FakeRequest("r", 17)
    at.side.on_new_request(request)
    at.lookups.answer(set(request.block_hashes), reason)
    assert at.side.get_num_new_matched_tokens(request, 0) == 0


def test_an_old_answer_is_asked_for_again() -> None:
    at = Engine()
    request = FakeRequest("r", 17)
    assert at.match(request) == 16
    at.clock.now += LOOKUP_AGE_MAX_S
    assert at.side.get_num_new_matched_tokens(request, 0) == 16
    at.clock.now += 0.1
    assert at.side.get_num_new_matched_tokens(request, 0) is None
    at.lookups.answer(set(request.block_hashes[:2]))
    assert at.side.get_num_new_matched_tokens(request, 0) == 8


def test_never_asks_nothing() -> None:
    at = Engine(config=PoolConfig(load_policy="never"))
    assert at.match(FakeRequest("r", 17)) == 0 and at.lookups.asked == []


def test_a_group_that_cannot_be_pooled_ends_hits_and_stores() -> None:
    whole = full_layout()
    state = GroupLayout(fingerprint="s", block_tokens=4, layers=1, poolable=False)
    at = Engine(
        layout=PoolLayout(
            **{n: getattr(whole, n) for n in whole.__struct_fields__} | {"groups": (*whole.groups, state)}
        )
    )
    request = FakeRequest("r", 17)
    assert at.match(request) == 0 and at.lookups.asked == []
    assert at.step(request, 17, [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) is None


# ----------------------------------------------------------------------------------------------------------- loads


def test_a_load_holds_its_blocks_until_every_rank_reported() -> None:
    at = Engine(layout=full_layout(ranks=2))
    request = FakeRequest("r", 17, cache_salt="t")
    assert at.match(request, local=4) == 12
    job = at.load(request, 12, [1, 2, 3, 4, 5])
    assert (job.kind, job.request_id, job.cache_salt, job.deadline_s) == (JobKind.LOAD, "r", "t", 5.0)
    (named,) = job.groups
    assert (named.block_ids, named.first_index, named.parent) == ([2, 3, 4], 1, request.block_hashes[0])
    assert named.hashes == b"".join(request.block_hashes[1:4])
    outcome = JobOutcome(job_id=job.job_id, kind=job.kind, done=b"\1\1\1")
    assert at.side.update_output([ConnectorOutput(outcomes=[outcome]), ConnectorOutput()]) == []
    assert at.holder.held() == {2: 1, 3: 1, 4: 1}
    worse = JobOutcome(job_id=job.job_id, kind=job.kind, done=b"\1\0\1")
    ends = at.side.update_output([ConnectorOutput(), ConnectorOutput(outcomes=[worse])])
    assert ends == [LoadEnd(job_id=job.job_id, request_id="r", asked_tokens=12, loaded_tokens=4)]
    assert at.holder.held() == {} and at.side.jobs_pending() == 0
    assert at.side.get_num_new_matched_tokens(request, 4) == 0  # the rest is computed
    at.side.check()


def test_nothing_external_is_no_load() -> None:
    at = Engine()
    request = FakeRequest("r", 17)
    at.match(request, have=0)
    assert at.side.update_state_after_alloc(request, ([1, 2, 3, 4, 5],), 0) is None
    assert at.side.build_meta([]) is None


def test_a_window_group_loads_its_window_and_partial_loads_count_what_is_usable() -> None:
    at = Engine(layout=window_layout())
    request = FakeRequest("r", 33)
    assert at.match(request, local=8) == 24
    # window of 9: the last 8 tokens before token 32 are one block of 8; the others are the null block
    job = at.load(request, 24, list(range(1, 10)), [20, 0, 0, 23, 24])
    assert [(g.group, g.first_index, g.block_ids) for g in job.groups] == [(0, 2, [3, 4, 5, 6, 7, 8]), (1, 3, [23])]
    assert [end.loaded_tokens for end in at.report(job, done=b"\1\1\1\1\1\0\1")] == [0]  # no window at 24 or 16


def test_a_window_makes_holes_harmless() -> None:
    at = Engine(layout=window_layout())
    request = FakeRequest("r", 33)
    at.side.on_new_request(request)
    full, window = at.lookups.asked[0].hashes
    assert len(full) == 8 * 16 and len(window) == 4 * 16
    at.lookups.end(b"\1" * 8, b"\0\0\1\0")
    assert at.side.get_num_new_matched_tokens(request, 0) == 24


def test_a_load_into_the_null_block_is_a_broken_contract() -> None:
    at = Engine()
    request = FakeRequest("r", 17)
    at.match(request)
    with pytest.raises(AssertionError, match="null block"):
        at.side.update_state_after_alloc(request, ([1, 0, 3, 4, 5],), 16)


def test_computing_is_chosen_where_it_is_faster_and_a_load_is_cut_by_the_deadline() -> None:
    at = Engine(config=PoolConfig(load_deadline_ms=1000))
    first = FakeRequest("a", 17)
    at.match(first)
    at.report(at.load(first, 16, [1, 2, 3, 4, 5]), seconds=0.5)  # 64 bytes in 0.5 s
    at.side.forward_done(10, 10.0)  # a token takes a second
    assert at.match(FakeRequest("b", 161)) == 4  # at 128 bytes a second, 0.8 s allow one block
    at.side.forward_done(100_000, 10.0)
    assert at.match(FakeRequest("c", 17)) == 0
    stats = at.side.stats()
    assert (stats["decisions_part"], stats["decisions_compute"]) == (1, 1)


@pytest.mark.parametrize(("window", "expected"), [(b"\0\0\1\0", 0), (b"\0\1\1\0", 16)])
def test_a_cut_load_needs_the_window_of_its_own_end(window: bytes, expected: int) -> None:
    at = Engine(layout=window_layout(), config=PoolConfig(load_deadline_ms=1000))
    at.side.policy.load_ended(asked_tokens=8, loaded_tokens=8, nbytes=1000, seconds=2.3, explored=False, now=0.0)
    at.side.forward_done(1, 10.0)
    request = FakeRequest("r", 33)
    at.side.on_new_request(request)
    at.lookups.end(b"\1" * 8, window)  # 24 tokens are 448 bytes: 1.03 s, where 0.8 are allowed
    assert at.side.get_num_new_matched_tokens(request, 0) == expected


def test_an_absent_pool_is_left_alone_until_it_is_ready() -> None:
    at = Engine()
    request = FakeRequest("r", 17)
    at.report(pool=PoolState.ABSENT)
    assert at.match(request) == 0 and at.lookups.asked == []
    assert at.step(request, 17, [1, 2, 3, 4, 5]) is None
    at.report(pool=PoolState.READY)
    assert rows(at.step(request, 17, [1, 2, 3, 4, 5])) == [(0, 0, [1, 2, 3, 4])]
    assert at.match(FakeRequest("s", 17)) == 16
    assert at.side.stats()["pool_lost"] == 1


def test_one_absent_rank_is_an_absent_pool() -> None:
    at = Engine(layout=full_layout(ranks=2))
    at.side.update_output([ConnectorOutput(), ConnectorOutput(pool=PoolState.ABSENT)])
    assert at.match(FakeRequest("r", 17)) == 0


def test_an_overdue_load_is_counted_and_goes_on_holding() -> None:
    at = Engine()
    request = FakeRequest("r", 17)
    at.match(request)
    job = at.load(request, 16, [1, 2, 3, 4, 5])
    assert at.side.update_output([ConnectorOutput()]) == [] and at.side.stats()["loads_overdue"] == 0
    at.clock.now += 11.5
    assert at.side.update_output([ConnectorOutput()]) == [] and at.side.stats()["loads_overdue"] == 1
    assert at.holder.held() == {1: 1, 2: 1, 3: 1, 4: 1}
    assert [end.loaded_tokens for end in at.report(job)] == [16]


# ------------------------------------------------------------------------------------------- requests stop and return


def test_a_stopped_request_has_no_load_end_and_its_id_may_return_at_once() -> None:
    at = Engine()
    old = FakeRequest("r", 17)
    at.match(old)
    old_job = at.load(old, 16, [1, 2, 3, 4, 5])
    at.side.request_stopped(old)
    assert at.holder.held() == {1: 1, 2: 1, 3: 1, 4: 1}
    new = FakeRequest("r", 17)
    assert at.match(new) == 16
    new_job = at.load(new, 16, [6, 7, 8, 9, 10])
    assert at.report(old_job) == []
    assert at.holder.held() == {6: 1, 7: 1, 8: 1, 9: 1}
    assert [end.job_id for end in at.report(new_job)] == [new_job.job_id]
    assert at.side.stats()["loads_unwanted"] == 1


def test_the_answer_to_an_old_life_is_not_the_new_ones() -> None:
    at = Engine()
    old = FakeRequest("r", 17, content="old")
    at.side.on_new_request(old)
    at.side.request_stopped(old)
    new = FakeRequest("r", 17, content="new")
    at.side.on_new_request(new)
    at.lookups.answer(set(old.block_hashes), lookup_id=1)
    assert at.side.get_num_new_matched_tokens(new, 0) is None
    at.lookups.answer(set(), lookup_id=2)
    assert at.side.get_num_new_matched_tokens(new, 0) == 0


def test_a_load_that_no_rank_was_told_of_is_cancelled() -> None:
    at = Engine()
    request = FakeRequest("r", 17)
    at.match(request)
    at.side.update_state_after_alloc(request, ([1, 2, 3, 4, 5],), 16)
    at.side.request_stopped(request)
    assert at.holder.held() == {} and at.side.build_meta([]) is None and at.side.jobs_pending() == 0
    at.side.check()


def test_stopping_twice_or_unknown_is_nothing() -> None:
    at = Engine()
    request = FakeRequest("r", 17)
    at.side.request_stopped(request)
    at.side.on_new_request(request)
    at.side.request_stopped(request)
    at.side.request_stopped(request)


def test_closing_releases_everything() -> None:
    at = Engine()
    request = FakeRequest("r", 17)
    at.match(request)
    at.load(request, 16, [1, 2, 3, 4, 5])
    at.side.close()
    assert at.holder.held() == {} and at.lookups.closed and at.side.jobs_pending() == 0
    at.side.check()


# ---------------------------------------------------------------------------------------------------------- stores


def test_full_blocks_are_stored_as_they_are_computed() -> None:
    at = Engine()
    request = FakeRequest("r", 10)
    at.match(request, have=0)
    first = at.step(request, 7, [1, 2])
    assert rows(first) == [(0, 0, [1])] and first is not None and first.stores[0].groups[0].parent == b""
    second = at.step(request, 10, [1, 2, 3])
    assert rows(second) == [(0, 1, [2])] and second is not None
    assert second.stores[0].groups[0].parent == request.block_hashes[0]
    assert second.stores[0].groups[0].hashes == request.block_hashes[1]
    request.grow(2)  # the third block is full, but its last token is not computed yet
    assert at.step(request, 11, [1, 2, 3]) is None
    assert rows(at.step(request, 12, [1, 2, 3])) == [(0, 2, [3])]
    assert at.step(request, 12, [1, 2, 3]) is None
    assert at.holder.held() == {1: 1, 2: 1, 3: 1}


class TestWhatIsOffered:
    table: ClassVar[list[int]] = [1, 2, 3, 4, 5]

    def test_not_what_the_pool_has(self) -> None:
        at = Engine()
        request = FakeRequest("r", 20)
        at.match(request, have=3)
        assert rows(at.step(request, 20, self.table)) == [(0, 3, [4, 5])]

    def test_holes_give_runs_with_their_parents(self) -> None:
        at = Engine()
        request = FakeRequest("r", 20)
        at.side.on_new_request(request)
        at.lookups.answer({request.block_hashes[1], request.block_hashes[3]})
        at.side.get_num_new_matched_tokens(request, 0)
        meta = at.step(request, 20, self.table)
        assert rows(meta) == [(0, 0, [1]), (0, 2, [3]), (0, 4, [5])] and meta is not None
        assert [g.parent for g in meta.stores[0].groups] == [b"", request.block_hashes[1], request.block_hashes[3]]
        at.report(meta.stores[0])
        assert at.holder.held() == {}

    def test_not_what_another_request_offered(self) -> None:
        at = Engine()
        one, two = FakeRequest("a", 20), FakeRequest("b", 20)
        at.match(one, have=0)
        at.match(two, have=0)
        meta = at.side.build_meta(
            [Computed(one, lambda: (self.table,), 20), Computed(two, lambda: ([6, 7, 8, 9, 10],), 20)]
        )
        assert rows(meta) == [(0, 0, self.table)]
        assert at.step(FakeRequest("c", 20, cache_salt="other"), 20, self.table) is not None

    def test_again_what_the_pool_has_lost_since(self) -> None:
        at = Engine()
        one, two = FakeRequest("a", 20), FakeRequest("b", 20)
        at.match(one, have=0)
        meta = at.step(one, 20, self.table)
        assert meta is not None
        at.report(*meta.stores)
        at.match(two, have=1)
        assert rows(at.step(two, 20, self.table)) == [(0, 1, [2, 3, 4, 5])]

    def test_loaded_blocks_are_not_and_failed_ones_are(self) -> None:
        at = Engine()
        request = FakeRequest("r", 20)
        assert at.match(request) == 16
        at.report(at.load(request, 16, self.table), done=b"\1\1\0\1")
        assert rows(at.step(request, 20, self.table)) == [(0, 2, [3])]

    def test_failed_stores_are_tried_again_a_few_times(self) -> None:
        at = Engine()
        request = FakeRequest("r", 20)
        at.match(request, have=0)
        done = b"\1\0\1\1\1"
        for tries in range(STORE_TRIES_MAX):
            meta = at.step(request, 20, self.table)
            assert meta is not None and rows(meta) == ([(0, 0, self.table)] if tries == 0 else [(0, 1, [2])])
            at.report(*meta.stores, done=done)
            done = b"\0"
        assert at.step(request, 20, self.table) is None
        assert at.side.stats()["store_blocks_failed"] == STORE_TRIES_MAX

    def test_everything_again_after_the_pool_was_away(self) -> None:
        at = Engine()
        request = FakeRequest("r", 20)
        at.match(request, have=2)
        meta = at.step(request, 20, self.table)
        assert meta is not None
        at.report(*meta.stores)
        at.report(pool=PoolState.ABSENT)
        assert at.step(request, 20, self.table) is None
        at.report(pool=PoolState.READY)
        assert rows(at.step(request, 20, self.table)) == [(0, 0, self.table)]

    def test_prompt_only_or_nothing_where_so_configured(self) -> None:
        prompt_only, nothing = (Engine(config=PoolConfig(**c)) for c in ({"store_decode": False}, {"store": False}))
        request = FakeRequest("r", 20, num_prompt_tokens=9)
        for at in (prompt_only, nothing):
            at.match(request, have=0)
        assert rows(prompt_only.step(request, 20, self.table)) == [(0, 0, [1, 2])]
        assert nothing.step(request, 20, self.table) is None

    def test_the_null_block_is_not(self) -> None:
        at = Engine(layout=window_layout())
        request = FakeRequest("r", 24)
        at.match(request, have=0)
        assert rows(at.step(request, 24, [1, 2, 3, 4, 5, 6], [0, 8, 9])) == [(0, 0, [1, 2, 3, 4, 5, 6]), (1, 1, [8, 9])]

    def test_at_most_what_may_be_pending_and_the_rest_later(self) -> None:
        at = Engine(config=PoolConfig(store_pending_blocks_max=3))
        request = FakeRequest("r", 20)
        at.match(request, have=0)
        first = at.step(request, 20, self.table)
        assert rows(first) == [(0, 0, [1, 2, 3])] and first is not None
        assert at.step(request, 20, self.table) is None
        at.report(*first.stores)
        assert rows(at.step(request, 20, self.table)) == [(0, 3, [4, 5])]
        at.side.request_stopped(request)
        assert at.side.stats()["store_blocks_skipped"] == 0

    def test_what_never_fitted_is_counted(self) -> None:
        at = Engine(config=PoolConfig(store_pending_blocks_max=3))
        request = FakeRequest("r", 20)
        at.match(request, have=0)
        at.step(request, 20, self.table)
        at.side.request_stopped(request)
        assert at.side.stats()["store_blocks_skipped"] == 2

    def test_stores_hold_half_of_the_cache_at_most(self) -> None:
        at = Engine(layout=full_layout(num_blocks=9))
        request = FakeRequest("r", 20)
        at.match(request, have=0)
        assert rows(at.step(request, 20, self.table)) == [(0, 0, [1, 2, 3, 4])]

    def test_after_preemption_what_was_offered_is_skipped(self) -> None:
        at = Engine()
        request = FakeRequest("r", 20)
        at.match(request, have=0)
        at.step(request, 12, [1, 2, 3])
        at.side.request_stopped(request)
        at.side.on_new_request(request)
        at.lookups.answer(set())
        at.side.get_num_new_matched_tokens(request, 0)
        assert rows(at.step(request, 20, [6, 7, 8, 9, 10])) == [(0, 3, [9, 10])]
        assert at.holder.held() == {1: 1, 2: 1, 3: 1, 9: 1, 10: 1}


def test_ten_thousand_blocks_that_the_pool_has_are_not_remembered_one_by_one() -> None:
    at = Engine(layout=full_layout(num_blocks=20_000))
    request = FakeRequest("r", 40_001)
    assert at.match(request) == 40_000
    assert at.step(request, 40_000, list(range(1, 10_002))) is None
    assert len(at.side.offers) == 0


def test_the_real_one_has_a_descriptor_and_closes(tmp_path: Path) -> None:
    side = make_scheduler_side(full_layout(), PoolConfig(), f"ipc://{tmp_path}/lookup", CountingHolder())
    fd = side.fileno_or_none()
    assert fd is not None and fd >= 0
    stats = side.stats()
    assert stats["lookups"] == 0 and all(isinstance(value, float) for value in stats.values())
    side.check()
    side.close()


# ------------------------------------------------------------------------------------------------ new weights


class TestReset:
    def test_the_ranks_hear_of_it_once_also_when_nothing_runs(self) -> None:
        at = Engine()
        at.side.reset()
        assert at.side.jobs_pending() == 1, "the engine must step once more"
        meta = at.side.build_meta([])
        assert meta is not None and meta.reset and not meta.loads and not meta.stores
        assert at.side.jobs_pending() == 0 and at.side.build_meta([]) is None
        assert at.side.stats()["resets"] == 1

    def test_a_load_of_before_brings_nothing_whatever_the_ranks_say(self) -> None:
        at = Engine()
        request = FakeRequest("r", 17)
        assert at.match(request) == 16
        job = at.load(request, 16, [1, 2, 3, 4])
        at.side.reset()
        (end,) = at.report(job)
        assert (end.asked_tokens, end.loaded_tokens) == (16, 0) and at.holder.held() == {}

    def test_what_was_begun_neither_loads_nor_stores_any_more_and_its_next_life_does(self) -> None:
        at = Engine()
        request = FakeRequest("r", 17)
        at.side.on_new_request(request)
        assert rows(at.step(request, 3, [1, 2, 3, 4, 5])) == [], "less than a block, and of older weights all the same"
        at.side.reset()
        meta = at.step(request, 17, [1, 2, 3, 4, 5])
        assert meta is not None and meta.reset and rows(meta) == []
        assert at.side.get_num_new_matched_tokens(request, 0) == 0
        at.side.request_stopped(request)
        at.side.on_new_request(request)
        assert rows(at.step(request, 17, [1, 2, 3, 4, 5])) == [(0, 0, [1, 2, 3, 4])]

    def test_what_only_waits_is_asked_for_again(self) -> None:
        at = Engine()
        request = FakeRequest("r", 17)
        at.side.on_new_request(request)
        at.lookups.answer(set(request.block_hashes))
        assert at.side.get_num_new_matched_tokens(request, 0) == 16
        at.side.reset()
        assert at.side.get_num_new_matched_tokens(request, 0) is None
        at.lookups.answer(set())
        assert at.side.get_num_new_matched_tokens(request, 0) == 0
        assert rows(at.step(request, 17, [1, 2, 3, 4, 5])) == [(0, 0, [1, 2, 3, 4])]

    def test_blocks_stored_before_are_offered_again(self) -> None:
        at = Engine()
        first, under_way, again = FakeRequest("a", 9), FakeRequest("b", 9, content="other"), FakeRequest("c", 9)
        at.report(*at.step(first, 9, [1, 2, 3]).stores)  # type: ignore[union-attr]
        meta = at.step(under_way, 9, [4, 5, 6])
        assert meta is not None
        at.side.reset()
        at.report(*meta.stores)  # the ranks had not heard of it: what they stored is of the older weights
        assert rows(at.step(again, 9, [7, 8, 9])) == [(0, 0, [7, 8])]
        assert rows(at.step(FakeRequest("d", 9, content="other"), 9, [10, 11, 12])) == [(0, 0, [10, 11])]

    def test_weights_of_the_past_show(self) -> None:
        at = Engine()
        at.side.update_output([ConnectorOutput(superseded=True)])
        assert at.side.stats()["weights_superseded"] == 1
        at.side.update_output([ConnectorOutput()])
        assert at.side.stats()["weights_superseded"] == 0


# -------------------------------------------------------------------- loads beside a step


def layered_engine(**more: object) -> Engine:
    return Engine(config=PoolConfig(load_policy="always", layered_loads="always", **more))  # type: ignore[arg-type]


def layered_job(engine: Engine, request: FakeRequest, table: list[int], tokens: int) -> Job:
    assert engine.side.loads_by_layer(request, tokens, 4)
    job_id = engine.side.update_state_after_alloc(request, (table,), tokens, layered=True)
    meta = engine.step(request, request.num_tokens, table)
    assert meta is not None and [job.job_id for job in meta.loads] == [job_id] and not meta.stores
    return meta.loads[0]


def test_a_layered_load_is_one_at_a_time_and_nothing_is_stored_beside_it() -> None:
    engine = layered_engine()
    request, other = FakeRequest("r", 22), FakeRequest("o", 22, content="other")
    assert engine.match(request, have=4) == 16 and engine.match(other, have=4) == 16
    table = list(range(1, 7))
    load = layered_job(engine, request, table, 16)
    assert load.layered and not engine.side.loads_by_layer(other, 16, 4)
    ends = engine.report(load)
    assert [end.loaded_tokens for end in ends] == [16] and engine.side.loads_by_layer(other, 16, 4)
    meta = engine.step(request, 22, table)
    assert meta is not None and [blocks.first_index for job in meta.stores for blocks in job.groups] == [4]


def test_what_a_step_waited_and_whether_a_load_ended_with_it_is_counted() -> None:
    engine = layered_engine()
    for turn, (waited, ends_with_step) in enumerate([(0.002, True), (0.5, False)]):
        request = FakeRequest(f"r{turn}", 22, content=f"text {turn}")
        engine.match(request, have=4)
        load = layered_job(engine, request, list(range(1, 7)), 16)
        outcome = JobOutcome(job_id=load.job_id, kind=JobKind.LOAD, done=b"\1" * 4, seconds=0.02)
        outputs = [ConnectorOutput(waited_s=waited, outcomes=[outcome] if ends_with_step else [])]
        assert len(engine.side.update_output(outputs)) == ends_with_step
        if not ends_with_step:
            engine.side.check()
            assert len(engine.side.update_output([ConnectorOutput(outcomes=[outcome])])) == 1
        engine.side.request_stopped(request)
        engine.side.check()
    stats = engine.side.stats()
    assert (stats["loads_layered"], stats["loads_layered_failed"]) == (2, 1)
    assert stats["load_waited_seconds"] == pytest.approx(0.502)
    assert stats["load_waited_share"] == pytest.approx(0.1 + 0.2 * (1.0 - 0.1)), "a late one was waited for in vain"


def test_a_load_whose_layers_were_missed_was_waited_for_in_vain_though_it_ended_with_its_step() -> None:
    engine = layered_engine()
    request = FakeRequest("r", 22)
    engine.match(request, have=4)
    load = layered_job(engine, request, list(range(1, 7)), 16)
    outcome = JobOutcome(job_id=load.job_id, kind=JobKind.LOAD, done=b"\1" * 4, seconds=0.7)
    output = ConnectorOutput(waited_s=0.1, layers_missed=True, outcomes=[outcome])
    assert [end.loaded_tokens for end in engine.side.update_output([output])] == [16]
    stats = engine.side.stats()
    assert stats["loads_layered_failed"] == 1 and stats["load_waited_share"] == 1.0
    engine.side.check()


def test_groups_of_several_kinds_load_first() -> None:
    engine = Engine(layout=window_layout(), config=PoolConfig(load_policy="always", layered_loads="always"))
    request = FakeRequest("r", 22)
    assert engine.match(request, have=5) == 16
    assert not engine.side.loads_by_layer(request, 16, 6)


def test_no_load_runs_beside_a_step_unless_asked_for() -> None:
    engine = Engine(config=PoolConfig(load_policy="always"))
    request = FakeRequest("r", 22)
    engine.match(request, have=4)
    engine.side.forward_done(100, 1.0)
    engine.side.policy.load_seconds.add(4 * 64, 0.02)
    assert not engine.side.loads_by_layer(request, 16, 6)


def test_by_what_was_measured_a_load_runs_beside_the_step_or_before_it() -> None:
    engine = Engine(config=PoolConfig(load_policy="always", layered_loads="auto"))
    request = FakeRequest("r", 22)
    engine.match(request, have=4)
    assert not engine.side.loads_by_layer(request, 16, 6), "nothing is known yet"
    engine.side.forward_done(100, 1.0)
    engine.side.policy.load_seconds.add(4 * 64, 0.02)
    assert engine.side.loads_by_layer(request, 16, 6)
    assert not engine.side.loads_by_layer(request, 16, 1), "a step of 10 ms would wait for a load of 20 ms"
