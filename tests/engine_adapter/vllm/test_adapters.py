"""Keys of LoRA adapters' blocks: contents count, beside the name and path that are in vLLM's hashes."""

from __future__ import annotations

from hashlib import md5
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.vllm import adapters
from kvstrata.engine_adapter.vllm.adapters import AdapterDigests, AdapterHashes
from kvstrata.engine_adapter.vllm.requests import RequestView
from kvstrata.transfer.kv_events.events import tail
from tests.engine_adapter.vllm.stand_ins import Lora, Request

HASHES = [bytes([index]) * 32 for index in range(6)]


def make_adapter(folder: Path, weights: bytes = b"w", alpha: int = 8) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def test_an_adapter_is_told_by_its_weights_and_its_configuration(tmp_path: Path) -> None:
    paths = [
        make_adapter(tmp_path / "a"),
        make_adapter(tmp_path / "b", b"v"),
        make_adapter(tmp_path / "c", alpha=16),
        make_adapter(tmp_path / "copy of a"),
    ]
    one, two, three, copy = (AdapterDigests().digest(Lora(1, path)) for path in paths)
    assert len({one, two, three}) == 3 and one == copy


def test_no_adapter_and_a_name_on_a_hub_add_nothing_to_vllms_hashes() -> None:
    assert AdapterDigests().digest(None) == AdapterDigests().digest(Lora(1, "org/adapter")) == b""
    assert RequestView(Request("r", 97, 97, HASHES)).block_hashes is HASHES


def test_files_are_read_when_the_adapter_is_first_asked_for_as_vllm_reads_them(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    engine = AdapterDigests()
    first = engine.digest(Lora(1, path))
    make_adapter(tmp_path / "a", b"trained on")
    assert engine.digest(Lora(1, path)) == first, "vLLM still has the older weights"
    assert AdapterDigests().digest(Lora(1, path)) != first


@pytest.mark.parametrize("inplace", [True, False])
def test_one_that_has_changed_under_a_running_engine_is_nobody_elses(tmp_path: Path, inplace: bool) -> None:
    """vLLM's own cache has KV of the older weights under the same hashes: it must not be stored as of the newer."""
    path = make_adapter(tmp_path / "a")
    engine, numbers = AdapterDigests(), count(1)

    def loaded() -> bytes:
        return engine.digest(Lora(1 if inplace else next(numbers), path, load_inplace=inplace))

    first = loaded()
    assert loaded() == first, "loaded again, and the same"
    make_adapter(tmp_path / "a", b"trained on")
    begun_later = AdapterDigests().digest(Lora(1, path))
    changed = loaded()
    assert changed not in (first, begun_later) and loaded() == changed
    make_adapter(tmp_path / "a")
    assert loaded() not in (first, begun_later), "it was another meanwhile"
    engine.reset()
    assert loaded() == first


def test_files_that_are_as_they_were_are_not_read_for_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_adapter(tmp_path / "a")
    engine = AdapterDigests()
    first = engine.digest(Lora(1, path, load_inplace=True))
    monkeypatch.setattr(adapters, "weights_digest", None)
    assert engine.digest(Lora(1, path, load_inplace=True)) == first


def test_a_folder_that_is_not_there_yet_is_no_name_on_a_hub(tmp_path: Path) -> None:
    engine = AdapterDigests()
    assert engine.digest(Lora(1, str(tmp_path / "a"))) != engine.digest(Lora(1, str(tmp_path / "a")))
    path = make_adapter(tmp_path / "a")
    assert engine.digest(Lora(1, path)) == AdapterDigests().digest(Lora(1, path))


def test_a_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_adapter(tmp_path / "a")
    assert AdapterDigests().digest(Lora(1, "~/a"))


def test_files_that_cannot_be_read_are_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(folder: Path, configuration: str) -> str:
        raise PermissionError(folder)

    monkeypatch.setattr(adapters, "weights_digest", unreadable)
    one, two = (AdapterDigests().digest(Lora(1, str(tmp_path))) for _ in range(2))
    assert one and two and one != two


def test_past_so_many_nothing_is_forgotten_and_nothing_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "ADAPTERS_MAX", 1)
    path = make_adapter(tmp_path / "a")
    engine = AdapterDigests()
    first, further = engine.digest(Lora(1, path)), Lora(2, path, lora_name="further")
    assert first not in (engine.digest(further), engine.digest(further))
    assert engine.digest(further) != engine.digest(further) and engine.digest(Lora(1, path)) == first


@given(st.lists(st.lists(st.sampled_from([b"a", b"b"]), max_size=5), max_size=6))
def test_keys_are_those_of_the_list_as_it_is(chains: list[list[bytes]]) -> None:
    view = AdapterHashes(b"digest")
    for hashes in chains:
        chained = [md5(b"".join(hashes[: index + 1])).digest() for index in range(len(hashes))]
        assert list(view.keyed(chained)) == list(AdapterHashes(b"digest").keyed(chained))
        assert all(len(key) == 16 for key in view.keyed(chained))


def test_a_request_that_grows_has_the_keys_of_its_adapter(tmp_path: Path) -> None:
    growing = list(HASHES[:2])
    request = Request("r", 97, 97, growing)
    one, other = RequestView(request, b"one"), RequestView(request, b"other")
    first = list(one.block_hashes)
    growing += HASHES[2:]
    assert [*one.block_hashes[:2]] == first and len(one.block_hashes) == 6
    assert not {*one.block_hashes} & {*other.block_hashes} and not {*one.block_hashes} & {*HASHES}


def test_routers_know_an_adapters_blocks_by_their_tails() -> None:
    keys = RequestView(Request("r", 97, 97, HASHES), b"one").block_hashes
    assert [tail(key) for key in keys] == [tail(each) for each in HASHES]
    assert len({key[:-8] for key in keys}) == len(HASHES)
