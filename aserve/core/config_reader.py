"""Typed access to a model's ``config.json``: what has the wrong type or value is an error that names the field.

Knows no field. Called by ``model_spec`` and ``rope_spec``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from aserve.core.errors import ModelLoadError


class ConfigReader:
    """Typed access to one JSON object; absent and null count the same, wrong types and values are errors."""

    def __init__(self, config: Mapping[str, Any], where: str = "") -> None:
        self.config = config
        self._where = where

    def has(self, name: str) -> bool:
        return self.config.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, value, "a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not _is_positive(value):
            raise self.error(name, value, "a positive number")
        return float(cast("float", value))

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of positive numbers, so many."""
        found: object = self.config.get(name)
        values: list[Any] = cast("list[Any]", found) if isinstance(found, list) else []
        if len(values) != count or not all(map(_is_positive, values)):
            raise self.error(name, values or self.config.get(name), f"a list of {count} positive numbers")
        return tuple(map(float, values))

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def empty(self, name: str) -> ConfigReader:
        """An object without fields, in the place of one that is absent."""
        return ConfigReader({}, f"{self._where}{name}.")

    def child(self, name: str) -> ConfigReader | None:
        """An object; absent, null and empty count the same."""
        value: object = self.config.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return ConfigReader(cast("dict[str, Any]", value), f"{self._where}{name}.")

    def error(self, name: str, value: object, wanted: str) -> ModelLoadError:
        return ModelLoadError(f"config.json: {self._where}{name} must be {wanted}, not {value!r}")

    def _get(self, name: str, default: object) -> object:
        value: object = self.config.get(name)
        if value is not None:
            return value
        if default is None:
            raise ModelLoadError(f"config.json: {self._where}{name} is missing")
        return default


def _is_positive(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf
