"""Security settings that do not go together are refused, with what to do; what is left open is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.proto.errors import ConfigError
from kvstrata.transfer.security import watched_file
from kvstrata.transfer.security.checks import checked, open_to_all
from kvstrata.transfer.security.files import SecurityFiles
from kvstrata.transfer.security.opened import Security
from tests.transfer.security.doors import write_keys

FILE = Path("file")
LOCAL, OPEN = ("127.0.0.1:1", "[::1]:2", "localhost:3"), ("127.0.0.1:1", "0.0.0.0:2")
BOTH = {"tokens": FILE, "ticket_keys": FILE}
PAIR = {"tls_cert": FILE, "tls_key": FILE}
SHOWN = {**BOTH, "token_file": FILE}


@pytest.mark.parametrize(
    "settings, addresses, masters, says",
    [
        ({"tokens": FILE}, LOCAL, (), "--tokens without --ticket-keys leaves the channel open"),
        ({"ticket_keys": FILE}, LOCAL, (), "--ticket-keys without --tokens leaves HTTP and gRPC open"),
        ({"tls_cert": FILE}, LOCAL, (), "go together"),
        ({"tls_key": FILE}, LOCAL, (), "go together"),
        ({"client_certs": True, **PAIR}, LOCAL, (), "needs --tls-cert and --tls-key, and the clients' CA"),
        ({"client_certs": True, "tls_ca": FILE}, LOCAL, (), "needs --tls-cert and --tls-key"),
        (BOTH, LOCAL, ("127.0.0.1:1",), "give it as --token-file"),
        (BOTH, OPEN, (), "in clear to 0.0.0.0:2: give --tls-cert and --tls-key, or --plain-tokens"),
        (SHOWN, LOCAL, ("master:7400",), "in clear to master:7400: give the masters' CA as --tls-ca, or --plain"),
        ({**SHOWN, **PAIR}, OPEN, ("10.0.0.1:1",), "in clear to 10.0.0.1:1"),
    ],
)
def test_what_does_not_go_together_is_refused(
    settings: dict[str, object], addresses: tuple[str, ...], masters: tuple[str, ...], says: str
) -> None:
    files = SecurityFiles(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        checked(files, addresses, masters=masters)
    if "in clear" in says:
        plain = SecurityFiles(**settings, plain_tokens=True)  # type: ignore[arg-type]
        assert checked(plain, addresses, masters=masters) is plain


@pytest.mark.parametrize(
    "settings, addresses, masters",
    [
        ({}, OPEN, ("master:1",)),
        (BOTH, LOCAL, ()),
        ({**BOTH, **PAIR}, OPEN, ()),
        ({**SHOWN, **PAIR, "tls_ca": FILE}, OPEN, ("master:1",)),
        ({**BOTH, **PAIR, "tls_ca": FILE, "client_certs": True}, OPEN, ("master:1",)),
        (SHOWN, LOCAL, ("localhost:1", "unix:/somewhere")),
    ],
)
def test_what_does_is_taken(settings: dict[str, object], addresses: tuple[str, ...], masters: tuple[str, ...]) -> None:
    files = SecurityFiles(**settings)  # type: ignore[arg-type]
    assert checked(files, addresses, masters=masters) is files


def test_what_everybody_reaches_is_told_in_health() -> None:
    channel, others = "0.0.0.0:1", ("127.0.0.1:2", "[::]:3")
    assert open_to_all(SecurityFiles(), LOCAL[0], LOCAL[1:]) == []
    assert open_to_all(SecurityFiles(**BOTH), channel, others) == []  # type: ignore[arg-type]
    for settings, told in (
        ({}, "0.0.0.0:1, [::]:3: open"),
        ({"ticket_keys": FILE}, "[::]:3: open"),
        ({"client_certs": True}, "0.0.0.0:1: open"),
    ):
        (warning,) = open_to_all(SecurityFiles(**settings), channel, others)  # type: ignore[arg-type]
        assert warning.startswith(told)
    (warning,) = Security.opened(SecurityFiles(), channel, others).warnings()
    assert "open to whoever reaches it" in warning


def test_a_row_with_a_certificate_wants_somebody_to_ask_for_one(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("- {name: a, certificate: b, role: read}")
    with pytest.raises(ConfigError, match="nobody is asked for one: add --client-certs"):
        Security.opened(SecurityFiles(tokens=tokens))


def test_ticket_keys_that_go_bad_are_a_problem_until_they_are_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    keys = tmp_path / "keys"
    write_keys(keys, "one")
    security = Security.opened(SecurityFiles(ticket_keys=keys))
    assert security.problems() == [] and security.facts()["tickets"]
    keys.write_text("nonsense")
    (problem,) = security.problems()
    assert str(keys) in problem and "last good one" in problem
    write_keys(keys, "two")
    assert security.problems() == []
    assert Security().problems() == [] and not Security().facts()["tickets"]
