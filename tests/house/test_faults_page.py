"""docs/faults.md is true: every fault has a test, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
#: What may read the wall clock: it is shown to people, kept beside what outlives the process, or agreed between hosts
#: (when a ticket or a certificate runs out). No deadline, lease or liveness comes of it.
WALL_CLOCK = {
    "storage/tiers/movers.py": "when a block was written, in its header on SSD",
    "engine_adapter/serve/chat.py": "OpenAI's API: when an answer was created",
    "engine_adapter/serve/completions.py": "OpenAI's API: when an answer was created",
    "engine_adapter/serve/daemon.py": "OpenAI's API: when a model was loaded",
    "engine_adapter/vllm/endpoint.py": "the age of sockets that dead engines left, which nobody listens at",
    "master/hub.py": "events: when something happened, for people",
    "master/status/document.py": "the status page: when it was made",
    "master/status/sampler.py": "the status page: when its minutes began",
    "transfer/kv_events/publisher.py": "KV events: the time in a batch, as vLLM's",
    "transfer/security/admission.py": "tickets: whether one has run out, with a minute of slack",
    "transfer/security/certificate_end.py": "certificates: when they run out",
    "transfer/security/minted.py": "tickets: when they are made and run out",
    "transfer/security/opened.py": "certificates: days left",
    "transfer/security/ticket_route.py": "tickets: when they are made and run out",
}


def rows() -> list[str]:
    lines = (ROOT / "docs" / "faults.md").read_text().splitlines()
    return [line for line in lines if line.startswith("|") and not re.match(r"\|[ -]*\|?(-|.*held by \|$)", line)]


def names(path: Path) -> set[str]:
    """Tests of a file: functions, and the cases of state machines."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return found


def test_every_fault_has_its_tests() -> None:
    table = rows()
    assert len(table) > 60
    bare = [row for row in table if not NAMED.search(row) and "*not yet:" not in row]
    assert not bare


def test_every_named_test_is_there() -> None:
    missing = []
    for row in rows():
        for file, name in NAMED.findall(row):
            path = ROOT / "tests" / file
            if not path.exists() or name not in names(path):
                missing.append(f"{file}::{name}")
    assert not missing


def test_only_what_is_shown_or_kept_reads_the_wall_clock() -> None:
    """A clock that jumps an hour then changes no lease, no deadline and nobody's liveness."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("proto", "transfer", "storage", "master", "client", "engine_adapter")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\b|\bdatetime\b", path.read_text())
    }
    assert found == set(WALL_CLOCK)
