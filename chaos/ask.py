"""What clients of a chaos run ask: seeded, mixed, and with an answer that is known beforehand (chaos/reference.py)."""

import json
import random
from dataclasses import dataclass, replace
from typing import Literal

from cluster.stubs.inference_pb2 import GenerateRequest, TokenIds

Api = Literal["http", "grpc"]
SCHEMA = (
    '{"type":"object","properties":{"name":{"enum":["mill","wheel","sluice"]},'
    '"rows":{"type":"array","items":{"type":"integer","minimum":0,"maximum":99},"maxItems":4},'
    '"open":{"type":"boolean"}},"required":["name","rows","open"],"additionalProperties":false}'
)
REGEXES = ("[a-f ]{10,60}(xy|z)", "([0-9]{2}-){1,20}")


@dataclass(frozen=True, slots=True)
class Rules:
    """What earlier tokens have to say about a draw; by default nothing. At most one of the grammars."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    json_schema: str = ""
    regex: str = ""

    @property
    def grammar(self) -> bool:
        return bool(self.json_schema or self.regex)

    def numbers(self) -> dict[str, float | int]:
        """Those that both APIs call by the same name."""
        return {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_p": self.min_p,
            "min_tokens": self.min_tokens,
        }

    def fields(self) -> dict[str, object]:
        """As fields of a JSON body."""
        fields: dict[str, object] = {**self.numbers(), "logit_bias": {str(t): bias for t, bias in self.logit_bias}}
        if self.json_schema:
            schema = {"name": "answer", "schema": json.loads(self.json_schema)}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.regex:
            fields["guided_regex"] = self.regex
        return fields

    def put_into(self, message: GenerateRequest) -> None:
        """The same over gRPC."""
        for name, value in self.numbers().items():
            setattr(message, name, value)
        message.logit_bias.update(dict(self.logit_bias))
        if self.json_schema:
            message.json_schema = self.json_schema
        if self.regex:
            message.regex = self.regex


NO_RULES = Rules()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; hashable, because its answer does not depend on who asks it, how, or when.

    `logprobs`: of every token, and so many likely ones beside it; None: none.
    `more`: further prompts of the same call, over HTTP alone. Choice p * n + s is sample s of prompt p.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = True
    rules: Rules = NO_RULES
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    more: tuple[tuple[int, ...], ...] = ()

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return (self.prompt, *self.more)

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)

    def body(self, model: str, *, stream: bool) -> dict[str, object]:
        """The JSON body of POST /v1/completions."""
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        return {
            "model": model,
            "prompt": [list(prompt) for prompt in self.prompts] if self.more else list(self.prompt),
            "max_tokens": self.max_tokens,
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "stream": stream,
            **usage,
            **({} if self.logprobs is None else {"logprobs": self.logprobs}),
            **({"stop": list(self.stop)} if self.stop else {}),
            **({} if self.rules == NO_RULES else self.rules.fields()),
        }

    def message(self, model: str) -> GenerateRequest:
        """The same over gRPC."""
        message = GenerateRequest(
            model=model,
            token_ids=TokenIds(ids=self.prompt),
            max_tokens=self.max_tokens,
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            stop=self.stop,
        )
        if self.rules != NO_RULES:
            self.rules.put_into(message)
        return message


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client asks: over which API, whether it leaves after so many seconds, whether it is in a hurry."""

    api: Api
    stream: bool
    leaves_after_s: float | None = None
    deadline_s: float | None = None  # shorter than the cluster's own; gRPC clients only


