"""The parent of all sections of the settings."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

Table: TypeAlias = dict[str, Any]
"""A table of TOML: values of any type by their names."""


def _drop_unset(table: Table) -> Table:
    """Returns the entries that have a value. TOML cannot write None."""
    return {name: value for name, value in table.items() if value is not None}


Options: TypeAlias = Annotated[Table, AfterValidator(_drop_unset)]
"""Arguments of a function or template. None leaves one out."""


def is_list(field: FieldInfo) -> bool:
    """True for a setting that holds several values; it may also be unset."""
    types = (field.annotation, *get_args(field.annotation))
    return any(get_origin(field_type) is tuple for field_type in types)


class Section(BaseModel):
    """Frozen settings, without unknown names and infinite numbers.

    A single value stands for a list of one.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _wrap_single_values(cls, values: object) -> object:
        """Puts a single value of a list into a list. Raises ValueError for true as a number."""
        if not isinstance(values, dict):
            return values
        wrapped: Table = dict(values)
        for name, field in cls.model_fields.items():
            if name not in wrapped:
                continue
            value = wrapped[name]
            types = (field.annotation, *get_args(field.annotation))
            # pydantic would take true as the number 1.
            is_number = (float in types or int in types) and bool not in types
            if is_number and isinstance(value, bool):
                raise ValueError(f"{name} = {str(value).lower()}: write a number")
            if is_list(field) and isinstance(value, str | int | dict):
                wrapped[name] = (value,)
        return wrapped
