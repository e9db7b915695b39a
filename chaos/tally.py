"""What clients saw, judged: every answer against the reference, every gap against the faults of its time."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

from chaos.ask import NO_RULES, Ask, Manner
from chaos.disturb import Disturbances
from chaos.exchange import End, Exchange
from chaos.reference import Expected, Reference

EPSILON = 5e-3  # float32 in batches of other sizes; another token's is off by far more


@dataclass(slots=True)
class Tally:
    """Counts of a whole run, and the words for what went wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    failovers: int = 0
    failovers_with: Counter[str] = field(default_factory=Counter)
    gaps_s: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.outcomes.total()


def judge(ask: Ask, exchange: Exchange, reference: Reference) -> str | None:
    """What is wrong with the tokens a client got, or None. Whoever left, or was cut off, has a beginning."""
    expected = reference.answer(ask)
    whole = exchange.end is End.OK
    for index, right in enumerate(expected):
        if problem := _judge_sample(exchange, index, right, whole) or _judge_logprobs(ask, exchange, index, right):
            return f"sample {index} of {ask}: {problem}"
    total = sum(len(right.tokens) for right in expected)
    if whole and exchange.completion_tokens != total:
        return f"{ask}: {exchange.completion_tokens} completion tokens are reported, there are {total}"
    return None


def _judge_sample(exchange: Exchange, index: int, right: Expected, whole: bool) -> str | None:
    text, reason = exchange.texts[index], exchange.reasons[index]
    if exchange.tokens is not None:
        got = tuple(exchange.tokens[index])
        if got != (right.tokens if whole else right.tokens[: len(got)]):
            return f"tokens {got} instead of {right.tokens}"
    if (text != right.text) if whole else not right.text.startswith(text):
        return f"text {text!r} instead of {right.text!r}"
    if whole and reason != right.reason:
        return f"ended by {reason!r} instead of {right.reason!r}"
    return None


def _judge_logprobs(ask: Ask, exchange: Exchange, index: int, right: Expected) -> str | None:
    """Over HTTP the token that ended a sample has none, nor those that a stop string cut off."""
    got = exchange.logprobs[index]
    least = most = 0 if ask.logprobs is None else len(right.tokens)
    if exchange.end is not End.OK:
        least = 0
    elif exchange.tokens is None and right.reason == "stop":
        least = 0 if ask.stop else max(0, least - 1)
    if not least <= len(got) <= most:
        return f"{len(got)} logprobs, {least} to {most} are right"
    for at, (told, own) in enumerate(zip(got, right.logprobs, strict=False)):
        if not abs(told - own) <= EPSILON:
            return f"logprob {told} of token {at} instead of {own}"
    return None


def count_failover(
    tally: Tally, exchange: Exchange, ask: Ask, manner: Manner, disturbances: Disturbances, router: str
) -> None:
    """An answer that took several attempts; its longest gap, when a decode worker was disturbed within it."""
    if exchange.attempts <= len(ask.prompts):
        return
    tally.failovers += 1
    asked = {
        "rules": ask.rules != NO_RULES,
        "a grammar": ask.rules.grammar,
        "stop strings": bool(ask.stop),
        "logprobs": ask.logprobs is not None,
    }
    tally.failovers_with.update(what for what, there in asked.items() if there)
    if not manner.stream or not exchange.arrivals:
        return
    times = [exchange.asked, *exchange.arrivals]
    gap, begin = max((after - before, before) for before, after in itertools.pairwise(times))
    for kind in disturbances.of_decode(router, begin - 0.1, begin + gap):
        tally.gaps_s.setdefault(kind, []).append(gap)
