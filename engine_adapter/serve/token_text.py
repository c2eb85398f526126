"""Single tokens as text, for log probabilities and ``/tokenize``."""

from __future__ import annotations

from kvstrata.engine_adapter.paged.text.tokenizer import Tokenizer
from kvstrata.engine_adapter.serve.choice import ChosenToken
from kvstrata.engine_adapter.serve.responses import ChatLogprob, CompletionLogprobs, TopLogprob

#: What a decoder puts where bytes are no text, as in a token that is a part of a character.
REPLACEMENT = "�"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text, or ``token_id:N`` when it is none on its own, so that names stay distinct."""
    text = tokenizer.decode([token_id])
    return f"token_id:{token_id}" if not text or REPLACEMENT in text else text


def completion_logprobs(tokenizer: Tokenizer, tokens: list[ChosenToken], top: int) -> CompletionLogprobs:
    """Completions' shape. ``top``: alternatives to show a token."""
    shown = CompletionLogprobs()
    for chosen in tokens:
        shown.text_offset.append(chosen.offset)
        shown.token_logprobs.append(chosen.logprobs.sampled)
        shown.tokens.append(token_text(tokenizer, chosen.token_id))
        shown.top_logprobs.append({token_text(tokenizer, other): value for other, value in chosen.logprobs.top[:top]})
    return shown


def chat_logprobs(tokenizer: Tokenizer, tokens: list[ChosenToken], top: int) -> list[ChatLogprob]:
    """Chat's shape."""
    shown = []
    for chosen in tokens:
        text = token_text(tokenizer, chosen.token_id)
        others = [_top(token_text(tokenizer, other), value) for other, value in chosen.logprobs.top[:top]]
        own = _top(text, chosen.logprobs.sampled)
        shown.append(ChatLogprob(token=text, logprob=own.logprob, bytes=own.bytes, top_logprobs=others))
    return shown


def _top(text: str, logprob: float) -> TopLogprob:
    named = text.startswith("token_id:")
    return TopLogprob(token=text, logprob=logprob, bytes=None if named else list(text.encode()))
