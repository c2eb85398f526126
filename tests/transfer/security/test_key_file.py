"""Ticket keys are read again when their file changes, the last good ones stay, and tickets follow the keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.proto.errors import ConfigError
from kvstrata.transfer.security.key_file import KeyFile
from kvstrata.transfer.security.minted import MintedTickets, node_tickets
from kvstrata.transfer.security.rights import Role
from kvstrata.transfer.security.tickets import LIFE_S, pb
from tests.transfer.security.doors import someone, write_keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ticket-keys"


def test_a_change_is_seen_by_itself(path: Path) -> None:
    now = 0.0
    write_keys(path, "one")
    file = KeyFile(path, clock=lambda: now)
    assert file.keys().signs == "one"
    write_keys(path, "two", "one")
    assert file.keys().signs == "one", "the file is not looked at for each call"
    now = 5.0
    assert file.keys().signs == "two" and set(file.keys().secrets) == {"one", "two"}
    assert file.problem() == ""


@pytest.mark.parametrize("content", ["", "one", "one:00", "# nothing\n", "\0\xff", "one:zz"])
def test_what_cannot_be_used_leaves_the_last_good_keys(path: Path, content: str) -> None:
    file = write_keys(path, "one")
    keys = file.keys()
    path.write_bytes(content.encode("latin-1"))
    file.refresh()
    assert file.keys() is keys and str(path) in file.problem()
    write_keys(path, "two")
    file.refresh()
    assert file.keys().signs == "two" and file.problem() == ""


@pytest.mark.parametrize("content", ["", "one:00", "\0\xff"])
def test_at_the_start_it_has_to_be_good(path: Path, content: str) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=str(path)):
        KeyFile(path)


def test_a_secret_is_in_no_error(path: Path) -> None:
    path.touch(mode=0o600)
    path.write_text("one:" + "ab" * 31 + "\n")
    with pytest.raises(ConfigError) as caught:
        KeyFile(path)
    assert "abab" not in str(caught.value)


def test_others_may_not_read_it(path: Path) -> None:
    write_keys(path, "one")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        KeyFile(path)


def claims(ticket: pb.Ticket) -> pb.TicketClaims:
    return pb.TicketClaims.FromString(ticket.claims)


def test_a_ticket_is_the_same_for_half_of_its_life(path: Path) -> None:
    now = 1e9
    tickets = MintedTickets(write_keys(path, "one"), someone(), clock=lambda: now)
    first = tickets.current()
    now += LIFE_S / 2 - 1
    assert tickets.current() is first
    now += 2
    second = tickets.current()
    assert second is not first and claims(second).expires_ms - claims(first).expires_ms > LIFE_S / 2 * 1e3
    now -= LIFE_S
    assert claims(tickets.current()).issued_ms <= now * 1e3, "a clock that was set back makes no ticket of the future"


def test_a_new_key_and_a_refusal_make_a_new_ticket(path: Path) -> None:
    file = write_keys(path, "one")
    tickets = MintedTickets(file, someone())
    first = tickets.current()
    tickets.refused(first)
    second = tickets.current()
    assert second is not first
    tickets.refused(first)
    assert tickets.current() is second, "that was about another one"
    write_keys(path, "two", "one")
    file.refresh()
    assert claims(tickets.current()).key == "two"


def test_a_node_may_touch_every_tenant(path: Path) -> None:
    told = claims(node_tickets(write_keys(path, "one"), "node-1").current())
    assert (told.subject, told.role, list(told.salts), list(told.groups)) == ("node-1", Role.NODE, ["*"], ["*"])
