"""What the owner thread asks of a NIXL agent: the seam at which tests put one that fails on purpose."""

from __future__ import annotations

from typing import Protocol

from kvstrata.transfer.memory import Memory
from kvstrata.transfer.rdma.engine import Pieces


class AgentError(Exception):
    """The agent refused a call. The text is for people."""


class PeerGone(AgentError):
    """The other agent died, or its connection did."""


class BadMetadata(AgentError):
    """This is not what another agent says of itself."""


class Agent(Protocol):
    """One agent with one backend. Not thread-safe: all calls come from the owner thread. All raise AgentError.

    Handles of memory and of transfers are the agent's own. ``version``: of the library, as "1.5.1".
    """

    version: str

    def metadata(self) -> bytes: ...
    def connection(self) -> bytes: ...

    def register(self, address: int, nbytes: int, memory: Memory) -> object: ...
    def describe(self, handle: object) -> bytes:
        """Metadata of that memory alone."""

    def deregister(self, handle: object) -> None: ...

    def load(self, metadata: bytes) -> str:
        """Learn of an agent, or more of it; its name. Raises :class:`BadMetadata` for what never will be one."""

    def forget(self, peer: str) -> None: ...

    def create(self, peer: str, local: Pieces, remote: Pieces) -> object:
        """A read of ``remote`` into ``local``, not begun: when it raises, no byte moves."""

    def post(self, transfer: object) -> bool:
        """Begin; True when it has ended already, with all bytes in place."""

    def poll(self, transfer: object) -> bool:
        """True when it has ended, with all bytes in place."""

    def release(self, transfer: object) -> None: ...

    def progress(self) -> None:
        """Answer other agents' first contact."""

    def close(self) -> None:
        """End, with everything that is registered."""
