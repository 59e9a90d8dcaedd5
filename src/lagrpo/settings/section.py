"""What every section of the settings has in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator

ONE_OR_MORE = BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)
"""Of a list of texts: one alone may be given without a list around it."""


class Section(BaseModel):
    """Settings that cannot be changed, have no unknown names, no infinite numbers and no integers beyond 64 bits."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("it is an integer of at most 64 bits")
        return value
