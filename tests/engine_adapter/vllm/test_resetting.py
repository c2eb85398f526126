"""A reset of vLLM's caches, as the settings say what becomes of the pool."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstrata.engine_adapter.connector.access import PoolAccess
from kvstrata.engine_adapter.vllm import resetting
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


def reset(planner: Planner, **extra: object) -> bool:
    return reset_cache(read_settings({"masters": "pool:1", **extra}), layout(FULL, STATE), planner)


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
