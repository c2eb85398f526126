"""Which state store a ``--state`` names: nothing is memory, a path a SQLite file, a URL a Redis."""

from __future__ import annotations

import re
from pathlib import Path

from kvstrata.master.stores.base import StateStore
from kvstrata.master.stores.redis import RedisStore
from kvstrata.master.stores.redis_url import SCHEMES, parse_redis_url
from kvstrata.master.stores.sqlite import SqliteStore
from kvstrata.proto.errors import ConfigError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(spec: str | None, cluster_id: str | None = None, password_file: Path | None = None) -> StateStore:
    """Open the store that ``spec`` names; ``password_file`` holds the password of a Redis.

    Raises :class:`ConfigError` saying what to change, and :class:`kvstrata.proto.errors.Unavailable` when a Redis does
    not answer.
    """
    url = None if spec is None else _URL.match(spec)
    if url is None:
        if password_file is not None:
            raise ConfigError("--state-password-file is of a Redis: give a redis:// URL as --state")
        return SqliteStore(None if spec is None else Path(spec), cluster_id)
    assert spec is not None
    if url[1].lower() not in SCHEMES:
        raise ConfigError(
            f"--state: unknown scheme {url[1]}://: give the path of a SQLite file, or one of "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}"
        )
    return RedisStore(parse_redis_url(spec, password_file), cluster_id)
