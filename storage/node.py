"""One storage node as an object: its memory, its state, what serves it, and the loops that keep it going.

:mod:`.daemon` runs one in a process of its own; tests run several in one.
"""

from __future__ import annotations

import resource
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ConfigError
from kvstrata.proto.logs import get_logger
from kvstrata.storage.arena import Arena
from kvstrata.storage.channel import NodeChannel
from kvstrata.storage.http import NodeHttp
from kvstrata.storage.identity import DataDirectory
from kvstrata.storage.report import NodeReport
from kvstrata.storage.state import NodeState
from kvstrata.transfer.channel import SOFTWARE, boot_id
from kvstrata.transfer.loops import Loop, Loops
from kvstrata.transfer.server import ChannelServer, Session

log = get_logger(__name__)

#: Deadlines are looked at this often; a lease may outlive its own by as much.
EXPIRE_S: Final = 0.05
#: sun_path holds 107 bytes; the rest is room for what containers mount in front.
UNIX_PATH_BYTES_MAX: Final = 100
STOP_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """What a node is started with. Addresses are ``HOST:PORT``; port 0 picks a free one.

    ``masters`` are channel addresses. ``name`` becomes the node id when the data directory is new.
    """

    masters: tuple[str, ...]
    listen: str
    http: str
    data: Path
    dram_bytes: int
    name: str | None = None
    hugepages: bool = False
    slab_bytes: int | None = None
