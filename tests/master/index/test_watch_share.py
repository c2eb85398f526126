"""No token takes all places of those who watch."""

from __future__ import annotations

import random
from contextlib import ExitStack, closing

import pytest

from kvstrata.master.hub import Hub
from kvstrata.master.index import watch as module
from kvstrata.master.index.watch import Watchers
from kvstrata.master.stores.opening import open_store
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import Busy
from kvstrata.transfer.security.rights import EVERYTHING, Rights, Role


def test_a_token_has_a_share_of_the_watchers_and_gets_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_MAX", 2)
    watchers = Watchers(Hub(open_store(None, None, None), random.Random(1), 0.0, clock=lambda: 1.0))

    def begin(stack: ExitStack, rights: Rights) -> None:
        stream = watchers.watch(control.IndexQuery(), rights, lambda: True)
        stack.enter_context(closing(stream))
        next(stream)

    mine, other = (Rights(name, Role.READ) for name in ("mine", "other"))
    for _ in range(2):
        with ExitStack() as stack:
            for rights in (mine, mine, other, EVERYTHING, EVERYTHING, EVERYTHING):
                begin(stack, rights)
            with pytest.raises(Busy, match="mine watches"):
                begin(stack, mine)
            begin(stack, other)
        assert watchers.watching == 0 and not watchers._by_subject
