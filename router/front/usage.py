"""What a request used, counted once and reported the same way on every path (FAULTS C31, C32).

`Usage` is what an answer tells its client. A `Receipt` is what the client's tenant is charged for: as far as the answer
was handed to the client's socket, which is all of it unless somebody left or something broke.

    receipt.opened(...)        a prompt was admitted
    receipt.hold(delta)        this is about to be written, with what comes next or at once
    receipt.handed(index)      it was; nothing: all that is held
    receipt.close()            the answer is over, or almost: what its prompts had cached is known
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
    """One call's. `count` is told what is handed over, when it is: every token, character, prompt and call once."""

    def __init__(self, count: Callable[[Sums], None] = lambda _: None) -> None:
        self._count = count
        self._opened: list[_Opened] = []
        self._held: dict[int, Sums] = {}
        self._samples: set[int] = set()
        self._begun = False
        self._closed = False

    def opened(self, first: int, samples: int, *, tokens: int, characters: int, trace: Trace) -> None:
        """A prompt of so many tokens and characters was admitted, which samples `first` on answer."""
        self._opened.append(_Opened(first, samples, tokens, characters, trace))

    def hold(self, delta: Delta) -> None:
        """Part of the answer, not handed over yet."""
        characters = len(delta.text) + sum(len(call.name or "") + len(call.arguments) for call in delta.calls)
        held = Sums(output_tokens=len(delta.ids), output_characters=characters)
        before = self._held.get(delta.index)
        self._held[delta.index] = held if before is None else before.plus(held)

    def handed(self, index: int | None = None) -> None:
        """What is held of sample `index`, or of all, was given to the client's socket."""
        for sample in [index] if index is not None else list(self._held):
            sums = self._held.pop(sample, NOTHING)
            if sample not in self._samples:
                self._samples.add(sample)
                sums = sums.plus(self._first_of(sample))
            self._count(sums)

    def close(self) -> None:
        """Nothing more is handed over that was not held; traces are complete. The first time counts."""
        if self._closed:
            return
        self._closed = True
        if cached := sum(min(one.trace.cached_tokens, one.tokens) for one in self._opened if one.counted):
            self._count(Sums(cached_tokens=cached))

    def _first_of(self, sample: int) -> Sums:
        """What begins with the first part of a sample: its prompt, perhaps the call."""
        prompt = next((one for one in self._opened if 0 <= sample - one.first < one.samples), None)
        if prompt is None or prompt.counted:
            return NOTHING
        prompt.counted = True
        calls, self._begun = int(not self._begun), True
        return Sums(requests=calls, input_tokens=prompt.tokens, input_characters=prompt.characters)
