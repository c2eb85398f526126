"""Plays a scheduler for whatever executes its steps: any chunks, any mix, preemption and resumption.

Block ids are scattered and reused, and a request's blocks are the caller's choice of one table a group.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvstrata.engine_adapter.paged.cache.kv_cache_spec import KVCacheConfig
from kvstrata.engine_adapter.paged.outputs import CachedRequest, ModelRunnerOutput, NewRequest, SchedulerOutput
from kvstrata.engine_adapter.paged.request import SamplingParams

Execute = Callable[[SchedulerOutput], ModelRunnerOutput]


@dataclass
class Live:
    """A request as the scheduler knows it. ``told``: tokens that the worker has been told of; 0: not known there."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    computed: int = 0
    told: int = 0
    blocks: list[list[int]] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def todo(self) -> int:
        return len(self.token_ids) - self.computed

    @property
    def done(self) -> bool:
        return len(self.output) >= self.sampling.max_tokens


class Steps:
    """``execute`` gets one :class:`SchedulerOutput` a step. ``seed`` decides block ids and random choices."""

    def __init__(self, execute: Execute, config: KVCacheConfig, seed: int = 0) -> None:
        self.execute = execute
        self.config = config
        self.random = random.Random(seed)
        self.free = list(range(1, config.num_blocks))
        self.random.shuffle(self.free)
        self.live: dict[str, Live] = {}
        self.outputs: dict[str, list[int]] = {}
        self.results: list[ModelRunnerOutput] = []
        self._finished: list[str] = []
        self._preempted: list[str] = []
        self._step_id = 0

    def add(self, request_id: str, prompt: list[int], sampling: SamplingParams | None = None) -> None:
        tables: list[list[int]] = [[] for _ in self.config.groups]
        sampling = sampling or SamplingParams(max_tokens=4)
        self.live[request_id] = Live(list(prompt), len(prompt), sampling, blocks=tables)

    def step(self, scheduled: Mapping[str, int]) -> ModelRunnerOutput:
        """Compute so many tokens of each request."""
        new, cached = [], []
        for request_id, count in scheduled.items():
            live = self.live[request_id]
            added = self._grow(live, live.computed + count)
            if live.told:
                fresh = live.token_ids[live.told :]
                cached.append(
                    CachedRequest(
                        request_id=request_id,
                        new_token_ids=fresh,
                        new_block_ids=added,
                        num_computed_tokens=live.computed,
                    )
                )
            else:
                new.append(
                    NewRequest(
                        request_id=request_id,
                        token_ids=list(live.token_ids),
                        num_prompt_tokens=live.num_prompt_tokens,
                        sampling=live.sampling,
                        block_ids=tuple(list(table) for table in live.blocks),
                        num_computed_tokens=live.computed,
                    )
                )
            live.told = len(live.token_ids)
        self._step_id += 1
        output = SchedulerOutput(
            step_id=self._step_id,
            new=new,
            cached=cached,
            num_scheduled_tokens=dict(scheduled),
            finished=self._finished,
            preempted=self._preempted,
        )
        self._finished, self._preempted = [], []
        result = self.execute(output)
        self.results.append(result)
        for request_id, count in scheduled.items():
            live = self.live[request_id]
            live.computed += count
            assert (request_id in result.sampled) == (live.todo == 0)
            if request_id in result.sampled:
                live.token_ids.append(result.sampled[request_id])
            if live.done:
                self.finish(request_id)
        return result

    def finish(self, request_id: str) -> None:
        live = self.live.pop(request_id)
        self.outputs[request_id] = live.output
        self._finished.append(request_id)
        self._release(live)

    def preempt(self, request_id: str) -> None:
        live = self.live[request_id]
        self._preempted.append(request_id)
        self._release(live)
        live.computed = live.told = 0

    def run(self, *, chunk_max: int = 40, preemptions: int = 0) -> dict[str, list[int]]:
        """Until all are done, in random order and chunks. Returns the output tokens of each request."""
        while self.live:
            known = [request_id for request_id, live in self.live.items() if live.told]
            if known and preemptions and self.random.random() < 0.2:
                preemptions -= 1
                self.preempt(self.random.choice(known))
            names = self.random.sample(sorted(self.live), self.random.randint(1, len(self.live)))
            self.step({name: self.random.randint(1, min(chunk_max, self.live[name].todo)) for name in names})
        return self.outputs

    def _grow(self, live: Live, num_tokens: int) -> tuple[list[int], ...]:
        added = []
        for group, table in zip(self.config.groups, live.blocks, strict=True):
            needed = -(-num_tokens // group.spec.block_size)
            added.append([self.free.pop() for _ in range(needed - len(table))])
            table.extend(added[-1])
        return tuple(added)

    def _release(self, live: Live) -> None:
        for table in live.blocks:
            self.free.extend(table)
            table.clear()
        self.random.shuffle(self.free)
