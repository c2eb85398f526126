"""A reset of vLLM's caches, as the settings say what becomes of the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from kvstrata.engine_adapter.connector.access import PoolAccess
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.vllm import resetting
from kvstrata.engine_adapter.vllm.identity import weights_digest
from kvstrata.engine_adapter.vllm.resetting import reset_cache
from kvstrata.engine_adapter.vllm.settings import read_settings
from kvstrata.proto.errors import Unavailable
from tests.engine_adapter.connector.scripted_client import FULL, STATE, layout


class Planner:
    resets = 0

    def reset(self) -> None:
        self.resets += 1


class Masters:
    """What was asked of them; ``away``: nobody answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.away = False

    def begin_epochs(self, masters: str, groups: Sequence[str], access: PoolAccess) -> None:
        if self.away:
            raise Unavailable("no master answers")
        self.asked.append((masters, list(groups)))


@pytest.fixture
def masters(monkeypatch: pytest.MonkeyPatch) -> Masters:
    made = Masters()
    monkeypatch.setattr(resetting, "begin_epochs", made.begin_epochs)
    return made


STARTED = layout(FULL, STATE)


def reset(planner: Planner, now: Callable[[], PoolLayout] = lambda: STARTED, **extra: object) -> bool:
    return reset_cache(read_settings({"masters": "pool:1", **extra}), STARTED, now, planner)


def of(folder: Path) -> PoolLayout:
    """As an engine makes it anew: its fingerprint is of what the model's files hold by then."""
    return layout(msgspec.structs.replace(FULL, fingerprint=weights_digest(folder)), STATE)


def test_without_a_word_of_weights_it_is_refused_and_the_log_says_both_remedies(
    masters: Masters, caplog: pytest.LogCaptureFixture
) -> None:
    planner = Planner()
    assert not reset(planner)
    assert "fixed_weights" in caplog.text and "reset_external" in caplog.text
    assert not masters.asked and not planner.resets


def test_with_fixed_weights_it_succeeds_and_the_pool_stays_as_it_is(masters: Masters) -> None:
    planner = Planner()
    assert reset(planner, fixed_weights=True)
    assert not masters.asked and not planner.resets


def test_with_reset_external_the_next_epoch_begins_and_a_pool_that_is_away_fails_it(masters: Masters) -> None:
    planner = Planner()
    assert reset(planner, reset_external=True)
    assert masters.asked == [("pool:1", [FULL.fingerprint])] and planner.resets == 1
    masters.away = True
    assert not reset(planner, reset_external=True)
    assert planner.resets == 1


def test_fixed_weights_are_not_believed_where_the_model_s_files_have_changed_or_are_gone(
    masters: Masters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planner, settings = Planner(), read_settings({"masters": "pool:1", "fixed_weights": True})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    started = of(tmp_path)
    assert reset_cache(settings, started, lambda: of(tmp_path), planner)
    weights.write_bytes(b"new")
    assert not reset_cache(settings, started, lambda: of(tmp_path), planner)
    assert "others than at the start" in caplog.text
    assert not reset_cache(settings, started, lambda: of(tmp_path / "gone"), planner)
    assert "cannot be read" in caplog.text
    assert not masters.asked and not planner.resets


def test_what_ends_is_what_was_stored_also_when_the_model_s_files_have_changed(masters: Masters) -> None:
    now = layout(msgspec.structs.replace(FULL, fingerprint="of the new files"), STATE)
    assert reset(Planner(), lambda: now, reset_external=True)
    assert masters.asked == [("pool:1", [FULL.fingerprint])]
