"""The error tree. A class answers two questions: may the caller retry, and is it the caller's fault.

::

    KVError
    +-- Retryable                the same call may succeed later, or elsewhere
    |   +-- Unavailable          a peer is unreachable, silent, or its breaker is open
    |   +-- LeaseExpired         a lease or reservation ended before the transfer did
    |   +-- Busy                 a bound was reached (connections, queue, requests)
    |   +-- TicketExpired        prove a fresh ticket, and call again
    |   +-- TicketNotYetValid    the hosts' clocks differ; Unavailable by the time callers see it
    |   +-- NotLeader            this master does not lead; the text ends with the leader's address, if there is one
    +-- Refused                  the call as it stands will never succeed
    |   +-- InvalidArgument      wrong size, layout, dtype, range (also a ValueError)
    |   +-- QuotaExceeded        the tenant has no room and nothing of its own to evict
    |   +-- Unauthenticated      no token or ticket, or one that is not good here
    |   +-- Forbidden            the role of this token or ticket does not allow the call
    |   |   +-- ForbiddenSalt    this client may not touch this tenant, or this namespace
    |   +-- FingerprintMismatch  namespace unknown here, or known with another layout or epoch
    |   +-- VersionMismatch      the two sides share no protocol version
    |   +-- ProtocolError        a frame that is malformed, oversized or out of place
    |   +-- ConfigError          a flag, file or environment variable (also a ValueError)
    +-- Corrupt                  bytes failed verification
    +-- Closed                   used after close, or in a forked child (also a RuntimeError)

A miss is a value (:class:`kvstrata.proto.status.BlockStatus`), never an exception.
"""

from __future__ import annotations


class KVError(Exception):
    """Base of everything kvstrata raises on purpose."""


class Retryable(KVError):
    """The same call may succeed later or elsewhere."""


class Unavailable(Retryable):
    """A peer is unreachable, silent beyond its deadline, or its breaker is open."""


class LeaseExpired(Retryable):
    """A lease or a reservation ended before the transfer did."""


class Busy(Retryable):
    """A named bound was reached; the text says which."""


class TicketExpired(Retryable):
    """The ticket that was proved has run out: prove a fresh one on this connection, and call again."""


class TicketNotYetValid(Retryable):
    """The ticket is from the future: the hosts' clocks differ by more than is let pass. It will be good in a while."""


class NotLeader(Retryable):
    """This master does not lead. The text is "... the leader is HOST:PORT", or says that there is none now."""


class Refused(KVError):
    """The call as it stands will never succeed; the text says what to change."""


class InvalidArgument(Refused, ValueError):
    """A size, layout, dtype or range is wrong. Raised before any byte moves."""


class QuotaExceeded(Refused):
    """The tenant is at its limit and everything it holds is leased."""


class Unauthenticated(Refused):
    """No token or ticket was shown, or one that is not good here. The text does not say which part was wrong."""


class Forbidden(Refused):
    """The role of this token or ticket does not allow the call."""


class ForbiddenSalt(Forbidden):
    """This client may not touch this tenant, or this namespace."""


class FingerprintMismatch(Refused):
    """The namespace is unknown here, or known with another layout or weight epoch."""


class VersionMismatch(Refused):
    """The two sides share no protocol version."""


class ProtocolError(Refused):
    """A frame is malformed, oversized or out of place."""


class ConfigError(Refused, ValueError):
    """A flag, a configuration file or an environment variable is wrong."""


class Corrupt(KVError):
    """Bytes failed verification."""


class Closed(KVError, RuntimeError):
    """The object was closed, or belongs to the process this one was forked from."""


#: What may travel in a Failure frame, by class name.
BY_CODE: dict[str, type[KVError]] = {
    cls.__name__: cls
    for cls in (
        Unavailable,
        LeaseExpired,
        Busy,
        TicketExpired,
        TicketNotYetValid,
        NotLeader,
        Refused,
        InvalidArgument,
        QuotaExceeded,
        Unauthenticated,
        Forbidden,
        ForbiddenSalt,
        FingerprintMismatch,
        VersionMismatch,
        ProtocolError,
        Corrupt,
        Closed,
    )
}


def from_code(code: str, message: str) -> KVError:
    """Build the error a Failure frame names; an unknown code becomes :class:`Refused`."""
    return BY_CODE.get(code, Refused)(message)
