"""Reads fields of a model's config.json with their meaning checked. Knows no model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.errors import CheckpointError


class Fields:
    """A config whose reads name the field, what was expected and what was found. Aliases are tried in order.

    A field that is absent or null falls back to `defaults` (a family's own), then to the call's default.
    Raises CheckpointError with `param` set to the field.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._config = config
        self._defaults = defaults or {}

    def get(self, *names: str) -> Any:
        """The first alias that is present and not null, else the family's default, else None."""
        for source in (self._config, self._defaults):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return None

    def count(self, *names: str, default: int | None = None, low: int = 1) -> int:
        """An integer of at least `low`; required unless a default is given."""
        value = self.get(*names)
        if value is None:
            if default is None:
                raise _error(names[0], f"is missing; expected an integer of at least {low}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise _error(names[0], f"must be an integer of at least {low}, got {value!r}")
        return value

    def counts(self, *names: str, length: int, default: int) -> list[int]:
        """`length` positive integers: the field is a list of them, or one for all."""
        value = self.get(*names)
        if not isinstance(value, list | tuple):
            return [self.count(*names, default=default)] * length
        if len(value) != length or not all(type(v) is int and v > 0 for v in value):
            raise _error(names[0], f"must be a positive integer or a list of {length} of them, got {value!r}")
        return list(value)

    def optional_count(self, *names: str) -> int | None:
        """A positive integer, or None where the field is absent, null or 0."""
        return self.count(*names, default=0, low=0) or None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _error(name, f"must be true or false, got {value!r}")
        return value

    def names(self, name: str, length: int) -> list[str] | None:
        """A list of `length` strings, or None where absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != length or not all(isinstance(v, str) for v in value):
            raise _error(name, f"must be a list of {length} strings, got {value!r}")
        return list(value)


def _error(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"config.json: {name} {what}", param=name)
