"""Tickets are good for who was given them, on one connection, for a while; and rights are what they say."""

from __future__ import annotations

import os

import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import (
    ConfigError,
    Forbidden,
    ForbiddenSalt,
    InvalidArgument,
    TicketExpired,
    TicketNotYetValid,
    Unauthenticated,
)
from kvstrata.transfer.security.rights import EVERYTHING, Rights, Role
from kvstrata.transfer.security.tickets import (
    BEHIND_S,
    LIFE_S,
    SKEW_S,
    TicketKeys,
    check_answer,
    greeting_of,
    issue,
    prove,
    verify,
)

NOW = 1_000_000.0
KEYS = TicketKeys({"new": b"n" * 32, "old": b"o" * 32}, "new")
ENGINE = Rights("engine-a", Role.CLIENT, ("acme-*", ""), ("llama*",))


def greeting() -> bytes:
    return greeting_of(os.urandom(100), os.urandom(100))


def test_who_was_given_a_ticket_proves_it_and_is_answered() -> None:
    about = greeting()
    ticket = issue(KEYS, ENGINE, NOW)
    verified = verify(KEYS, prove(ticket, about), about, NOW + 1)
    rights = verified.rights
    assert (rights.subject, rights.role, rights.salts, rights.groups) == (
        "engine-a",
        Role.CLIENT,
        ("acme-*", ""),
        ("llama*",),
    )
    assert rights.expires == NOW + LIFE_S
    check_answer(ticket, about, verified.answer)
    assert verified.key == KEYS.signs


def test_a_proof_is_worth_nothing_on_another_connection() -> None:
    proof = prove(issue(KEYS, ENGINE, NOW), greeting())
    with pytest.raises(Unauthenticated):
        verify(KEYS, proof, greeting(), NOW)


def test_a_greeting_is_both_hellos_and_where_one_ends() -> None:
    one = greeting_of(b"hello", b"answer")
    assert one == greeting_of(b"hello", b"answer")
    for other in ((b"hello", b"answers"), (b"hell", b"oanswer"), (b"answer", b"hello"), (b"", b"helloanswer")):
        assert greeting_of(*other) != one


@pytest.mark.parametrize("field", ["subject", "role", "salts", "groups", "expires_ms", "key", "serial"])
def test_claims_cannot_be_changed(field: str) -> None:
    about = greeting()
    ticket = issue(KEYS, ENGINE, NOW)
    claims = pb.TicketClaims.FromString(ticket.claims)
    if field in ("salts", "groups"):
        getattr(claims, field)[:] = ["*"]
    else:
        setattr(claims, field, {"expires_ms": 2**60, "serial": b"x", "role": "admin", "key": "old"}.get(field, "other"))
    forged = pb.Ticket(claims=claims.SerializeToString(), secret=ticket.secret)
    with pytest.raises(Unauthenticated):
        verify(KEYS, prove(forged, about), about, NOW)


def test_a_ticket_runs_out_after_its_life_and_the_slack_for_clocks() -> None:
    about = greeting()
    proof = prove(issue(KEYS, ENGINE, NOW), about)
    verify(KEYS, proof, about, NOW + LIFE_S + SKEW_S - 1)
    with pytest.raises(TicketExpired):
        verify(KEYS, proof, about, NOW + LIFE_S + SKEW_S + 1)
    verify(KEYS, proof, about, NOW - BEHIND_S + 1)
    with pytest.raises(TicketNotYetValid, match="301 s behind"):
        verify(KEYS, proof, about, NOW - BEHIND_S - 1)


def test_keys_rotate_without_a_moment_in_which_a_good_ticket_is_refused() -> None:
    about = greeting()
    before = TicketKeys({"old": b"o" * 32}, "old")
    both = TicketKeys({"old": b"o" * 32, "new": b"n" * 32}, "old")
    signs = TicketKeys({"new": b"n" * 32, "old": b"o" * 32}, "new")
    after = TicketKeys({"new": b"n" * 32}, "new")
    for issuer, verifier in ((before, both), (both, before), (both, signs), (signs, both), (signs, after)):
        verify(verifier, prove(issue(issuer, ENGINE, NOW), about), about, NOW)
    with pytest.raises(Unauthenticated):
        verify(after, prove(issue(before, ENGINE, NOW), about), about, NOW)


