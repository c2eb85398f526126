"""``kvstrata auth``: certificates, tokens and ticket keys for a pool, made and rotated; what a token is good for."""

from __future__ import annotations

import datetime
import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvstrata.cli import ticket_key_file, token_rows
from kvstrata.cli.authority import Authority, check_installed
from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master
from kvstrata.cli.output import expected_errors, print_json, print_table
from kvstrata.cli.secret_files import write_secret
from kvstrata.cli.ticket_key_file import Step
from kvstrata.proto.errors import ConfigError
from kvstrata.transfer.security.rights import Role

auth = typer.Typer(help="Who may use the pool: tokens, ticket keys, certificates.", no_args_is_help=True)
token = typer.Typer(help="Rows of a token file.", no_args_is_help=True)
keys = typer.Typer(help="The file of ticket keys.", no_args_is_help=True)
auth.add_typer(token, name="token")
auth.add_typer(keys, name="keys")

TOKENS_FILE: Final = "tokens.yaml"
KEYS_FILE: Final = "ticket-keys"

File = Annotated[Path, typer.Argument(help="The token file of the masters, and of nodes.", show_default=False)]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", help="A name or address by which masters are reached; again for each. This host, if none."),
]
NodeHosts = Annotated[
    list[str] | None,
    typer.Option("--node-host", help="The same for nodes: their certificate is good for these and no masters' names."),
]
Folder = Annotated[Path, typer.Argument(help="A directory for the files.", show_default=False)]


@auth.command()
def init(folder: Folder, host: Hosts = None, node_host: NodeHosts = None, as_json: Json = False) -> None:
    """Make all that a secured pool needs, and say which flags use it. Nothing that is there is replaced.

    An authority, certificates of masters, nodes and clients, ticket keys, and a token for each role, in a file each.
    """
    with expected_errors():
        check_installed()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            there = any(folder.iterdir())
        except OSError as error:
            raise ConfigError(f"cannot use {folder}: {error.strerror or error}") from error
        if there:
            raise ConfigError(f"{folder} is not empty: name another directory, or use auth token, keys and certs on it")
        now = datetime.datetime.now(datetime.UTC)
        authority = Authority.new(now)
        authority.write(folder)
        _give_certificates(authority, folder, host, node_host, now)
        ticket_key_file.write_first(folder / KEYS_FILE)
        rows = []
        for role in Role:
            row, secret = token_rows.row_of(role.value, role, [], [])
            write_secret(folder / f"{role.value}.token", f"{secret}\n".encode())
            rows.append(row)
        token_rows.write(folder / TOKENS_FILE, rows)
        flags = _flags(folder.absolute())
        if as_json:
            print_json({"folder": str(folder.absolute()), "flags": flags})
        else:
            _say(folder, flags)


@auth.command()
def certs(folder: Folder, host: Hosts = None, node_host: NodeHosts = None) -> None:
    """Give new certificates by the authority that `auth init` made: daemons read them without a restart."""
    with expected_errors():
        check_installed()
        _give_certificates(Authority.read(folder), folder, host, node_host, datetime.datetime.now(datetime.UTC))
        typer.echo(f"new certificates of master, node and client are in {folder}")


@auth.command()
def ticket(master: Master = DEFAULT_MASTER, as_json: Json = False) -> None:
    """What the token given by --token-file may do: asks a master for a ticket, and shows what it says."""
    with expected_errors():
        from kvstrata.client.masters import parse_masters
        from kvstrata.client.security.credentials import Credentials
        from kvstrata.client.security.fetched import FetchedTickets
        from kvstrata.client.security.holding import read_claims

        source = FetchedTickets.shown_for(parse_masters(master), Credentials.given())
        if source is None:
            raise ConfigError("there is no token to show: --token-file FILE, or KVSTRATA_TOKEN_FILE")
        with source.start():
            claims = read_claims(source.current())
        shown = {
            "subject": claims.subject,
            "role": claims.role,
            "salts": list(claims.salts),
            "groups": list(claims.groups),
            "key": claims.key,
            "life_seconds": (claims.expires_ms - claims.issued_ms) / 1e3,
        }
        if as_json:
            print_json(shown)
        else:
            print_table("", ("what", "value"), [(name, _text(value)) for name, value in shown.items()])


# ---------------------------------------------------------------- tokens


