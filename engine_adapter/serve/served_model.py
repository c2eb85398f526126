"""The model as clients see it."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.engine_adapter.paged.text.tokenizer import Tokenizer
from kvstrata.engine_adapter.serve.errors import ApiError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under one name. ``created``: Unix seconds."""

    name: str
    max_model_len: int
    tokenizer: Tokenizer
    created: int

    def refuse_other(self, name: str | None) -> None:
        """Raise 404 when a request names another model."""
        if name is not None and name != self.name:
            message = f"there is no model {name!r} here: this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
