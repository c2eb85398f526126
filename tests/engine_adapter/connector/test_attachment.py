"""How an engine's memory is named to the pool's client, on a scripted one."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.engine_adapter.connector.attachment import Attachment
from kvstrata.engine_adapter.connector.layout import EngineMemory
from kvstrata.proto.errors import Unavailable
from kvstrata.transfer.gpu.memory import Buffer
from kvstrata.transfer.memory import Memory
from tests.engine_adapter.connector.scripted_client import ScriptedClient, layout


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_memory_of_an_engine_that_exchanges_it_is_staged_also_when_the_pool_comes_later(
    staged: bool, late: bool
) -> None:
    client = ScriptedClient()
    made = layout()
    memory = Buffer(Memory("cuda", 0), 1 << 20, made.memory_bytes, True, None)
    own = EngineMemory(np.zeros(0, np.uint8), (made.descriptors(0),), device=(memory,), staged=staged)
    away = [Unavailable("nobody is there")] if late else []

    def connect() -> ScriptedClient:
        if away:
            raise away.pop()
        return client

    attachment = Attachment(made, 0, connect, own)
    attachment.complete()
    assert client.staged == [staged] and client.regions[0].extents == ((memory.address, memory.nbytes),)
    attachment.close()
