"""A world for the scheduler without arithmetic: memory that knows what was written, ranks that read it, a pool.

The KV of a token is a digest of all tokens up to it, and the next token follows from the last digest. So a read
of a block that was reused, not yet written, or loaded from another prefix is seen at once, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import xxhash

from kvstrata.engine_adapter.connector.base import (
    BlockHolder,
    BlockIds,
    Computed,
    ConnectorMeta,
    ConnectorOutput,
    ConnectorRequest,
    GroupBlocks,
    Job,
    JobKind,
    JobOutcome,
    LoadEnd,
)
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout
from kvstrata.engine_adapter.connector.lookups import LookupEnd, LookupReason
from kvstrata.engine_adapter.connector.scheduler_side import PoolSchedulerSide
from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.kv_cache_manager import KVCacheManager
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    SlidingWindowSpec,
)
from kvstrata.engine_adapter.paged.config import StepConfig
from kvstrata.engine_adapter.paged.outputs import ModelRunnerOutput, RequestOutput, SchedulerOutput
from kvstrata.engine_adapter.paged.request import Request, SamplingParams
from kvstrata.engine_adapter.paged.scheduling.scheduler import Scheduler

BLOCK = 4
VOCAB = 50
EOS = 7
GARBAGE = -1

HASHER = BlockHasher(BLOCK)
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4)
SLIDING = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, sliding_window=6)


def kv_config(num_blocks: int, *specs: KVCacheSpec, max_model_len: int = 40, budget: int = 16) -> KVCacheConfig:
    """One layer a group; full attention when no specs are given."""
    return KVCacheConfig(
        num_blocks=num_blocks,
        groups=tuple(KVCacheGroup((i,), spec) for i, spec in enumerate(specs or (FULL,))),
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
    )


def digests(tokens: Sequence[int], salt: str = "") -> list[int]:
    """The KV of each token."""
    found, last = [], xxhash.xxh3_64_intdigest(salt.encode())
    for token in tokens:
        last = xxhash.xxh3_64_intdigest(f"{last},{token}".encode())
        found.append(last)
    return found


def next_token(tokens: Sequence[int], salt: str = "") -> int:
    return digests(tokens, salt)[-1] % VOCAB


def expected(
    prompt: Sequence[int], sampling: SamplingParams, max_model_len: int, salt: str = ""
) -> tuple[list[int], str]:
    """Output tokens and finish reason of a request that nothing disturbs."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, salt))
        output = tokens[len(prompt) :]
        if tokens[-1] in sampling.stop_token_ids or (tokens[-1] == EOS and not sampling.ignore_eos):
            return output, "stop"
        if len(output) == sampling.max_tokens or len(tokens) == max_model_len:
            return output, "length"


@dataclass
class Pool:
    """What is stored outside: KV of a block by its hash. ``answers`` False: no lookup is answered for now."""

    blocks: dict[bytes, list[int]] = field(default_factory=dict)
    answers: bool = True

    def put(self, tokens: Sequence[int], salt: str = "") -> None:
        """Every full block of these tokens."""
        hashes: list[bytes] = []
        HASHER.extend(HASHER.root(salt), hashes, tokens)
        kv = digests(tokens, salt)
        for index, block_hash in enumerate(hashes):
            self.blocks[block_hash] = kv[index * BLOCK : (index + 1) * BLOCK]


@dataclass
class _Known:
    token_ids: list[int]
    tables: list[list[int]]
    num_computed_tokens: int
    salt: str


