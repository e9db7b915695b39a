"""What a request used, counted once and reported the same way on every path (FAULTS C31, C32).

`Usage` is what an answer tells its client. A `Receipt` is what the client's tenant is charged for: as far as the answer
was handed to the client's socket, which is all of it unless somebody left or something broke.

    receipt.opened(...)        a prompt was admitted
    receipt.hold(delta)        this is about to be written, with what comes next or at once
    receipt.handed(index)      it was
    receipt.tell()             what was handed over until now is counted
    receipt.close()            so is the rest: all but the end is handed over, and what prompts had cached is known
"""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.usage import NOTHING, Sums
from router.front.text import Delta
from router.requests import Trace


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `completion` includes each sample's ending token; `cached`: prompt positions that nobody computed."""

    prompt: int
    completion: int
    cached: int


@dataclass(slots=True)
class _Opened:
    """One prompt of the call: `first` of its `samples`. It counts when something of its answer was handed over."""

    first: int
    samples: int
    tokens: int
    characters: int
    trace: Trace
    counted: bool = False


class Receipt:
    """One call's: every token, character, prompt and call is counted once, when `tell` or `close` says it to `count`.

    Kept in plain numbers between, as every piece of every answer comes by here.
    """

    def __init__(self, count: Callable[[Sums], None] = lambda _: None) -> None:
        self._count = count
        self._opened: list[_Opened] = []
        self._held: dict[int, tuple[int, int]] = {}
        self._samples: set[int] = set()
        self._begun = False
        self._closed = False
        self._tokens = 0
        self._characters = 0
        self._rest = NOTHING

    def opened(self, first: int, samples: int, *, tokens: int, characters: int, trace: Trace) -> None:
        """A prompt of so many tokens and characters was admitted, which samples `first` on answer."""
        self._opened.append(_Opened(first, samples, tokens, characters, trace))

    def hold(self, delta: Delta) -> None:
        """Part of the answer, not handed over yet."""
        tokens, characters = self._held.get(delta.index, (0, 0))
        characters += len(delta.text)
        if delta.calls:
            characters += sum(len(call.name or "") + len(call.arguments) for call in delta.calls)
        self._held[delta.index] = tokens + len(delta.ids), characters

    def handed(self, index: int) -> None:
        """What is held of sample `index` was given to the client's socket."""
        tokens, characters = self._held.pop(index, (0, 0))
        self._tokens += tokens
        self._characters += characters
        if index not in self._samples:
            self._samples.add(index)
            self._begin(index)

    def handed_all(self) -> None:
        """All that is held was."""
        for index in list(self._held):
            self.handed(index)

    def tell(self) -> None:
        """Count what was handed over since it was last told."""
        if self._tokens or self._characters or self._rest is not NOTHING:
            told = self._rest.plus(Sums(output_tokens=self._tokens, output_characters=self._characters))
            self._tokens, self._characters, self._rest = 0, 0, NOTHING
            self._count(told)

    def close(self) -> None:
        """Nothing more is handed over; traces are complete. The first time counts."""
        if self._closed:
            return
        self._closed = True
        cached = sum(min(one.trace.cached_tokens, one.tokens) for one in self._opened if one.counted)
        self._rest = self._rest.plus(Sums(cached_tokens=cached))
        self.tell()

    def _begin(self, sample: int) -> None:
        """The first part of a sample: with it comes its prompt, perhaps the call."""
        prompt = next((one for one in self._opened if 0 <= sample - one.first < one.samples), None)
        if prompt is None or prompt.counted:
            return
        prompt.counted = True
        calls, self._begun = int(not self._begun), True
        self._rest = self._rest.plus(
            Sums(requests=calls, input_tokens=prompt.tokens, input_characters=prompt.characters)
        )
