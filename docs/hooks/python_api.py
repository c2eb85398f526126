"""The Python reference: which objects, in which order; mkdocstrings writes them out."""

from __future__ import annotations

import importlib

#: Section -> module, and its public names (those of ``__all__`` where nothing is named here).
SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "The client": ("kvstrata.client", ()),
    "For asyncio": ("kvstrata.client.aio", ("AsyncClient",)),
    "Administration": ("kvstrata.client.admin", ("AdminClient",)),
    "vLLM": ("kvstrata.engine_adapter.vllm.settings", ("Settings", "read_settings")),
    "SGLang": ("kvstrata.engine_adapter.sglang.settings", ("Settings", "read_settings")),
    "An engine of your own": ("kvstrata.engine_adapter.connector.base", ()),
}
PROSE = {
    "The client": "Import these from `kvstrata.client`. Values of `BlockStatus` and `Tier`: [on the wire](wire.md).",
    "For asyncio": "The same calls, awaited.",
    "Administration": "What `kvstrata node`, `tenant`, `namespace`, `block` and `why` are made of, over gRPC. "
    "Messages are described in [gRPC](grpc.md).",
    "vLLM": "The keys of `kv_connector_extra_config`; how to use them is in [vLLM](../vllm.md).",
    "SGLang": "The keys under `kvstrata`; how to use them is in [SGLang and LMCache](../integrations.md).",
    "An engine of your own": "The protocols between a paged engine and the pool, and what goes between the two halves.",
}


def objects() -> list[tuple[str, str]]:
    """(section, full name of the object), in order."""
    found = []
    for section, (module, names) in SECTIONS.items():
        for name in names or public(module):
            found.append((section, f"{module}.{name}"))
    return found


def public(module: str) -> list[str]:
    """``__all__``, or the public classes that the module defines."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        return [name for name in loaded.__all__ if isinstance(getattr(loaded, name), type)]
    classes = {name: each for name, each in vars(loaded).items() if isinstance(each, type) and name[0].isupper()}
    return [name for name, each in classes.items() if each.__module__ == module]


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
