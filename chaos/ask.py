"""What clients of a chaos run ask: seeded, mixed, and with an answer that is known beforehand (chaos/reference.py)."""

import random
from dataclasses import dataclass, replace
from typing import Literal

from cluster.stubs.inference_pb2 import GenerateRequest, TokenIds

Api = Literal["http", "grpc"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; hashable, because its answer does not depend on who asks it, how, or when."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = True

    def body(self, model: str, *, stream: bool) -> dict[str, object]:
        """The JSON body of POST /v1/completions."""
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "stream": stream,
            **usage,
        }

    def message(self, model: str) -> GenerateRequest:
        """The same over gRPC."""
        return GenerateRequest(
            model=model,
            token_ids=TokenIds(ids=self.prompt),
            max_tokens=self.max_tokens,
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client asks: over which API, whether it leaves after so many seconds, whether it is in a hurry."""

    api: Api
    stream: bool
    leaves_after_s: float | None = None
    deadline_s: float | None = None  # shorter than the cluster's own; gRPC clients only


@dataclass(frozen=True, slots=True)
class Appetite:
    """Bounds of what is asked. `vocab`: ids below it are asked for; `prefixes`: prompts that many others begin with."""

    vocab: int
    max_prompt: int
    max_tokens: int
    prefixes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(vocab: int, block_size: int, max_prompt: int, max_tokens: int) -> "Appetite":
        rng = random.Random("prefixes")
        lengths = [n for n in (block_size - 1, 3 * block_size, 7 * block_size + 5) if n < max_prompt]
        return Appetite(vocab, max_prompt, max_tokens, tuple(tuple(_ids(rng, vocab, n)) for n in lengths))


def random_ask(rng: random.Random, appetite: Appetite) -> Ask:
    """Greedy or seeded, one or two answers, half of the prompts with a beginning that others share."""
    prefix = rng.choice(appetite.prefixes) if appetite.prefixes and rng.random() < 0.5 else ()
    own = rng.randrange(1, appetite.max_prompt - len(prefix) + 1)
    ask = Ask(
        (*prefix, *_ids(rng, appetite.vocab, own)),
        max_tokens=rng.choice([1, 2, rng.randrange(1, appetite.max_tokens), rng.randrange(1, appetite.max_tokens)]),
        n=rng.choice([1, 1, 1, 2]),
        ignore_eos=rng.random() < 0.7,
    )
    if rng.random() < 0.5:
        ask = replace(ask, temperature=rng.choice([0.3, 0.8, 1.5]), top_p=rng.choice([1.0, 0.9]))
        ask = replace(ask, top_k=rng.choice([0, 20]), seed=rng.getrandbits(63))
    return ask


def random_manner(rng: random.Random, cancels: float) -> Manner:
    """`cancels`: the share of clients that leave before the end."""
    api: Api = rng.choice(["http", "http", "grpc"])
    stream = api == "grpc" or rng.random() < 0.75
    leaves = rng.random() * 0.8 if rng.random() < cancels else None
    hurry = rng.uniform(0.1, 3.0) if api == "grpc" and rng.random() < 0.1 else None
    return Manner(api, stream, leaves, hurry)


def _ids(rng: random.Random, vocab: int, count: int) -> list[int]:
    return rng.choices(range(vocab), k=count)