class SimulatedRanks:
    """An executor: one memory, ``ranks`` equal answers. Transfers end when a test says so (:meth:`end_job`)."""

    def __init__(
        self, config: KVCacheConfig, step: StepConfig, salt_of: Callable[[str], str], pool: Pool, ranks: int = 1
    ) -> None:
        self.kv_config = config
        self.vocab_size = VOCAB
        self.eos_token_id: int | None = EOS
        self.max_model_len = config.max_model_len
        self.layout = PoolLayout(
            groups=tuple(
                GroupLayout(
                    fingerprint=f"group {index}",
                    block_tokens=BLOCK,
                    layers=1,
                    window_tokens=group.spec.sliding_window if isinstance(group.spec, SlidingWindowSpec) else 0,
                )
                for index, group in enumerate(config.groups)
            ),
            num_blocks=config.num_blocks,
            num_tensors=1,
            page_bytes=1,
            parts=1,
            hash_block_tokens=BLOCK,
            hash_bytes=HASHER.hash_bytes,
            aligned_tokens=BLOCK,
        )
        self.steps: list[SchedulerOutput] = []
        self.jobs: dict[int, Job] = {}
        self.compute_s = 0.0
        self.descriptors: list[int] = []
        self.closed = False
        self._step = step
        self._salt_of = salt_of
        self._pool = pool
        self._ranks = ranks
        self._memory: dict[int, list[int]] = {}
        self._known: dict[str, _Known] = {}
        self._ended: list[JobOutcome] = []
        self._stored: dict[int, list[list[int]]] = {}  # what a store read, when it was allowed to
        #: What a layered load has done when its step ends, a row each; None: it has not ended.
        self.end_layered: Callable[[Job], Sequence[bool] | None] = lambda job: [True] * len(_rows(job))
        #: Whether the last rank reads a layer of it too early, however it ends.
        self.misses_layer: Callable[[Job], bool] = lambda job: False

    # -- the executor

    def execute(self, output: SchedulerOutput) -> list[ModelRunnerOutput]:
        self.steps.append(output)
        assert output.total_tokens <= self._step.max_num_batched_tokens
        meta = output.connector_meta or ConnectorMeta()
        for job in (*meta.loads, *meta.stores):
            assert job.job_id not in self.jobs
            self.jobs[job.job_id] = job
        spoiled: set[str] = set()
        missed = False
        for job in meta.loads:
            self._scribble(job)
            if job.layered:
                done = self.end_layered(job)
                if done is not None:
                    self.end_job(job.job_id, done)
                early = self.misses_layer(job)
                missed |= early
                if done is None or not all(done) or early:
                    spoiled.add(job.request_id)
        sampled = self._compute(output, spoiled)
        for job in meta.stores:
            self._stored[job.job_id] = [list(self._memory[block]) for _, block in _rows(job)]
        ended, self._ended = self._ended, []
        return [
            ModelRunnerOutput(
                step_id=output.step_id,
                sampled=sampled,
                connector=ConnectorOutput(outcomes=ended, layers_missed=missed and rank == self._ranks - 1),
                compute_s=self.compute_s,
            )
            for rank in range(self._ranks)
        ]

    def wake_fds(self) -> list[int]:
        return self.descriptors

    def close(self) -> None:
        self.closed = True

    # -- the worker side

    def end_job(self, job_id: int, done: Sequence[bool]) -> None:
        """The job's transfers are over; ``done`` a row."""
        job = self.jobs.pop(job_id)
        rows = _rows(job)
        assert len(done) == len(rows)
        if job.kind is JobKind.STORE:
            for (block_hash, block), loaded, before in zip(rows, done, self._stored.pop(job_id), strict=True):
                assert self._memory[block] == before, f"block {block} changed while job {job_id} stored it"
                if loaded:
                    self._pool.blocks[block_hash] = before
        else:
            for (block_hash, block), loaded in zip(rows, done, strict=True):
                assert self._memory[block] == [GARBAGE] * BLOCK, f"block {block} was written under load job {job_id}"
                if loaded:
                    self._memory[block] = list(self._pool.blocks[block_hash])
        self._ended.append(JobOutcome(job_id=job_id, kind=job.kind, done=bytes(done)))

    def num_rows(self, job_id: int) -> int:
        return len(_rows(self.jobs[job_id]))

    def _scribble(self, job: Job) -> None:
        """Bytes of a load arrive in any order: until its end, its blocks hold nothing to rely on."""
        for block_hash, block in _rows(job):
            assert block != 0 and block_hash in self._pool.blocks
            self._memory[block] = [GARBAGE] * BLOCK

    # -- the runner

    def _compute(self, output: SchedulerOutput, spoiled: Set[str]) -> dict[str, int]:
        """``spoiled`` requests read garbage, so they write it."""
        for request_id in (*output.finished, *output.preempted):
            del self._known[request_id]
        for new in output.new:
            assert new.request_id not in self._known
            self._known[new.request_id] = _Known(
                list(new.token_ids),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
                self._salt_of(new.request_id),
            )
        for cached in output.cached:
            known = self._known[cached.request_id]
            assert known.num_computed_tokens == cached.num_computed_tokens
            known.token_ids += cached.new_token_ids
            for table, ids in zip(known.tables, cached.new_block_ids, strict=True):
                table += ids
        assert len(self._known) <= self._step.max_num_seqs
        scheduled = {request_id: self._known[request_id] for request_id in output.num_scheduled_tokens}
        assert set(scheduled) == {r.request_id for r in (*output.new, *output.cached)}
        for request_id, known in scheduled.items():
            if request_id not in spoiled:
                self._read(request_id, known)  # all reads first: what this step computes, nobody may rely on in it
        written: set[tuple[int, int]] = set()
        sampled: dict[str, int] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            self._write(scheduled[request_id], count, written, good=request_id not in spoiled)
            if scheduled[request_id].num_computed_tokens == len(scheduled[request_id].token_ids):
                sampled[request_id] = next_token(scheduled[request_id].token_ids, scheduled[request_id].salt)
                if request_id in spoiled:
                    sampled[request_id] = (sampled[request_id] + 1) % VOCAB
        return sampled

    def _read(self, request_id: str, known: _Known) -> None:
        kv = digests(known.token_ids, known.salt)
        for group, table in zip(self.kv_config.groups, known.tables, strict=True):
            first = 0
            if isinstance(group.spec, SlidingWindowSpec):
                first = max(0, known.num_computed_tokens - group.spec.sliding_window + 1)
            for position in range(first, known.num_computed_tokens):
                block = table[position // BLOCK]
                found = self._memory.get(block, [GARBAGE] * BLOCK)[position % BLOCK]
                assert block != 0 and found == kv[position], f"{request_id}: wrong KV at {position}, block {block}"

    def _write(self, known: _Known, count: int, written: set[tuple[int, int]], *, good: bool) -> None:
        start = known.num_computed_tokens
        assert count > 0 and start + count <= len(known.token_ids)
        kv = digests(known.token_ids, known.salt)
        loading = {block for job in self.jobs.values() if job.kind is JobKind.LOAD for _, block in _rows(job)}
        for table in known.tables:
            for position in range(start, start + count):
                block, offset = table[position // BLOCK], position % BLOCK
                assert block not in (0, *loading) and (block, offset) not in written, f"block {block} is not free"
                written.add((block, offset))
                self._memory.setdefault(block, [GARBAGE] * BLOCK)[offset] = kv[position] if good else GARBAGE
        known.num_computed_tokens += count


def _rows(job: Job) -> list[tuple[bytes, int]]:
    """(hash, block id) of every row, group after group."""
    width = HASHER.hash_bytes
    return [
        (blocks.hashes[row * width : (row + 1) * width], block)
        for blocks in job.groups
        for row, block in enumerate(blocks.block_ids)
    ]


@dataclass
class _Life:
    """A request from queued to stopped, as the connector sees it."""

    number: int
    stored: int = 0  # blocks of its chain that were offered
    load: int | None = None


class ScriptedConnector:
    """A scheduler side that does as it is told: hits are what ``pool`` has, one load a life. It holds what the
    contract says, and counts what it is told so that a test can hold it against the contract."""

    def __init__(self, holder: BlockHolder, pool: Pool, *, store: bool = True) -> None:
        self.held: dict[int, Job] = {}
        self.calls: list[tuple[str, str]] = []
        self.prefill: list[tuple[int, float]] = []
        self.accepted: set[int] = set()
        self.ends: list[LoadEnd] = []
        self.late: set[str] = set()  #: requests whose lookup is not answered yet
        self.layered = False  #: loads run beside the step
        self.ailing: list[str] = []  #: what its ranks say is wrong with their threads
        self.closed = False
        self._holder = holder
        self._pool = pool
        self._store = store
        self._lives: dict[str, _Life] = {}
        self._of_job: dict[int, tuple[str, int]] = {}
        self._jobs = 0
        self._births = 0
        self._unsent: list[Job] = []

    def on_new_request(self, request: ConnectorRequest) -> None:
        self.calls.append(("new", request.request_id))
        assert request.request_id not in self._lives
        self._births += 1
        self._lives[request.request_id] = _Life(self._births)

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> int | None:
        self.calls.append(("match", request.request_id))
        if not self._pool.answers or request.request_id in self.late:
            return None
        if self._lives[request.request_id].load is not None:
            return 0
        assert num_computed_tokens % BLOCK == 0
        index = first = num_computed_tokens // BLOCK
        while (index + 1) * BLOCK < request.num_tokens and request.block_hashes[index] in self._pool.blocks:
            index += 1
        return (index - first) * BLOCK

    def loads_by_layer(self, request: ConnectorRequest, num_external: int, rest_tokens: int) -> bool:
        assert num_external > 0 and 0 < rest_tokens <= request.num_tokens - num_external
        return self.layered and not any(job.kind is JobKind.LOAD for job in self.held.values())

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: BlockIds, num_external: int, *, layered: bool = False
    ) -> int | None:
        self.calls.append(("alloc", request.request_id))
        if not num_external:
            return None
        first = request.num_computed_tokens // BLOCK
        job = self._open(JobKind.LOAD, request, block_ids, first, first + num_external // BLOCK)
        self.held[job.job_id] = job = msgspec.structs.replace(job, layered=layered)
        self._lives[request.request_id].load = job.job_id
        self.accepted.add(job.job_id)
        self._unsent.append(job)
        return job.job_id

    def build_meta(self, computed: Sequence[Computed]) -> ConnectorMeta | None:
        loads, self._unsent = self._unsent, []
        stores = []
        for request, tables, tokens in computed if self._store else ():
            assert tokens <= request.num_tokens
            life = self._lives[request.request_id]
            if life.load in self.held:
                continue
            if tokens // BLOCK > life.stored:
                stores.append(self._open(JobKind.STORE, request, tables(), life.stored, tokens // BLOCK))
                life.stored = tokens // BLOCK
        return ConnectorMeta(loads=loads, stores=stores) if loads or stores else None

    def update_output(self, outputs: Sequence[ConnectorOutput]) -> list[LoadEnd]:
        ends = []
        for outcome in outputs[0].outcomes:
            job = self.held.pop(outcome.job_id)
            self._holder.release([block for _, block in _rows(job)])
            request_id, number = self._of_job[outcome.job_id]
            life = self._lives.get(request_id)
            if job.kind is JobKind.LOAD and life is not None and life.number == number:
                ends.append(self._load_end(job, outcome.done))
        self.ends += ends
        return ends

    def request_stopped(self, request: ConnectorRequest) -> None:
        self.calls.append(("stopped", request.request_id))
        del self._lives[request.request_id]

    def forward_done(self, tokens: int, seconds: float) -> None:
        self.prefill.append((tokens, seconds))

    def reset(self) -> None:
        self.calls.append(("reset", ""))

    def jobs_pending(self) -> int:
        return len(self.held)

    def fileno_or_none(self) -> int | None:
        return None

    def problems(self) -> list[str]:
        return self.ailing

    def stats(self) -> dict[str, float]:
        return {"loads": float(len(self.accepted))}

    def check(self) -> None:
        assert set(self.held) <= set(self._of_job)

    def close(self) -> None:
        self.closed = True

    def be_late(self, steps: dict[str, int]) -> None:
        """Lookups of these requests are not answered for so many steps; called each step."""
        self.late = set(steps)

    @property
    def num_lives(self) -> int:
        return len(self._lives)

    def stopped_load_blocks(self) -> set[int]:
        """Blocks under a load whose request does not wait for it any more: nobody's, until it is terminal."""
        return {
            block
            for job_id, job in self.held.items()
            if job.kind is JobKind.LOAD and not self._alive(job_id)
            for _, block in _rows(job)
        }

    def _alive(self, job_id: int) -> bool:
        request_id, number = self._of_job[job_id]
        life = self._lives.get(request_id)
        return life is not None and life.number == number

    def _open(self, kind: JobKind, request: ConnectorRequest, tables: BlockIds, first: int, end: int) -> Job:
        groups = []
        for group, table in enumerate(tables):
            rows = [index for index in range(first, end) if table[index] != 0]
            hashes = b"".join(request.block_hashes[index] for index in rows)
            groups.append(GroupBlocks(group=group, hashes=hashes, block_ids=[table[index] for index in rows]))
        self._jobs += 1
        job = Job(
            job_id=self._jobs,
            kind=kind,
            request_id=request.request_id,
            cache_salt=request.cache_salt,
            groups=groups,
            deadline_s=1.0,
        )
        self._holder.hold([block for _, block in _rows(job)])
        self.held[job.job_id] = job
        self._of_job[job.job_id] = (request.request_id, self._lives[request.request_id].number)
        return job

    def _load_end(self, job: Job, done: bytes) -> LoadEnd:
        """The leading run of rows; of several groups all or nothing, as windows fit the end of the load only."""
        asked = len(job.groups[0].block_ids)
        loaded = len(done) - len(done.lstrip(b"\1")) if len(job.groups) == 1 else asked * all(done)
        return LoadEnd(
            job_id=job.job_id,
            request_id=job.request_id,
            asked_tokens=asked * BLOCK,
            loaded_tokens=min(loaded, asked) * BLOCK,
        )


class SimulatedLookups:
    """Answers from ``pool``, after as many polls as ``delay`` says when it is asked."""

    def __init__(self, pool: Pool) -> None:
        self.delay = 0
        self._pool = pool
        self._open: dict[int, tuple[list[bytes], int]] = {}
        self._asked = 0

    def ask(
        self, cache_salt: str, hashes: Sequence[bytes], *, prefetch: bool, request: str = "", trace: str = ""
    ) -> int:
        self._asked += 1
        self._open[self._asked] = (list(hashes), self.delay)
        return self._asked

    def poll(self) -> list[LookupEnd]:
        self._open = {lookup_id: (hashes, polls - 1) for lookup_id, (hashes, polls) in self._open.items()}
        ready = [lookup_id for lookup_id, (_, polls) in self._open.items() if polls < 0]
        return [LookupEnd(i, self._present(self._open.pop(i)[0]), LookupReason.ANSWERED) for i in ready]

    def fileno(self) -> int:
        raise AssertionError("nothing waits here")

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._open.clear()

    def _present(self, groups: list[bytes]) -> tuple[bytes, ...]:
        width, have = HASHER.hash_bytes, self._pool.blocks
        return tuple(bytes(packed[i : i + width] in have for i in range(0, len(packed), width)) for packed in groups)


class RecordedPoolSide(PoolSchedulerSide):
    """The real scheduler side, with what :class:`ScriptedConnector` lets a test see."""

    def __init__(
        self, layout: PoolLayout, pool: Pool, holder: BlockHolder, clock: Callable[[], float], *, layered: bool = False
    ) -> None:
        self.lookups = SimulatedLookups(pool)
        config = PoolConfig(load_policy="always", layered_loads="always" if layered else "never")
        super().__init__(layout, config, self.lookups, holder, clock=clock)
        self.accepted: set[int] = set()
        self.ends: list[LoadEnd] = []

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: BlockIds, num_external: int, *, layered: bool = False
    ) -> int | None:
        job_id = super().update_state_after_alloc(request, block_ids, num_external, layered=layered)
        self.accepted |= {job_id} if job_id is not None else set()
        return job_id

    def update_output(self, outputs: Sequence[ConnectorOutput]) -> list[LoadEnd]:
        ends = super().update_output(outputs)
        self.ends += ends
        return ends

    def be_late(self, steps: dict[str, int]) -> None:
        self.lookups.delay = max(steps.values(), default=0)

    @property
    def num_lives(self) -> int:
        return len(self._requests)

    def stopped_load_blocks(self) -> set[int]:
        jobs = (self.ledger._open[i].job for i, x in self._loads.items() if not self._live(x.request_id, x.life))
        return {block for job in jobs for _, block in _rows(job)}


@dataclass
class Life:
    """A request from its arrival to its last output. One id may have several, one after the other."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    reason: str = ""

    @property
    def prompt(self) -> list[int]:
        return self.request.token_ids[: self.request.num_prompt_tokens]


class World:
    """A scheduler in a simulated world, stepped by hand. Time is a number."""

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        step: StepConfig | None = None,
        pool: bool = True,
        store: bool = True,
        enable_prefix_caching: bool = True,
        real_side: bool = False,
        layered: bool = False,
        ranks: int = 1,
    ) -> None:
        self.now = 0.0
        self.pool = Pool()
        self.step_config = step or StepConfig(max_num_batched_tokens=16, max_num_seqs=4, max_waiting=100)
        self.kv = KVCacheManager(config, hash_block_size=BLOCK, enable_prefix_caching=enable_prefix_caching)
        self.lives: dict[str, list[Life]] = {}
        self.ranks = SimulatedRanks(
            config, self.step_config, lambda rid: self[rid].request.cache_salt, self.pool, ranks
        )
        self.scripted = ScriptedConnector(self.kv.pool, self.pool, store=store)
        self.scripted.layered = layered
        self.connector: ScriptedConnector | RecordedPoolSide | None = self.scripted if pool else None
        if real_side:
            self.connector = RecordedPoolSide(
                self.ranks.layout, self.pool, self.kv.pool, lambda: self.now, layered=layered
            )
        self.scheduler = Scheduler(
            self.step_config,
            self.kv,
            self.connector,
            max_model_len=config.max_model_len,
            clock=lambda: self.now,
        )

    def __getitem__(self, request_id: str) -> Life:
        """The latest life of the id."""
        return self.lives[request_id][-1]

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 3,
        salt: str = "",
        ignore_eos: bool = True,
        stop_token_ids: tuple[int, ...] = (),
    ) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids)
        request = Request(request_id, prompt, sampling, HASHER, cache_salt=salt, eos_token_id=EOS, arrival_s=self.now)
        self.scheduler.add_request(request)
        self.lives.setdefault(request_id, []).append(Life(request))
        return request

    def step(self, between: Callable[[], None] | None = None) -> SchedulerOutput:
        """One step, checked. ``between``: something that happens while the ranks compute."""
        output = self.scheduler.schedule()
        self._check_jobs()
        if between is not None:
            between()
        ranks = self.ranks.execute(output)
        for result in self.scheduler.update(output, ranks):
            # An id that came back before the end of its last life was reported: ends come in order.
            life = next(life for life in self.lives[result.request_id] if not life.reason)
            life.outputs.append(result)
            life.tokens += result.new_token_ids
            life.reason = result.finish_reason or ""
        self.scheduler.check()
        return output

    def run(self, steps_max: int = 1000) -> None:
        """Until every request has ended; transfers end well, as they are started."""
        for _ in range(steps_max):
            if not self.scheduler.has_unfinished:
                return
            self.step()
            self.end_jobs()
        raise AssertionError(f"no end after {steps_max} steps: {[self.scheduler.story(r) for r in self.lives]}")

    def end_jobs(self, kind: JobKind | None = None, done: Literal[True, False] = True) -> None:
        for job_id, job in list(self.ranks.jobs.items()):
            if kind is None or job.kind is kind:
                self.ranks.end_job(job_id, [done] * self.ranks.num_rows(job_id))

    def settle(self) -> None:
        """All transfers end, and their ends are seen."""
        self.end_jobs()
        self.step()

    def check_outcome(self, request_id: str) -> None:
        """The request ended with the tokens that nothing can change."""
        life = self[request_id]
        sampling, salt = life.request.sampling, life.request.cache_salt
        assert (life.tokens, life.reason) == expected(life.prompt, sampling, self.scheduler.max_model_len, salt)

    def check_empty(self) -> None:
        """Nothing is left of anything."""
        scheduler, kv = self.scheduler, self.kv
        assert not scheduler.has_unfinished
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_loading) == (0, 0, 0)
        assert kv.pool.num_free_blocks == kv.pool.num_blocks - 1 and kv.usage == 0.0
        assert kv.reset_prefix_cache()
        if self.connector is not None:
            assert self.connector.num_lives == 0 and not self.connector.jobs_pending() and not self.ranks.jobs

    def _check_jobs(self) -> None:
        """INV-3: no table names a block of a load that its own request does not wait for."""
        if self.connector is None:
            return
        stopped = self.connector.stopped_load_blocks()
        for request_id in self.lives:
            for table in self.kv.block_ids(request_id):
                assert stopped.isdisjoint(table), f"{request_id} got blocks of a load under way"
