"""docs/observability.md is true: its metrics are those that there are, and events that it names are in the code."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.metric_reference import PAGE, reference, written

ROOT = Path(__file__).resolve().parents[2]
CODE = ("proto", "transfer", "storage", "master", "client", "engine_adapter", "cli")


def test_the_metric_reference_is_what_daemons_have() -> None:
    page = PAGE.read_text()
    assert page == written(page, reference()), "run: python -m tests.house.metric_reference"


def test_events_of_the_page_are_logged_somewhere() -> None:
    table = PAGE.read_text().split("| Event |")[1].split("\n\n")[0]
    events = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    assert len(events) > 10
    texts = [path.read_text() for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    for event in events:
        assert any(f'"{event}"' in text for text in texts), event


def test_an_event_is_logged_from_one_module_so_that_its_name_tells() -> None:
    logged = re.compile(r'\blog\.(?:info|warning|error|exception)\(\s*"([^"]+)"')
    places: dict[str, set[str]] = {}
    for folder in CODE:
        for path in (ROOT / folder).rglob("*.py"):
            for event in logged.findall(path.read_text()):
                places.setdefault(event, set()).add(str(path.relative_to(ROOT)))
    assert len(places) > 50
    assert {event: where for event, where in places.items() if len(where) > 1} == {}


def test_spans_of_the_page_are_the_ones_in_the_code() -> None:
    told = set(re.findall(r"\bkvstrata\.[a-z.]+[a-z]\b", PAGE.read_text().split("## Traces")[1].split("## Logs")[0]))
    named = re.compile(r'(?:span\(|Operation\("[a-z]+", )"(kvstrata\.[a-z.]+)"')
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    made = {name for path in files for name in named.findall(path.read_text())}
    assert len(made) > 15
    assert made <= told, made - told
