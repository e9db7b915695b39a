"""A model's text to content and calls: pure folds over characters, one per format (FAULTS C22).

    feed(text) -> Parsed, any number of times; finish() -> Parsed

Every character is looked at once and by itself, so what comes out, joined, does not depend on how the text was cut
into pieces; a whole answer is the same fold over one piece. What looks like the start of a call is held back until it
is one, and is content after all when it is not. White space before a call and behind the last one
is nobody's.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.front.tools.call_object import CallObject, Reading
from router.front.tools.types import CallDelta

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text added."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class CallFold(Protocol):
    """One answer's text being read."""

    over: bool
    """A call ended and no other is wanted: feed no more."""

    def feed(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed:
        """The text ended: what was held back is content, unless it belongs to a call."""

    def complete(self) -> bool:
        """Whether there are calls and none was broken off."""


class _Fold:
    """What the formats share: the calls told so far and the pieces of one step."""

    def __init__(self, *, parallel: bool, names: frozenset[str] | None = None) -> None:
        self._parallel = parallel
        self._names = names
        self._take: Callable[[str], None] = self._outside
        self._object = CallObject(names)
        self._raw: list[str] = []  # of what may turn out to be no call
        self._begun = self._all_settled = False  # of the call at hand; of those before it
        self._count = 0
        self._content: list[str] = []
        self._deltas: dict[int, tuple[str | None, list[str]]] = {}
        self.over = False

    def feed(self, text: str) -> Parsed:
        for char in text:
            if self.over:
                break
            self._take(char)
        return self._parsed()

    def finish(self) -> Parsed:
        if not self.over:
            self._end()
        return self._parsed()

    def complete(self) -> bool:
        return self._count > 0 and self._all_settled

    def _outside(self, char: str) -> None:
        """A character that belongs to no call yet."""
        raise NotImplementedError

    def _after(self, *, done: bool) -> None:
        """The call's JSON has ended, or (not `done`) something else stands in its place."""
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _enter(self, held: str) -> None:
        """A call's JSON may begin here; `held` is content if it does not."""
        self._object, self._raw, self._begun = CallObject(self._names), [held], False
        self._take = self._inside

    def _inside(self, char: str) -> None:
        call = self._object
        call.take(char)
        if not self._begun:
            self._raw.append(char)
            if not call.begun:
                if call.reading is Reading.BROKEN:
                    self._raw.pop()
                    self._give_up()
                    self._take(char)
                return
            self._begun = True
            self._all_settled = self._count == 0 or self._all_settled
            self._count += 1
            self._tell(call.name, call.arguments())
        elif text := call.arguments():
            self._tell(None, text)
        if call.reading is not Reading.GOING:
            self._all_settled &= call.settled
            self.over = not self._parallel
            self._after(done=call.reading is Reading.DONE)
            if call.reading is Reading.BROKEN and not self.over:
                self._take(char)

    def _give_up(self) -> None:
        """No call after all: what was held is content."""
        self._say("".join(self._raw))
        self._after(done=False)

    def _cut(self) -> None:
        """The text ends inside a call's JSON."""
        if self._begun:
            self._all_settled &= self._object.settled
        else:
            self._say("".join(self._raw))

    def _say(self, text: str) -> None:
        self._content.append(text)

    def _tell(self, name: str | None, arguments: str) -> None:
        index = self._count - 1
        known = self._deltas.setdefault(index, (name, []))
        known[1].append(arguments)

    def _parsed(self) -> Parsed:
        calls = tuple(CallDelta(index, name, "".join(text)) for index, (name, text) in self._deltas.items())
        parsed = Parsed("".join(self._content), calls)
        self._content.clear()
        self._deltas.clear()
        return parsed


class HermesCalls(_Fold):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` among text (Hermes 2 Pro, Qwen 2.5 and 3)."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, *, parallel: bool = True) -> None:
        super().__init__(parallel=parallel)
        self._space = ""  # held back: nothing to show if a call follows
        self._marker = ""  # as much of a marker as has come

    def _outside(self, char: str) -> None:
        if self.OPEN.startswith(self._marker + char):
            self._marker += char
            if self._marker == self.OPEN:
                self._enter(self._space + self.OPEN)
                self._space = self._marker = ""
            return
        if self._marker:
            self._release()
            self._outside(char)
        elif char in _SPACE:
            self._space += char
        else:
            self._release()
            self._say(char)

    def _release(self) -> None:
        self._say(self._space + self._marker)
        self._space = self._marker = ""

    def _after(self, *, done: bool) -> None:
        self._take = self._closing if self._begun else self._outside

    def _closing(self, char: str) -> None:
        """Behind a call's JSON: up to its closing marker, a brace too many is passed over."""
        if self.CLOSE.startswith(self._marker + char):
            self._marker += char
            if self._marker == self.CLOSE:
                self._marker, self._take = "", self._outside
        elif self._marker:  # no closing marker after all
            held, self._marker, self._take = self._marker, "", self._outside
            for earlier in held + char:
                self._take(earlier)
        elif char not in _SPACE and char not in "}]":
            self._take = self._outside
            self._outside(char)

    def _end(self) -> None:
        if self._take == self._inside:
            self._cut()
        elif self._take == self._outside:
            if self._count and not self._marker:
                self._space = ""  # what follows the last call
            self._release()


class JsonCalls(_Fold):
    """An answer that is calls and nothing else (Llama 3): `{"name": ..., "parameters": {...}}`, `; ` between several.

    Lists of calls are read too. JSON that names none of `names` is content, as is everything behind the first thing
    that is no call.
    """

    _BETWEEN = _SPACE + ";,[]"
    _TAG = "<|python_tag|>"

    def __init__(self, names: frozenset[str], *, parallel: bool = True) -> None:
        super().__init__(parallel=parallel, names=names)
        self._held = ""

    def _outside(self, char: str) -> None:
        if char == "{":
            held, self._held = self._held, ""
            self._enter(held)
            self._inside(char)
        elif char in self._BETWEEN or self._TAG.startswith(self._held + char):
            self._held += char
        else:
            self._say(self._held + char)
            self._held, self._take = "", self._say

    def _after(self, *, done: bool) -> None:
        self._take = self._outside if done else self._say

    def _end(self) -> None:
        if self._take == self._inside:
            self._cut()
        elif not self._count:
            self._say(self._held)


class NamedCall:
    """An answer that is the arguments of one function, as demanded by name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text: list[str] = []
        self.over = False

    def feed(self, text: str) -> Parsed:
        if not text:
            return Parsed()
        name = None if self._text else self._name
        self._text.append(text)
        return Parsed(calls=(CallDelta(0, name, text),))

    def finish(self) -> Parsed:
        return Parsed()

    def complete(self) -> bool:
        try:
            json.loads("".join(self._text))
        except ValueError:
            return False
        return True
