"""Stop strings over a stream of text (FAULTS C20).

An Aho-Corasick automaton (Aho and Corasick, 1975) over the stop strings. Its state after each character is the longest
tail of the text that begins some stop string, which is exactly what must be held back; a state where a stop string ends
is a match. The first character that completes a stop string decides; of several completed there, the longest. So the
result depends on the characters alone, and the work is linear in the text.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton: immutable, shared by the samples of a request. Raises ValueError for an empty string.

    `shown`: the stop string that ends a text is part of it.
    """

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        self.shown = shown
        self.next: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.depth = [0]
        self.match_length = [0]
        """Per state: length of the longest stop string that ends here, 0 for none."""
        for stop in stops:
            if not stop:
                raise ValueError("an empty stop string would stop everything")
            self._add(stop)
        self._link()

    @property
    def empty(self) -> bool:
        return len(self.next) == 1

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.next[state]:
                self.next[state][char] = len(self.next)
                self.next.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match_length.append(0)
            state = self.next[state][char]
        self.match_length[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.next[state].items():
                self.fallback[child] = self.step(self.fallback[state], char) if state else 0
                longest = self.match_length[self.fallback[child]]
                self.match_length[child] = max(self.match_length[child], longest)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after `char`."""
        while state and char not in self.next[state]:
            state = self.fallback[state]
        return self.next[state].get(char, 0)


NO_STOPS = StopStrings(())


class StopScan:
    """One text being watched."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Text that is now certain to be shown, and whether a stop string ended in `text` (then feed no more).

        Not `armed`: a stop string that ends in `text` is passed over.
        """
        if self._stops.empty:
            return text, False
        stops, state = self._stops, self._state
        buffer = self._held + text
        for at, char in enumerate(text, start=len(self._held) + 1):
            state = stops.step(state, char)
            if armed and stops.match_length[state]:
                self._held = ""
                return buffer[: at if stops.shown else at - stops.match_length[state]], True
        self._state = state
        certain = len(buffer) - stops.depth[state]
        self._held = buffer[certain:]
        return buffer[:certain], False

    def finish(self) -> str:
        """The text ended without a stop string: what was held back is shown."""
        held, self._held = self._held, ""
        return held
