"""The default model in float32 through real programs: split, local and after a prefix hit, judged by transformers.

`make test` asks the quick prompts; `make verify` asks all thirty, and reports (without a verdict) how bfloat16 does.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from cluster.core.config import ClusterConfig
from cluster.models.pull import pull
from cluster.models.registry import DEFAULT_MODEL
from cluster.models.store import default_cache
from cluster.rpc import channel
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub
from engine.messages import SampleSpec
from tests.checkpoints import reference_logits, reference_model
from tests.integration.stack import Stack, stack
from tests.parity.judge import GREEDY, Ledger
from tests.parity.prompts import LONG_TOKENS, PROMPTS, QUICK, Prompt
from tests.verify_record import Report

if TYPE_CHECKING:
    from cluster.stubs.inference_pb2_grpc import InferenceAsyncStub

TOGETHER = 4  # requests in flight
PATIENCE_S = 300.0  # of one request, beside whatever else this machine does
SPLITS = "least_loaded"  # never leaves a prompt to decode because that would be quicker
BLOCK = 16
SCORED = 3  # of the prompts every so many-th is asked for its own log-probabilities as well
LIKELY = 2  # tokens named beside each of a prompt's own
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, the ids that transformers' tokenizer makes of it, and how to draw."""

    prompt: Prompt
    ids: list[int]
    spec: SampleSpec


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    summary: pb.Summary
    prompt: list[pb.PromptToken]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Every case twice; and again some of them, with the log-probabilities of their prompts' tokens."""

    answers: list[list[Answer]]
    scored: list[Answer]


@pytest.fixture(scope="module")
def folder() -> Path:
    return pull(DEFAULT_MODEL, default_cache())


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    torch.set_num_threads(2)
    return reference_model(folder)


def _cases(folder: Path, prompts: Sequence[Prompt]) -> list[Case]:
    """Every third one is drawn at random, by a seed of its own."""
    tokenizer, cases = AutoTokenizer.from_pretrained(folder), []
    for number, prompt in enumerate(prompts):
        if prompt.chat:
            ids = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=True)
        else:
            ids = tokenizer(prompt.text)
        seeded = SampleSpec(index=0, seed=1000 + number, temperature=0.8, top_p=0.95, top_k=0, logprobs=-1)
        cases.append(Case(prompt, list(ids["input_ids"]), seeded if number % 3 == 2 else GREEDY))
    return cases


def _config(folder: Path, dtype: str, *, split: bool) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": str(folder),
            "engine": {"dtype": dtype, "block_size": BLOCK, "pool_tokens": 8192, "poison": True},
            "pools": {"prefill": {"replicas": int(split)}, "decode": {"replicas": 1}},
            # 0: every prompt goes to the prefill worker, however little of it is missing
            "router": {
                "http_port": 0,
                "grpc_port": 0,
                "local_max_tokens": 0,
                "policy": SPLITS,
                "deadline_s": PATIENCE_S,
            },
        }
    )


async def _ask(stub: "InferenceAsyncStub", case: Case, max_tokens: int, likely: int | None) -> Answer:
    spec, prompt = case.spec, case.prompt
    request = pb.GenerateRequest(
        max_tokens=max_tokens, temperature=spec.temperature, top_p=spec.top_p, top_k=spec.top_k, seed=spec.seed
    )
    if prompt.chat:
        request.chat.messages.extend(pb.ChatMessage(**message) for message in prompt.messages)
    else:
        request.prompt = prompt.text
    if likely is not None:
        request.prompt_logprobs = likely
    tokens: list[int] = []
    prompt_tokens: list[pb.PromptToken] = []
    summary = pb.Summary()
    async for event in stub.Generate(request, timeout=PATIENCE_S):
        tokens += event.delta.token_ids
        prompt_tokens += event.prompt.tokens
        if event.HasField("summary"):
            summary = event.summary
    assert summary.prompt_tokens == len(case.ids)
    assert summary.completion_tokens == len(tokens) <= max_tokens
    assert tokens or not max_tokens
    return Answer(tokens, summary, prompt_tokens)


async def _ask_all(running: Stack, cases: Sequence[Case], max_tokens: int, likely: int | None = None) -> list[Answer]:
    """Every case once, TOGETHER at a time; nothing is in use afterwards."""
    answers: dict[int, Answer] = {}
    waiting = iter(range(len(cases)))
    async with channel(running.cluster.grpc_address) as connection:
        stub = InferenceStub(connection)

        async def work() -> None:
            for number in waiting:
                answers[number] = await _ask(stub, cases[number], max_tokens, likely)

        async with asyncio.TaskGroup() as group:
            for _ in range(TOGETHER):
                group.create_task(work())
    await running.quiet(10.0)
    return [answers[number] for number in range(len(cases))]


def _run(config: ClusterConfig, folder: Path, cases: Sequence[Case], max_tokens: int) -> Rounds:
    """Two rounds through one cluster: the second finds every prompt's full blocks in the decode worker's cache."""
    with stack(config, folder) as running:
        rounds = [asyncio.run(_ask_all(running, cases, max_tokens)) for _ in range(2)]
        scored = asyncio.run(_ask_all(running, cases[::SCORED], 0, LIKELY))
        counters = asyncio.run(running.counters())
        assert not counters.get("prefix_hit_corrupt"), counters
        assert not counters.get("digest_mismatch"), counters
        return Rounds(rounds, scored)


