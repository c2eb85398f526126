"""Where rank 0 of an engine answers its scheduler's lookups: a socket in a folder that only this user can enter."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.socket_folder import socket_home

FOLDER: Final = "kvstrata-vllm-{uid}"
#: A socket this old that nobody listens at was left by a process that was killed.
STALE_S: Final = 60.0


def lookup_endpoint(engine_id: str) -> str:
    """``ipc://...``, the same in the engine's scheduler and workers. Raises :class:`InvalidArgument` when the folder
    is not this user's alone."""
    folder_name, name = FOLDER.format(uid=os.getuid()), hashlib.sha256(engine_id.encode()).hexdigest()[:24]
    folder = socket_home(f"{folder_name}/{name}") / folder_name
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat(follow_symlinks=False)
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise InvalidArgument(f"{folder} is open to other users, or theirs: remove it, or set TMPDIR")
    return f"ipc://{folder / name}"


def remove_stale(endpoint: str) -> int:
    """Remove the sockets beside ``endpoint`` that killed engines left behind; returns how many."""
    removed = 0
    for path in Path(endpoint.removeprefix("ipc://")).parent.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > STALE_S and not _listened_at(path):
                path.unlink()
                removed += 1
    return removed


def _listened_at(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # full, or not a socket: not for us to judge
            return True
    return True
