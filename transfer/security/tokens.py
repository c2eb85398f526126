"""Tokens: who may call HTTP and gRPC, by the hashes of their secrets.

A YAML file of rows::

    - name: engines            # who it is, in logs and health
      sha256: 9f86d0...        # of the token; `kvstrata auth token add` makes both
      role: client             # client, node, read, operate or admin
      salts: ["team-a-*"]      # tenants that may be touched; a client must say, all others may touch all
      groups: ["*"]            # namespaces' groups; all if absent
      reset: true              # a client that may declare its groups' weights changed
    - name: prometheus
      certificate: prom.example.org    # instead of sha256: whoever comes by mTLS with this common name
      role: read

Tokens have 256 random bits, so a hash of one cannot be turned back, and needs no salt or stretching.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from kvstrata.proto.errors import ConfigError, InvalidArgument, Unauthenticated
from kvstrata.transfer.security.rights import Rights, Role
from kvstrata.transfer.security.watched_file import WatchedFile, read_private
from kvstrata.transfer.strict_yaml import SameKeyError, StrictLoader

TOKEN_PREFIX: Final = "kvs_"
ROWS_MAX: Final = 10_000
_TOKEN: Final = re.compile(r"kvs_[A-Za-z0-9_-]{43}")
_NAME: Final = re.compile(r"[A-Za-z0-9@._:/-]{1,128}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_KEYS: Final = frozenset({"name", "sha256", "certificate", "role", "salts", "groups", "reset"})
_ALL: Final = ("*",)


@dataclass(frozen=True, slots=True)
class Holder:
    """One row: what its holder may do. ``may_reset``: a client that may bump the weight epoch of its groups."""

    rights: Rights
    may_reset: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Of one token file: whose each token is, by its hash, and each certificate, by its common name."""

    by_digest: Mapping[str, Holder]
    by_certificate: Mapping[str, Holder]


def new_token() -> str:
    """A token to give away: to be shown once, and kept as its :func:`digest` only."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """What a token file holds of a token: its SHA-256, in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


class TokenFile:
    """The rows of a file, read again when it changes. Raises :class:`ConfigError` that names the row, never a hash."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._file = WatchedFile(
            (path,), lambda: parse_rows(read_private(path, "tokens", secret=False), path), clock=clock
        )

    def holder_of(self, token: str) -> Holder:
        """Who has this token. Raises :class:`Unauthenticated` for one that is not good here."""
        if _TOKEN.fullmatch(token):
            # Found by its hash, which nobody can choose bit by bit: how long that takes tells nothing of a token.
            holder = self._file.current().by_digest.get(digest(token))
            if holder is not None:
                return holder
        raise Unauthenticated("this token is not good here: is it one of this pool, and still in its token file?")

    def holder_of_certificate(self, names: tuple[str, ...]) -> Holder | None:
        """Who comes with a verified certificate of these names; None when no row knows it."""
        rows = self._file.current().by_certificate
        return next((rows[name] for name in names if name in rows), None)

    @property
    def knows_certificates(self) -> bool:
        """Whether some row wants a certificate instead of a token."""
        return bool(self._file.current().by_certificate)

    def problem(self) -> str:
        """Why the file as it is now is not in use, or an empty string."""
        return self._file.problem()


def read_token(path: Path) -> str:
    """The one token that a file holds, for the process that shows it. Raises :class:`ConfigError`."""
    text = read_private(path, "token file", secret=True).decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(text):
        raise ConfigError(
            f"the token file {path} does not hold one token, as kvs_ and 43 characters: "
            "`kvstrata auth token add` makes one"
        )
    return text


class OwnToken:
    """The token that this process shows, read again when its file changes."""

    def __init__(self, path: Path) -> None:
        self._file = WatchedFile((path,), lambda: read_token(path))

    def __call__(self) -> str:
        return self._file.current()

    def problem(self) -> str:
        return self._file.problem()


def parse_rows(content: bytes, path: Path) -> Rows:
    """The rows of a file's content. Raises as :class:`TokenFile`; ``path`` names the file in the error."""
    try:
        rows = yaml.load(content.decode(), StrictLoader)
    except Exception as error:  # noqa: BLE001 (PyYAML lets those of what it calls through; the text shows content)
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where is not None else ""
        wrong = "have a key twice in a row" if isinstance(error, SameKeyError) else "are not YAML"
        raise ConfigError(f"the tokens {path} {wrong}{line}: `kvstrata auth token add` writes them") from None
    if not isinstance(rows, list) or not rows or len(rows) > ROWS_MAX:
        raise ConfigError(f"the tokens {path} are not a list of 1 to {ROWS_MAX} rows: `kvstrata auth init` makes one")
    by_digest: dict[str, Holder] = {}
    by_certificate: dict[str, Holder] = {}
    names: set[str] = set()
    for number, row in enumerate(rows, 1):
        where = f"row {number} of {path}"
        holder = _holder(row, where)
        if holder.rights.subject in names:
            raise ConfigError(f"{where}: the name {holder.rights.subject!r} is taken by another row")
        names.add(holder.rights.subject)
        kept, key = (by_digest, row["sha256"]) if "sha256" in row else (by_certificate, row["certificate"])
        if key in kept:
            raise ConfigError(f"{where} ({holder.rights.subject}): another row has the same token or certificate")
        kept[key] = holder
    return Rows(by_digest, by_certificate)


def _holder(row: Any, where: str) -> Holder:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a mapping with name, sha256 and role")
    unknown = sorted(str(key) for key in row if key not in _KEYS)
    if unknown:
        raise ConfigError(f"{where} has the unknown key {unknown[0]!r}: known are {', '.join(sorted(_KEYS))}")
    name = row.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: its name is not 1 to 128 letters, digits and @ . _ : / -")
    where = f"{where} ({name})"
    if ("sha256" in row) == ("certificate" in row):
        raise ConfigError(f"{where} needs one of sha256 (of its token) and certificate (its common name)")
    if "sha256" in row and not (isinstance(row["sha256"], str) and _DIGEST.fullmatch(row["sha256"])):
        raise ConfigError(f"{where}: its sha256 is not 64 lower-case hex digits in quotes")
    if "certificate" in row and not (isinstance(row["certificate"], str) and 0 < len(row["certificate"]) <= 256):
        raise ConfigError(f"{where}: its certificate is not a common name")
    try:
        role = Role(str(row.get("role")))
    except ValueError:
        raise ConfigError(f"{where}: its role is not one of {', '.join(Role)}") from None
    if role is Role.CLIENT and "salts" not in row:
        raise ConfigError(f'{where}: a client names the tenants that it may touch: salts: ["*"] for all')
    if not isinstance(row.get("reset", False), bool) or (row.get("reset") and role is not Role.CLIENT):
        raise ConfigError(f"{where}: reset is true or false, and for the role client")
    try:
        rights = Rights(name, role, _patterns(row, "salts", where), _patterns(row, "groups", where))
    except InvalidArgument as error:
        raise ConfigError(f"{where}: {error}") from error
    return Holder(rights, row.get("reset", False))


def _patterns(row: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    given = row.get(key, list(_ALL))
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise ConfigError(f"{where}: its {key} are not a list of texts in quotes")
    return tuple(given)
