"""A prefill worker that lies to a real decode worker, with a real NIXL agent behind it: the tokens are right (S03)."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from cluster.core.digest import digest_block
from cluster.core.ids import agent_name, new_epoch
from cluster.core.keys import KeyChain, root_key
from cluster.rpc import make_server, service
from cluster.stubs import link_pb2, link_pb2_grpc
from cluster.stubs.common_pb2 import WorkerAddress, WorkerIdentity
from cluster.stubs.link_pb2 import (
    First,
    FirstToken,
    FromDecodePeer,
    FromPrefill,
    Job,
    JobAccepted,
    JobDone,
    JobFailed,
    JobRefused,
    Offer,
    OfferedBlock,
    PrefillHello,
    RecheckedBlock,
    RecheckResult,
    WorkerGone,
)
from cluster.stubs.session_pb2 import (
    FromRouter,
    RouterHello,
)
from tests.contract.kv_holder import ProcessHolder, content
from tests.integration.asks import EOS
from tests.integration.inside import (
    RIGHT,
    answer,
    assert_unhurt,
    attempts,
    credentials,
    hear,
    small_cluster,
    stream,
    submit,
)
from tests.integration.stack import BLOCK, Stack, stack, until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(small_cluster(), tmp_path_factory.mktemp("hostile")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
async def unhurt(running: Stack) -> AsyncIterator[None]:
    pids = running.pids()
    yield
    await assert_unhurt(running, pids)


LIAR = "liar"

# -- a prefill worker that lies -----------------------------------------------------------------------------------

Script = Callable[["FakePrefill", Job], Awaitable[None]]


class FakePrefill(link_pb2_grpc.LinkServicer):
    """Listens like a prefill worker, with a real agent in another process behind it, and follows a script."""

    def __init__(self, real: PrefillHello, holder: ProcessHolder) -> None:
        self.hello = PrefillHello()
        self.hello.CopyFrom(real)
        self.hello.identity.worker, self.hello.identity.epoch = LIAR, 7
        self.hello.agent, self.hello.agent_metadata = holder.agent, holder.metadata
        self.hello.pool_address = holder.address
        self.script: Script = silent
        self._write: Callable[[FromPrefill], Awaitable[None]]

    async def Open(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self._write = context.write
        await self.say(hello=self.hello)
        async for message in request_iterator:
            if message.HasField("job"):
                await self.script(self, message.job)

    async def say(self, **message: Any) -> None:
        await self._write(FromPrefill(**message))

    def honest_blocks(self, job: Job) -> list[OfferedBlock]:
        """Right keys, and the right digests of what the holder really has: nonsense, but whole."""
        keys = KeyChain(root_key(self.hello.identity.fingerprint, salt=job.salt), BLOCK).extend(list(job.tokens))
        memory = content().reshape(-1, self.hello.block_bytes)
        heads = self.hello.identity.layout.kv_heads
        return [
            OfferedBlock(block=i, generation=1, key=key, digest=digest_block(memory[i], heads))
            for i, key in enumerate(keys)
        ]

    async def offer(self, job: Job, first_position: int = 0, **changes: Any) -> None:
        blocks = self.honest_blocks(job)
        for block in blocks:
            for name, value in changes.items():
                setattr(block, name, value)
        await self.say(offer=Offer(attempt=job.attempt, first_position=first_position, blocks=blocks, last=True))


async def silent(fake: FakePrefill, job: Job) -> None:
    """Says nothing at all."""


def offering(**changes: Any) -> Script:
    async def script(fake: FakePrefill, job: Job) -> None:
        await fake.say(accepted=JobAccepted(attempt=job.attempt, eta_s=0.1))
        await fake.offer(job, **changes)

    return script


def saying(*messages: Callable[[str], dict[str, Any]]) -> Script:
    async def script(fake: FakePrefill, job: Job) -> None:
        for message in messages:
            await fake.say(**message(job.attempt))

    return script


async def everything_twice(fake: FakePrefill, job: Job) -> None:
    for _ in range(2):
        await fake.say(accepted=JobAccepted(attempt=job.attempt, eta_s=-1.0))
        await fake.offer(job, digest=bytes(16))
        await fake.say(done=JobDone(attempt=job.attempt, cached_tokens=-1))


async def vouching(fake: FakePrefill, job: Job) -> None:
    """Offers wrong digests and stands by them before anybody asked."""
    results = [RecheckedBlock(block=i, generation=1, current=True) for i in range(-1, 10)]
    await fake.offer(job, digest=bytes(16))
    for _ in range(5):
        await fake.say(recheck=RecheckResult(attempt=job.attempt, blocks=results))


SCRIPTS: dict[str, Script] = {
    "silence": silent,
    "wrong keys": offering(key=bytes(16)),
    "no keys": offering(key=b""),
    "wrong digests": offering(digest=bytes(16)),
    "no digests": offering(digest=b""),
    "negative blocks": offering(block=-1),
    "blocks of no pool": offering(block=2**31 - 1),
    "blocks just behind the pool": offering(block=64 * 128 * 1024 // 2048),
    "a negative position": offering(first_position=-BLOCK),
    "a position between blocks": offering(first_position=3),
    "a position far away": offering(first_position=2**31 - BLOCK),
    "everything twice": everything_twice,
    "vouching": vouching,
    "refusal after acceptance": saying(
        lambda a: {"accepted": JobAccepted(attempt=a, eta_s=float("nan"))}, lambda a: {"refused": JobRefused(attempt=a)}
    ),
    "a first token beyond the vocabulary": saying(
        lambda a: {"first": First(attempt=a, tokens=[FirstToken(index=0, id=EOS + 1)])}
    ),
    "first tokens of nobody": saying(
        lambda a: {"first": First(attempt=a, tokens=[FirstToken(index=i, id=5) for i in (-1, 7)])}
    ),
    "done and nothing else": saying(lambda a: {"done": JobDone(attempt=a)}, lambda a: {"done": JobDone(attempt=a)}),
    "failed": saying(lambda a: {"failed": JobFailed(attempt=a, reason="x" * 10_000)}),
    "empty": saying(lambda a: {}, lambda a: {}),
    "lost": saying(lambda a: {"lost": WorkerGone(reason="so it says")}),
}
HELLOS: dict[str, dict[str, Any]] = {
    "metadata of nobody": {"agent_metadata": b"nonsense"},
    "no metadata": {"agent_metadata": b""},
    "metadata without end": {"agent_metadata": bytes(20_000_000)},
    "an address of no machine": {"pool_address": 2**64 - 1},
    "another address": {"pool_address": 4096},
    "another agent": {"agent": "x" * 100_000},
    "blocks of no size": {"block_bytes": 0},
}


@pytest.fixture(scope="module")
def holder() -> Iterator[ProcessHolder]:
    """A real agent in a process of its own, that serves whoever reads."""
    real = ProcessHolder(agent_name(LIAR, 7), {})
    real.serve(True)
    yield real
    real.kill()


async def real_hello(running: Stack) -> PrefillHello:
    async with stream(running, "prefill-0", "Link") as call:
        await call.write(FromDecodePeer(hello=WorkerIdentity(worker="curious", epoch=5)))
        hello: PrefillHello = (await hear(call, {"hello"})).hello
        return hello


@contextlib.asynccontextmanager
async def listening(running: Stack, fake: FakePrefill) -> AsyncIterator[WorkerAddress]:
    listener = service(link_pb2.DESCRIPTOR, "Link", link_pb2_grpc.add_LinkServicer_to_server, fake)
    server = make_server("127.0.0.1", 0, [listener], credentials(running))
    await server.start()
    try:
        yield WorkerAddress(worker=fake.hello.identity.worker, epoch=fake.hello.identity.epoch, address=server.address)
    finally:
        await server.stop(0)


async def ask_through(running: Stack, address: WorkerAddress) -> list[int]:
    """A request whose only prefill worker is the fake one."""
    async with stream(running, "decode-0", "Session") as call:
        await call.write(FromRouter(hello=RouterHello(epoch=new_epoch(), session=1)))
        message = submit(prefill=[address], salt=next(attempts).encode())
        await call.write(FromRouter(submit=message))
        return await answer(call, message.attempt)


NOTICED = {
    "silence": "handoff_left: no offer in time",
    "wrong keys": "offer_wrong_key",
    "wrong digests": "digest_mismatch",
    "vouching": "digest_mismatch",
    "blocks of no pool": "read_failed",
    "blocks just behind the pool": "read_failed",
    "negative blocks": "offer_out_of_range",
    "a first token beyond the vocabulary": "handoff_left: sent other first tokens",
}
"""Scripts and the counter that shows how far they got."""


@pytest.mark.parametrize("kind", SCRIPTS)
async def test_whatever_it_says_the_tokens_are_right(running: Stack, holder: ProcessHolder, kind: str) -> None:
    counter = NOTICED.get(kind, "steps")
    before = (await running.counters()).get(counter, 0)
    fake = FakePrefill(await real_hello(running), holder)
    fake.script = SCRIPTS[kind]
    async with listening(running, fake) as address:
        assert await ask_through(running, address) == RIGHT

    async def noticed() -> bool:
        return (await running.counters()).get(counter, 0) > before

    assert await until(noticed, 2.0), await running.counters()


@pytest.mark.parametrize("kind", HELLOS)
async def test_whatever_it_says_it_is(running: Stack, holder: ProcessHolder, kind: str) -> None:
    """It is used for nothing: the request comes back to the router, or the decode worker does it all."""
    fake = FakePrefill(await real_hello(running), holder)
    for name, value in HELLOS[kind].items():
        setattr(fake.hello, name, value)
    fake.script = offering()
    async with listening(running, fake) as address, stream(running, "decode-0", "Session") as call:
        await call.write(FromRouter(hello=RouterHello(epoch=new_epoch(), session=1)))
        message = submit(prefill=[address], salt=next(attempts).encode())
        await call.write(FromRouter(submit=message))
        said = await hear(call, {"no_prefill", "tokens"})
        assert said.HasField("no_prefill") or said.tokens.runs[0].ids[0] == RIGHT[0]
