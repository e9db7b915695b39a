"""Penalties, bias, min_tokens and grammars on every path: the tokens of one process that folds all history (I5).

The judge folds prompt and tokens anew for each draw. What a sample was, nobody tells: every path has to find it out
from the history that it was given (FAULTS C18).
"""

import json
from functools import lru_cache

import pytest

from cluster.core.grammar import GrammarMatcher
from cluster.stubs.common_pb2 import Grammar, Sampling
from cluster.stubs.session_pb2 import SampleState
from engine.asked import rules_of, spec_of
from engine.model.tracer import reference_tokens
from simulation.vocabulary import tracer_vocabulary_of
from tests.fakes.world import World
from tests.unit.workers.test_tracer_matrix import SPEC, B, config, prompt

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["x", "yy", "zzz"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "size", "tags"],
    "additionalProperties": False,
}
EOS = SPEC.vocab_size - 1
HOW = {
    "penalties": Sampling(
        temperature=0.9, top_p=0.95, seed=7, logprobs=-1, presence_penalty=1.5, frequency_penalty=0.5,
        repetition_penalty=1.3, min_p=0.02, min_tokens=5, logit_bias={3: 4.0, 900: -100.0},
    ),
    "greedy": Sampling(top_p=1.0, logprobs=-1, repetition_penalty=2.0, frequency_penalty=2.0),
    "schema": Sampling(
        temperature=1.0, top_p=1.0, seed=5, logprobs=-1, presence_penalty=0.5, frequency_penalty=0.7,
        grammar=Grammar(kind="json_schema", source=json.dumps(SCHEMA)),
    ),
    "regex": Sampling(top_p=1.0, logprobs=-1, grammar=Grammar(kind="regex", source="[a-f]{30}(xy|z)")),
}  # fmt: skip


@lru_cache(maxsize=64)
def _right(how: str, ids: tuple[int, ...], count: int, index: int) -> tuple[int, ...]:
    sampling = HOW[how]
    rules = rules_of(sampling, len(ids), [])
    assert rules is not None

    def start() -> GrammarMatcher:
        return tracer_vocabulary_of(SPEC.vocab_size).compile(sampling.grammar.kind, sampling.grammar.source)

    grammar = start if rules.grammar else None
    return tuple(reference_tokens(list(ids), count, SPEC, spec_of(sampling, index), rules=rules, grammar=grammar))


def right(how: str, ids: list[int], count: int = 60, index: int = 0) -> list[int]:
    return list(_right(how, tuple(ids), count, index))


def check_text(how: str, tokens: list[int]) -> None:
    """What a grammar promises, judged by others than the grammar's own library."""
    text = b"".join(bytes((t,)) if t < 256 else b"<%d>" % t for t in tokens if t != EOS).decode()
    if how == "schema":
        value = json.loads(text)
        assert list(value) == ["kind", "size", "tags"]
        assert value["kind"] in ("x", "yy", "zzz")
        assert 0 <= value["size"] <= 99
        assert len(value["tags"]) <= 3
    if how == "regex":
        assert len(text.rstrip("xyz")) == 30


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("length", [1, B, 4 * B + 1])
@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_split_and_local(split: bool, length: int, how: str) -> None:
    world = World(config(chunk_tokens=16), seed=length)
    ids = prompt(length)
    attempt = world.submit(ids, 60, prefill=None if split else [], sampling=HOW[how])
    world.run(check=True)
    answer = world.answers[attempt]
    assert answer.tokens[0] == right(how, ids)
    assert answer.prefill_on == (["prefill-0"] if split else ["local"])
    if answer.ends == {0: "eos"}:
        check_text(how, answer.tokens[0])
    world.tick(6)
    world.assert_quiet()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_samples_of_one_prompt_each_have_their_own_state(split: bool, how: str) -> None:
    world = World(config())
    ids = prompt(2 * B + 3)
    attempt = world.submit(ids, 60, n=3, prefill=None if split else [], sampling=HOW[how])
    world.run(check=True)
    tokens = world.answers[attempt].tokens
    assert {i: tokens[i] for i in range(3)} == {i: right(how, ids, index=i) for i in range(3)}
    world.tick(6)
    world.assert_quiet()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_grammar_and_penalties_go_on_from_history(split: bool, n: int, how: str) -> None:
    """A failover, a pre-emption, a hand-off all start from a history that was cut somewhere."""
    world = World(config(), seed=n)
    ids = prompt(B + 5)
    whole = [right(how, ids, index=i) for i in range(n)]
    for emitted in {1, 2, 9, min(len(whole[0]), 60) - 1}:
        histories = [SampleState(emitted=whole[i][: emitted if i == 0 else 0]) for i in range(n)]
        attempt = world.submit(ids, 60, prefill=None if split else [], sampling=HOW[how], histories=histories)
        world.run()
        answer = world.answers[attempt]
        assert [list(h.emitted) + answer.tokens[i] for i, h in enumerate(histories)] == whole, emitted
    world.tick(6)
    world.assert_quiet()


@pytest.mark.parametrize("how", ["penalties", "schema"])
def test_the_first_token_came_and_the_prefill_worker_died(how: str) -> None:
    """The first token is history; decode computes the rest of the prompt and swallows that token exactly once."""
    world = World(config(chunk_tokens=16))
    ids = prompt(4 * B)
    attempt = world.submit(ids, 60, sampling=HOW[how])
    while not world.answers[attempt].tokens[0]:
        assert world.step()
    world.kill_prefill("prefill-0")
    world.run()
    assert world.answers[attempt].tokens[0] == right(how, ids)


def test_one_grammar_that_cannot_be_built_ends_its_request_alone() -> None:
    world = World(config())
    broken = Sampling(top_p=1.0, logprobs=-1, grammar=Grammar(kind="regex", source="("))
    ids = prompt(B)
    bad = [world.submit(ids, 60, sampling=broken), world.submit(ids, 60, prefill=[], sampling=broken)]
    good = world.submit(ids, 60, sampling=HOW["schema"])
    world.run(check=True)
    for attempt in bad:
        assert "invalid regex" in world.answers[attempt].lost
        assert not world.answers[attempt].tokens
    assert world.answers[good].tokens[0] == right("schema", ids)
    world.tick(6)
    world.assert_quiet()
