"""What a Redis URL says, what is wrong with one, and that nothing of it gives a password away."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.master.daemon import MasterConfig
from kvstrata.master.stores.opening import open_store
from kvstrata.master.stores.redis_url import RedisAddress, has_password, parse_redis_url
from kvstrata.master.stores.sqlite import SqliteStore
from kvstrata.proto.errors import ConfigError

SECRET = "hun:ter@2/é"
QUOTED = "hun%3Ater%402%2F%C3%A9"


@pytest.mark.parametrize(
    ("spec", "address"),
    [
        ("redis://db", RedisAddress((("db", 6379),))),
        ("redis://10.0.0.1:7000/3?cluster=prod-1", RedisAddress((("10.0.0.1", 7000),), db=3, cluster="prod-1")),
        ("redis://[::1]:7000", RedisAddress((("::1", 7000),))),
        (
            f"redis://me:{QUOTED}@db/1?replicas=2",
            RedisAddress((("db", 6379),), db=1, username="me", password=SECRET, replicas=2),
        ),
        (f"redis://:{QUOTED}@db", RedisAddress((("db", 6379),), password=SECRET)),
        ("rediss://db?check_hostname=no", RedisAddress((("db", 6379),), tls=True, check_hostname=False)),
        (
            "redis+sentinel://a,b:7000,[::1]/kv/2?sentinel_username=watch&sentinel_password=pw",
            RedisAddress(
                (("a", 26379), ("b", 7000), ("::1", 26379)),
                service="kv",
                db=2,
                sentinel_username="watch",
                sentinel_password="pw",
            ),
        ),
        ("rediss+sentinel://:x@a/kv", RedisAddress((("a", 26379),), service="kv", password="x", tls=True)),
    ],
)
def test_what_a_url_says(spec: str, address: RedisAddress) -> None:
    assert parse_redis_url(spec) == address


def test_files_hold_passwords_and_certificates(tmp_path: Path) -> None:
    (tmp_path / "pw").write_text(SECRET + "\n")
    (tmp_path / "spw").write_text("other\r\n")
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(name)
    files = "&".join(f"{name}={tmp_path / name}" for name in ("ca", "cert", "key"))
    address = parse_redis_url(f"rediss://me@db?{files}&password_file={tmp_path / 'pw'}")
    assert (address.username, address.password) == ("me", SECRET)
    assert (address.ca, address.cert, address.key) == tuple(str(tmp_path / name) for name in ("ca", "cert", "key"))
    assert parse_redis_url("redis://db", tmp_path / "pw").password == SECRET
    watched = parse_redis_url(f"redis+sentinel://a/kv?sentinel_password_file={tmp_path / 'spw'}", tmp_path / "pw")
    assert (watched.password, watched.sentinel_password) == (SECRET, "other")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("redis://", "a host is missing"),
        ("redis:///0", "a host is missing"),
        ("redis://db:port", "not HOST or HOST:PORT"),
        ("redis://db:99999", "not HOST or HOST:PORT"),
        ("redis://::1", "not HOST or HOST:PORT"),
        ("redis://[::1", "a host is missing"),
        ("redis://db/one", "the database is 'one'"),
        ("redis://db/0/1", "more than the number of a database"),
        ("redis://a,b/0", r"write redis\+sentinel://"),
        ("redis+sentinel://a,b", "the name of the service is missing"),
        ("redis+sentinel://a,,b/kv", "a host is missing"),
        ("redis://db?pasword_file=x", "unknown option 'pasword_file' in the URL: known are ca,"),
        ("redis://db?cluster=a&cluster=b", "twice"),
        ("redis://db?cluster={x}", "must be letters"),
        ("redis://db?cluster=", "must be letters"),
        ("redis://db?replicas=many", "replicas is 'many'"),
        ("redis://db?replicas=-1", "replicas is '-1'"),
        ("redis://db?ca=/ca.crt", "ca is of TLS: write rediss://"),
        ("rediss://db?ca=/nowhere/ca.crt", "cannot read /nowhere/ca.crt: No such file"),
        ("rediss://db?cert=/nowhere/c", "cert and key come together"),
        ("rediss://db?check_hostname=maybe", "must be yes or no"),
        ("redis://db?sentinel_password=x", r"sentinel_password is of Sentinels: write redis\+sentinel://"),
        ("redis://db?password_file=/nowhere/pw", "cannot read the password in /nowhere/pw"),
    ],
)
def test_what_is_wrong_is_said(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_redis_url(spec)


def test_a_password_is_in_one_place_and_is_one(tmp_path: Path) -> None:
    (tmp_path / "pw").write_text("a")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "long").write_text("x" * 5000)
    with pytest.raises(ConfigError, match="in the URL and in a file"):
        parse_redis_url("redis://:b@db", tmp_path / "pw")
    for name in ("empty", "binary", "long"):
        with pytest.raises(ConfigError, match="must hold one password"):
            parse_redis_url("redis://db", tmp_path / name)


@pytest.mark.parametrize(
    "spec",
    [
        f"redis://me:{QUOTED}@db",
        f"redis://me:{QUOTED}@db:wrong",
        f"redis://me:{QUOTED}@db?sort=1",
        f"redis://me:{QUOTED}@[::1",
        f"redis+sentinel://:x{QUOTED}@db?sentinel_password={QUOTED}",
        f"redis+sentinel://:x{QUOTED}@db/kv?sentinel_password={QUOTED}",
        f"https://me:{QUOTED}@db",
    ],
)
def test_nothing_shows_a_password(spec: str) -> None:
    assert has_password(spec)
    shown = [repr(MasterConfig("h:1", "h:2", "h:3", spec))]
    try:
        address = parse_redis_url(spec)
        shown += [str(address), repr(address)]
    except ConfigError as error:
        shown += [str(error)]
    for text in shown:
        assert SECRET not in text and QUOTED not in text and "hun" not in text, text


def test_who_and_where_is_shown_and_that_there_is_a_password() -> None:
    assert str(parse_redis_url("rediss://me:x@[::1]:7/2")) == "rediss://me:***@[::1]:7/2"
    assert str(parse_redis_url("redis+sentinel://me@a,b/kv")) == "redis+sentinel://me@a:26379,b:26379/kv/0"
    assert not has_password("redis://me@db") and not has_password("/var/lib/state.db")
    assert not has_password("redis://db?password_file=/run/secrets/redis")


def test_a_path_is_a_file_and_nothing_is_memory(tmp_path: Path) -> None:
    for spec in (None, str(tmp_path / "state.db"), str(tmp_path / "redis:state")):
        store = open_store(spec)
        assert isinstance(store, SqliteStore) and not store.shared
        store.close()
    assert (tmp_path / "state.db").exists() and (tmp_path / "redis:state").exists()
    with pytest.raises(ConfigError, match="unknown scheme etcd://: give the path of a SQLite file, or one of redis://"):
        open_store("etcd://me:pw@host")
    with pytest.raises(ConfigError, match="--state-password-file is of a Redis"):
        open_store(str(tmp_path / "state.db"), password_file=tmp_path / "pw")
