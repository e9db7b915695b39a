"""What is sent: every prompt and arrival of a run, drawn up front from a seed. Pure.

Open loop: requests go out at their time whether or not earlier ones have finished. Chats and long prompts come from
separate random streams, so changing one leaves the other as it was. Every prompt is unique: the seed of its text names
seed, round and place.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

# One token each, with the space before them, in the usual BPE vocabularies; the report says what was counted.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name president team minute idea body information back parent
face others level office door health person art war history party result change morning reason research girl guy
moment air teacher force education foot boy age policy music market sense nation plan college interest death
experience effect use class control field development role effort rate heart drug show leader light voice wife
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to send, `at` seconds after the start (open loop only)."""

    kind: str
    prompt: str
    max_tokens: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A named load. `concurrency` None is an open loop of `duration_s`, else a closed loop of `count` requests."""

    name: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = None
    count: int = 0
    duration_s: float = 0.0
    rate: float = 0.0
    long_rate: float = 0.0
    long_prompt_tokens: int = 3000
    long_output_tokens: int = 16

    def describe(self) -> str:
        shape = f"{self.prompt_tokens} in / {self.output_tokens} out"
        if self.concurrency is not None:
            how = "one at a time" if self.concurrency == 1 else f"{self.concurrency} at a time"
            return f"{shape}, {self.count} requests, {how}"
        text = f"{shape}, Poisson {self.rate:g}/s for {self.duration_s:g} s"
        if self.long_rate:
            text += f"; every {1 / self.long_rate:g} s {self.long_prompt_tokens} in / {self.long_output_tokens} out"
        return text


@dataclass(frozen=True, slots=True)
class Writer:
    """Makes prompts. `per_byte`: the tracer's tokenizer, one token per byte; else one token per word."""

    per_byte: bool = False

    def prompt(self, rng: random.Random, tokens: int) -> str:
        """A random text of `tokens` tokens."""
        if self.per_byte:
            return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=tokens))
        return "".join(f" {word}" for word in rng.choices(WORDS, k=tokens))


def draw(workload: Workload, seed: int, repetition: int, writer: Writer) -> list[Ask]:
    """All requests, in order of arrival. Arrival times depend on the seed alone, prompts on the repetition as well."""
    texts = random.Random(f"{workload.name}/{seed}/{repetition}/text")
    if workload.concurrency is not None:
        prompts = [writer.prompt(texts, workload.prompt_tokens) for _ in range(workload.count)]
        return [Ask("chat", prompt, workload.output_tokens) for prompt in prompts]
    chats = poisson(workload.rate, workload.duration_s, random.Random(f"{workload.name}/{seed}/chats"))
    longs = evenly(workload.long_rate, workload.duration_s)
    asks = [Ask("chat", writer.prompt(texts, workload.prompt_tokens), workload.output_tokens, at) for at in chats]
    long_texts = random.Random(f"{workload.name}/{seed}/{repetition}/long")
    for at in longs:
        prompt = writer.prompt(long_texts, workload.long_prompt_tokens)
        asks.append(Ask("long", prompt, workload.long_output_tokens, at))
    return sorted(asks, key=lambda ask: ask.at)


def poisson(rate: float, duration_s: float, rng: random.Random) -> list[float]:
    """Arrival times in [0, duration_s) at `rate` per second."""
    times: list[float] = []
    at = 0.0
    while rate > 0 and (at := at + rng.expovariate(rate)) < duration_s:
        times.append(at)
    return times


def evenly(rate: float, duration_s: float) -> list[float]:
    """Evenly spaced times, the first half a period in."""
    return [] if rate <= 0 else [(i + 0.5) / rate for i in range(int(duration_s * rate + 0.5))]


@dataclass(frozen=True, slots=True)
class Profile:
    """How much is run. Each seed is run `rounds` times on each set-up, in turn."""

    name: str
    seeds: Sequence[int]
    rounds: int
    workloads: Sequence[Workload]
    overhead_requests: int


def profile(name: str) -> Profile:
    """`quick` (2 minutes), `default` (10), `full`. Raises KeyError."""
    sizes = {  # seeds, rounds, single, concurrent, at a time, interference seconds, long per second, router requests
        "quick": ((1,), 1, 1, 4, 4, 12.0, 1 / 12, 150),
        "default": ((1,), 2, 3, 16, 8, 60.0, 0.05, 500),
        "full": ((1, 2, 3), 2, 6, 32, 8, 120.0, 0.05, 2000),
    }
    seeds, rounds, single, count, concurrency, seconds, long_rate, overhead = sizes[name]
    workloads = (
        Workload("single stream", 32, 128, concurrency=1, count=single),
        Workload("concurrent", 512, 64, concurrency=concurrency, count=count),
        Workload("interference", 128, 128, duration_s=seconds, rate=0.5, long_rate=long_rate),
    )
    return Profile(name, seeds, rounds, workloads, overhead)
