"""Token files: what is in them, what is refused and how that is said, and what happens when they change."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvstrata.proto.errors import ConfigError, ForbiddenSalt, Unauthenticated
from kvstrata.transfer.security.access import Access, Gate
from kvstrata.transfer.security.rights import Role
from kvstrata.transfer.security.tokens import OwnToken, TokenFile, digest, new_token, read_token
from kvstrata.transfer.security.watched_file import LOOK_S, WatchedFile

HASH = digest("kvs_" + "a" * 43)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def written(path: Path, *rows: object) -> Path:
    path.write_text(yaml.safe_dump(list(rows)))
    return path


def row(token: str, name: str = "somebody", role: str = "read", **more: object) -> dict[str, object]:
    return {"name": name, "sha256": digest(token), "role": role, **more}


def test_who_shows_a_token_has_the_rights_of_its_row(tmp_path: Path) -> None:
    engine, reader = new_token(), new_token()
    path = written(
        tmp_path / "tokens",
        row(engine, "engine", "client", salts=["acme-*"], groups=["llama*"], reset=True),
        row(reader, "prometheus"),
    )
    tokens = TokenFile(path)
    rights = tokens.holder_of(engine).rights
    assert (rights.subject, rights.role, rights.expires) == ("engine", Role.CLIENT, None)
    rights.touch("acme-1", "llama-8b")
    with pytest.raises(ForbiddenSalt):
        rights.touch("other", "llama-8b")
    assert tokens.holder_of(engine).may_reset and not tokens.holder_of(reader).may_reset
    assert tokens.holder_of(reader).rights.salts == ("*",)
    for wrong in (new_token(), "", "kvs_", engine[:-1], engine + "a", engine.upper(), "Bearer", "\0", "é" * 47):
        with pytest.raises(Unauthenticated, match="not good here"):
            tokens.holder_of(wrong)


def test_tokens_are_long_random_and_of_one_shape() -> None:
    made = {new_token() for _ in range(100)}
    assert len(made) == 100 and all(len(token) == 47 and token.startswith("kvs_") for token in made)


def test_a_certificate_stands_for_a_token(tmp_path: Path) -> None:
    rows = [{"name": "prom", "certificate": "prom.example.org", "role": "read"}, row(new_token())]
    tokens = TokenFile(written(tmp_path / "tokens", *rows))
    holder = tokens.holder_of_certificate(("other", "prom.example.org"))
    assert holder is not None and holder.rights.subject == "prom"
    assert tokens.holder_of_certificate(("prom", "*", "")) is None
    assert tokens.knows_certificates


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "not a list"),
        ("[]", "not a list"),
        ("name: x", "not a list"),
        ("- x: [", "not YAML, line"),
        ("- just text", "row 1 .*mapping"),
        (f"- {{name: a, sha256: {HASH}, role: god}}", r"row 1 .*\(a\).*client, node, read, operate, admin"),
        (f"- {{name: a, sha256: {HASH}}}", "row 1 .*role"),
        (f"- {{name: '', sha256: {HASH}, role: read}}", "row 1 .*name"),
        (f"- {{name: a b, sha256: {HASH}, role: read}}", "row 1 .*name"),
        (f"- {{sha256: {HASH}, role: read}}", "row 1 .*name"),
        ("- {name: a, role: read}", "row 1 .*one of sha256"),
        (f"- {{name: a, sha256: {HASH}, certificate: b, role: read}}", "row 1 .*one of sha256"),
        (f"- {{name: a, sha256: {HASH.upper()}, role: read}}", "row 1 .*64 lower-case"),
        ("- {name: a, sha256: 1234, role: read}", "row 1 .*64 lower-case"),
        ("- {name: a, certificate: '', role: read}", "row 1 .*common name"),
        (f"- {{name: a, sha256: {HASH}, role: client}}", "row 1 .*tenants that it may touch"),
        (f"- {{name: a, sha256: {HASH}, role: client, salts: x}}", "row 1 .*salts are not a list"),
        (f"- {{name: a, sha256: {HASH}, role: client, salts: [1]}}", "row 1 .*salts are not a list"),
        (f"- {{name: a, sha256: {HASH}, role: client, salts: ['[a]']}}", "row 1 .*patterns know"),
        (f"- {{name: a, sha256: {HASH}, role: read, reset: true}}", "row 1 .*reset"),
        (f"- {{name: a, sha256: {HASH}, role: client, salts: ['*'], reset: 1}}", "row 1 .*reset"),
        (f"- {{name: a, sha256: {HASH}, role: read, rolle: x}}", "row 1 .*unknown key 'rolle'"),
        (f"- {{name: a, sha256: {HASH}, role: read}}\n- {{name: b, sha256: {HASH}, role: read}}", "row 2 .*same token"),
        (
            f"- {{name: a, sha256: {HASH}, role: read}}\n- {{name: a, certificate: b, role: read}}",
            "row 2 .*'a' is taken",
        ),
        ("\x00\xff", "not YAML"),
        ("- name: 2026-02-30\n  role: read\n", "not YAML"),
        ("- {? [a]: b}", "not YAML"),
        ("- name: !!int x\n", "not YAML"),
        ("- name: !!timestamp x\n", "not YAML"),
        ("- name: !!float ''\n", "not YAML"),
        (f"- name: a\n  sha256: {HASH}\n  role: read\n  role: admin\n", "key twice in a row, line 4"),
    ],
)
def test_a_bad_file_is_refused_with_its_row_and_without_its_hashes(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as refused:
        TokenFile(path)
    assert HASH[:12] not in str(refused.value).lower() and str(path) in str(refused.value)


def test_what_others_can_change_or_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "tokens", row(new_token()))
    path.chmod(0o646)
    with pytest.raises(ConfigError, match="changed by others: chmod o-rwx"):
        TokenFile(path)
    path.chmod(0o644)
    TokenFile(path)
    own = tmp_path / "own"
    own.write_text(new_token() + "\n")
    own.chmod(0o644)
    with pytest.raises(ConfigError, match="read or changed by others: chmod o-rwx"):
        read_token(own)
    own.chmod(0o440)
    assert read_token(own).startswith("kvs_")
    for secret in ("", "two words", new_token() + new_token()):
        own.unlink()
        own.write_text(secret)
        own.chmod(0o600)
        with pytest.raises(ConfigError, match="does not hold one token") as refused:
            read_token(own)
        assert not secret or secret not in str(refused.value)
    with pytest.raises(ConfigError, match=r"cannot read the tokens .*No such file"):
        TokenFile(tmp_path / "none")


def test_a_changed_file_is_used_within_a_moment_and_a_bad_one_is_not(tmp_path: Path) -> None:
    clock = Clock()
    old, new = new_token(), new_token()
    path = written(tmp_path / "tokens", row(old))
    tokens = TokenFile(path, clock=clock)
    written(path, row(new, "another"))
    assert tokens.holder_of(old).rights.subject == "somebody", "not looked at again so soon"
    clock.now += LOOK_S
    assert tokens.holder_of(new).rights.subject == "another"
    with pytest.raises(Unauthenticated):
        tokens.holder_of(old)
    assert tokens.problem() == ""
    path.write_text("- nonsense")
    clock.now += LOOK_S
    assert tokens.holder_of(new).rights.subject == "another"
    assert "row 1" in tokens.problem() and "last good one is in use" in tokens.problem()
    path.unlink()
    clock.now += LOOK_S
    assert tokens.holder_of(new).rights.subject == "another" and "cannot read" in tokens.problem()
    written(path, row(new, "third"))
    clock.now += LOOK_S
    assert tokens.holder_of(new).rights.subject == "third" and tokens.problem() == ""


def test_a_file_that_nobody_can_make_anything_of_ends_no_call_that_stands(tmp_path: Path) -> None:
    clock = Clock()
    token = new_token()
    path = written(tmp_path / "tokens", row(token))
    tokens = TokenFile(path, clock=clock)
    gate = Gate(tokens)
    shown = f"Bearer {token}"
    rights = gate.holder(shown, ()).rights
    path.write_text(path.read_text() + "- name: 2026-02-30\n")
    for _ in range(2):
        clock.now += LOOK_S
        gate.stand(shown, (), rights)
        assert "last good one is in use" in tokens.problem()
    written(path, row(new_token()))
    clock.now += LOOK_S
    with pytest.raises(Unauthenticated):
        gate.stand(shown, (), rights)


def test_whatever_reading_raises_the_last_good_content_stays(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "file"
    path.write_text("1")
    file = WatchedFile((path,), lambda: int(path.read_text()), clock=clock)
    path.write_text("secret")
    clock.now += LOOK_S
    assert file.current() == 1
    assert "ValueError" in file.problem() and "secret" not in file.problem()
    path.write_text("22")
    clock.now += LOOK_S
    assert file.current() == 22 and file.problem() == ""


def test_a_file_that_is_a_link_to_another_is_read_again_when_the_link_changes(tmp_path: Path) -> None:
    clock = Clock()
    first, second = new_token(), new_token()
    written(tmp_path / "1", row(first))
    written(tmp_path / "2", row(second))
    link = tmp_path / "tokens"
    link.symlink_to("1")
    tokens = TokenFile(link, clock=clock)
    (tmp_path / "new").symlink_to("2")
    (tmp_path / "new").replace(link)
    clock.now += LOOK_S
    assert tokens.holder_of(second)


def test_ones_own_token_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "own"
    first, second = new_token(), new_token()
    path.write_text(first)
    path.chmod(0o600)
    own = OwnToken(path)
    assert own() == first
    path.write_text(second)
    own._file.refresh()
    assert own() == second and own.problem() == ""


def test_the_gate_counts_who_is_refused_by_reason(tmp_path: Path) -> None:
    reader, engine = new_token(), new_token()
    rows = [row(reader, "reader", salts=["a"]), row(engine, "engine", "client", salts=["a"], reset=True)]
    gate = Gate(TokenFile(written(tmp_path / "tokens", *rows)))
    admin_only, read = Access(Role.ADMIN), Access(Role.READ, lambda rights, salt: rights.touch_salt(salt))
    assert gate.admit(read, f"bearer  {reader}", (), "a").subject == "reader"
    assert gate.admit(Access(Role.ADMIN, may_reset=True), f"Bearer {engine}", (), None).subject == "engine"
    refusals = (
        (read, None, "a", Unauthenticated, "no token was shown"),
        (read, f"Basic {reader}", "a", Unauthenticated, "is not `Bearer TOKEN`"),
        (read, f"Bearer {new_token()}", "a", Unauthenticated, "not good here"),
        (admin_only, f"Bearer {reader}", "a", Exception, "needs the role admin, and reader has read"),
        (admin_only, f"Bearer {engine}", "a", Exception, "needs the role admin"),
        (None, f"Bearer {reader}", "a", Exception, "nobody may call this"),
        (read, f"Bearer {reader}", "b", ForbiddenSalt, "may not touch this tenant"),
    )
    for access, shown, salt, kind, says in refusals:
        with pytest.raises(kind, match=says):
            gate.admit(access, shown, (), salt)
    assert gate.refused() == {"no_token": 1, "bad_token": 2, "role": 3, "tenant": 1, "throttled": 0}
