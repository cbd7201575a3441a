"""`Strict`: the base class of JSON objects in requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

MAX_FIELDS = 160
"""Most fields of an object: each unknown one would be an error. Fields of other servers count as well."""


class Strict(BaseModel):
    """An object without further fields."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if len(given) > MAX_FIELDS:
            raise ValueError(f"an object with {len(given)} fields; at most {MAX_FIELDS}")
        return cls.read(given)

    @classmethod
    def read(cls, given: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The fields that are checked, of those that came. Few came: that was checked.
        Raises ValueError: a field that is refused by name."""
        return given
