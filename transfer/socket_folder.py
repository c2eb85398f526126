"""Where sockets between processes of this host may lie."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

#: A Unix socket's path has room for so many bytes (sockaddr_un, without the byte that ends it).
PATH_BYTES_MAX: Final = 107
SHORT: Final = "/tmp"


def socket_home(below: str, path_bytes_max: int = PATH_BYTES_MAX) -> Path:
    """The folder for temporary files if the path of a socket ``below`` it is short enough, else /tmp."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual / below)) <= path_bytes_max else Path(SHORT)
