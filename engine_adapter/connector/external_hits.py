"""What the pool has beyond a request's local prefix, and how much of that to load: the lookups of all requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvstrata.engine_adapter.connector.base import ConnectorRequest
from kvstrata.engine_adapter.connector.counters import Counters
from kvstrata.engine_adapter.connector.hits import LoadRows, block_counts, longest_hit, packed_hashes
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.connector.lookups import LookupReason, Lookups
from kvstrata.engine_adapter.connector.offers import OfferedBlocks
from kvstrata.engine_adapter.connector.policy import LoadOrCompute
from kvstrata.engine_adapter.connector.tracked import Match, Question, TrackedRequest

#: An answer older than this is asked for again before it is used.
LOOKUP_AGE_MAX_S: Final = 2.0


class ExternalHits:
    """Asks for each tracked request once, and again when its tokens changed or the answer is old."""

    def __init__(
        self,
        layout: PoolLayout,
        lookups: Lookups,
        policy: LoadOrCompute,
        offers: OfferedBlocks,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._lookups = lookups
        self._policy = policy
        self._offers = offers
        self._counters = counters
        self._clock = clock
        self._asked: dict[int, Question] = {}

    def limit(self, request: ConnectorRequest) -> int:
        """Where an external hit ends at most, in tokens: aligned, and the last token is always computed."""
        return (request.num_tokens - 1) // self._layout.aligned_tokens * self._layout.aligned_tokens

    def ask(self, state: TrackedRequest, request: ConnectorRequest) -> Question:
        """Look up the whole chain, and have what is found made ready to be loaded."""
        moment = self._offers.moment()
        hashes = [
            packed_hashes(self._layout, group, request.block_hashes, range(count))
            for group, count in enumerate(block_counts(self._layout, len(request.block_hashes)))
        ]
        name, trace = request.request_id, request.trace
        lookup_id = self._lookups.ask(request.cache_salt, hashes, prefetch=True, request=name, trace=trace)
        question = Question(request.num_tokens, moment)
        # A request that stops forgets its question: the answer is then written where nobody looks.
        self._asked[lookup_id] = state.question = question
        state.match = None
        return question

    def poll(self) -> None:
        """Write the answers that came, and the deadlines that passed, into their questions. Never blocks."""
        for end in self._lookups.poll():
            question = self._asked.pop(end.lookup_id)
            question.present = [bytearray(have) for have in end.present]
            question.known = end.reason is LookupReason.ANSWERED
            question.ended_at = self._clock()

    def tokens_to_load(self, state: TrackedRequest, request: ConnectorRequest, local_tokens: int) -> int | None:
        """Tokens after the local ones; None while the answer is not there. The same until something changed."""
        question = state.question
        if question is None or question.num_tokens != request.num_tokens or self._outdated(question):
            question = self.ask(state, request)
        if not question.ended:
            return None
        if state.match is None or state.match.local_tokens != local_tokens:
            state.match = self._match(question, request, local_tokens)
            self._count(state, state.match, request)
        return state.match.choice.tokens

    def _outdated(self, question: Question) -> bool:
        return question.ended and self._clock() - question.ended_at > LOOKUP_AGE_MAX_S

    def _match(self, question: Question, request: ConnectorRequest, local: int) -> Match:
        hit = longest_hit(self._layout, question.present, local, self.limit(request)) - local
        choice = self._policy.choose(hit, LoadRows(self._layout, local, local + hit).nbytes, self._clock())
        if choice.tokens < hit:  # a window that ends earlier needs other blocks
            end = longest_hit(self._layout, question.present, local, local + choice.tokens)
            choice = replace(choice, tokens=end - local)
        assert 0 <= choice.tokens <= max(0, request.num_tokens - 1 - local), choice
        return Match(local, hit, choice)

    def _count(self, state: TrackedRequest, match: Match, request: ConnectorRequest) -> None:
        if state.counted:
            return
        state.counted = True
        self._counters.add("queries")
        self._counters.add("query_tokens", request.num_tokens - match.local_tokens)
        self._counters.add("hit_tokens", match.hit_tokens)
        self._counters.add("chosen_tokens", match.choice.tokens)
        if match.hit_tokens:
            self._counters.add(f"decisions_{match.choice.decision.name.lower()}")

    def close(self) -> None:
        self._asked.clear()
        self._lookups.close()
