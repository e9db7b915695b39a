"""One call's JSON object, read character by character.

    {"name": "f", "arguments": {...}}        `parameters` for arguments, `function` for name (Llama's spellings)

Of the arguments the very characters are passed on as they come. They are checked for nothing but where they end: what a
model writes is told as it was written. Arguments that are a JSON string hold JSON themselves; it is what is told.
"""

import enum
import json
from collections.abc import Callable

_SPACE = " \t\r\n"
_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")


class Reading(enum.Enum):
    """Where a reader stands. BROKEN: the last character did not belong there."""

    GOING = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


class CallObject:
    """Reads one object. `begun`: there is a call to tell of; `settled`: all of its arguments were read."""

    def __init__(self, names: frozenset[str] | None = None) -> None:
        """`names`: an object that names none of these is no call; None: every name is one."""
        self._names = names
        self._next: Callable[[str], None] = self._open
        self._after_string: Callable[[str], None] = self._value_text
        self._key = ""
        self._raw: list[str] = []  # of the string or number that is being read
        self._depth = 0
        self._in_string = self._escaped = False
        self._arguments: list[str] = []
        self._told = False  # arguments were begun
        self.reading = Reading.GOING
        self.name: str | None = None
        self.settled = False

    @property
    def begun(self) -> bool:
        return self.name is not None and (self._told or self.reading is Reading.DONE)

    def take(self, char: str) -> None:
        """The next character; none may come after DONE or BROKEN."""
        self._next(char)

    def arguments(self) -> str:
        """The characters of the arguments that came since this was last asked."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _break(self) -> None:
        self.reading = Reading.BROKEN

    def _open(self, char: str) -> None:
        if char == "{":
            self._next = self._key_or_end
        elif char not in _SPACE:
            self._break()

    def _key_or_end(self, char: str) -> None:
        if char == '"':
            self._begin_string(self._key_text)
        elif char == "}":
            self._end()
        elif char not in _SPACE:
            self._break()

    def _key_text(self, text: str) -> None:
        self._key, self._next = text, self._colon

    def _colon(self, char: str) -> None:
        if char == ":":
            self._next = self._value
        elif char not in _SPACE:
            self._break()

    def _value(self, char: str) -> None:
        if char in _SPACE:
            return
        if char == '"':
            self._begin_string(self._value_text)
        elif char in "{[":
            self._depth = 0
            self._next = self._nested
            self._nested(char)
        elif char in ",}":
            self._break()
        else:
            self._raw = [char]
            self._next = self._scalar

    def _begin_string(self, then: Callable[[str], None]) -> None:
        self._raw, self._escaped, self._after_string = ['"'], False, then
        self._next = self._string

    def _string(self, char: str) -> None:
        self._raw.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            try:
                text = json.loads("".join(self._raw), strict=False)
                text.encode()  # a lone surrogate, which JSON can spell, is no text
            except ValueError:
                self._break()
            else:
                self._after_string(text)

    def _value_text(self, text: str) -> None:
        self._next = self._comma_or_end
        if self._key in _NAMES and self.name is None:
            self.name = text
            if self._names is not None and text not in self._names:
                self._break()
        elif self._is_arguments():
            self._tell(text)

    def _scalar(self, char: str) -> None:
        if char not in _SPACE and char not in ",}":
            self._raw.append(char)
            return
        if self._is_arguments():
            text = "".join(self._raw)
            self._tell("{}" if text == "null" else text)
        self._next = self._comma_or_end
        self._comma_or_end(char)

    def _nested(self, char: str) -> None:
        """An object or a list, to its own end."""
        if self._is_arguments():
            self._told = True
            self._arguments.append(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string, self._escaped = True, False
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self.settled = self.settled or self._is_arguments()
                self._next = self._comma_or_end

    def _comma_or_end(self, char: str) -> None:
        if char == ",":
            self._next = self._key_or_end
        elif char == "}":
            self._end()
        elif char not in _SPACE:
            self._break()

    def _is_arguments(self) -> bool:
        """Whether the value at hand is the arguments: the first that goes by one of their names."""
        return self._key in _ARGUMENTS and not self.settled

    def _tell(self, text: str) -> None:
        self._told = self.settled = True
        self._arguments.append(text)

    def _end(self) -> None:
        if self.name is None:
            self._break()
            return
        if not self.settled:
            self._tell("{}")
        self.reading = Reading.DONE
