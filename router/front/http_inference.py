"""One OpenAI inference request over HTTP, as a plain ASGI endpoint: we decide when headers go out and how it ends.

1. Read and parse the body; admit the request. Any error so far is a proper HTTP status.
2. Headers go out with the first token (I4; FAULTS F04), so an attempt that fails before it is still a 5xx. A stream
   that has nothing more to say for `router.sse_keep_alive_s` says so by a comment.
3. What was handed over is counted (usage.py); where routers share a book, it is there before the last byte goes.
4. A failure after that is an error event, no `[DONE]`, and the connection is closed in mid-body: no client can take
   the answer for a whole one.
5. A client that leaves at any moment cancels the work (FAULTS R13). Exactly one outcome is counted (metrics.py).

One that breaks off while its client has nothing of it yet, as no whole answer's has, is a 503: it can be asked again.

A stream's headers go out before most timings are known. With `x-headrace-trace: 1` in the request they come as SSE
comments before `[DONE]`, which clients ignore.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Sequence
from typing import Protocol

import orjson
from starlette.types import Receive, Scope, Send

from cluster.core.errors import HeadraceError
from cluster.core.ids import new_request_id
from router.front import sse
from router.front.auth import tenant_of
from router.front.batch import Answer, Part, open_all, prepare_all
from router.front.bodies import ChatBody, CompletionBody, InferenceBody
from router.front.door import FrontDoor, UntilDeadline, or_unavailable
from router.front.errors_http import error_body, error_headers, error_object, log_failure, status_of
from router.front.http_body import WhileConnected, read_json
from router.front.http_protocol import PIECES, Pieces
from router.front.keep_alive import KeepAlive
from router.front.metrics import Call, ClientGone
from router.front.openai_shapes import AnswerHead, ChatShape, CompletionShape, Json, WholeSample
from router.front.prompt_scores import PromptPart
from router.front.text import Delta
from router.front.traces import trace_headers
from router.front.usage import Receipt, Usage
from router.tenants import Tenant

log = logging.getLogger(__name__)

_STILL_HERE = sse.comment("keep-alive")
_PATIENCE_S = 1.0  # with a client that does not read, once its request has failed
_PUBLIC_ID = re.compile(rb"[!-~]{1,128}")


class Shape(Protocol):
    """How an endpoint writes answers (openai_shapes.py)."""

    def prompt(self, part: PromptPart) -> None: ...

    def events(self, delta: Delta) -> bytes: ...

    def usage_chunk(self, usage: Usage) -> Json: ...

    def whole(self, samples: list[WholeSample], usage: Usage) -> Json: ...


class Reply:
    """The answer to one HTTP request: remembers whether its headers went out."""

    def __init__(self, send: Send, public_id: str, *, traced: bool = False, pieces: Pieces | None = None) -> None:
        """`pieces`: the server's way to write without waiting, where it has one."""
        self._send = send
        self.pieces = pieces
        self.public_id = public_id
        self.traced = traced
        self.started = False
        self.context: dict[str, str] = {}

    async def whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        await self.start(status, {**_json_headers(body), **headers})
        await self.write(body, more=False)

    async def all_but_the_last_byte(self, body: bytes, headers: dict[str, str]) -> bytes:
        """Of a success. Returns what is left to be written."""
        await self.start(200, {**_json_headers(body), **headers})
        await self.write(body[:-1], more=True)
        return body[-1:]

    async def start(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        lines = {**headers, **self.context, "x-request-id": self.public_id}
        encoded = [(name.encode("ascii"), _header_value(value)) for name, value in lines.items()]
        await self._guarded({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, body: bytes, *, more: bool) -> None:
        await self._guarded({"type": "http.response.body", "body": body, "more_body": more})

    async def still_here(self) -> None:
        """A sign of life, once it has begun."""
        if self.started:
            await self.write(_STILL_HERE, more=True)

    async def _guarded(self, message: dict[str, object]) -> None:
        try:
            await self._send(message)
        except OSError:  # ASGI 2.4: the client is gone
            raise ClientGone from None


class InferenceEndpoint:
    """The ASGI app of one inference route."""

    def __init__(self, front: FrontDoor, api: str, body: type[InferenceBody]) -> None:
        self._front = front
        self._api = api
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        traced = (b"x-headrace-trace", b"1") in scope["headers"]
        reply = Reply(send, public_id_of(scope), traced=traced, pieces=scope.get(PIECES))
        await telling(reply, self._take(scope, receive, reply))

    async def _take(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        with self._front.call(self._api, scope["headers"]) as call:
            if call.span is not None:
                reply.context = call.span.context()
            raw = await read_json(scope, receive, self._front.settings)
            self._front.check_room(tenant := tenant_of(scope))
            async with WhileConnected(receive):
                await self._serve(raw, tenant, reply, call)

    async def _serve(self, raw: bytes, tenant: Tenant, reply: Reply, call: Call) -> None:
        body = self._body.parse(raw)
        parts = await prepare_all(self._front, body.asks(), call, reply.public_id, tenant)
        requests = [part.request for part in parts]
        async with UntilDeadline(requests[0]), self._front.permitted(tenant, requests, call):
            await self._answer(body, parts, reply, call)

    async def _answer(self, body: InferenceBody, parts: Sequence[Part], reply: Reply, call: Call) -> None:
        shape = self._shape(body, parts)
        every_s, receipt = self._front.settings.sse_keep_alive_s, call.receipt
        with or_unavailable(lambda: receipt.begun):
            async with open_all(self._front, parts, call) as answer:
                if body.stream:
                    await _EventStream(answer, shape, reply, receipt, every_s).run()
                else:
                    gathering = _Gathering(sum(part.request.n for part in parts), receipt)
                    await gathering.run(answer, shape)
        # Only now, with the context left, are usage and trace complete.
        if body.stream:
            ending = sse.event(shape.usage_chunk(answer.usage)) if body.include_usage else b""
            if reply.traced:
                ending += b"".join(sse.comment(f"{k}: {v}") for k, v in trace_headers(answer.trace).items())
            await self._front.settled(call)
            await reply.write(ending + sse.DONE, more=False)
        else:
            whole = orjson.dumps(shape.whole(gathering.samples, answer.usage))
            await self._hand_over(whole, trace_headers(answer.trace), reply, call)

    async def _hand_over(self, whole: bytes, headers: dict[str, str], reply: Reply, call: Call) -> None:
        """An answer in one piece. Its last byte makes it one for the client, so that byte waits for the book."""
        if not self._front.gate.ledger.shared:
            await reply.whole(200, whole, headers)
            call.receipt.handed_all()
            return
        rest = await reply.all_but_the_last_byte(whole, headers)
        call.receipt.handed_all()
        await self._front.settled(call)
        await reply.write(rest, more=False)

    def _shape(self, body: InferenceBody, parts: Sequence[Part]) -> Shape:
        front = self._front
        chat = isinstance(body, ChatBody)
        first = parts[0]
        head = AnswerHead(
            answer_id=("chatcmpl-" if chat else "cmpl-") + new_request_id(),
            created=int(front.metrics.clock.wall()),
            model=front.model_name,
            tokenizer=front.text.tokenizer,
            top=first.request.sampling.logprobs,
            include_usage=body.include_usage,
        )
        if chat:
            return ChatShape(head, front.shown(first.ask))
        prompts = [prompt for part in parts for prompt in [front.shown(part.ask)] * part.request.n]
        return CompletionShape(head, prompts)


def inference_routes(front: FrontDoor) -> dict[str, InferenceEndpoint]:
    """Path -> endpoint."""
    return {
        "/v1/chat/completions": InferenceEndpoint(front, "chat", ChatBody),
        "/v1/completions": InferenceEndpoint(front, "completions", CompletionBody),
    }


async def telling(reply: Reply, serving: Awaitable[None]) -> None:
    """All that serves one HTTP request: however it fails, a client that is there is told, in OpenAI's shape."""
    try:
        await serving
    except ClientGone:
        return
    except asyncio.CancelledError:
        raise
    except HeadraceError as error:
        await _tell(reply, error)
    except Exception as error:  # the one guard around a request (I8)
        log_failure(log, reply.public_id, error)
        await _tell(reply, error)


class _EventStream:
    """An answer as server-sent events."""

    def __init__(self, answer: Answer, shape: Shape, reply: Reply, receipt: Receipt, keep_alive_s: float) -> None:
        self._answer = answer
        self._shape = shape
        self._reply = reply
        self._receipt = receipt
        self._alive = KeepAlive(reply.still_here, keep_alive_s)

    async def run(self) -> None:
        async with self._alive:
            if self._reply.pieces is not None:
                self._answer.offer(_EventTaker(self._reply.pieces, self._shape, self._receipt, self._alive))
            async for delta in self._answer:
                if isinstance(delta, PromptPart):
                    self._shape.prompt(delta)
                else:
                    await self._write(delta)

    async def _write(self, delta: Delta) -> None:
        if self._alive.saying is not None:
            await self._alive.saying
        if not self._reply.started:
            await self._reply.start(200, {**sse.HEADERS, **trace_headers(self._answer.trace)})
        self._receipt.hold(delta)
        if events := self._shape.events(delta):
            await self._reply.write(events, more=True)
            self._receipt.handed(delta.index)
            self._alive.wrote()


class _EventTaker:
    """Implements Taker for all but the head of a stream, which the server writes."""

    def __init__(self, pieces: Pieces, shape: Shape, receipt: Receipt, alive: KeepAlive) -> None:
        self._pieces = pieces
        self._shape = shape
        self._receipt = receipt
        self._alive = alive

    def ready(self) -> bool:
        """See Taker. What is just being said goes first."""
        return self._alive.saying is None and self._pieces.ready()

    def take(self, delta: Delta) -> None:
        """See Taker."""
        if events := self._shape.events(delta):
            self._pieces.write(events)
            self._receipt.give(delta)
            self._alive.wrote()
        else:
            self._receipt.hold(delta)


class _Gathering:
    """An answer's samples, to be written in one piece. Implements Taker."""

    def __init__(self, choices: int, receipt: Receipt) -> None:
        self.samples = [WholeSample() for _ in range(choices)]
        self._receipt = receipt

    async def run(self, answer: Answer, shape: Shape) -> None:
        answer.offer(self)
        async for delta in answer:
            if isinstance(delta, PromptPart):
                shape.prompt(delta)
            else:
                self.take(delta)

    def ready(self) -> bool:
        """See Taker: nobody has to be waited for."""
        return True

    def take(self, delta: Delta) -> None:
        """See Taker."""
        self._receipt.hold(delta)
        self.samples[delta.index].add(delta)


async def _tell(reply: Reply, error: Exception) -> None:
    """A status, or an error event and then nothing: returning with an unfinished body makes the server cut the line."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            if reply.started:
                await reply.write(sse.event(error_object(error)), more=True)
            else:
                await reply.whole(status_of(error), error_body(error), error_headers(error))
    except (ClientGone, TimeoutError):
        log.debug("the client left, or does not read, and was not told of %s", type(error).__name__)


def public_id_of(scope: Scope) -> str:
    """The client's own x-request-id where it is short and printable, else one of ours. Only echoed (FAULTS C37)."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode("ascii") if _PUBLIC_ID.fullmatch(given) else f"req-{new_request_id()}"


def _json_headers(body: bytes) -> dict[str, str]:
    return {"content-type": "application/json", "content-length": str(len(body))}


def _header_value(value: str) -> bytes:
    return value.encode("ascii", "replace").replace(b"\r", b"?").replace(b"\n", b"?")