@dataclass(frozen=True, slots=True)
class Appetite:
    """Bounds of what is asked. `vocab`: ids below it are asked for; `prefixes`: prompts that many others begin with.

    `rules`: the share of requests that are drawn under rules; `batches`: of those that have several prompts.
    `stops`: what some of them end at; each is met after a few dozen tokens, and lies across several.
    """

    vocab: int
    max_prompt: int
    max_tokens: int
    prefixes: tuple[tuple[int, ...], ...]
    rules: float = 0.0
    batches: float = 0.0
    stops: tuple[tuple[str, ...], ...] = ()

    @staticmethod
    def of(vocab: int, block_size: int, max_prompt: int, max_tokens: int) -> "Appetite":
        rng = random.Random("prefixes")
        lengths = [n for n in (block_size - 1, 3 * block_size, 7 * block_size + 5) if n < max_prompt]
        return Appetite(vocab, max_prompt, max_tokens, tuple(tuple(_ids(rng, vocab, n)) for n in lengths))


def random_ask(rng: random.Random, appetite: Appetite) -> Ask:
    """Greedy or seeded, one or two answers, half of the prompts with a beginning that others share."""
    ask = Ask(
        _prompt(rng, appetite),
        max_tokens=rng.choice([1, 2, rng.randrange(1, appetite.max_tokens), rng.randrange(1, appetite.max_tokens)]),
        n=rng.choice([1, 1, 1, 2]),
        ignore_eos=rng.random() < 0.7,
    )
    if rng.random() < 0.5:
        ask = replace(ask, temperature=rng.choice([0.3, 0.8, 1.5]), top_p=rng.choice([1.0, 0.9]))
        ask = replace(ask, top_k=rng.choice([0, 20]), seed=rng.getrandbits(63))
    if rng.random() < appetite.rules:
        ask = _under_rules(rng, ask, appetite)
    if appetite.stops and not ask.rules.grammar and rng.random() < 0.2:
        ask = replace(ask, stop=rng.choice(appetite.stops))
    if rng.random() < 0.2:
        ask = replace(ask, logprobs=rng.randrange(4))
    if rng.random() < appetite.batches:
        ask = replace(ask, more=tuple(_prompt(rng, appetite) for _ in range(rng.randrange(1, 3))))
    return ask


def random_manner(rng: random.Random, cancels: float, ask: Ask) -> Manner:
    """`cancels`: the share of clients that leave before the end."""
    api: Api = "http" if ask.more else rng.choice(["http", "http", "grpc"])
    stream = api == "grpc" or rng.random() < 0.75
    leaves = rng.random() * 0.8 if rng.random() < cancels else None
    hurry = rng.uniform(0.1, 3.0) if api == "grpc" and rng.random() < 0.1 else None
    return Manner(api, stream, leaves, hurry)


def _under_rules(rng: random.Random, ask: Ask, appetite: Appetite) -> Ask:
    """Some of all rules there are; half of the time a grammar, whose end is the end."""
    rules = NO_RULES
    if rng.random() < 0.6:
        penalties = rng.choice([0.0, 0.6, -1.0]), rng.choice([0.0, 1.5]), rng.choice([1.3, 2.0])
        rules = Rules(*penalties)
    if rng.random() < 0.3:
        biased = rng.sample(range(appetite.vocab), 4)
        rules = replace(rules, logit_bias=tuple((token, rng.choice([-100.0, -2.0, 4.0])) for token in biased))
    if rng.random() < 0.3:
        rules = replace(rules, min_p=0.05)
    if rng.random() < 0.3:
        rules = replace(rules, min_tokens=rng.randrange(1, ask.max_tokens + 1))
    if rng.random() < 0.5:
        regex = rng.choice(["", *REGEXES])
        rules = replace(rules, json_schema="" if regex else SCHEMA, regex=regex)
    return replace(ask, rules=rules, ignore_eos=ask.ignore_eos and not rules.grammar)


def _prompt(rng: random.Random, appetite: Appetite) -> tuple[int, ...]:
    prefix = rng.choice(appetite.prefixes) if appetite.prefixes and rng.random() < 0.5 else ()
    own = rng.randrange(1, appetite.max_prompt - len(prefix) + 1)
    return (*prefix, *_ids(rng, appetite.vocab, own))


def _ids(rng: random.Random, vocab: int, count: int) -> list[int]:
    return rng.choices(range(vocab), k=count)
