"""One answer as it grows: tokens in, text out, cut at stop strings, with a reason at the end. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvstrata.engine_adapter.paged.outputs import RequestOutput, TokenLogprobs
from kvstrata.engine_adapter.paged.text.tokenizer import Detokenizer
from kvstrata.engine_adapter.serve.stops import StopMatcher

FINISH_REASONS: Final = ("stop", "length", "abort", "error")


class ChosenToken(msgspec.Struct, frozen=True):
    """A token with its log probabilities; ``offset``: characters of the answer before its text."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one push brought. ``finish_reason`` is set once, in the last one."""

    text: str
    tokens: list[ChosenToken] = []
    finish_reason: str | None = None


class Choice:
    """Turns one request's outputs into deltas.

    A token that the engine stops at (end of text, one of ``stop_token_ids``) counts as generated and is no part of
    the text. After a stop string the engine may still send tokens: they count for nothing.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._decoded = 0  # characters that the tokens so far stand for
        self.finish_reason: str | None = None
        self.error = ""
        self.num_prompt_tokens = 0
        self.num_local_cached_tokens = 0
        self.num_external_cached_tokens = 0
        self.num_output_tokens = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def stopped_early(self) -> bool:
        """A stop string ended it, and the engine does not know yet: abort its request."""
        return self._matcher.stopped

    def push(self, output: RequestOutput) -> Delta:
        """Take one output; nothing comes of any after the finish."""
        if self.finished:
            return Delta(text="")
        self._count(output)
        text, tokens = self._tokens(output)
        if self._matcher.stopped:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            text += self._end()
            self.finish_reason = "stop" if self._matcher.stopped else output.finish_reason
            self.error = output.error
        return Delta(text=text, tokens=tokens, finish_reason=self.finish_reason)

    def _count(self, output: RequestOutput) -> None:
        self.num_prompt_tokens = output.num_prompt_tokens
        self.num_local_cached_tokens = output.num_local_cached_tokens
        self.num_external_cached_tokens = output.num_external_cached_tokens

    def _tokens(self, output: RequestOutput) -> tuple[str, list[ChosenToken]]:
        # Token by token, so that the count is exact when a stop string is complete in the middle of an output.
        text, tokens = "", []
        for index, token_id in enumerate(output.new_token_ids):
            self.num_output_tokens += 1
            if output.finish_reason == "stop" and index == len(output.new_token_ids) - 1:
                break
            if output.logprobs:
                tokens.append(ChosenToken(token_id, output.logprobs[index], self._decoded))
            text += self._pass(self._detokenizer.push([token_id]))
            if self._matcher.stopped:
                break
        return text, tokens

    def _end(self) -> str:
        return self._pass(self._detokenizer.finish()) + self._matcher.finish()

    def _pass(self, text: str) -> str:
        self._decoded += len(text)
        return self._matcher.push(text)

    def check(self) -> None:
        self._matcher.check()
        assert self.finish_reason is None or self.finish_reason in FINISH_REASONS, self.finish_reason
        assert not self._matcher.stopped or self.finish_reason == "stop"
        assert self.num_local_cached_tokens + self.num_external_cached_tokens <= max(self.num_prompt_tokens - 1, 0)
