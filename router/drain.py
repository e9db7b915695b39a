"""What admission knows of the recent past, to say how long a new request would take (DESIGN §4.3). Pure.

Three things are measured: how much work leaves a line per second while somebody waits in it (`Pace`), how long answers
are, and how long it takes from a place to the first token, for prompts of each class of length (`Answers`). Nothing is
guessed: what has not been seen yet is None, or 0.
"""

import math
from collections import deque
from collections.abc import Callable

from router.fairness import length_class

_WINDOW_S = 30.0
_REMEMBERED = 256  # departures
_ENOUGH = 8  # departures to know the pace by
_SOON_S = 0.5  # before that and with fewer departures nothing can be said
_MEMORY = 0.1  # share of the newest value in a running mean

Departure = tuple[float, float]  # when, in busy seconds, and its work
Estimate = Callable[["Pace", float, float, float], float | None]
"""`Pace.wait_s`, `longest_s` or `shortest_s`."""


class Pace:
    """How much work leaves a line per second, while somebody waits in it. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._departures: deque[Departure] = deque(maxlen=_REMEMBERED)

    def began(self, now: float) -> None:
        """The line was empty and is not any more."""
        self._busy_since = now

    def ended(self, now: float) -> None:
        """The line is empty."""
        self._busy_s = self._busy(now)
        self._busy_since = None

    def stood_still(self, seconds: float, now: float) -> None:
        """For so long until now nobody could leave, since there was no worker to go to: that is no pace."""
        if self._busy_since is not None:
            self._busy_since = min(now, self._busy_since + seconds)

    def departed(self, work: float, now: float) -> Departure:
        """A request that had to wait left the line for a worker, while the line was not empty."""
        departure = (self._busy(now), work)
        self._departures.append(departure)
        return departure

    def came_back(self, departure: Departure) -> None:
        """The worker would not have it: it never left."""
        if departure in self._departures:
            self._departures.remove(departure)

    def wait_s(self, work: float, typical: float, now: float) -> float | None:
        """How long this much work takes to leave the line at the present pace; None while that is unknown.

        Time is counted only while somebody waits: an idle hour is not a slow queue, and a line that has just become
        empty is no new one. Where few have left, the next one, of `typical` work, is taken to leave just now: a line
        that hardly moves is not taken for one that stands.
        """
        return self._estimate(work, typical, now)[0]

    def longest_s(self, work: float, typical: float, now: float) -> float | None:
        """As `wait_s`, at the low end of what is known of the pace: from n departures that come at random it is known
        to about one part in sqrt(n). When a line has just formed these are few, and quick: workers were still empty."""
        wait, departures = self._estimate(work, typical, now)
        return None if wait is None else wait * (1 + 1 / math.sqrt(1 + departures))

    def shortest_s(self, work: float, typical: float, now: float) -> float | None:
        """As `wait_s`, at the high end: nothing can be ruled out by a line from which nobody has left yet, be it that
        its workers have just been restarted."""
        wait, departures = self._estimate(work, typical, now)
        return None if wait is None else wait * (1 - 1 / math.sqrt(1 + departures))

    def _estimate(self, work: float, typical: float, now: float) -> tuple[float | None, int]:
        """The wait, and from how many departures it is known."""
        busy = self._busy(now)
        since = max(0.0, busy - _WINDOW_S)
        if len(self._departures) == _REMEMBERED:  # what was before the oldest is forgotten
            since = max(since, self._departures[0][0])
        recent = [done for at, done in self._departures if at >= since]
        done, few = sum(recent), len(recent) < _ENOUGH
        if busy <= since or (few and busy - since < _SOON_S):
            return None, len(recent)
        return work * (busy - since) / (done + typical if few else done), len(recent)

    def _busy(self, now: float) -> float:
        """Seconds in which somebody waited, in all."""
        return self._busy_s + (0.0 if self._busy_since is None else now - self._busy_since)


class Answers:
    """How long answers are, and how soon they begin."""

    def __init__(self) -> None:
        self._tokens: float | None = None
        self._first_token_s: dict[int, float] = {}

    def answered(self, tokens: int) -> None:
        """A sample has ended by itself, with so many tokens."""
        self._tokens = _mean(self._tokens, tokens)

    def answer_tokens(self, most: int) -> float:
        """How long an answer of at most `most` tokens will probably be."""
        return most if self._tokens is None else min(most, self._tokens)

    def first_token(self, prompt_tokens: int, seconds: float) -> None:
        """A request had its first token so long after it was placed."""
        length = length_class(prompt_tokens)
        self._first_token_s[length] = _mean(self._first_token_s.get(length), seconds)

    def first_token_s(self, prompt_tokens: int) -> float:
        """From a place to the first token, for such a prompt; 0 while none was seen."""
        return self._first_token_s.get(length_class(prompt_tokens), 0.0)


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _MEMORY * (value - before)
