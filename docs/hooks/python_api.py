"""The Python reference: which objects, in which order; mkdocstrings writes them out."""

from __future__ import annotations

import importlib
import re
from enum import IntEnum

#: Where the documented names are, or are defined.
FOLDERS = ("client", "engine_adapter", "transfer", "proto")
#: Section -> module, and its public names (those of ``__all__`` where nothing is named here).
SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "The client": ("kvstrata.client", ("Client",)),
    "What it gives and takes": ("kvstrata.client", ()),
    "For asyncio": ("kvstrata.client.aio", ("AsyncClient",)),
    "Administration": ("kvstrata.client.admin", ("AdminClient",)),
    "vLLM": ("kvstrata.engine_adapter.vllm.settings", ("Settings", "read_settings")),
    "SGLang": ("kvstrata.engine_adapter.sglang.settings", ("Settings", "read_settings")),
    "An engine of your own": ("kvstrata.engine_adapter.connector.base", ()),
}
PROSE = {
    "The client": "A first example is on [the first page](../index.md#use-it-from-python).",
    "What it gives and takes": "Import these from `kvstrata.client`; also `BlockStatus` and `Tier`, whose values are "
    "[here](wire.md).",
    "For asyncio": "The same calls, awaited.",
    "Administration": "What `kvstrata node`, `tenant`, `namespace`, `block` and `why` are made of, over gRPC. "
    "Messages are described in [gRPC](grpc.md).",
    "vLLM": "The keys of `kv_connector_extra_config`; how to use them is in [vLLM](../vllm.md).",
    "SGLang": "The keys under `kvstrata`; how to use them is in [SGLang and LMCache](../integrations.md).",
    "An engine of your own": "The protocols between a paged engine and the pool, and what goes between the two halves.",
}


def objects() -> list[tuple[str, str]]:
    """(section, full name of the object), in order."""
    found: list[tuple[str, str]] = []
    seen: set[tuple[str, str]] = set()
    for section, (module, names) in SECTIONS.items():
        for name in names or public(module):
            if (module, name) not in seen:
                seen.add((module, name))
                found.append((section, f"{module}.{name}"))
    return found


def public(module: str) -> list[str]:
    """Classes in ``__all__``, or the public ones that the module defines; enums have a page of their own."""
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [
        name for name, each in vars(loaded).items() if name[0].isupper() and getattr(each, "__module__", "") == module
    ]
    classes = {name: getattr(loaded, name) for name in names}
    return [name for name, each in classes.items() if isinstance(each, type) and not issubclass(each, IntEnum)]


def python_page() -> str:
    """``reference/python.md``."""
    lines = ["# Python", "", "What is documented here is public. Calls are thread-safe unless they say otherwise.", ""]
    section = ""
    for name, path in objects():
        if name != section:
            lines += [f"## {name}", "", PROSE[name], ""]
            section = name
        lines += [f"::: {path}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def without_roles(html: str) -> str:
    """Docstrings are reStructuredText in a few places: drop the marks that Markdown does not know."""
    html = re.sub(r":(?:class|meth|func|mod|attr|exc|data):(<code>)", r"\1", html)
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")
