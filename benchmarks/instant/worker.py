"""The worker: real Session and Watch services, and tokens the moment a Submit comes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import grpc.aio

from cluster.core.clock import SystemClock
from cluster.core.ids import new_epoch
from cluster.core.protocol import PROTOCOL
from cluster.program import ProgramContext
from cluster.rpc import make_server, service
from cluster.streams import ServerStream
from cluster.stubs import session_pb2, session_pb2_grpc
from cluster.stubs.common_pb2 import Layout, WorkerIdentity
from cluster.stubs.session_pb2 import FromDecode, FromRouter, PrefillOn, Submit, TokenRun, Tokens
from cluster.stubs.watch_pb2 import Status, WatchHello
from cluster.watch import WatchPublisher
from cluster.worker import Life, live

TOKEN = 65  # plain text in every tokenizer we have
BLOCKS = 1 << 20
VOCABULARY = 1 << 18
CONTEXT = 1 << 17


class InstantWorker(session_pb2_grpc.SessionServicer):
    """Answers a Submit with all its tokens, `per_message` of them in each message.

    `step_s`: all that runs gets its next tokens in one message, and the next step begins so much later, or when the
    router has room.
    """

    def __init__(self, identity: WorkerIdentity, per_message: int, *, step_s: float | None = None) -> None:
        self._identity = identity
        self._per_message = per_message
        self._step_s = step_s

    async def Open(  # type: ignore[override]  # a coroutine that writes is allowed too
        self, request_iterator: AsyncIterator[FromRouter], context: grpc.aio.ServicerContext[FromRouter, FromDecode]
    ) -> None:
        """One router's session."""
        if self._step_s is not None:
            await self._open_stepped(request_iterator, context, self._step_s)
            return
        stream: ServerStream[FromRouter, FromDecode] = ServerStream(
            context, limit=1_000_000, join=lambda messages: FromDecode(batch=messages)
        )
        stream.send(FromDecode(hello=self._identity))

        def receive(message: FromRouter) -> None:
            for each in message.batch or (message,):
                if each.WhichOneof("message") == "submit":
                    for answer in self.answers(each.submit):
                        stream.send(answer)

        await stream.run(request_iterator, receive)

    def answers(self, submit: Submit) -> list[FromDecode]:
        """Who prefills, then the tokens."""
        messages = [_prefilled(submit)]
        for offset in range(0, submit.max_tokens, self._per_message):
            messages.append(FromDecode(tokens=Tokens(runs=[self._run(submit, offset)])))
        return messages

    def _run(self, submit: Submit, offset: int) -> TokenRun:
        ids = [TOKEN] * min(self._per_message, submit.max_tokens - offset)
        end = "length" if offset + len(ids) == submit.max_tokens else ""
        return TokenRun(attempt=submit.attempt, index=0, offset=offset, ids=ids, end=end)

    async def _open_stepped(
        self,
        request_iterator: AsyncIterator[FromRouter],
        context: grpc.aio.ServicerContext[FromRouter, FromDecode],
        step_s: float,
    ) -> None:
        """Writes wait for the router (HTTP/2 flow control): the next step is made when it can be read."""
        running: dict[str, tuple[Submit, int]] = {}
        arrived: list[Submit] = []
        news = asyncio.Event()
        await context.write(FromDecode(hello=self._identity))

        async def step() -> None:
            while True:
                news.clear()
                begun = [_prefilled(submit) for submit in arrived]
                running.update((submit.attempt, (submit, 0)) for submit in arrived)
                arrived.clear()
                if not running:
                    await news.wait()
                    continue
                runs = [self._run(submit, offset) for submit, offset in running.values()]
                for run in runs:
                    running[run.attempt] = (running[run.attempt][0], run.offset + len(run.ids))
                    if run.end:
                        del running[run.attempt]
                await context.write(FromDecode(batch=[*begun, FromDecode(tokens=Tokens(runs=runs))]))
                await asyncio.sleep(step_s)

        stepping = asyncio.create_task(step())
        try:
            async for message in request_iterator:
                for each in message.batch or (message,):
                    if each.WhichOneof("message") == "submit":
                        arrived.append(each.submit)
                        news.set()
                    elif each.WhichOneof("message") == "cancel":
                        running.pop(each.cancel.attempt, None)
        finally:
            stepping.cancel()


def _prefilled(submit: Submit) -> FromDecode:
    return FromDecode(prefill_on=PrefillOn(attempt=submit.attempt, worker="local"))


async def serve(context: ProgramContext, per_message: int, *, stepped: bool = False) -> None:
    """The program, until `context.stopping`. `stepped`: a step takes an emit interval, as where decoding is fast."""
    epoch = new_epoch()
    identity = WorkerIdentity(
        worker=context.name,
        epoch=epoch,
        role="decode",
        layout=Layout(layers=1, kv_heads=1, head_dim=2, block_size=16, dtype="int64"),
        fingerprint=b"instant worker 1",
        protocol=PROTOCOL,
    )
    hello = WatchHello(
        identity=identity,
        vocab_size=VOCABULARY,
        max_context=CONTEXT,
        eos_ids=[VOCABULARY - 1],
        num_blocks=BLOCKS,
        block_size=16,
    )
    publisher = WatchPublisher(
        hello, list, lambda: Status(ready=True, free_blocks=BLOCKS), heartbeat_s=context.config.timing.heartbeat_s
    )
    step_s = context.config.timing.emit_interval_s if stepped else None
    worker = InstantWorker(identity, per_message, step_s=step_s)
    session = service(session_pb2.DESCRIPTOR, "Session", session_pb2_grpc.add_SessionServicer_to_server, worker)
    server = make_server(context.config.host, 0, [session, publisher.service()], context.credentials)
    hello.identity.address = identity.address = server.address
    life = Life(
        server=server,
        publisher=publisher,
        epoch=epoch,
        pids=(os.getpid(),),
        tick=lambda: None,
        tasks=(_for_ever(),),
        idle=lambda: True,
        drain=lambda: None,
        hand_over=lambda: None,
        flushed=lambda: True,
    )
    await live(context, life, SystemClock())


async def _for_ever() -> None:
    await asyncio.Event().wait()
