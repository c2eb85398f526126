"""The tokenizer of a replay: bytes, a given file, or one trained on the trace's own text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvstrata.cli.paged_replay.options import PagedOptions
from kvstrata.cli.paged_replay.text_trace import TextTrace


def tokenizer_path(options: PagedOptions, trace: TextTrace, folder: Path) -> str:
    """What an engine's ``tokenizer`` option is given: empty for bytes, else a file (in ``folder`` if trained)."""
    if options.tokenizer == "bytes":
        return ""
    if not options.bpe_tokens:
        return options.tokenizer
    path = folder / "tokenizer.json"
    train_bpe(_texts(trace), options.bpe_tokens).save(str(path))
    return str(path)


def train_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocabulary`` tokens: any text encodes, the same texts train the same merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _texts(trace: TextTrace) -> Iterable[str]:
    """Each session's longest prompt, which holds most of the others, and what was generated."""
    for session in trace.sessions:
        yield max((request.prompt for request in session.requests), key=len)
        yield from (request.output for request in session.requests)
