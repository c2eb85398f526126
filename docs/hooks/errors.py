"""Errors, block statuses and frame kinds, from proto/."""

from __future__ import annotations

import inspect
import re
from enum import IntEnum

from commands import cell

from kvstrata.proto import errors, status, wire

_MEMBER = re.compile(r"^\s+(?P<name>[A-Z][A-Z_0-9]*) = (?P<value>-?\d+)\s*(#:?\s*(?P<text>.*))?$")


def errors_page() -> str:
    """``reference/errors.md``."""
    tree = inspect.getdoc(errors) or ""
    drawing = "\n".join(line[4:] for line in tree.splitlines() if line.startswith("    "))
    lines = [
        "# Errors",
        "",
        "A class answers two questions: may the caller retry, and whose mistake is it. A miss is a value (see "
        "[block statuses](wire.md#blockstatus)), never an exception. All of them are in `kvstrata.proto.errors`.",
        "",
        "```text",
        drawing,
        "```",
        "",
        "| class | base | retry | travels | |",
        "|---|---|---|---|---|",
    ]
    for cls in error_classes():
        retry = "yes" if issubclass(cls, errors.Retryable) else "no"
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        travels = "yes" if cls.__name__ in errors.BY_CODE else "no"
        text = cell(inspect.getdoc(cls) or "")
        lines.append(f"| `{cls.__name__}` | {bases} | {retry} | {travels} | {text} |")
    lines += ["", "*Travels*: a peer may answer with it by name, in a Failure frame or as a gRPC status.", ""]
    return "\n".join(lines)


def error_classes() -> list[type[errors.KVError]]:
    """Every class of the tree, in the order of the module."""
    return [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.KVError) and each.__module__ == errors.__name__
    ]


def wire_page() -> str:
    """``reference/wire.md``."""
    lines = [
        "# Block statuses and frames",
        "",
        "Small numbers that travel. Values are wire format: they are never given another meaning.",
        "",
    ]
    for cls in enums():
        lines += _enum(cls)
    return "\n".join(lines) + "\n"


def enums() -> list[type[IntEnum]]:
    """What is documented here: the public enums of ``proto/status.py``, and the kinds of frames."""
    public = [each for each in vars(status).values() if isinstance(each, type) and issubclass(each, IntEnum)]
    return [each for each in public if each is not IntEnum] + [wire.Kind]


def _enum(cls: type[IntEnum]) -> list[str]:
    document = (inspect.getdoc(cls) or "").replace("Values are wire format: never renumber.", "")
    document = document.replace("Values are wire format.", "")
    texts = {}
    for line in inspect.getsource(cls).splitlines():
        found = _MEMBER.match(line)
        if found:
            texts[found["name"]] = found["text"] or ""
    prose, table = _without_table(document)
    lines = [f"## {cls.__name__}", "", prose, ""]
    if table:
        lines += ["```text", *table, "```", ""]
    lines += ["| name | value | |", "|---|---|---|"]
    lines += [f"| `{each.name}` | {each.value} | {cell(texts.get(each.name, ''))} |" for each in cls]
    return [*lines, ""]


def _without_table(document: str) -> tuple[str, list[str]]:
    """Prose, and the lines of a reStructuredText table without its rules."""
    rules = [number for number, line in enumerate(document.splitlines()) if re.fullmatch(r"=+( =+)+", line.strip())]
    if not rules:
        return document.strip(), []
    lines = document.splitlines()
    table = [line for line in lines[rules[0] : rules[-1] + 1] if not re.fullmatch(r"[= ]+", line.strip())]
    return "\n".join(lines[: rules[0]] + lines[rules[-1] + 1 :]).strip(), table
