"""`kvstrata auth`: what it writes is what servers read, and nobody else may; and the options that name it."""

from __future__ import annotations

import datetime
import json
import os
import ssl
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli import token_rows
from kvstrata.cli.app import app
from kvstrata.cli.command_tree import leaves
from kvstrata.proto.errors import ConfigError, Unauthenticated
from kvstrata.transfer.security.key_file import KeyFile
from kvstrata.transfer.security.rights import Role
from kvstrata.transfer.security.tls import ServerTls, client_context
from kvstrata.transfer.security.tokens import TokenFile, read_token
from kvstrata.transfer.security.watched_file import FILE_BYTES_MAX

x509 = pytest.importorskip("cryptography.x509")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["auth", *arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auth") / "pool"
    run("init", str(folder), "--host", "kv-0.example.org", "--host", "10.0.0.1", "--node-host", "*.kv.svc")
    return folder


def copy_of(path: Path, to: Path) -> Path:
    target = to / path.name
    target.write_bytes(path.read_bytes())
    target.chmod(0o600)
    return target


def test_init_makes_what_each_flag_names(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    flags = json.loads(run("init", str(folder), "--json"))["flags"]
    assert set(flags) == {"master", "storage", "client", "operator", "admin"}
    for flag in (flag for found in flags.values() for flag in found):
        assert Path(flag.partition("=")[2]).is_file(), flag
    assert "is not empty" in run("init", str(folder), code=2)


def test_secrets_are_the_owners_alone(made: Path) -> None:
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    public = {"ca.pem", "master.pem", "node.pem", "client.pem"}
    for path in made.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o644 if path.name in public else 0o600), path.name


def test_each_role_has_a_token_that_its_row_knows(made: Path) -> None:
    tokens = TokenFile(made / "tokens.yaml")
    for role in Role:
        secret = read_token(made / f"{role.value}.token")
        assert tokens.holder_of(secret).rights.role is role
        assert secret not in (made / "tokens.yaml").read_text()


def test_certificates_are_good_for_their_hosts_and_no_others(made: Path) -> None:
    ServerTls(made / "master.pem", made / "master-key.pem", made / "ca.pem")
    client_context(made / "ca.pem", made / "client.pem", made / "client-key.pem")
    assert handshake(made, "master", "kv-0.example.org") == ""
    assert handshake(made, "master", "10.0.0.1") == "" and handshake(made, "node", "a.kv.svc") == ""
    assert handshake(made, "master", "localhost") == ""
    assert handshake(made, "node", "kv-0.example.org") and handshake(made, "master", "a.kv.svc")
    assert "not valid for" in handshake(made, "master", "elsewhere") or "mismatch" in handshake(
        made, "master", "elsewhere"
    )
    assert "purpose" in handshake(made, "client", "kv-0.example.org").lower(), "a client's certificate serves nobody"


def handshake(made: Path, server: str, host: str) -> str:
    """Why a strict client does not believe it, or "". In memory."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(made / f"{server}.pem", made / f"{server}-key.pem")
    calling = client_context(made / "ca.pem")
    calling.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        calling.wrap_bio(to_client, to_server, server_hostname=host),
        serving.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(10):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return str(error)
    return ""


def test_certs_replaces_certificates_and_keeps_the_authority(made: Path, tmp_path: Path) -> None:
    for name in ("ca.pem", "ca-key.pem"):
        copy_of(made / name, tmp_path)
    run("certs", str(tmp_path), "--host", "kv-9.example.org")
    assert handshake(tmp_path, "master", "kv-9.example.org") == "" and handshake(tmp_path, "master", "kv-0.example.org")
    certificate = x509.load_pem_x509_certificate((tmp_path / "master.pem").read_bytes())
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 390 < left.days < 398
    assert "holds no authority" in run("certs", str(tmp_path / "nowhere"), code=2)


def test_tokens_are_added_listed_and_removed(made: Path, tmp_path: Path) -> None:
    file = copy_of(made / "tokens.yaml", tmp_path)
    secret = run("token", "add", str(file), "team", "--salt", "a-*", "--salt", "b", "--group", "m/*", "--reset").strip()
    holder = TokenFile(file).holder_of(secret)
    assert (holder.rights.role, holder.rights.salts, holder.rights.groups) == (Role.CLIENT, ("a-*", "b"), ("m/*",))
    assert holder.may_reset and stat.S_IMODE(file.stat().st_mode) == 0o600
    listed = run("token", "list", str(file), "--json")
    assert {row["name"] for row in json.loads(listed)} == {"team", *Role} and "sha256" not in listed
    assert "already" in run("token", "add", str(file), "team", code=2)
    run("token", "remove", str(file), "team")
    with pytest.raises(Unauthenticated):
        TokenFile(file).holder_of(secret)
    assert "no row" in run("token", "remove", str(file), "team", code=2)


def test_a_token_may_go_to_a_file_and_a_certificate_needs_none(made: Path, tmp_path: Path) -> None:
    file, out = copy_of(made / "tokens.yaml", tmp_path), tmp_path / "own.token"
    said = run("token", "add", str(file), "own", "--role", "read", "--out", str(out))
    secret = read_token(out)
    assert secret not in said and TokenFile(file).holder_of(secret).rights.role is Role.READ
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    run("token", "add", str(file), "prom", "--role", "read", "--certificate", "prom.example.org")
    assert TokenFile(file).holder_of_certificate(("prom.example.org",)) is not None


@pytest.mark.parametrize("bad", [("x y",), ("ok", "--salt", "[a]"), ("ok", "--role", "read", "--reset")])
def test_a_row_that_servers_would_refuse_changes_nothing(made: Path, tmp_path: Path, bad: tuple[str, ...]) -> None:
    file = copy_of(made / "tokens.yaml", tmp_path)
    before = file.read_bytes()
    run("token", "add", str(file), *bad, code=2)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_rows_that_servers_would_not_read_to_the_end_change_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than"):
        token_rows.write(tmp_path / "tokens", [{"name": "x" * FILE_BYTES_MAX}])
    assert list(tmp_path.iterdir()) == []


def test_keys_that_servers_would_not_take_are_not_rotated(made: Path, tmp_path: Path) -> None:
    file = copy_of(made / "ticket-keys", tmp_path)
    file.chmod(0o644)
    assert "chmod o-rwx" in run("keys", "rotate", str(file), "--step", "add", code=2)


def test_keys_rotate_in_three_steps_and_in_no_other_order(made: Path, tmp_path: Path) -> None:
    file = copy_of(made / "ticket-keys", tmp_path)
    old = KeyFile(file).keys()
    for step in ("sign", "retire"):
        assert "one key only" in run("keys", "rotate", str(file), "--step", step, code=2)
    run("keys", "rotate", str(file), "--step", "add")
    added = KeyFile(file).keys()
    assert added.signs == old.signs and len(added.secrets) == 2
    assert "already" in run("keys", "rotate", str(file), "--step", "add", code=2)
    run("keys", "rotate", str(file), "--step", "sign")
    signing = KeyFile(file).keys()
    assert signing.signs != old.signs and dict(signing.secrets) == dict(added.secrets)
    assert json.loads(run("keys", "list", str(file), "--json")) == list(signing.secrets)
    run("keys", "rotate", str(file), "--step", "retire")
    assert dict(KeyFile(file).keys().secrets) == {signing.signs: signing.secrets[signing.signs]}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secrets = [secret.hex() for secret in added.secrets.values()]
    assert not any(secret in run("keys", "list", str(file)) for secret in secrets)


def test_ticket_wants_a_token() -> None:
    assert "--token-file" in run("ticket", "--master", "127.0.0.1:1", code=2)


# ---------------------------------------------------------------- the options of all commands


def test_every_command_that_calls_a_pool_takes_credentials() -> None:
    every = {path: {parameter.name for parameter in command.params} for path, command in leaves(hidden=True)}
    calling = {path: names for path, names in every.items() if names & {"master", "pool"} and path != ("storage",)}
    assert ("health",) in calling and ("node", "check") in calling and ("serve",) in calling
    for path, names in calling.items():
        assert {"token_file", "ca", "cert", "key"} <= names, path
    assert not {"ca", "cert"} & every["storage",]
    assert not [path for path, names in every.items() if "token" in names], "a secret is no argument"


def test_an_option_is_the_environment_for_as_long_as_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSTRATA_TOKEN_FILE", raising=False)
    token = tmp_path / "bad"
    token.write_text("two words")
    result = CliRunner().invoke(app, ["health", "--master", "127.0.0.1:1", "--token-file", str(token)])
    assert result.exit_code != 0 and "is no token" in result.output and "two words" not in result.output
    assert "KVSTRATA_TOKEN_FILE" not in os.environ
