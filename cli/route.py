"""``kvstrata route``: who has most of a prompt, engines by their own caches and nodes by the pool's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.as_json import as_dict
from kvstrata.cli.groups import among
from kvstrata.cli.hashes import looks_whole
from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master, ask
from kvstrata.cli.output import Exit, expected_errors, print_json, print_table, say
from kvstrata.proto.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from kvstrata.proto import channel_pb2 as pb
    from kvstrata.proto import control_pb2 as control

#: Bytes of hashes or text that are read.
INPUT_BYTES_MAX = 8 << 20


def route(
    hashes: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Block hashes in hexadecimal, one a line; - is standard input.", allow_dash=True
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="A prompt instead, hashed as the bundled engine does; @FILE reads one.")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="A tokenizer.json for --text; by default one token a byte.", show_default=False)
    ] = "",
    group: Annotated[
        str,
        typer.Option(
            "--namespace", metavar="GROUP", help="The namespace's group, or enough of its beginning; if there are many."
        ),
    ] = "",
    tenant: Annotated[str, typer.Option("--tenant", metavar="SALT", help="The prompt's tenant.")] = "",
    load: Annotated[
        list[str] | None, typer.Option(help="NAME=LOAD: how busy an engine is, 0 to 1; again for each.")
    ] = None,
    master: Master = DEFAULT_MASTER,
    as_json: Json = False,
) -> None:
    """Where should this prompt go? Engines by what they have of it, in their caches or near, and the pool's nodes."""
    with expected_errors():
        if (hashes is None) == (text is None):
            raise InvalidArgument("give either a file of block hashes (- for standard input), or --text")
        loads = dict(_load(each) for each in load or ())
        with ask(master) as admin:
            spec = _namespace({row.spec.group: row.spec for row in admin.namespaces()}, group)
            packed = _of_text(text, tokenizer, spec, tenant) if text is not None else _of_file(hashes, spec)
            answer = admin.route(spec, tenant, packed, loads=loads)
        if as_json:
            print_json(as_dict(answer))
        else:
            _say(answer)
        if not answer.engines and not answer.pool_blocks:
            raise typer.Exit(int(Exit.FAILED))


def _namespace(specs: dict[str, pb.NamespaceSpec], group: str) -> pb.NamespaceSpec:
    if not group and len(specs) == 1:
        return next(iter(specs.values()))
    if not specs:
        raise InvalidArgument("the pool has no namespace yet: nothing was ever stored")
    return specs[among(set(specs), group)]


def _of_file(path: Path | None, spec: pb.NamespaceSpec) -> bytes:
    assert path is not None
    try:
        text = sys.stdin.read(INPUT_BYTES_MAX + 1) if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if len(text) > INPUT_BYTES_MAX:
        raise ConfigError(f"{path} has more than {INPUT_BYTES_MAX} bytes")
    found = text.split()
    for number, line in enumerate(found, 1):
        if not looks_whole(line) or len(line) != 2 * spec.hash_bytes:
            raise InvalidArgument(
                f"hash {number} of {path} is not {2 * spec.hash_bytes} hexadecimal digits, as those of {spec.group}"
            )
    return bytes.fromhex("".join(found))


def _of_text(text: str, tokenizer: str, spec: pb.NamespaceSpec, tenant: str) -> bytes:
    from kvstrata.engine_adapter.hashing import BlockHasher, HashAlgorithm
    from kvstrata.engine_adapter.paged.text.tokenizer import load_tokenizer

    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {text[1:]}: {error}") from error
    algorithm: HashAlgorithm = "sha256" if spec.hash_bytes == 32 else "xxh3-128"
    hasher = BlockHasher(spec.block_tokens, algorithm)
    found: list[bytes] = []
    hasher.extend(hasher.root(tenant), found, load_tokenizer(tokenizer).encode(text))
    if not found:
        raise InvalidArgument(f"the text is shorter than one block, which has {spec.block_tokens} tokens")
    return b"".join(found)


def _load(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise InvalidArgument(f"--load {text!r}: write NAME=0.5") from error


def _say(answer: control.RouteAnswer) -> None:
    say(f"{answer.asked} blocks asked; the pool has the first {answer.pool_blocks}")
    if answer.engines:
        rows = [
            (row.name, row.state, row.own_blocks, row.pool_blocks, row.near_blocks, f"{row.score:.1f}", row.host or "-")
            for row in answer.engines
        ]
        print_table("engines, best first", ("engine", "state", "own", "from pool", "near", "score", "host"), rows)
    if answer.nodes:
        nodes = [(row.node_id, row.prefix_blocks, row.dram_blocks, row.ssd_blocks, row.host) for row in answer.nodes]
        print_table("nodes, longest prefix first", ("node", "prefix", "dram", "ssd only", "host"), nodes)
    if answer.problem:
        say(f"note: {answer.problem}", err=True)
