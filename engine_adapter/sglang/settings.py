"""What a user may say under ``"kvstrata"`` in SGLang's extra config: known keys only, each with a default."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from kvstrata.engine_adapter.connector.access import PoolAccess
from kvstrata.proto.errors import InvalidArgument

#: Our keys stand below this one: the others of the extra config are SGLang's.
SECTION: Final = "kvstrata"
MASTERS_VARIABLE: Final = "KVSTRATA_MASTER"
MASTERS_DEFAULT: Final = "127.0.0.1:7400"


class Settings(PoolAccess, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All keys are optional.

    ``masters``: addresses of the pool's masters, comma-separated; else the variable ``KVSTRATA_MASTER``, else
    127.0.0.1:7400. ``transport``: auto, shm, rdma or tcp. ``verify``: whether loaded pages are checked against their
    checksums. ``deadline_ms``: what a call may take; what has not come by then is a miss.

    ``token_file``, ``tls_ca``, ``tls_cert``, ``tls_key``: what a secured pool wants to see, else the environment's;
    ``token``: the same in place, where everybody who sees the settings may have it.

    ``namespace``: stands for the model's name. Name the revision here when the same name gets new weights.
    """

    masters: str = ""
    transport: str = "auto"
    verify: Literal["always", "sample", "never"] = "sample"
    deadline_ms: Annotated[int, msgspec.Meta(ge=1)] = 5_000
    namespace: str = ""


def read_settings(extra: Mapping[str, object]) -> Settings:
    """``extra`` is SGLang's whole extra config. Raises :class:`InvalidArgument`, naming the key."""
    if not extra.get("interface_v1"):
        raise InvalidArgument(
            'say "interface_v1": 1 in --hicache-storage-backend-extra-config: without it SGLang copies every page '
            "once more, by an interface it means to remove"
        )
    section = extra.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise InvalidArgument(f'"{SECTION}" is a {type(section).__name__}: expected an object of settings')
    known = Settings.__struct_fields__
    for key in section:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise InvalidArgument(f'"{SECTION}" has an unknown key {key!r}: {hint}')
    try:
        settings = msgspec.convert(dict(section), Settings)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f'"{SECTION}": {error}') from error
    masters = settings.masters or os.environ.get(MASTERS_VARIABLE, "") or MASTERS_DEFAULT
    return msgspec.structs.replace(settings, masters=masters)
