"""The page about the chart: every value, sizes as they are rendered, files and commands that exist."""

from __future__ import annotations

import re

import typer.main

from kvstrata.cli.app import app
from tests.helm.rendering import EXAMPLES, ROOT, Values, main_container, objects, one
from tests.helm.values_table import PAGE, page_with_table

RUNBOOK = ROOT / "docs" / "runbook.md"


def test_the_table_names_every_value() -> None:
    text = PAGE.read_text()
    assert page_with_table(text) == text, "python -m tests.helm.update"


def limit_mib(values: Values) -> int:
    container = main_container(one(objects(values), "DaemonSet", "-storage"))
    return int(container["resources"]["limits"]["memory"].removesuffix("Mi"))


def test_sizes_are_as_rendered() -> None:
    rows = dict(re.findall(r"^\| (.+?) \| ([\d,]+) MiB\b", PAGE.read_text(), re.M))
    devices = [{"hostPath": f"/mnt/{n}", "size": "3200Gi"} for n in range(2)]
    large: Values = {"dram": "256Gi", "blockBytes": "1Mi", "ssd": {"devices": devices}}
    assert {name: int(size.replace(",", "")) for name, size in rows.items()} == {
        "64 GiB, 256 KiB blocks": limit_mib({"storage": {"dram": "64Gi"}}),
        "256 GiB and 6.25 TiB of SSD, 1 MiB blocks": limit_mib({"storage": large}),
    }


def test_every_example_is_named() -> None:
    named = set(re.findall(r"^\| `([\w-]+\.yaml)` \|", PAGE.read_text(), re.M))
    assert named == {path.name for path in EXAMPLES.iterdir()}


def test_commands_exist() -> None:
    root = typer.main.get_command(app)
    for page in (PAGE, RUNBOOK):
        for words in re.findall(r"(?:`|-- )kvstrata ((?:[a-z]+ ?)+)", page.read_text()):
            command = root
            for word in words.split():
                if not hasattr(command, "commands"):
                    break
                assert word in command.commands, f"{page.name}: kvstrata {words}"  # type: ignore[attr-defined]
                command = command.commands[word]  # type: ignore[attr-defined]
