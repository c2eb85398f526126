"""HTTP routes, from the source of the daemons, and gRPC, from the descriptors and comments of the .proto files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from commands import cell

from kvstrata.master.status.pages import PUBLIC
from kvstrata.proto import channel_pb2, control_pb2

ROOT = Path(__file__).resolve().parents[2]
#: Routes that are made elsewhere, and of which daemon they are.
SHARED = {"transfer/security/ticket_route.py": "master"}
#: Where routes are made, and of which daemon they are.
DAEMONS = {"master": "Master", "storage": "Storage node", "engine_adapter/serve": "Engine (`kvstrata serve`)"}
#: What a route does, by daemon and path; of others the handler's docstring is shown.
MEANINGS = {
    ("master", "/metrics"): "Prometheus metrics",
    ("master", "/healthz"): "health as JSON; 503 when something is wrong",
    ("master", "/readyz"): "whether it answers lookups for good; 503 while it waits for nodes that it knows",
    ("master", "/status.json"): "all that the status page shows, as one document; made at most once a second",
    ("master", "/events.json"): "recent events; `?since=N` only those after number N",
    ("master", "/ticket"): "a ticket for the channel, as protobuf, for the token in the `Authorization` header",
    ("master", "/quota"): "all tenants: policies and use; see [Tenants](../tenants.md)",
    ("master", "/quota/{salt:path}"): "one tenant's policy: read, set, remove; `?dry_run=1` says what would be",
    ("storage", "/metrics"): "Prometheus metrics",
    ("storage", "/healthz"): "health as JSON; 503 when something is wrong",
    ("storage", "/readyz"): "503 while the node is leaving",
    ("storage", "/tenants"): "bytes and shares of tenants on this node; `?salt=` names some",
    ("engine_adapter/serve", "/v1/completions"): "OpenAI's completions",
    ("engine_adapter/serve", "/v1/chat/completions"): "OpenAI's chat",
    ("engine_adapter/serve", "/v1/models"): "the model that is served",
    ("engine_adapter/serve", "/v1/models/{name:path}"): "the same, by name",
    ("engine_adapter/serve", "/tokenize"): "text to tokens",
    ("engine_adapter/serve", "/detokenize"): "tokens to text",
    ("engine_adapter/serve", "/health"): "503 when the engine has stopped",
    ("engine_adapter/serve", "/readyz"): "503 until it serves",
    ("engine_adapter/serve", "/metrics"): "Prometheus metrics, with vLLM's names; see [engine](../engine.md#metrics)",
    ("engine_adapter/serve", "/version"): "the version",
    ("engine_adapter/serve", "/reset_prefix_cache"): "forget cached blocks; only where the server allows it",
}


class Found(NamedTuple):
    """A route in the source."""

    daemon: str
    path: str
    methods: tuple[str, ...]
    meaning: str


def routes() -> list[Found]:
    """Every route that a daemon makes, as written."""
    page = [Found("master", path, ("GET",), "the status page" if path == "/" else "of the page") for path in PUBLIC]
    sources = [(daemon, path) for daemon in DAEMONS for path in sorted((ROOT / daemon).rglob("*.py"))]
    sources += [(daemon, ROOT / path) for path, daemon in SHARED.items()]
    found = sorted(page)
    for daemon, source in sources:
        text = source.read_text()
        if "Route(" in text:
            found += [route for route in _written(daemon, ast.parse(text)) if route not in found]
    return found


def _written(daemon: str, tree: ast.Module) -> Iterator[Found]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    handlers = {node.name: ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, functions)}
    for node in ast.walk(tree):
        route = _route(daemon, node, handlers)
        if route:
            yield route


def _route(daemon: str, node: ast.AST, handlers: dict[str, str | None]) -> Found | None:
    """``Route("/path", handler, methods=[...])``, or ``guarded("/path", handler, "POST")``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
        return None
    first = node.args[0]
    if node.func.id not in ("Route", "guarded") or not isinstance(first, ast.Constant):
        return None
    methods: tuple[str, ...] = ("GET",)
    for keyword in node.keywords:
        if keyword.arg == "methods":
            methods = tuple(ast.literal_eval(keyword.value))
    if node.func.id == "guarded" and isinstance(node.args[2], ast.Constant):
        methods = (str(node.args[2].value),)
    path = str(first.value)
    named = ast.unparse(node.args[1]).rpartition(".")[2] if len(node.args) > 1 else ""
    meaning = MEANINGS.get((daemon, path)) or (handlers.get(named) or "").split("\n\n")[0]
    return Found(daemon, path, methods, meaning)


