"""The documentation is true: it builds strictly, holds all of the code's interfaces, and what it shows can be typed."""

from __future__ import annotations

import html
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.cli.command_tree import leaves
from kvstrata.proto import errors, status, wire
from tests.house.commands import options, parse
from tests.house.test_faults_page import NAMED, names

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="what builds the site is not installed: pip install 'kvstrata[docs]'",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: dead links and anchors, pages in no menu and warnings end it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def text_of(site: Path, page: str) -> str:
    """What a reader sees of a page, in one line."""
    body = (site / "reference" / f"{page}.html").read_text()
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


@needs_mkdocs
def test_nothing_is_fetched_from_elsewhere_when_it_is_read(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert not [each for each in loaded if re.match(r"(https?:)?//", each)], page
    assert not [sheet for sheet in site.rglob("*.css") if re.search(r"url\(['\"]?https?:", sheet.read_text())]


@needs_mkdocs
def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    body = (site / "reference" / "commands.html").read_text()
    sections = dict(re.findall(r'<h2 id="([^"]+)">(.*?)(?=<h2 |</article>)', body, re.S))
    assert len(sections) == len(list(leaves()))
    for path, command in leaves():
        section = html.unescape(sections["-".join(path)])
        for option in options(command):
            assert re.search(rf"<code>[^<]*{re.escape(option)}\b", section), (path, option)


@needs_mkdocs
def test_every_key_of_the_daemons_is_in_the_configuration_reference(site: Path) -> None:
    text = text_of(site, "configuration")
    commands = {
        path: command for path, command in leaves() if path in (("master",), ("storage",), ("serve",), ("dev",))
    }
    for path, command in commands.items():
        for parameter in command.params:
            if parameter.name not in ("help", "config"):
                assert f"{parameter.name} KVSTRATA_{path[0].upper()}_{parameter.name.upper()}" in text


@needs_mkdocs
def test_every_route_is_in_the_reference(site: Path) -> None:
    text = text_of(site, "http")
    sources = [
        path for folder in ("master", "storage", "engine_adapter/serve") for path in (ROOT / folder).rglob("*.py")
    ]
    routes = [
        route for path in sources for route in re.findall(r"\b(?:Route|guarded)\(\s*\"(/[^\"]*)", path.read_text())
    ]
    assert len(routes) > 15
    for route in routes:
        assert f" {route} " in text


@needs_mkdocs
def test_every_method_and_message_is_in_the_reference(site: Path) -> None:
    text = text_of(site, "grpc")
    for file in ("control.proto", "channel.proto"):
        source = (ROOT / "proto" / file).read_text()
        found = re.findall(r"^\s*(?:rpc|message|service) (\w+)", source, re.M)
        assert found
        for name in found:
            assert re.search(rf"\b{name}\b", text), name
    assert "One long stream a node: attach, snapshot, numbered deltas" in text  # comments come along


@needs_mkdocs
def test_every_error_status_and_frame_is_in_the_reference(site: Path) -> None:
    text = text_of(site, "errors")
    for name in errors.BY_CODE:
        assert f" {name} " in text
    numbers = text_of(site, "wire")
    for each in (*status.BlockStatus, *status.Departure, *wire.Kind):
        assert f" {each.name} {each.value} " in numbers


@needs_mkdocs
def test_the_client_s_calls_are_in_the_reference(site: Path) -> None:
    body = (site / "reference" / "python.html").read_text()
    calls = (
        "Client.lookup",
        "Client.load",
        "Client.store",
        "LoadResult.settled",
        "Region.view",
        "aio.AsyncClient.load",
    )
    for name in (*calls, "admin.AdminClient.drain_node"):
        assert f'id="kvstrata.client.{name}"' in body, name
    assert ":class:" not in body and "::</p>" not in body


def test_the_first_page_and_the_readme_show_the_same_example() -> None:
    first, readme = (
        re.search(r"```python\n(.*?)```", path.read_text(), re.S) for path in (DOCS / "index.md", ROOT / "README.md")
    )
    assert first is not None and readme is not None and first[1] == readme[1]


def table(page: str, name: str) -> list[list[str]]:
    """Cells of the rows between ``<!-- name: begin -->`` and its end, without the head."""
    found = re.search(rf"<!-- {name}: begin -->(.*?)<!-- {name}: end -->", (DOCS / page).read_text(), re.S)
    assert found is not None
    rows = [line for line in found[1].splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def kib_a_token(layers: str, heads: str, size: str) -> float:
    """Of 16-bit KV, by the formulas on the page."""
    if heads.startswith("latent"):
        return int(layers) * (int(heads.split()[1]) + int(size.split()[1])) * 2 / 1024
    return 2 * int(layers) * int(heads) * int(size) * 2 / 1024


def test_the_sizing_table_is_what_its_formula_gives() -> None:
    rows = table("sizing.md", "models")
    assert len(rows) > 8
    for model, layers, heads, size, shown, block, million in rows:
        kib = kib_a_token(layers, heads, size)
        assert shown == f"{round(kib, 1):g}", model
        assert block == f"{kib * 16:g} KiB", model
        assert million == f"{kib * 1024 * 1e6 / 2**30:.1f} GiB", model
    for kib_shown, *rates in table("sizing.md", "even"):
        wanted = [f"{int(kib_shown) * 1024 * 8 * rate / 1e9:.1f} Gbit/s" for rate in (2_000, 10_000, 50_000)]
        assert rates == wanted


def test_the_comparison_has_the_figures_of_the_performance_page() -> None:
    columns = ("ours shm", "ours shm, allocated", "ours tcp", "Mooncake shm", "Mooncake tcp", "OpenLake", "Redis unix")
    lines = (DOCS / "performance.md").read_text().splitlines()
    head = next(line for line in lines if line.startswith("| op | block | blocks a call |")).strip("| ").split(" | ")
    cases = {}
    for line in lines:
        found = re.match(r"\| (load|store) \| (64 KiB|2 MiB) \| (1|64) \| [\d.]+ \|", line)
        if found:
            cases[found.groups()] = dict(zip(head, line.strip("| ").split(" | "), strict=True))
    page = (DOCS / "comparison.md").read_text()
    for op, block, blocks, wanted, digits in (
        ("load", "2 MiB", "64", [name for name in columns if "allocated" not in name], 1),
        ("store", "2 MiB", "64", list(columns), 1),
        ("load", "64 KiB", "1", ["ours shm", "Mooncake shm", "OpenLake", "Redis unix"], 2),
        ("store", "64 KiB", "1", ["ours shm", "Mooncake shm", "OpenLake", "Redis unix"], 2),
    ):
        measured = [f"{float(cases[op, block, blocks][name]):.{digits}f}" for name in wanted]
        shown = [re.findall(r"\d+\.\d+", line) for line in page.splitlines() if line.startswith(f"| {op} |")]
        assert measured in shown, (op, block, measured, shown)


def failures() -> list[str]:
    lines = (DOCS / "failure-modes.md").read_text().splitlines()
    return [line for line in lines if line.startswith("| ") and not re.match(r"\| (fails|happens) \|", line)]


def test_every_failure_names_a_test_that_is_there() -> None:
    rows = failures()
    assert len(rows) > 25
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 6, row
        found = NAMED.findall(row)
        assert found, row
        for file, name in found:
            path = ROOT / "tests" / file
            assert path.exists() and name in names(path), f"{file}::{name}"


def shown_commands() -> Iterator[tuple[str, str]]:
    """(page, command line) of everything in shell blocks that starts with kvstrata."""
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        for block in re.findall(r"```(?:bash|sh|console)?\n(.*?)```", page.read_text(), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.match(r"\s*(?:\$ )?(?:/opt/kvstrata/bin/)?kvstrata (.*)", line)
                if found:
                    yield page.name, found[1]


def test_every_command_that_is_shown_can_be_typed(tmp_path: Path) -> None:
    shown = list(shown_commands())
    assert len(shown) > 60
    wrong = [f"{page}: kvstrata {line}: {problem}" for page, line in shown if (problem := parse(line, tmp_path))]
    assert not wrong, "\n".join(wrong)
