"""Requests with known answers: the tracer's reference judges every token, wherever and however it was written."""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property, lru_cache
from typing import Any

import grpc
import grpc.aio

from cluster.rpc import channel
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub
from engine.messages import SampleSpec
from engine.model.tracer import reference_tokens
from router.front.stops import StopStrings
from router.front.text import SampleText, TextRules
from router.front.tokenizer import TracerTokenizer
from tests.integration.stack import BLOCK, MODEL, SPEC, HttpAnswer, Stack, connect, post_bytes

EOS = SPEC.vocab_size - 1
PATH = "/v1/completions"


class End(Enum):
    """How a request ended, for its client."""

    OK = auto()
    ERROR = auto()
    LEFT = auto()  # the client left before the end


@dataclass(frozen=True, slots=True)
class Outcome:
    """`error`: what the client was told; `attempts`: how many tries a success took."""

    end: End
    error: str = ""
    attempts: int = 0


@dataclass(frozen=True)
class Ask:
    """One request. `api` is "http" or "grpc"."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = True
    stream: bool = True
    api: str = "http"

    @cached_property
    def right(self) -> list[tuple[list[int], str]]:
        """Per sample: the tokens and why they end."""
        return [self._right(index) for index in range(self.n)]

    def _right(self, index: int) -> tuple[list[int], str]:
        spec = SampleSpec(index, self.seed, self.temperature, self.top_p, self.top_k, -1)
        tokens = reference_tokens(list(self.prompt), self.max_tokens, SPEC, spec, stop_at_eos=not self.ignore_eos)
        for at, token in enumerate(tokens):
            if token in self.stop_token_ids or (token == EOS and not self.ignore_eos):
                return tokens[: at + 1], "stop"
        return tokens, "length"

    def texts(self) -> list[str]:
        """Per sample: the text those tokens are."""
        ends = frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else {EOS})
        rules = TextRules(TracerTokenizer(), ends, self.max_tokens, StopStrings(()), fresh=False)
        return [SampleText(i, rules).feed(tokens).text for i, (tokens, _) in enumerate(self.right)]

    def body(self) -> dict[str, Any]:
        return {
            "model": MODEL, "prompt": list(self.prompt), "max_tokens": self.max_tokens, "n": self.n,
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": self.seed,
            "stop_token_ids": list(self.stop_token_ids), "ignore_eos": self.ignore_eos, "stream": self.stream,
            **({"stream_options": {"include_usage": True}} if self.stream else {}),
        }  # fmt: skip

    def message(self) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            model=MODEL, token_ids=pb.TokenIds(ids=self.prompt), max_tokens=self.max_tokens, n=self.n,
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed,
            stop_token_ids=self.stop_token_ids, ignore_eos=self.ignore_eos,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Leave:
    """Where a client disconnects: after part of its own request, of the answer, or after a time."""

    request_share: float | None = None
    answer_bytes: int | None = None  # gRPC: messages
    seconds: float | None = None


async def ask_http(
    stack: Stack, ask: Ask, leave: Leave | None = None, *, started: Callable[[], None] = lambda: None
) -> Outcome:
    """Send it, read the answer, judge it. Raises AssertionError for a wrong token or a dishonest end.

    `started` is called when the answer begins.
    """
    raw = post_bytes(PATH, json.dumps(ask.body()).encode(), **stack.headers)
    async with connect(stack.url) as connection:
        if leave is None:
            await connection.send(raw)
            await connection.receive(1)
            started()
            return judge_http(ask, await connection.answer())
        share = 1.0 if leave.request_share is None else leave.request_share
        await connection.send(raw[: int(len(raw) * share)])
        if share < 1:
            return Outcome(End.LEFT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(connection.receive(leave.answer_bytes), leave.seconds)
        connection.leave()
    return Outcome(End.LEFT)


def judge_http(ask: Ask, answer: HttpAnswer) -> Outcome:
    assert answer.status, "the connection ended without an answer"
    if answer.status != 200:
        assert answer.whole, answer
        assert answer.status >= 429, answer
        error = answer.json["error"]
        assert error["message"], answer
        assert error["type"], answer
        return Outcome(End.ERROR, f"{answer.status} {error['code']}: {error['message']}")
    return _judge_stream(ask, answer) if ask.stream else _judge_whole(ask, answer)


def _judge_whole(ask: Ask, answer: HttpAnswer) -> Outcome:
    assert answer.whole, "a 200 that is cut short"
    said = answer.json
    choices = sorted(said["choices"], key=lambda choice: choice["index"])
    assert [choice["text"] for choice in choices] == ask.texts(), ask
    assert [choice["finish_reason"] for choice in choices] == [reason for _, reason in ask.right], ask
    _judge_usage(ask, said["usage"])
    return Outcome(End.OK, attempts=int(answer.headers["x-headrace-attempts"]))


def _judge_stream(ask: Ask, answer: HttpAnswer) -> Outcome:
    events = answer.events()
    done = bool(events) and events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    texts, reasons = [""] * ask.n, [""] * ask.n
    for choice in (choice for chunk in chunks for choice in chunk.get("choices", ())):
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    if not done:
        assert [chunk for chunk in chunks[-1:] if "error" in chunk], f"a stream that ends without a word: {answer}"
        assert len(errors) == 1, answer
        assert not answer.whole, "an error event must not be followed by an orderly end"
        for text, right in zip(texts, ask.texts(), strict=True):
            assert right.startswith(text), (ask, text)
        return Outcome(End.ERROR, f"after headers: {errors[0]['message']}")
    assert answer.whole, answer
    assert not errors, answer
    assert texts == ask.texts(), ask
    assert reasons == [reason for _, reason in ask.right], ask
    _judge_usage(ask, chunks[-1]["usage"])
    return Outcome(End.OK)


def _judge_usage(ask: Ask, usage: dict[str, Any]) -> None:
    assert usage["prompt_tokens"] == len(ask.prompt)
    assert usage["completion_tokens"] == sum(len(tokens) for tokens, _ in ask.right), (ask, usage)
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= len(ask.prompt)


class GrpcClient:
    """The public gRPC API. Use within one event loop, as a context manager."""

    def __init__(self, stack: Stack, address: str | None = None) -> None:
        """`address`: of another router than the first."""
        self._channel = channel(address or stack.cluster.grpc_address)
        self._stub = InferenceStub(self._channel)

    async def __aenter__(self) -> "GrpcClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def ask(
        self,
        ask: Ask,
        leave: Leave | None = None,
        *,
        timeout_s: float | None = None,
        started: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Send it, read the answer, judge it; see `ask_http`."""
        call = self._stub.Generate(ask.message(), timeout=timeout_s)
        tokens: list[list[int]] = [[] for _ in range(ask.n)]
        reasons = [""] * ask.n
        summary: pb.Summary | None = None
        error: grpc.aio.AioRpcError | None = None

        async def read() -> None:
            nonlocal summary
            seen = 0
            async for response in call:
                started()
                kind = response.WhichOneof("event")
                if kind == "delta":
                    tokens[response.delta.index] += response.delta.token_ids
                elif kind == "finish":
                    reasons[response.finish.index] = response.finish.reason
                else:
                    summary = response.summary
                seen += 1
                if leave is not None and leave.answer_bytes is not None and seen >= leave.answer_bytes:
                    return

        try:
            await asyncio.wait_for(read(), None if leave is None else leave.seconds)
        except TimeoutError:
            pass
        except grpc.aio.AioRpcError as failure:
            error = failure
        finally:
            call.cancel()
        self._judge_prefix(ask, tokens)
        if error is not None:
            assert error.code().name in ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "INTERNAL"), error
            assert error.details(), error
            return Outcome(End.ERROR, f"{error.code().name}: {error.details()}")
        if leave is not None:
            return Outcome(End.LEFT)
        assert summary is not None, "OK without a summary"
        assert tokens == [right for right, _ in ask.right], ask
        assert reasons == [reason for _, reason in ask.right], ask
        assert summary.completion_tokens == sum(len(t) for t in tokens)
        return Outcome(End.OK, attempts=summary.attempts)

    def _judge_prefix(self, ask: Ask, tokens: list[list[int]]) -> None:
        for got, (right, _) in zip(tokens, ask.right, strict=True):
            assert got == right[: len(got)], (ask, got)


