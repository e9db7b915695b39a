"""What a request used, counted once and reported the same way on every path (FAULTS C31, C32).

`Usage` is what an answer tells its client. A `Receipt` is what the client's tenant is charged for: as far as the answer
was handed to the client's socket, which is all of it unless somebody left or something broke.

    receipt.opened(...)        a prompt was admitted
    receipt.hold(delta)        this is about to be written, with what comes next or at once
    receipt.handed(index)      it was
    receipt.give(delta)        both at once
    receipt.tell()             what was handed over until now is counted
    await receipt.known()      so is how many characters its prompts are
    receipt.close()            so is the rest: all but the end is handed over, and what prompts had cached is known
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cluster.usage import NOTHING, Sums
from router.front.text import Delta
from router.requests import Trace

INLINE_TOKENS = 1024  # of a prompt of ids: what they are in characters is known in a fraction of a millisecond
Characters = int | Callable[[], int]
"""Of a prompt: known, or worked out when something of its answer was handed over; no first token waits for that."""


class Usage(NamedTuple):
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
    characters: Characters
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
        self._counting: set[asyncio.Task[None]] = set()

    @property
    def begun(self) -> bool:
        """Whether anything was handed over."""
        return self._begun

    def opened(self, first: int, samples: int, *, tokens: int, characters: Characters, trace: Trace) -> None:
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

    def give(self, delta: Delta) -> None:
        """This was given to the client's socket, and what is held of its sample."""
        if self._held or delta.calls or delta.index not in self._samples:
            self.hold(delta)
            self.handed(delta.index)
            return
        self._tokens += len(delta.ids)
        self._characters += len(delta.text)

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

    async def known(self) -> None:
        """Until the characters of all prompts that count are."""
        while self._counting:
            await asyncio.wait(self._counting)

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
        self._rest = self._rest.plus(Sums(requests=calls, input_tokens=prompt.tokens))
        characters = prompt.characters
        if isinstance(characters, int):
            self._read(characters)
        elif prompt.tokens <= INLINE_TOKENS:
            self._read(characters())
        else:
            task = asyncio.create_task(self._work_out(characters))
            self._counting.add(task)
            task.add_done_callback(self._counting.discard)

    def _read(self, characters: int) -> None:
        self._rest = self._rest.plus(Sums(input_characters=characters))

    async def _work_out(self, characters: Callable[[], int]) -> None:
        """Beside everybody's streams."""
        self._read(await asyncio.to_thread(characters))
        if self._closed:  # its client has left meanwhile
            self.tell()
