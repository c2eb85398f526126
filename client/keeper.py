"""The client's one background loop: leases given back, views renewed, breakers probed, stores told of, signs of life
exchanged with masters, old peers closed.
"""

from __future__ import annotations

import time
from typing import Final

from kvstrata.client.directory import Directory
from kvstrata.client.peers import Peers
from kvstrata.client.placing import Placer
from kvstrata.transfer.loops import Loop
from kvstrata.transfer.traces import join_host

PERIOD_S: Final = 0.05
#: A turn stops probing unreachable peers after this; one probe takes at most half a second.
PROBE_BUDGET_S: Final = 0.1
#: Age at which the loop counts as stuck.
BOUND_S: Final = 5.0


def start_keeper(directory: Directory, peers: Peers, placer: Placer) -> Loop:
    """Start the loop; the caller stops it."""

    def turn() -> None:
        join_host()
        peers.close_retired()
        peers.upkeep(PROBE_BUDGET_S)
        placer.upkeep()
        now = time.monotonic()
        for master in directory.masters:
            master.upkeep(now)

    return Loop("client-keeper", PERIOD_S, turn, bound_s=BOUND_S).start()