@token.command("add")
def token_add(
    file: File,
    name: Annotated[str, typer.Argument(help="Who it is for: shown in logs and health.", show_default=False)],
    role: Annotated[Role, typer.Option(help="What it may do.")] = Role.CLIENT,
    salt: Annotated[
        list[str] | None,
        typer.Option(help="Tenants that may be touched, by a pattern (* and ?); again for more. All by default."),
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option(help="Namespaces' groups that may be touched; again for more.")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="A client that may begin new weight epochs of its groups.")
    ] = False,
    certificate: Annotated[
        str, typer.Option(help="Common name of a certificate that is shown instead of a token.", show_default=False)
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Write the token here (mode 600), and do not print it.")] = None,
    as_json: Json = False,
) -> None:
    """Add a row, and print its token: it is in no file, and cannot be shown again."""
    with expected_errors():
        if out is not None and out.exists():
            raise ConfigError(f"{out} is there already")
        row, secret = token_rows.row_of(name, role, salt or [], group or [], reset=reset, certificate=certificate)
        token_rows.add(file, row)
        if out is not None and secret:
            write_secret(out, f"{secret}\n".encode())
        if as_json:
            print_json(
                {"name": name, "role": role.value, "token": secret if out is None else "", "file": str(out or "")}
            )
        elif secret:
            typer.echo(secret if out is None else f"the token is in {out}")
        else:
            typer.echo(f"{name} comes with the certificate {certificate}")


@token.command("list")
def token_list(file: File, as_json: Json = False) -> None:
    """Names, roles, and what each may touch; no hashes."""
    with expected_errors():
        rows = [{key: value for key, value in row.items() if key != "sha256"} for row in token_rows.read(file)]
        if as_json:
            print_json(rows)
            return
        columns = ("name", "role", "salts", "groups", "by")
        table = [
            (
                row["name"],
                row["role"] + (", reset" if row.get("reset") else ""),
                _text(row.get("salts", ["*"])),
                _text(row.get("groups", ["*"])),
                f"certificate {row['certificate']}" if "certificate" in row else "token",
            )
            for row in rows
        ]
        print_table("", columns, table)


@token.command("remove")
def token_remove(file: File, name: Annotated[str, typer.Argument(help="The row's name.", show_default=False)]) -> None:
    """Take a row away: its token is refused within seconds, tickets that it was given run out within 11 minutes."""
    with expected_errors():
        token_rows.remove(file, name)
        typer.echo(f"{name} is removed from {file}; tickets of it are good for up to 11 more minutes")


# ---------------------------------------------------------------- ticket keys


@keys.command("rotate")
def keys_rotate(
    file: Annotated[Path, typer.Argument(help="The file of --ticket-keys.", show_default=False)],
    step: Annotated[Step, typer.Option(help="add, then sign, then retire: see docs/security.md.", show_default=False)],
) -> None:
    """Change the key that tickets are made with, in three steps, without a refused call."""
    with expected_errors():
        told = ticket_key_file.rotate(file, step)
        first, *others = ticket_key_file.ids(file)
        typer.echo(f"{first} signs; also believed: {', '.join(others) or 'none'}. Next: {told}")


@keys.command("list")
def keys_list(
    file: Annotated[Path, typer.Argument(help="The file of --ticket-keys.", show_default=False)], as_json: Json = False
) -> None:
    """The ids of the keys, the one that signs first."""
    with expected_errors():
        found = ticket_key_file.ids(file)
        if as_json:
            print_json(found)
        else:
            typer.echo("\n".join(found))


# ---------------------------------------------------------------- what is said


def _give_certificates(
    authority: Authority,
    folder: Path,
    masters: list[str] | None,
    nodes: list[str] | None,
    now: datetime.datetime,
) -> None:
    for name, hosts in (("master", masters), ("node", nodes)):
        authority.give(folder, name, hosts or [os.uname().nodename], now)
    authority.give(folder, "client", [], now)


def _flags(folder: Path) -> dict[str, list[str]]:
    """What each process is started with, by its kind."""
    tls = f"--tls-ca={folder}/ca.pem"
    asks = [f"--tokens={folder}/{TOKENS_FILE}", f"--ticket-keys={folder}/{KEYS_FILE}"]

    def own(name: str) -> list[str]:
        return [f"--tls-cert={folder}/{name}.pem", f"--tls-key={folder}/{name}-key.pem", tls]

    return {
        "master": [*asks, *own("master")],
        "storage": [*asks, f"--token-file={folder}/node.token", *own("node")],
        "client": [f"--token-file={folder}/client.token", f"--ca={folder}/ca.pem"],
        "operator": [f"--token-file={folder}/operate.token", f"--ca={folder}/ca.pem"],
        "admin": [f"--token-file={folder}/admin.token", f"--ca={folder}/ca.pem"],
    }


def _say(folder: Path, flags: dict[str, list[str]]) -> None:
    quoted = {name: " \\\n    ".join(shlex.quote(flag) for flag in found) for name, found in flags.items()}
    typer.echo(
        f"{folder} has an authority, certificates, ticket keys, and a token for each role. Keep ca-key.pem away.\n\n"
        f"kvstrata master \\\n    {quoted['master']}\n\n"
        f"kvstrata storage \\\n    {quoted['storage']}\n\n"
        f"kvstrata health \\\n    {quoted['operator']}\n\n"
        "Engines and programs:\n"
        f"    export KVSTRATA_TOKEN_FILE={shlex.quote(flags['client'][0].partition('=')[2])}\n"
        f"    export KVSTRATA_CA={shlex.quote(flags['client'][1].partition('=')[2])}\n\n"
        "A process gets only the files that its flags name; ticket keys go to masters and nodes alone."
    )


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)
