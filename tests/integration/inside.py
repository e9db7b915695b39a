"""Inside the cluster: internal streams to real workers, as somebody who knows the secret."""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from cluster.core.config import ClusterConfig
from cluster.credentials import Credentials
from cluster.rpc import channel, check_answer, proof_metadata
from cluster.stubs.common_pb2 import Sampling
from cluster.stubs.link_pb2_grpc import LinkStub
from cluster.stubs.session_pb2 import FromDecode, SampleState, Submit
from cluster.stubs.session_pb2_grpc import SessionStub
from engine.model.tracer import reference_tokens
from tests.integration.asks import EOS, Ask, End, ask_http
from tests.integration.stack import BLOCK, SPEC, Stack, config

PROMPT = [(7 * i + 3) % EOS for i in range(5 * BLOCK + 3)]
COUNT = 4
RIGHT = reference_tokens(PROMPT, COUNT, SPEC, stop_at_eos=False)
WITHIN_S = 10.0

attempts = (f"attempt-{number}" for number in itertools.count())


def small_cluster() -> ClusterConfig:
    """One worker of each kind, without patience, that gives every liar its chance."""
    handoff = {"slots": 8, "slot_bytes": 8192, "offer_timeout_s": 0.3, "breaker_failures": 0}
    return config(prefill=1, decode=1, step_s=0.0, handoff=handoff, timing={"resume_s": 0.3})


async def assert_unhurt(running: Stack, pids: dict[str, tuple[int, ...]]) -> None:
    """The same processes, nothing in use, and a normal request over both workers is right."""
    outcome = await ask_http(running, Ask(tuple(range(100)), 3))
    assert outcome.end is End.OK, outcome
    await running.quiet()
    assert running.pids() == pids


def credentials(running: Stack) -> Credentials:
    return Credentials(Path(running.cluster.config.secret_file or "").read_text().strip())


class InsideCall:
    """A call whose messages are read one by one, those that travelled together too. All else is the call's own."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._waiting: deque[Any] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def read(self) -> Any:
        if not self._waiting:
            message = await self._call.read()
            self._waiting.extend(getattr(message, "batch", None) or (message,))
        return self._waiting.popleft()


@contextlib.asynccontextmanager
async def stream(running: Stack, worker: str, service_name: str) -> AsyncIterator[Any]:
    """An internal bidirectional stream to a worker, as somebody who knows the secret."""
    address = running.cluster.ready(worker).address
    async with channel(address) as connection:
        stub = {"Session": SessionStub, "Link": LinkStub}[service_name](connection)
        proof = credentials(running).proof(address)
        call = stub.Open(metadata=proof_metadata(proof))
        await check_answer(call, proof)
        yield InsideCall(call)
        call.cancel()


async def hear(call: Any, kinds: set[str]) -> Any:
    """The next message of one of these kinds."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            message = await call.read()
            assert hasattr(message, "WhichOneof"), f"the stream has ended: {await call.details()}"
            if message.WhichOneof("message") in kinds:
                return message


def submit(**changes: Any) -> Submit:
    fields: dict[str, Any] = {
        "attempt": next(attempts),
        "prompt": PROMPT,
        "samples": [SampleState()],
        "max_tokens": COUNT,
        "sampling": Sampling(top_p=1.0, logprobs=-1),
        "ignore_eos": True,
        "deadline_s": 60.0,
        **changes,
    }
    return Submit(**fields)


async def answer(call: Any, attempt: str) -> list[int]:
    """Every token of an attempt, up to its end."""
    tokens: list[int] = []
    while True:
        message: FromDecode = await hear(call, {"tokens", "refused", "failed", "no_prefill", "preempted"})
        assert message.HasField("tokens"), message
        for run in message.tokens.runs:
            if run.attempt == attempt:
                tokens += run.ids
                if run.end:
                    return tokens
