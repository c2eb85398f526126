"""The section of the extra config."""

from __future__ import annotations

import pytest

from kvstrata.engine_adapter.sglang.settings import MASTERS_DEFAULT, MASTERS_VARIABLE, Settings, read_settings
from kvstrata.proto.errors import InvalidArgument


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MASTERS_VARIABLE, raising=False)
    assert read_settings({"interface_v1": 1}) == Settings(masters=MASTERS_DEFAULT)
    monkeypatch.setenv(MASTERS_VARIABLE, "h:1")
    assert read_settings({"interface_v1": 1}).masters == "h:1"
    assert read_settings({"interface_v1": 1, "kvstrata": {"masters": "g:2"}}).masters == "g:2"


def test_keys_outside_of_the_section_are_sglangs() -> None:
    extra = {"interface_v1": True, "backend_name": "kvstrata", "anything": 3, "kvstrata": {"deadline_ms": 7}}
    assert read_settings(extra).deadline_ms == 7


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "interface_v1"),
        ({"interface_v1": 0}, "interface_v1"),
        ({"interface_v1": 1, "kvstrata": "127.0.0.1:7400"}, "expected an object"),
        ({"interface_v1": 1, "kvstrata": {"master": "h:1"}}, "did you mean 'masters'"),
        ({"interface_v1": 1, "kvstrata": {"deadline_ms": 0}}, "deadline_ms"),
        ({"interface_v1": 1, "kvstrata": {"verify": "perhaps"}}, "verify"),
    ],
)
def test_mistakes_are_named(extra: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        read_settings(extra)
