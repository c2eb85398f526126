"""What an engine shows to a secured pool: settings that every adapter has in common."""

from __future__ import annotations

from typing import Any, Final, TypedDict

import msgspec

_SECRET: Final = "token"


class Shown(TypedDict):
    """Keyword arguments of :class:`kvstrata.client.Client` and :class:`kvstrata.client.admin.AdminClient`."""

    token: str | None
    token_file: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None


class PoolAccess(msgspec.Struct, frozen=True, kw_only=True):
    """All optional, and by default what the environment says (``KVSTRATA_TOKEN_FILE``, ``KVSTRATA_CA``, ...).

    ``token`` is never part of a ``repr``; but what starts an engine may show its settings: prefer ``token_file``.
    """

    token: str = ""
    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    def shown(self) -> Shown:
        return Shown(
            token=self.token or None,
            token_file=self.token_file or None,
            tls_ca=self.tls_ca or None,
            tls_cert=self.tls_cert or None,
            tls_key=self.tls_key or None,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return [(name, "***" if name == _SECRET and value else value) for name, value in fields]


#: Nothing of one's own: what the environment says.
BY_ENVIRONMENT: Final = PoolAccess()
