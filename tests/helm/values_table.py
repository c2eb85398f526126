"""The table of all values for the docs, from the schema's descriptions and the chart's defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from tests.helm.rendering import CHART, ROOT

PAGE = ROOT / "docs" / "deploy-helm.md"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"


def leaves(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value that has no values under it, with its schema."""
    for name, each in schema["properties"].items():
        if name == "global":
            continue
        if "properties" in each:
            yield from leaves(each, f"{prefix}{name}.")
        else:
            yield prefix + name, each


def default_of(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values


def table() -> str:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = ["| value | default | |", "|---|---|---|"]
    for path, each in leaves(schema):
        default = json.dumps(default_of(values, path))
        choices = f" One of {', '.join(map(str, each['enum']))}." if "enum" in each else ""
        rows.append(f"| `{path}` | `{default}` | {each['description']}{choices} |")
    return "\n".join(rows)


def page_with_table(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
