"""The internal ports of real workers, abused by strangers, by a lying router and by a lying decode worker (S03).

A stranger gets UNAUTHENTICATED. Who knows the secret can waste a worker's time, but no message ends a process.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.core.ids import new_epoch
from cluster.rpc import channel, proof_metadata
from cluster.stubs.common_pb2 import Blame, Sampling, WorkerAddress, WorkerIdentity
from cluster.stubs.link_pb2 import (
    BlockRef,
    CancelJob,
    FromDecodePeer,
    Job,
    Recheck,
    Taken,
)
from cluster.stubs.session_pb2 import (
    CancelAttempt,
    FromRouter,
    ResumeAttempt,
    RouterHello,
    SampleState,
    StopSeq,
    Submit,
)
from tests.integration.asks import EOS
from tests.integration.inside import (
    PROMPT,
    RIGHT,
    WITHIN_S,
    answer,
    assert_unhurt,
    attempts,
    credentials,
    hear,
    small_cluster,
    stream,
    submit,
)
from tests.integration.stack import Stack, stack

INTERNAL = ("Session", "Link", "Watch")
NAN = float("nan")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(small_cluster(), tmp_path_factory.mktemp("hostile")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
async def unhurt(running: Stack) -> AsyncIterator[None]:
    pids = running.pids()
    yield
    await assert_unhurt(running, pids)


# -- strangers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer guess"),), (("authorization", ""),)])
async def test_without_the_secret_nothing_answers(running: Stack, worker: str, metadata: tuple[Any, ...]) -> None:
    methods = [f"/headrace.v1.{name}/Open" for name in INTERNAL]
    methods += ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/headrace.v1.Session/Other"]
    async with channel(running.cluster.ready(worker).address) as connection:
        for method in methods:
            call = connection.stream_stream(method, None, None)(None, metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), WITHIN_S)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, (method, caught.value)


@pytest.mark.parametrize(("worker", "name"), [("decode-0", "Session"), ("prefill-0", "Link"), ("decode-0", "Watch")])
@pytest.mark.parametrize("garbage", [b"\xff" * 100, b"\x12\xff\xff\xff\xff\x7f", bytes(1_000_000)])
async def test_bytes_that_are_no_message(running: Stack, worker: str, name: str, garbage: bytes) -> None:
    address = running.cluster.ready(worker).address
    async with channel(address) as connection:
        call = connection.stream_stream(f"/headrace.v1.{name}/Open", None, None)(
            None, metadata=proof_metadata(credentials(running).proof(address))
        )
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(garbage)
            await call.done_writing()
        assert await asyncio.wait_for(call.code(), WITHIN_S) is not grpc.StatusCode.OK


@pytest.mark.parametrize(("worker", "name"), [("decode-0", "Session"), ("prefill-0", "Link")])
async def test_a_stream_starts_with_hello(running: Stack, worker: str, name: str) -> None:
    first = FromRouter(submit=Submit(attempt="a")) if name == "Session" else FromDecodePeer(job=Job(attempt="a"))
    async with stream(running, worker, name) as call:
        await call.write(first)
        assert await asyncio.wait_for(call.code(), WITHIN_S) is grpc.StatusCode.INVALID_ARGUMENT


# -- a router that lies -------------------------------------------------------------------------------------------

BAD_SUBMITS: dict[str, dict[str, Any]] = {
    "no id": {"attempt": ""},
    "no prompt": {"prompt": []},
    "token -1": {"prompt": [-1]},
    "token beyond the vocabulary": {"prompt": [EOS + 1]},
    "a million tokens": {"prompt": [1] * 1_000_000},
    "max_tokens -1": {"max_tokens": -1},
    "max_tokens 2**31-1": {"max_tokens": 2**31 - 1},
    "no samples": {"samples": []},
    "100,000 samples": {"samples": [SampleState()] * 100_000},
    "history of nonsense": {"samples": [SampleState(emitted=[-1])]},
    "history of a million": {"samples": [SampleState(emitted=[1] * 1_000_000)]},
    "a stop id that no token has": {"stop_token_ids": [-1]},
    "temperature NaN": {"sampling": Sampling(temperature=NAN, top_p=1.0)},
    "deadline NaN": {"deadline_s": NAN},
    "waited for ever": {"waited_s": float("inf")},
}


async def test_submits_that_nobody_can_serve(running: Stack) -> None:
    async with stream(running, "decode-0", "Session") as call:
        await call.write(FromRouter(hello=RouterHello(epoch=new_epoch(), session=1)))
        for kind, changes in BAD_SUBMITS.items():
            await call.write(FromRouter(submit=submit(**changes)))
            message = await hear(call, {"refused", "failed", "tokens"})
            assert message.refused.permanent, (kind, message)


async def test_odd_submits_are_served(running: Stack) -> None:
    """What is odd but harmless changes no token: prefill workers that cannot be, numbers below 0."""
    addresses = [
        WorkerAddress(worker="", address=""),
        WorkerAddress(worker="x", address="nonsense"),
        WorkerAddress(worker="x" * 10_000, epoch=2**64 - 1, address="256.0.0.1:99999"),
        WorkerAddress(worker="\x00", address="\x00:\x00"),
        WorkerAddress(worker="y", address="unix:///nowhere"),
        WorkerAddress(worker="z", address="127.0.0.1:1"),
    ]
    async with stream(running, "decode-0", "Session") as call:
        await call.write(FromRouter(hello=RouterHello(epoch=new_epoch(), session=1)))
        odd: list[dict[str, Any]] = [
            {"local_max_tokens": -5, "preemptions": -3},
            {"preemptions": 2**31 - 1, "salt": b"x" * 100_000},
            *({"prefill": [address]} for address in addresses),
            {"prefill": addresses * 1000},
        ]
        for changes in odd:
            message = submit(**changes)
            await call.write(FromRouter(submit=message))
            assert await answer(call, message.attempt) == RIGHT, changes


async def test_words_about_nothing(running: Stack) -> None:
    async with stream(running, "decode-0", "Session") as call:
        await call.write(FromRouter(hello=RouterHello(epoch=new_epoch(), session=1)))
        for message in (
            FromRouter(),
            FromRouter(hello=RouterHello(epoch=2, session=2**63 - 1)),
            FromRouter(cancel=CancelAttempt(attempt="nobody")),
            FromRouter(stop_seq=StopSeq(attempt="nobody", index=-1)),
        ):
            await call.write(message)
        good = submit()
        for _ in range(2):  # the second time the id is in use: refused, and the first one goes on
            await call.write(FromRouter(submit=good))
        await call.write(FromRouter(stop_seq=StopSeq(attempt=good.attempt, index=2**31 - 1)))
        tokens: list[int] = []
        refused = False
        while not refused or len(tokens) < len(RIGHT):  # in any order
            message = await hear(call, {"refused", "tokens"})
            refused = refused or message.refused.permanent
            tokens += [token for run in message.tokens.runs for token in run.ids]
        assert tokens == RIGHT
        for _ in range(300):  # and a router that goes away with everything open
            await call.write(FromRouter(submit=submit(max_tokens=100)))


async def test_hellos_that_ask_for_what_cannot_be(running: Stack) -> None:
    """Attempts of nobody, absurd offsets, an older session of the same router: answered or ended, nothing is hurt."""
    epoch = new_epoch()
    odd = [
        ResumeAttempt(),
        ResumeAttempt(attempt="nobody", next_offsets=[2**31 - 1] * 1000),
        ResumeAttempt(attempt="nobody", next_offsets=[-(2**31)]),
    ]
    async with stream(running, "decode-0", "Session") as call:
        await call.write(FromRouter(hello=RouterHello(epoch=epoch, session=7, attempts=odd)))
        assert (await hear(call, {"unknown"})).unknown.attempt in ("", "nobody")
        async with stream(running, "decode-0", "Session") as older:
            await older.write(FromRouter(hello=RouterHello(epoch=epoch, session=6)))
            assert await older.code() is grpc.StatusCode.OK
        good = submit()
        await call.write(FromRouter(submit=good))
        assert await answer(call, good.attempt) == RIGHT


# -- a decode worker that lies ------------------------------------------------------------------------------------


def job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "attempt": next(attempts), "tokens": PROMPT, "sample_indices": [0], "deadline_s": 60.0,
        "sampling": Sampling(top_p=1.0, logprobs=-1), **changes,
    }  # fmt: skip
    return Job(**fields)


BAD_JOBS: dict[str, dict[str, Any]] = {
    "no id": {"attempt": ""},
    "no tokens": {"tokens": []},
    "token -1": {"tokens": [-1]},
    "token beyond the vocabulary": {"tokens": [EOS + 1]},
    "a million tokens": {"tokens": [1] * 1_000_000},
    "first_position -16": {"first_position": -16},
    "first_position 2**31-1": {"first_position": 2**31 - 1},
    "sample -1": {"sample_indices": [-1]},
    "a million samples": {"sample_indices": range(1_000_000)},
    "temperature NaN": {"sampling": Sampling(temperature=NAN, top_p=1.0)},
    "deadline NaN": {"deadline_s": NAN},
}


async def test_jobs_and_words_of_a_lying_decode_worker(running: Stack) -> None:
    refs = [BlockRef(block=b, generation=g) for b in (-1, 0, 95, 96, 2**31 - 1) for g in (-1, 0, 2**63 - 1)]
    async with stream(running, "prefill-0", "Link") as call:
        await call.write(FromDecodePeer(hello=WorkerIdentity(worker="x" * 1000, epoch=5)))
        await hear(call, {"hello"})
        for kind, changes in BAD_JOBS.items():
            await call.write(FromDecodePeer(job=job(**changes)))
            message = await hear(call, {"accepted", "refused", "failed", "first"})
            assert message.failed.blame == Blame.BLAME_REQUEST, (kind, message)
        for message in (
            FromDecodePeer(),
            FromDecodePeer(hello=WorkerIdentity()),
            FromDecodePeer(cancel=CancelJob(attempt="nobody")),
            FromDecodePeer(taken=Taken(attempt="nobody", until_position=-1, all=True)),
            FromDecodePeer(recheck=Recheck(attempt="nobody", blocks=refs * 10_000)),
        ):
            await call.write(message)
        await call.write(FromDecodePeer(recheck=Recheck(attempt="nobody", blocks=refs)))
        checked = (await hear(call, {"recheck"})).recheck
        assert not any(block.current for block in checked.blocks if block.block not in (0, 95) or block.generation)
        good = job()
        await call.write(FromDecodePeer(job=good))
        await call.write(FromDecodePeer(job=good))  # the id is in use
        kinds = {"failed", "first"}  # in any order
        heard = {m.WhichOneof("message"): m for m in [await hear(call, kinds), await hear(call, kinds)]}
        assert heard["failed"].failed.blame == Blame.BLAME_REQUEST
        assert [token.id for token in heard["first"].first.tokens] == RIGHT[:1]
