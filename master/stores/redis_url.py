"""Where a Redis is: what a ``redis://`` URL says, without its passwords wherever it is shown.

::

    redis://[USER[:PASSWORD]@]HOST[:6379][/DB][?...]
    rediss://...                                               over TLS
    redis+sentinel://[USER[:PASSWORD]@]HOST[:26379],HOST.../SERVICE[/DB][?...]
    rediss+sentinel://...                                      Sentinels and Redis over TLS
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvstrata.proto.errors import ConfigError

SCHEMES: Final = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")
REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
#: What may stand behind the ``?``.
OPTIONS: Final = (
    "ca",
    "cert",
    "check_hostname",
    "cluster",
    "key",
    "password_file",
    "replicas",
    "sentinel_password",
    "sentinel_password_file",
    "sentinel_username",
)
SECRET_BYTES_MAX: Final = 4096
EXAMPLE: Final = "redis://10.0.0.5:6379/0 or redis+sentinel://10.0.0.5,10.0.0.6,10.0.0.7/mymaster"

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """``hosts`` are Sentinels where ``service`` is given, else the one Redis.

    ``cluster`` names the keys, so that several pools may share a Redis; a save waits for ``replicas`` copies.
    """

    hosts: tuple[tuple[str, int], ...]
    service: str | None = None
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    check_hostname: bool = True
    cluster: str = "main"
    replicas: int = 0

    def __str__(self) -> str:
        """The URL as it may be shown: ``***`` in the place of a password."""
        scheme = ("rediss" if self.tls else "redis") + ("+sentinel" if self.service else "")
        user = self.username or ""
        who = f"{user}:***@" if self.password else f"{user}@" if user else ""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{scheme}://{who}{hosts}/{f'{self.service}/' if self.service else ''}{self.db}"

    @property
    def prefix(self) -> str:
        """What every key begins with. The braces keep the keys in one slot of a Redis Cluster."""
        return f"kvstrata:{{{self.cluster}}}:"

    def secrets(self) -> tuple[str, ...]:
        """What no text may show."""
        return tuple(secret for secret in (self.password, self.sentinel_password) if secret)


def has_password(spec: str) -> bool:
    """Whether a URL holds a password itself, rather than the name of a file with it."""
    try:
        split = _split(spec)
    except ValueError:
        return "@" in spec
    return ":" in split.netloc.rpartition("@")[0] or any(
        key == "sentinel_password" for key, _ in parse_qsl(split.query)
    )


def parse_redis_url(spec: str, password_file: Path | None = None) -> RedisAddress:
    """Read ``spec`` and the files of passwords it names. Raises :class:`ConfigError`, which shows no password."""
    try:
        split = _split(spec)
    except ValueError:
        raise ConfigError(f"--state is not a URL of a Redis: write {EXAMPLE}") from None
    if split.scheme not in SCHEMES:
        raise ConfigError(f"--state: unknown scheme {split.scheme}: known are {', '.join(SCHEMES)}")
    options = _options(split)
    sentinel = split.scheme.endswith("+sentinel")
    userinfo, _, netloc = split.netloc.rpartition("@")
    user, colon, password = userinfo.partition(":")
    service, db = _path(split.path, sentinel)
    for name in ("sentinel_username", "sentinel_password", "sentinel_password_file"):
        if name in options and not sentinel:
            raise ConfigError(f"--state: {name} is of Sentinels: write redis+sentinel://HOST,HOST.../SERVICE")
    hosts = tuple(_host(part, SENTINEL_PORT if sentinel else REDIS_PORT) for part in netloc.split(","))
    if len(hosts) > 1 and not sentinel:
        raise ConfigError("--state: several hosts are of Sentinels: write redis+sentinel://HOST,HOST.../SERVICE")
    tls = split.scheme.startswith("rediss")
    for name in ("ca", "cert", "key", "check_hostname"):
        if name in options and not tls:
            raise ConfigError(f"--state: {name} is of TLS: write {split.scheme.replace('redis', 'rediss', 1)}://...")
    if ("cert" in options) != ("key" in options):
        raise ConfigError("--state: cert and key come together: name both files")
    return RedisAddress(
        hosts=hosts,
        service=service,
        db=db,
        username=unquote(user) or None,
        password=_password(unquote(password) if colon else None, password_file or _file(options, "password_file")),
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=_password(options.get("sentinel_password"), _file(options, "sentinel_password_file")),
        tls=tls,
        ca=_readable(options, "ca"),
        cert=_readable(options, "cert"),
        key=_readable(options, "key"),
        check_hostname=_yes(options.get("check_hostname", "yes")),
        cluster=_cluster(options.get("cluster", "main")),
        replicas=_number("replicas", options.get("replicas", "0"), 16),
    )


def _split(spec: str) -> SplitResult:
    """As ``urlsplit``, for a list of hosts: newer Pythons take brackets for those of one host, and refuse others."""
    found = re.fullmatch(r"([^:/?#]+://)([^/?#]*)(.*)", spec, re.DOTALL)
    if not found:
        return urlsplit(spec)
    return urlsplit(f"{found[1]}{found[3]}")._replace(netloc=found[2])


def _options(split: SplitResult) -> dict[str, str]:
    pairs = parse_qsl(split.query, keep_blank_values=True)
    for name, _ in pairs:
        if name not in OPTIONS:
            raise ConfigError(f"--state: unknown option {name!r} in the URL: known are {', '.join(OPTIONS)}")
    if len(dict(pairs)) != len(pairs):
        raise ConfigError("--state: an option stands twice in the URL")
    return dict(pairs)


def _host(text: str, default_port: int) -> tuple[str, int]:
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]+))(?::(\d{1,5}))?", text)
    if not found or int(found[3] or 1) not in range(1, 65536):
        raise ConfigError(f"--state: a host is missing, or is not HOST or HOST:PORT: write {EXAMPLE}")
    return found[1] or found[2], int(found[3] or default_port)


def _path(path: str, sentinel: bool) -> tuple[str | None, int]:
    parts = [unquote(part) for part in path.strip("/").split("/") if part]
    service = parts.pop(0) if sentinel and parts else None
    if sentinel and service is None:
        raise ConfigError(f"--state: the name of the service is missing that the Sentinels watch: write {EXAMPLE}")
    if len(parts) > 1:
        raise ConfigError(f"--state: {path} is more than the number of a database: write {EXAMPLE}")
    return service, _number("the database", parts[0], 1 << 16) if parts else 0


def _number(what: str, text: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > most:
        raise ConfigError(f"--state: {what} is {text!r}, and must be a number from 0 to {most}")
    return int(text)


def _cluster(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--state: cluster={name!r} must be letters, digits, '.', '_' or '-'")
    return name


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ConfigError(f"--state: check_hostname={text!r} must be yes or no")
    return text == "yes"


def _file(options: dict[str, str], name: str) -> Path | None:
    return Path(options[name]) if name in options else None


def _readable(options: dict[str, str], name: str) -> str | None:
    path = _file(options, name)
    if path is None:
        return None
    try:
        with path.open("rb"):
            return str(path)
    except OSError as error:
        raise ConfigError(f"--state: {name}: cannot read {path}: {error.strerror or error}") from error


def _password(given: str | None, path: Path | None) -> str | None:
    if path is None:
        return given or None
    if given:
        raise ConfigError("--state: a password stands in the URL and in a file: keep the file")
    try:
        with path.open("rb") as file:
            text = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the password in {path}: {error.strerror or error}") from error
    try:
        secret = text.decode().strip("\r\n")
    except UnicodeDecodeError:
        secret = ""
    if not secret or len(text) > SECRET_BYTES_MAX:
        raise ConfigError(f"{path} must hold one password, as text of at most {SECRET_BYTES_MAX} bytes")
    return secret
