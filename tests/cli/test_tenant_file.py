"""Policies as text: what is written is read again, what is wrong is refused with the place, changes are ordered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli.tenant_file import Policies, dump, load
from kvstrata.cli.tenant_import import changes
from kvstrata.cli.tenant_policy import NOTHING, Limit, Policy
from kvstrata.proto.errors import ConfigError

GIB = 1 << 30
sizes = st.integers(0, 1 << 52)
limits = st.one_of(st.none(), sizes).map(Limit)
policies = st.builds(Policy, limits, limits, sizes, sizes)
salts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
books = st.builds(Policies, st.dictionaries(salts, policies, max_size=6), policies)


@given(books, st.booleans())
def test_what_is_written_is_read_again(book: Policies, denies: bool) -> None:
    if denies:
        book = Policies(book.tenants, NOTHING, True)
    assert load(dump(book), "f") == book


def test_a_file_as_people_write_it() -> None:
    read = load(
        """
        default: deny
        tenants:
          team-a: {dram: 200GiB, ssd: 2TiB, dram-floor: 20GiB}
          "": {dram: 1073741824}
          free:
        """,
        "f",
    )
    assert read.denies and read.tenants == {
        "team-a": Policy(Limit(200 * GIB), Limit(2048 * GIB), 20 * GIB, 0),
        "": Policy(Limit(GIB)),
        "free": Policy(),
    }
    assert load("tenants: {a: {ssd: none, dram: null}}", "f").tenants == {"a": Policy()}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a mapping"),
        ("[a, b]", "expected a mapping"),
        ("tenant: {a: {}}", "'tenants'"),
        ("tenants: [a]", "mapping of salts"),
        ("tenants: {a: {dram: -1}}", "tenant 'a'"),
        ("tenants: {a: {dram: .nan}}", "tenant 'a'"),
        ("tenants: {a: {dram: true}}", "not a size"),
        ("tenants: {a: {dram: 2 parsecs}}", "none for no limit"),
        ("tenants: {a: {dram-floor: none}}", "not a size"),
        ("tenants: {a: {memory: 1GiB}}", "dram-floor"),
        ("tenants: {a: 5}", "expected a mapping"),
        ("tenants: {17: {}}", "quotes"),
        ("tenants: {a: {}, a: {}}", "twice"),
        ("tenants: {a: {dram: 1, dram: 2}}", "twice"),
        ("tenants: {~: {}, ~: {}}", "twice"),
        ("tenants: {[a]: {}}", "not YAML"),
        ("tenants: {a: !!python/object/apply:os.getcwd []}", "not YAML"),
        ("{", "not YAML"),
        ("default: 5", "'default'"),
        (f"tenants: {{{'s' * 129}: {{}}}}", "128"),
    ],
)
def test_what_is_wrong_is_refused_and_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="f") as caught:
        load(text, "f.yaml")
    assert says in str(caught.value)


@given(books, books, st.booleans())
def test_changes_lead_from_one_book_to_the_other(now: Policies, wanted: Policies, prune: bool) -> None:
    todo = changes(now, wanted, prune=prune)
    after, default = dict(now.tenants), now.default
    for change in todo:
        assert change.before == (now.default if change.salt is None else now.tenants.get(change.salt))
        if change.salt is None:
            default = change.after
        elif change.after is None:
            del after[change.salt]
        else:
            assert after.get(change.salt) != change.after, "nothing is changed into itself"
            after[change.salt] = change.after
    kept = {} if prune else {salt: p for salt, p in now.tenants.items() if salt not in wanted.tenants}
    assert after == {**kept, **wanted.tenants} and default == wanted.default
    freed = [change.freed() for change in todo]
    assert freed == sorted(freed, reverse=True), "floors are lowered before others are raised"


def test_only_given_parts_of_a_policy_change() -> None:
    policy = Policy(Limit(GIB), Limit(2 * GIB), 5, 6)
    assert policy.changed(ssd=Limit(None)) == Policy(Limit(GIB), Limit(None), 5, 6)
    assert policy.changed(dram_floor=0) == Policy(Limit(GIB), Limit(2 * GIB), 0, 6)
    assert policy.changed() == policy


@given(salts, policies)
def test_a_policy_survives_its_message(salt: str, policy: Policy) -> None:
    message = policy.message(salt)
    assert message.salt == salt and Policy.of(type(message).FromString(message.SerializeToString())) == policy
