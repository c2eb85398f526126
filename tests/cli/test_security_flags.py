"""Security flags of the daemons: what is refused before anything is served, and settings by file and environment."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kvstrata.cli import daemons
from kvstrata.cli.app import app
from kvstrata.cli.settings import PREFIX
from kvstrata.transfer.security.rates import USUAL, Bounds, bounds_of
from kvstrata.transfer.security.tokens import digest, new_token

ANY = "127.0.0.1:0"


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """A daemon that must not come up: (exit code, what it says)."""
    done = CliRunner().invoke(app, arguments, env={"NO_COLOR": "1", **environment}, auto_envvar_prefix=PREFIX)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture(autouse=True)
def _logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "configure_logs", lambda *_: None)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "tokens").write_text(yaml.safe_dump([{"name": "a", "sha256": digest(new_token()), "role": "read"}]))
    (tmp_path / "keys").write_text(f"first:{os.urandom(32).hex()}\n")
    (tmp_path / "keys").chmod(0o600)
    return {name: tmp_path / name for name in ("tokens", "keys")}


def test_half_of_it_is_refused_by_flag_file_and_environment(files: dict[str, Path], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"tokens: {files['tokens']}\nlisten: {ANY}\n")
    for arguments, environment in (
        (("--tokens", str(files["tokens"])), {}),
        (("--config", str(config)), {}),
        ((), {"KVSTRATA_MASTER_TOKENS": str(files["tokens"])}),
    ):
        code, said = run("master", "--listen", ANY, *arguments, **environment)
        assert code == 2 and "--tokens without --ticket-keys leaves the channel open" in said, said


def test_tokens_do_not_travel_in_clear_unless_told(files: dict[str, Path], tmp_path: Path) -> None:
    both = ("--tokens", str(files["tokens"]), "--ticket-keys", str(files["keys"]))
    code, said = run("master", "--listen", ANY, "--grpc", "0.0.0.0:0", *both)
    assert code == 2 and "in clear to 0.0.0.0:0" in said and "--plain-tokens" in said
    own = tmp_path / "own"
    own.write_text(new_token())
    own.chmod(0o600)
    node = ("storage", "--data", str(tmp_path / "node"), "--listen", ANY, "--http", ANY, *both)
    code, said = run(*node, "--master", "master.example.org:7400", "--token-file", str(own))
    assert code == 2 and "--tls-ca" in said and not (tmp_path / "node").exists()


def test_secrets_that_others_can_read_are_refused_and_not_shown(files: dict[str, Path], tmp_path: Path) -> None:
    key = files["keys"].read_text().strip().partition(":")[2]
    files["keys"].chmod(0o644)
    both = ("--tokens", str(files["tokens"]), "--ticket-keys", str(files["keys"]))
    code, said = run("master", "--listen", ANY, "--grpc", ANY, "--http", ANY, *both)
    assert code == 2 and "can be read or changed by others: chmod o-rwx" in said and key not in said
    files["keys"].chmod(0o600)
    files["tokens"].write_text("- {name: a, sha256: short, role: read}")
    code, said = run("master", "--listen", ANY, "--grpc", ANY, "--http", ANY, *both)
    assert code == 2 and "row 1 of" in said and "short" not in said.replace(str(files["tokens"]), "")


@pytest.mark.parametrize("daemon", ["master", "storage"])
def test_bounds_of_a_client_are_set_by_flag_and_file(
    daemon: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Bounds] = []
    module = importlib.import_module(f"kvstrata.{daemon}.daemon")
    monkeypatch.setattr(module, "run", lambda config, _: started.append(config.bounds) or 0)
    (tmp_path / "config.yaml").write_text("client-requests: 7\nclient-connections: 3\n")
    for arguments in (
        (),
        ("--client-requests", "0", "--client-connections", "9"),
        ("--config", str(tmp_path / "config.yaml")),
    ):
        code, said = run(daemon, *arguments)
        assert code == 0, said
    assert started == [USUAL, bounds_of(0, 9), Bounds(connections=3, requests_s=7.0, burst=7)]
    code, said = run(daemon, "--client-connections", "-1")
    assert code == 2 and "client-connections" in said
