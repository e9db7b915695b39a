"""What simulated clients ask: seeded prompts, and for some of them rules about what may be drawn (engine/rules.py)."""

import random
from dataclasses import replace

from router.requests import Grammar, Request, SamplingParams, worst_blocks
from simulation.scenario import BLOCK, VOCAB, Scenario, Share

DEADLINE_S = 60.0
# Answers have at most 23 tokens: some of these end within them, others are cut.
GRAMMARS = (
    Grammar("json_schema", '{"type":"integer","minimum":0,"maximum":99999}'),
    Grammar("json_schema", '{"type":"object","properties":{"a":{"enum":["x","yy"]},"b":{"type":"boolean"}},'
            '"required":["a","b"],"additionalProperties":false}'),
    Grammar("json_object"),
    Grammar("regex", "[a-f]{4,12}(xy|z)"),
    Grammar("regex", "(ab|ba|[0-9]{3}-){1,9}"),
    Grammar("lark", 'start: "<" WORD (" " WORD)* ">"\nWORD: /[a-z]{2,5}/'),
)  # fmt: skip


class Asks:
    """Draws requests that fit both pools in the worst case, as the front door makes sure of."""

    def __init__(self, rng: random.Random, scenario: Scenario) -> None:
        self._random = rng
        self._scenario = scenario
        self._systems = [self._tokens(rng.randrange(1, 6) * BLOCK) for _ in range(2)]

    def request(self, name: str, share: Share | None = None, deadline_s: float = DEADLINE_S) -> Request:
        """One request of a tenant; `name` is its id."""
        rng, config = self._random, self._scenario.config
        room = min(config.num_blocks("decode"), config.num_blocks("prefill"))
        while True:
            n = rng.choice((1, 1, 1, 2))
            shared = rng.choice(self._systems) if rng.random() < 0.5 else []
            prompt = shared + self._tokens(rng.randrange(1, 40))
            count = rng.randrange(1, 24)
            if worst_blocks(len(prompt), n, count, BLOCK) <= room:
                break
        greedy = rng.random() < 0.5
        sampling = SamplingParams(
            temperature=0.0 if greedy else 0.9, top_p=1.0 if greedy else 0.95, seed=rng.getrandbits(64)
        )
        stops = tuple(rng.sample(range(VOCAB), 8)) if rng.random() < 0.2 else ()
        request = Request(
            name, name, tuple(prompt), count, n, sampling, (), stops,
            ignore_eos=rng.random() < 0.5, deadline_s=deadline_s,
            salt=rng.choice((b"", b"tenant")) if share is None else share.tenant.salt,
            tenant="" if share is None else share.tenant.name,
            priority=0 if share is None else rng.choice((-1, 0, 0, 0, 5)),
        )  # fmt: skip
        if rng.random() < self._scenario.rules:
            request = self._with_rules(request)
        return self._with_scores(request) if rng.random() < self._scenario.scores else request

    def _with_scores(self, request: Request) -> Request:
        """The prompt's log-probabilities as well; of some requests nothing else."""
        if len(request.prompt) < 2:
            return request
        asked = request._replace(prompt_logprobs=self._random.choice((0, 2)))
        only = self._random.random() < 0.25 and request.grammar is None and not request.sampling.min_tokens
        return asked._replace(max_tokens=0) if only else asked

    def _with_rules(self, request: Request) -> Request:
        """Some of all rules there are."""
        rng, how = self._random, request.sampling
        if rng.random() < 0.6:
            how = replace(
                how,
                presence_penalty=rng.choice((0.0, 0.6, -1.0)),
                frequency_penalty=rng.choice((0.0, 1.5)),
                repetition_penalty=rng.choice((1.3, 2.0)),
            )
        if rng.random() < 0.3:
            biased = rng.sample(range(VOCAB), 4)
            how = replace(how, logit_bias=tuple((token, rng.choice((-100.0, -2.0, 4.0))) for token in biased))
        if rng.random() < 0.3:
            how = replace(how, min_p=0.05)
        if rng.random() < 0.3:
            how = replace(how, min_tokens=rng.randrange(1, request.max_tokens + 1))
        if rng.random() < 0.5:  # whose end is the end: ignore_eos contradicts it
            return request._replace(sampling=how, grammar=rng.choice(GRAMMARS), ignore_eos=False)
        return request._replace(sampling=how)

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(VOCAB - 1), k=count)