def _check_scored(case: Case, answer: Answer, reference: PreTrainedModel, *, split: bool) -> None:
    """Every token of the prompt, without any help of the cache, as transformers has it."""
    assert [token.token_id for token in answer.prompt] == case.ids
    assert answer.summary.cached_tokens == 0
    assert answer.summary.prefill_worker == ("prefill-0" if split else "local")
    expected = torch.log_softmax(reference_logits(reference, case.ids).float(), dim=-1)
    assert not answer.prompt[0].HasField("logprob")
    for at, token in enumerate(answer.prompt[1:]):
        assert abs(token.logprob - float(expected[at, token.token_id])) < LOGPROB_TOLERANCE
        likeliest = expected[at].topk(LIKELY).values.tolist()
        assert [one.logprob for one in token.top] == pytest.approx(likeliest, abs=LOGPROB_TOLERANCE)
        assert all(abs(one.logprob - float(expected[at, one.token_id])) < LOGPROB_TOLERANCE for one in token.top)
        likelier = expected[at] > expected[at, token.token_id] + LOGPROB_TOLERANCE
        as_likely = (expected[at] - expected[at, token.token_id]).abs() <= LOGPROB_TOLERANCE
        assert likelier.sum() < token.rank <= likelier.sum() + as_likely.sum()


def _check_paths(cases: Sequence[Case], rounds: Sequence[Sequence[Answer]], *, split: bool) -> None:
    """The answers took the paths that this test is about."""
    workers = Counter(answer.summary.prefill_worker for answers in rounds for answer in answers)
    assert workers == {"prefill-0" if split else "local": 2 * len(cases)}
    assert all(answer.summary.attempts == 1 for answers in rounds for answer in answers)
    for case, first, second in zip(cases, *rounds, strict=True):
        hit = (len(case.ids) - 1) // BLOCK * BLOCK
        assert second.summary.cached_tokens == hit, case.prompt.text[:40]
        if split and hit < BLOCK <= len(case.ids):
            assert first.summary.kv_bytes > 0
    if split:
        assert sum(answer.summary.kv_bytes for answer in rounds[0]) > 0


def _check(
    folder: Path, reference: PreTrainedModel, scratch: Path, prompts: Sequence[Prompt], max_tokens: int
) -> Ledger:
    cases = _cases(folder, prompts)
    ledger = Ledger(reference, batch_positions=512)
    for split in (True, False):
        way = "split" if split else "local"
        rounds = _run(_config(folder, "float32", split=split), scratch / way, cases, max_tokens)
        _check_paths(cases, rounds.answers, split=split)
        for case, answer in zip(cases[::SCORED], rounds.scored, strict=True):
            _check_scored(case, answer, reference, split=split)
        for number, answers in enumerate(rounds.answers):
            for case, answer in zip(cases, answers, strict=True):
                path = f"{way}, {'prefix hit' if number else 'first'}, {case.prompt.text[:20]!r}"
                ledger.add(case.ids, case.spec, answer.tokens, path)
    ledger.settle()
    return ledger


def _report(ledger: Ledger, name: str, report: Report) -> None:
    report(f"{name}: {ledger.figures}")
    for text in ledger.figures.findings:
        report(f"  {text}")


def test_quick_prompts(folder: Path, reference: PreTrainedModel, tmp_path: Path, report: Report) -> None:
    ledger = _check(folder, reference, tmp_path, QUICK, max_tokens=12)
    _report(ledger, "smollm2-135m", report)


@pytest.mark.verify
def test_thirty_prompts(folder: Path, reference: PreTrainedModel, tmp_path: Path, report: Report) -> None:
    assert len(PROMPTS) == 30
    assert max(len(case.ids) for case in _cases(folder, PROMPTS)) >= LONG_TOKENS
    ledger = _check(folder, reference, tmp_path, PROMPTS, max_tokens=24)
    _report(ledger, "smollm2-135m, thirty prompts", report)


@pytest.mark.verify
def test_bfloat16_is_reported(folder: Path, reference: PreTrainedModel, tmp_path: Path, report: Report) -> None:
    """No claim of parity in 16 bits: every request must end well, and how close it comes is printed."""
    cases, agreed, total = _cases(folder, PROMPTS), 0, 0
    ledger = Ledger(reference, batch_positions=512)
    outputs: list[list[Answer]] = []
    for split in (True, False):
        rounds = _run(_config(folder, "bfloat16", split=split), tmp_path / f"{split}", cases, max_tokens=24)
        _check_paths(cases, rounds.answers, split=split)
        outputs += rounds.answers
    for case, *answers in zip(cases, *outputs, strict=True):
        for answer in answers:
            ledger.add(case.ids, case.spec, answer.tokens, "bfloat16")
            total += len(answer.tokens)
            agreed += sum(a == b for a, b in zip(answer.tokens, answers[0].tokens, strict=False))
    ledger.judge()
    wrong = ledger.figures.exceptions
    report(
        f"smollm2-135m in bfloat16: {agreed / total:.1%} of {total} tokens as on the first path; of "
        f"{ledger.figures.judged} distinct tokens {1 - wrong / ledger.figures.judged:.1%} are what float32 would write"
    )
