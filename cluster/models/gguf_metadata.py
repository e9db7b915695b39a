"""Typed access to the key-value section of a GGUF file.

The values come from outside, so every read says which type it expects and fails with the key's name. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gguf import GGUFReader

from cluster.core.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Scalar = bool | int | float | str
Value = Scalar | list[Scalar]


def open_gguf(path: Path) -> GGUFReader:
    """Map the file into memory and parse its header.

    Raises `ModelError` when the file is missing, truncated or not GGUF.
    """
    try:
        return GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"cannot read {path} as a GGUF file ({error}); download it again") from error


@dataclass(frozen=True)
class Metadata:
    """The key-value section, parsed. Keys are GGUF's own, e.g. `llama.block_count`."""

    values: Mapping[str, Value]

    @classmethod
    def of(cls, reader: GGUFReader) -> Metadata:
        """Everything the file states, copied out of the mapped memory."""
        try:
            return cls({name: field.contents() for name, field in reader.fields.items()})
        except UnicodeDecodeError as error:
            raise ModelError(f"a text in the GGUF file is not UTF-8 ({error}); download it again") from error

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def text(self, key: str) -> str:
        """A string; raises `ModelError` when it is missing or of another type."""
        value = self._value(key)
        if not isinstance(value, str):
            raise _wrong(key, "a string", value)
        return value

    def integer(self, key: str) -> int:
        """An integer; raises `ModelError` when it is missing or of another type."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(key, "an integer", value)
        return value

    def number(self, key: str) -> float:
        """A float; raises `ModelError` when it is missing or of another type."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(key, "a number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean, or `default` when the file does not state it."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise _wrong(key, "true or false", value)
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; raises `ModelError` when it is missing or holds anything else."""
        items = [item for item in self._items(key) if isinstance(item, str)]
        if len(items) != len(self._items(key)):
            raise _wrong(key, "strings only", self._items(key))
        return items

    def integers(self, key: str) -> list[int]:
        """A list of integers; raises `ModelError` when it is missing or holds anything else."""
        items = [item for item in self._items(key) if isinstance(item, int)]
        if len(items) != len(self._items(key)):
            raise _wrong(key, "integers only", self._items(key))
        return items

    def _items(self, key: str) -> list[Scalar]:
        value = self._value(key)
        if not isinstance(value, list):
            raise _wrong(key, "a list", value)
        return value

    def _value(self, key: str) -> Value:
        if key not in self.values:
            raise ModelError(f"the GGUF file does not state {key}; use a file written by a current llama.cpp")
        return self.values[key]


def _wrong(key: str, expected: str, value: Value) -> ModelError:
    shown = repr(value)[:80]
    return ModelError(f"{key} in the GGUF file is {shown} where {expected} is expected; the file is damaged")
