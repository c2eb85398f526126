"""Text to tokens and back: bytes by default, or a ``tokenizer.json``; and text as it streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import tokenizers

from kvstrata.proto.errors import ConfigError, InvalidArgument

#: What decoding puts where bytes are no character, or not yet a whole one.
REPLACEMENT: Final = "\ufffd"
#: Names under which tokenizers of this architecture know their end of sequence, most specific first.
_EOS_NAMES: Final[tuple[str, ...]] = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eos|>",
)


class Tokenizer(Protocol):
    """Thread-safe. ``decode(encode(text)) == text`` where the tokenizer loses nothing; special tokens are no text."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it: the model has so many logits."""
        ...

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD; ids that stand for nothing are left out."""
        ...


class ByteTokenizer:
    """A token a byte of UTF-8: ids 0 to 255. ``BOS``, ``EOS`` and ``PAD`` follow; the other ids stand for nothing."""

    BOS: Final = 256
    EOS: Final = 257
    PAD: Final = 258

    vocab_size = 512
    eos_token_id: int | None = EOS

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in token_ids if token_id < 256).decode("utf-8", "replace")


class FileTokenizer:
    """The ``tokenizers`` library's, from a ``tokenizer.json``.

    The end of sequence is what a ``tokenizer_config.json`` beside it says, else a token of a well-known name.
    Raises :class:`ConfigError` for a file that is missing or malformed.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"tokenizer {path}: {error}") from error
        # Texts are tokenised as they are: a file may ask for padding or cutting, which are for training.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size: int = self._ids_end()
        self.eos_token_id: int | None = self._eos(path.with_name("tokenizer_config.json"))

    def encode(self, text: str) -> list[int]:
        _utf8(text)
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _ids_end(self) -> int:
        """Ids of added tokens may leave holes, so the count of tokens is not enough."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def _eos(self, config: Path) -> int | None:
        names = _EOS_NAMES
        if config.is_file():
            named = _eos_name(config)
            names = (named, *_EOS_NAMES) if named else _EOS_NAMES
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((token_id for token_id in ids if token_id is not None), None)


def _eos_name(config: Path) -> str:
    try:
        settings = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer settings {config}: {error}") from error
    token = settings.get("eos_token") if isinstance(settings, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json`` or of the folder it is in; bytes when ``path`` is empty."""
    if not path:
        return ByteTokenizer()
    file = Path(path)
    return FileTokenizer(file / "tokenizer.json" if file.is_dir() else file)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the text is no Unicode: {error.reason} at character {error.start}") from error


class Detokenizer:
    """Text of tokens as they come, never with half a character: what :meth:`push` and :meth:`finish` return,
    joined, is the text of all tokens.

    Text that ends in U+FFFD may be the first bytes of a character, so it is held until it does not. A piece is
    decoded together with the piece before it, because some tokenizers decode a token differently at the start.
    Each push costs as much as decoding what was held.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # the piece that was emitted last
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens; may be empty."""
        self._held.extend(token_ids)
        return self._text(final=False)

    def finish(self) -> str:
        """The rest, whatever it is."""
        return self._text(final=True)

    def _text(self, *, final: bool) -> str:
        if not self._held:
            return ""
        known = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode(self._before + self._held)
        if text.endswith(REPLACEMENT) and not final:
            return ""
        if len(text) > len(known):
            # Tokens without text of their own (special ones) cannot be a piece to decode with.
            self._before = self._held
            self._held = []
        return text[len(known) :]
