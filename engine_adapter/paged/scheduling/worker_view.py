"""What the workers know of the requests, so that a step tells them only what is new to them."""

from __future__ import annotations

from kvstrata.engine_adapter.paged.outputs import BlockIds, CachedRequest, NewRequest
from kvstrata.engine_adapter.paged.request import Request


class WorkerView:
    """Per request the tokens that the workers were told of, and whom they are to forget in the next step."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._finished: list[str] = []
        self._preempted: list[str] = []

    def __len__(self) -> int:
        return len(self._told)

    def knows(self, request_id: str) -> bool:
        return request_id in self._told

    def introduce(self, request: Request, block_ids: BlockIds) -> NewRequest:
        """All of a request that the workers do not know. ``block_ids``: its whole tables."""
        assert request.request_id not in self._told, f"{request} is known already"
        self._told[request.request_id] = request.num_tokens
        return NewRequest(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
        )

    def advance(self, request: Request, new_block_ids: BlockIds) -> CachedRequest:
        """What changed for a request that they know."""
        told = self._told[request.request_id]
        self._told[request.request_id] = request.num_tokens
        return CachedRequest(
            request_id=request.request_id,
            new_token_ids=request.token_ids[told:],
            new_block_ids=new_block_ids,
            num_computed_tokens=request.num_computed_tokens,
        )

    def finished(self, request_id: str) -> None:
        if self._told.pop(request_id, None) is not None:
            self._finished.append(request_id)

    def preempted(self, request_id: str) -> None:
        if self._told.pop(request_id, None) is not None:
            self._preempted.append(request_id)

    def take_forgotten(self) -> tuple[list[str], list[str]]:
        """(finished, preempted) since the last step, each once. Workers forget them before they meet new ones."""
        taken = self._finished, self._preempted
        self._finished, self._preempted = [], []
        return taken

    def check(self, running: set[str]) -> None:
        """Assert that the workers keep nothing for a request that does not run."""
        assert set(self._told) <= running, f"workers still know {sorted(set(self._told) - running)}"
