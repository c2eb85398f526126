"""Tokenizers and chat text: nothing is lost, streams never show half a character, errors name the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvstrata.engine_adapter.paged.text.chat import ROLES, render_chat
from kvstrata.engine_adapter.paged.text.tokenizer import (
    ByteTokenizer,
    Detokenizer,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
)
from kvstrata.proto.errors import ConfigError, InvalidArgument

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def saved_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of a few merges."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    trained.train_from_iterator(["hello hello world, grüße 你好 你好"] * 5, trainer)
    path = folder / "tokenizer.json"
    trained.save(str(path))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module", params=["bytes", "file"])
def tokenizer(request: pytest.FixtureRequest, file: Path) -> Tokenizer:
    return load_tokenizer("" if request.param == "bytes" else str(file))


def streamed(tokenizer: Tokenizer, token_ids: list[int], cuts: list[int]) -> list[str]:
    stream, pieces, start = Detokenizer(tokenizer), [], 0
    for cut in [*cuts, len(token_ids)]:
        pieces.append(stream.push(token_ids[start : max(cut, start)]))
        start = max(cut, start)
    return [*pieces, stream.finish()]


@settings(deadline=None)
@given(text=TEXT)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in token_ids)


@settings(deadline=None)
@given(text=TEXT, data=st.data())
def test_a_stream_is_the_text_in_whole_characters(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    token_ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, token_ids, sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8))))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 511), max_size=40), data=st.data())
def test_a_stream_of_any_tokens_is_what_they_decode_to(token_ids: list[int], data: st.DataObject) -> None:
    tokenizer = ByteTokenizer()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8)))
    assert "".join(streamed(tokenizer, token_ids, cuts)) == tokenizer.decode(token_ids)


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    stream = Detokenizer(ByteTokenizer())
    assert [stream.push([byte]) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert stream.push("ü".encode()[:1]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_a_token_that_reads_differently_at_the_start_keeps_its_space(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"▁good": 0, "▁day": 1, "s": 2}, unk_token="s"))
    words.decoder = decoders.Metaspace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode([0, 1, 2, 0]) == "good days good"
    assert streamed(tokenizer, [0, 1, 2, 0], [1, 2, 3]) == ["good", " day", "s", " good", ""]


def test_special_tokens_are_no_text(file: Path) -> None:
    bpe = FileTokenizer(file)
    assert bpe.eos_token_id == 0
    assert bpe.decode([0, *bpe.encode("hi"), 0]) == "hi"
    byte = ByteTokenizer()
    assert byte.decode([byte.BOS, *byte.encode("hi"), byte.EOS, byte.PAD, 400]) == "hi"
    assert byte.vocab_size > byte.PAD


def test_the_settings_beside_a_file_name_its_end(tmp_path: Path) -> None:
    path = saved_tokenizer(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    bpe = FileTokenizer(path)
    for token in ("h", {"content": "h"}):
        settings.write_text(json.dumps({"eos_token": token}))
        assert load_tokenizer(str(tmp_path)).eos_token_id == bpe.encode("h")[0]
    settings.write_text(json.dumps({"eos_token": None}))
    assert FileTokenizer(path).eos_token_id == 0
    settings.write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        FileTokenizer(path)


def test_padding_and_cutting_that_a_file_asks_for_are_left_out(tmp_path: Path) -> None:
    path = saved_tokenizer(tmp_path)
    asked = tokenizers.Tokenizer.from_file(str(path))
    asked.enable_truncation(2)
    asked.enable_padding(length=64)
    asked.save(str(path))
    assert FileTokenizer(path).decode(FileTokenizer(path).encode("hello world")) == "hello world"


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_tokenizer(str(tmp_path / "nowhere.json"))
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ConfigError, match="bad"):
        load_tokenizer(str(tmp_path / "bad.json"))


def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="character 1"):
        tokenizer.encode("a\ud800")


MESSAGES = st.lists(st.tuples(st.sampled_from(ROLES), TEXT), min_size=1, max_size=5)


@settings(deadline=None)
@given(messages=MESSAGES, answer=TEXT, more=MESSAGES)
def test_a_longer_conversation_starts_with_the_shorter(
    messages: list[tuple[str, str]], answer: str, more: list[tuple[str, str]]
) -> None:
    def rendered(turns: list[tuple[str, str]], prompt: bool) -> str:
        turn = [{"role": role, "content": content} for role, content in turns]
        return render_chat(turn, add_generation_prompt=prompt)

    longer = rendered([*messages, ("assistant", answer), *more], True)
    assert longer.startswith(rendered(messages, True) + answer)
    assert rendered(messages + more, False).startswith(rendered(messages, False))


def test_the_template_and_what_it_refuses() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    assert render_chat(messages) == "<|system|>\nBe brief.\n<|user|>\nHello.\n<|assistant|>\n"
    with pytest.raises(InvalidArgument, match="'wizard'"):
        render_chat([{"role": "wizard", "content": ""}])
    with pytest.raises(InvalidArgument, match="no messages"):
        render_chat([])
