"""What all sections of a configuration have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A section of the YAML: immutable, without unknown keys; the doc of a setting stands under its field."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_has_defaults(cls, value: Any) -> Any:
        return {} if value is None else value

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """A copy with other values at dotted keys, such as `{"synchronizer.sync_method": "memory"}`.

        Raises pydantic's ValidationError for an unknown key and for a value that does not fit.
        """
        changed: dict[str, Any] = {}
        below: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            name, _, rest = key.partition(".")
            if rest:
                below.setdefault(name, {})[rest] = value
            else:
                changed[name] = value
        changed |= {name: getattr(self, name).with_values(inner) for name, inner in below.items()}
        checked = self.model_validate({**self.__dict__, **changed})
        return self.model_copy(update={name: getattr(checked, name) for name in changed})
