"""From what a client sends as a prompt to lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstrata.engine_adapter.paged.text.chat import render_chat
from kvstrata.engine_adapter.paged.text.tokenizer import Tokenizer
from kvstrata.engine_adapter.serve.errors import invalid
from kvstrata.engine_adapter.serve.requests import ChatMessage

PROMPTS_MAX: Final = 128


def completion_prompts(prompt: str | list[str | int | list[int]], tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts of a completion request, one or many. Slow for long text: not for an event loop.

    Raises :class:`ApiError` for a mixed, empty or overlong list and for ids that are no tokens.
    """
    if isinstance(prompt, str):
        return [_text_tokens(prompt, tokenizer)]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [_checked([item for item in prompt if isinstance(item, int)], tokenizer.vocab_size)]
    if len(prompt) > PROMPTS_MAX:
        raise invalid(f"prompt holds {len(prompt)} prompts: send at most {PROMPTS_MAX} a request", "prompt")
    if not prompt or any(isinstance(item, int) for item in prompt) or len({type(item) for item in prompt}) != 1:
        raise invalid("prompt must be text, token ids, or a list of one of these: at least one, not mixed", "prompt")
    return [
        _text_tokens(item, tokenizer)
        if isinstance(item, str)
        else _checked(item if isinstance(item, list) else [item], tokenizer.vocab_size)
        for item in prompt
    ]


def chat_prompt(messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> list[int]:
    """The conversation as tokens, ready for the assistant's next words. Slow for long text: not for an event loop."""
    return _text_tokens(render_chat([_plain(index, message) for index, message in enumerate(messages)]), tokenizer)


def _text_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    return _checked(tokenizer.encode(text), tokenizer.vocab_size)


def _checked(token_ids: list[int], vocab_size: int) -> list[int]:
    if not token_ids:
        raise invalid("the prompt has no tokens: send at least one", "prompt")
    if max(token_ids) >= vocab_size:
        raise invalid(f"token id {max(token_ids)} is outside the vocabulary of {vocab_size}", "prompt")
    if min(token_ids) < 0:
        raise invalid(f"token id {min(token_ids)} is negative", "prompt")
    return token_ids


def _plain(index: int, message: ChatMessage) -> dict[str, str]:
    where = f"messages[{index}]"
    if message.tool_calls:
        raise invalid(f"{where}.tool_calls is not supported: leave it out", where, "unsupported_parameter")
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise invalid(f"{where} has a part of type {part.type!r}: only text is supported", where)
        content = "".join(part.text or "" for part in content)
    if content is None:
        raise invalid(f"{where}.content is missing", where)
    return {"role": message.role, "content": content}