@lru_cache(maxsize=1)
def shared_prefixes() -> tuple[tuple[int, ...], ...]:
    """System prompts that many requests begin with."""
    rng = random.Random("prefixes")
    return tuple(tuple(rng.choices(range(EOS), k=length)) for length in (BLOCK - 1, 3 * BLOCK, 8 * BLOCK + 5))


def random_ask(rng: random.Random) -> Ask:
    """Any request that the cluster of `stack.config` must answer."""
    prefix: Iterable[int] = rng.choice(shared_prefixes()) if rng.random() < 0.5 else ()
    prompt = (*prefix, *rng.choices(range(EOS), k=rng.choice([1, BLOCK, rng.randrange(1, 12 * BLOCK)])))
    ask = Ask(
        prompt,
        max_tokens=rng.choice([1, 2, rng.randrange(1, 60), rng.randrange(60, 150)]),
        n=rng.choice([1, 1, 2]),
        ignore_eos=rng.random() < 0.7,
        stream=rng.random() < 0.7,
        api=rng.choice(["http", "http", "grpc"]),
    )
    if rng.random() < 0.5:
        ask = replace(ask, temperature=rng.choice([0.3, 0.8, 1.5]), top_p=rng.choice([1.0, 0.9]))
        ask = replace(ask, top_k=rng.choice([0, 20]), seed=rng.getrandbits(63))
    if rng.random() < 0.3:
        tokens = rng.choice(ask.right)[0]
        ask = replace(ask, stop_token_ids=(rng.choice(tokens), rng.randrange(EOS)))
    return ask


def random_leave(rng: random.Random) -> Leave:
    """Anywhere in a request's life."""
    return rng.choice(
        [
            Leave(request_share=rng.random()),
            Leave(answer_bytes=0),
            Leave(answer_bytes=rng.randrange(1, 30)),
            Leave(answer_bytes=rng.randrange(200, 8000)),
            Leave(seconds=rng.random() * 0.3),
        ]
    )