def http_page() -> str:
    """``reference/http.md``."""
    lines = [
        "# HTTP",
        "",
        "HTTP/1.1, over TLS where it is on; which role a route needs is in "
        "[Security](../security.md#what-each-role-may-do). Each daemon answers on the address of its `--http` "
        "(an engine: `--listen`).",
        "",
    ]
    found = routes()
    for daemon, title in DAEMONS.items():
        lines += [f"## {title}", "", "| method | path | |", "|---|---|---|"]
        for route in found:
            if route.daemon == daemon:
                lines.append(f"| {', '.join(route.methods)} | `{route.path}` | {' '.join(route.meaning.split())} |")
        lines.append("")
    return "\n".join(lines)


def grpc_page() -> str:
    """``reference/grpc.md``."""
    lines = [
        "# gRPC",
        "",
        "What is rare goes by gRPC: node sync, registration, administration. Lookups, placement and blocks go over the "
        "framed channel, whose messages are below too. The files are `proto/control.proto` and `proto/channel.proto`; "
        "they are installed with the package, as `kvstrata/proto/*.proto`.",
        "",
    ]
    comments = {**_comments("channel.proto"), **_comments("control.proto")}
    for file in (control_pb2.DESCRIPTOR, channel_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            lines += _service(service, comments)
    for title, file in (
        ("Messages of gRPC", control_pb2.DESCRIPTOR),
        ("Messages of the channel", channel_pb2.DESCRIPTOR),
    ):
        lines += [f"## {title}", ""]
        for message in file.message_types_by_name.values():
            lines += _message(message, comments)
    return "\n".join(lines) + "\n"


def _service(service: Any, comments: dict[str, str]) -> list[str]:
    lines = [f"## Service {service.name}", "", "| method | request | answer | |", "|---|---|---|---|"]
    for method in service.methods_by_name.values():
        asks = _type(method.input_type.name, method.client_streaming)
        gives = _type(method.output_type.name, method.server_streaming)
        lines.append(f"| `{method.name}` | {asks} | {gives} | {cell(comments.get(f'rpc {method.name}', ''))} |")
    return [*lines, ""]


def _type(name: str, streaming: bool) -> str:
    return f"{'stream of ' if streaming else ''}[`{name}`](#message-{name.lower()})"


def _message(message: Any, comments: dict[str, str]) -> list[str]:
    lines = [f"### {message.name} {{#message-{message.name.lower()}}}", ""]
    if comments.get(message.name):
        lines += [comments[message.name].replace("<", "&lt;"), ""]
    if not message.fields:
        return [*lines, "No fields.", ""]
    lines += ["| field | number | type | |", "|---|---|---|---|"]
    for field in message.fields:
        text = comments.get(f"{message.name}.{field.name}", "")
        lines.append(f"| `{field.name}` | {field.number} | {_field_type(field)} | {cell(text)} |")
    return [*lines, ""]


_TYPES = {1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 7: "fixed32", 8: "bool"}
_TYPES |= {
    9: "string",
    12: "bytes",
    13: "uint32",
    14: "enum",
    15: "sfixed32",
    16: "sfixed64",
    17: "sint32",
    18: "sint64",
}


def _field_type(field: Any) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        return f"map of {_TYPES[key.type]} to {_field_type(value)}"
    name = _type(field.message_type.name, False) if field.message_type is not None else _TYPES[field.type]
    return f"{'repeated ' if field.is_repeated else ''}{name}"


def _comments(file: str) -> dict[str, str]:
    """What stands before, or behind, each message, field and method."""
    found: dict[str, str] = {}
    above: list[str] = []
    inside = ""
    for line in (ROOT / "proto" / file).read_text().splitlines():
        text = line.strip()
        code, _, behind = text.partition("//")
        if not code:
            above = [*above, behind.strip()] if behind else []
            continue
        opened = re.match(r"message (\w+)", code)
        inside = opened[1] if opened else inside
        method = re.match(r"rpc (\w+)", code)
        field = re.match(r"(?:repeated |optional )?[\w.<>, ]+ (\w+) = \d+", code)
        name = inside if opened else f"rpc {method[1]}" if method else f"{inside}.{field[1]}" if field else ""
        if name:
            found[name] = " ".join([*above, behind.strip()]).strip()
        above = []
    return found