def test_who_answers_without_the_key_is_found_out() -> None:
    about = greeting()
    ticket = issue(KEYS, ENGINE, NOW)
    stranger = TicketKeys({"new": b"?" * 32}, "new")
    for answer in (pb.ProveOk(), pb.ProveOk(mac=prove(ticket, about).mac), pb.ProveOk(mac=b"x" * 32)):
        with pytest.raises(Unauthenticated):
            check_answer(ticket, about, answer)
    with pytest.raises(Unauthenticated):
        verify(stranger, prove(ticket, about), about, NOW)


@pytest.mark.parametrize("proof", [pb.Prove(), pb.Prove(claims=b"\xff\xff"), pb.Prove(claims=b"x" * (65 << 10))])
def test_garbage_is_refused_in_one_voice(proof: pb.Prove) -> None:
    with pytest.raises(Unauthenticated, match=r"^the ticket is not good here$"):
        verify(KEYS, proof, greeting(), NOW)


def test_rights_are_what_the_patterns_say() -> None:
    for salt in ("acme-1", ""):
        ENGINE.touch(salt, "llama-3")
        ENGINE.touch(salt, "llama-3")
    for salt, group in (("acme", "llama"), ("xacme-1", "llama"), ("acme-1", "qwen"), ("", "a llama")):
        with pytest.raises(ForbiddenSalt):
            ENGINE.touch(salt, group)
    with pytest.raises(ForbiddenSalt):
        Rights("nobody", Role.CLIENT).touch("", "")
    EVERYTHING.touch("any", "thing")
    with pytest.raises(InvalidArgument):
        Rights("x", Role.CLIENT, ("[a-z]",))


def test_names_that_are_too_long_are_neither_looked_at_nor_remembered() -> None:
    rights = Rights("engine-a", Role.CLIENT, ("*-1",), ("llama*",))
    for salt, group in (("x" * 129, "llama"), ("x" * 127 + "-1", "llama"), ("x-1", "llama" + "x" * 1024)):
        with pytest.raises(InvalidArgument, match="characters"):
            rights.touch(salt, group)
    assert not rights._touched
    rights.touch("x" * 126 + "-1", "llama" + "x" * 1019)
    assert len(rights._touched) == 1


def test_roles_include_what_is_below_them() -> None:
    allowed = {
        Role.CLIENT: {Role.CLIENT},
        Role.NODE: {Role.NODE, Role.CLIENT},
        Role.READ: {Role.READ},
        Role.OPERATE: {Role.READ, Role.OPERATE},
        Role.ADMIN: {Role.READ, Role.OPERATE, Role.ADMIN, Role.CLIENT},
    }
    for role in Role:
        for needed in Role:
            rights = Rights("x", role)
            assert rights.has(needed) == (needed in allowed[role])
            if needed not in allowed[role]:
                with pytest.raises(Forbidden):
                    rights.need(needed)


def test_key_files_are_read_or_refused_without_a_secret_in_the_text() -> None:
    secret = "ab" * 32
    keys = TicketKeys.parse(f"# made today\nk2:{secret}\n\nk1: {'cd' * 32}  # until Friday\n")
    assert keys.signs == "k2" and set(keys.secrets) == {"k1", "k2"} and keys.secrets["k2"] == bytes.fromhex(secret)
    assert secret not in repr(keys) and "\\xab" not in repr(keys)
    for text in ("", "#", f"k1:{secret[:-2]}", f"k1:{secret}\nk1:{secret}", secret, f"k 1:{secret}", f"k1:{secret}zz"):
        with pytest.raises(ConfigError) as caught:
            TicketKeys.parse(text)
        assert secret[:8] not in str(caught.value)
