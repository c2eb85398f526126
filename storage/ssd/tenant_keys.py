"""The keys of tenants' blocks on SSD: one random key a salt, all in one file that the operator's key seals.

::

    {"format": 1, "ring": id, "nonce": hex, "bytes": n}     one line, authenticated
    AES-256-GCM of {"keys": {salt: hex}}

The ring's id is in the superblock of each device written with it. A key is durable before the first payload under
it is, and a tenant whose key is gone from here can be read by nobody: not in slots that were given to others long
ago, not on a device that was away at the time.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import secrets
import stat
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstrata.proto.errors import ConfigError
from kvstrata.storage import durable_file
from kvstrata.storage.ssd.cipher import DataKey

FILE_NAME: Final = "ssd-keys"
FORMAT: Final = 1
OPERATOR_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_RING_BYTES: Final = 16
_KEY_FILE_BYTES_MAX: Final = 4096
#: Nobody outside the file's owner and group may read it, nobody but the owner write it.
_TOO_OPEN: Final = stat.S_IRWXO | stat.S_IWGRP


class TenantKeys:
    """Thread-safe. The file of a new ring is written by the first :meth:`ensure` or :meth:`save`.

    ``ring`` is its id, hex. Raises :class:`ConfigError` when the file is there and cannot be opened with the key.
    """

    def __init__(
        self, file: Path, operator_key: bytes, *, replace: Callable[[Path, bytes], None] = durable_file.replace
    ) -> None:
        self.file = file
        self._box = AESGCM(operator_key)
        self._replace = replace
        self._lock = threading.Lock()  #: the keys; never held while a disk works
        self._saving = threading.Lock()  #: the file
        self._keys: dict[str, DataKey] = {}
        self._changes = 0
        self._kept = -1  #: ``_changes`` as of the file
        self.found = self._load()
        if not self.found:
            self.ring = secrets.token_hex(_RING_BYTES)

    # ------------------------------------------------------------------ use

    def key(self, salt: str) -> DataKey | None:
        """A tenant's key; None when it has none, or has none any more."""
        with self._lock:
            return self._keys.get(salt)

    def ensure(self, salts: Iterable[str]) -> None:
        """Give each tenant a key, durable on return. Raises OSError; those without one then have none."""
        wanted = set(salts)
        with self._lock:
            if wanted <= self._keys.keys():
                return
        with self._saving:
            with self._lock:
                fresh = {salt: DataKey.new() for salt in wanted if salt not in self._keys}
                keys, changes = {**self._keys, **fresh}, self._changes
            self._write(keys)
            with self._lock:
                self._keys.update(fresh)
                self._kept = changes

    def retire(self, salt: str | None) -> None:
        """Forget a tenant's key, or with None all keys, at once. Gone for good after :meth:`save`."""
        with self._lock:
            if salt is None:
                self._keys.clear()
            else:
                self._keys.pop(salt, None)
            self._changes += 1

    def keep_only(self, salts: Collection[str]) -> None:
        """Forget the keys of all others."""
        with self._lock:
            idle = self._keys.keys() - set(salts)
            for salt in idle:
                del self._keys[salt]
            self._changes += bool(idle)

    def save(self) -> None:
        """Durable what was forgotten so far. Raises OSError: the keys are then still in the file."""
        with self._saving:
            with self._lock:
                keys, changes = dict(self._keys), self._changes
                if changes == self._kept:
                    return
            self._write(keys)
            with self._lock:
                self._kept = changes

    @property
    def count(self) -> int:
        """Tenants that have a key."""
        with self._lock:
            return len(self._keys)

    # ------------------------------------------------------------------ the file

    def _write(self, keys: dict[str, DataKey]) -> None:
        body = json.dumps({"keys": {salt: key.secret.hex() for salt, key in keys.items()}}).encode()
        nonce = secrets.token_bytes(_NONCE_BYTES)
        head = {"format": FORMAT, "ring": self.ring, "nonce": nonce.hex(), "bytes": len(body)}
        line = json.dumps(head).encode() + b"\n"
        self._replace(self.file, line + self._box.encrypt(nonce, body, line))

    def _load(self) -> bool:
        """False when there is no file."""
        try:
            content = self.file.read_bytes()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"cannot read {self.file}: {error.strerror or error}") from error
        line, _, sealed = content.partition(b"\n")
        try:
            head = json.loads(line)
            version, ring, nonce = head["format"], head["ring"], bytes.fromhex(head["nonce"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._lost("it is damaged") from error
        if version != FORMAT:
            raise ConfigError(f"{self.file} has format {version}, this version reads {FORMAT}: use the newer kvstrata")
        try:
            keys = json.loads(self._box.decrypt(nonce, sealed, line + b"\n"))["keys"]
        except (InvalidTag, ValueError) as error:
            raise self._lost("another key sealed it, or it is damaged") from error
        self.ring = str(ring)
        self._keys = {salt: DataKey(bytes.fromhex(secret)) for salt, secret in keys.items()}
        self._kept = 0
        return True

    def _lost(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.file} cannot be opened with the key of --ssd-key-file ({why}): give the key file that this node "
            "had before, or move that file and the files of its SSD directories away to start empty"
        )


def read_key_file(path: Path) -> bytes:
    """The operator's key: 32 bytes as hex or base64, in a file of its own. Raises :class:`ConfigError`."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_KEY_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read --ssd-key-file {path}: {error.strerror or error}") from error
    if stat.S_ISREG(mode) and mode & _TOO_OPEN:
        raise ConfigError(f"--ssd-key-file {path} can be read or changed by others: chmod 600 {path}")
    key = _decoded(text.strip())
    if key is None:
        raise ConfigError(
            f"--ssd-key-file {path} does not hold 32 bytes as hex or base64: make one with "
            f"(umask 077; head -c 32 /dev/urandom | base64 > {path})"
        )
    return key


def _decoded(text: bytes) -> bytes | None:
    for decode in (bytes.fromhex, lambda told: base64.b64decode(told, validate=True)):
        try:
            key = decode(text.decode("ascii"))
        except (ValueError, binascii.Error):
            continue
        if len(key) == OPERATOR_KEY_BYTES:
            return key
    return None
