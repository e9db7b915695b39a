"""The public gRPC API (proto/inference.proto): the same pipeline as HTTP in other clothes.

The client's deadline becomes the request's, cancelling the call cancels the work. Errors: INVALID_ARGUMENT with the
field in the message, NOT_FOUND, RESOURCE_EXHAUSTED, UNAVAILABLE, DEADLINE_EXCEEDED, INTERNAL; the trailing metadata
`retry-after` says when to come back where that makes sense. Every call ends with `x-request-id` and what happened to it
(traces.py) in its trailing metadata.
"""

from __future__ import annotations  # grpc's type stubs are generic where its classes are not

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import grpc
from grpc.aio import ServicerContext

from cluster.core.errors import (
    DeadlineExceeded,
    Forbidden,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from cluster.core.ids import new_request_id
from cluster.rpc import Metadata, authorization_of
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceServicer
from router.front.ask import Ask, Prompt, Spelling, TextPrompt, TokenPrompt
from router.front.door import FrontDoor, Generation, UntilDeadline, or_unavailable
from router.front.errors_http import log_failure, retry_after_s
from router.front.grammar_fields import choice_grammar
from router.front.messages import ROLES, ChatPrompt, ChatTurn
from router.front.metrics import Call
from router.front.prompt_scores import PromptPart
from router.front.text import Delta, TokenEntry
from router.front.tokenizer import Tokenizer
from router.front.traces import trace_headers
from router.front.tracing import CallSpan
from router.front.usage import Receipt
from router.requests import Grammar, Trace

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    Context = ServicerContext[pb.GenerateRequest, pb.GenerateResponse]

_MAX_PUBLIC_ID = 128
_CLOCK_SLACK_S = 0.05  # a call cancelled this close to its deadline was ended by it


@dataclass(slots=True)
class Trailer:
    """The trailing metadata of one call. `trace` is None until the request was admitted."""

    public_id: str
    trace: Trace | None = None
    span: CallSpan | None = None
    prompt_told: bool = False  # some of its log-probabilities

    @property
    def shown(self) -> str:
        """For metadata, which is ASCII; the client's own id may be any printable text."""
        return "".join(each if each.isascii() else "?" for each in self.public_id)

    def metadata(self) -> Metadata:
        headers = trace_headers(self.trace) if self.trace is not None else {}
        context = self.span.context() if self.span is not None else {}
        return (
            ("x-request-id", self.shown),
            *headers.items(),
            *context.items(),
        )


class InferenceService(InferenceServicer):
    """Add it to a server with `inference_pb2_grpc.add_InferenceServicer_to_server`."""

    def __init__(self, front: FrontDoor) -> None:
        self._front = front

    # Writing instead of yielding, which the generated types do not know: a cancelled generator would linger suspended.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Deltas and one Finish per sample, then one Summary."""
        told = Trailer(public_id_of(request.request_id[:_MAX_PUBLIC_ID]))
        try:
            with self._front.call("grpc", context.invocation_metadata() or ()) as call:
                told.span = call.span
                await self._generate(request, context, call, told)
            context.set_trailing_metadata(told.metadata())
            return
        except asyncio.CancelledError:
            raise
        except HeadraceError as error:
            failure: Exception = error
        except Exception as error:  # the one guard around a request (I8)
            log_failure(log, told.shown, error)
            failure = error
        await _abort(context, failure, told)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse]
    ) -> pb.ListModelsResponse:
        """The one model; `max_context` 0 while no worker is known."""
        try:
            max_context = self._front.dispatcher.limits().max_context
        except Unavailable:
            max_context = 0
        return pb.ListModelsResponse(models=[pb.Model(id=self._front.model_name, max_context=max_context)])

    async def _generate(self, message: pb.GenerateRequest, context: Context, call: Call, told: Trailer) -> None:
        front = self._front
        tenant = front.gate.tenants.authenticate(authorization_of(context.invocation_metadata()))
        front.check_room(tenant)
        if message.ByteSize() > front.settings.max_body_bytes:
            raise InvalidRequest(f"the request is larger than {front.settings.max_body_bytes} bytes")
        ask = ask_of(message, front.model_name)
        left = context.time_remaining()
        request = await front.prepare(ask, call, public_id=told.public_id, tenant=tenant, deadline_s=left)
        try:
            async with UntilDeadline(request), front.permitted(tenant, [request], call):
                with or_unavailable(lambda: told.prompt_told or call.receipt.begun):
                    async with front.open(request, call, ask) as generation:
                        told.trace = generation.trace
                        await _deliver(generation, ask, context, told, call.receipt)
                # Only now, with the context left, are usage and trace complete.
                await front.settled(call)
                await context.write(_summary(generation, front.model_name))
        except asyncio.CancelledError:
            if (remaining := context.time_remaining()) is not None and remaining <= _CLOCK_SLACK_S:
                raise DeadlineExceeded("the client's deadline passed") from None
            raise


def public_id_of(given: str) -> str:
    """The client's own id where it is printable, else one of ours: it goes into log lines, and into trailers, where a
    line break would make an error of a whole answer."""
    return given if given.strip() and given.isprintable() else f"req-{new_request_id()}"


def ask_of(message: pb.GenerateRequest, served_model: str) -> Ask:
    """A gRPC request in our own terms. Raises InvalidRequest."""
    prompt, spelling = _prompt(message)
    spelling = replace(spelling, grammar=message.WhichOneof("grammar") or "")
    return Ask(
        model=message.model or served_model,
        prompt=prompt,
        spelling=spelling,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        n=message.n if message.HasField("n") else None,
        temperature=message.temperature if message.HasField("temperature") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        seed=message.seed if message.HasField("seed") else None,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        presence_penalty=message.presence_penalty if message.HasField("presence_penalty") else None,
        frequency_penalty=message.frequency_penalty if message.HasField("frequency_penalty") else None,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        min_tokens=message.min_tokens if message.HasField("min_tokens") else None,
        logit_bias=tuple(message.logit_bias.items()),
        grammar=_grammar(message),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        priority=message.priority if message.HasField("priority") else None,
    )


def _grammar(message: pb.GenerateRequest) -> Grammar | None:
    match message.WhichOneof("grammar"):
        case "json_object":
            return Grammar("json_object") if message.json_object else None
        case "json_schema":
            return Grammar("json_schema", message.json_schema)
        case "regex":
            return Grammar("regex", message.regex)
        case "lark":
            return Grammar("lark", message.lark)
        case "choice":
            return choice_grammar(list(message.choice.texts), "choice")
        case _:
            return None


def _prompt(message: pb.GenerateRequest) -> tuple[Prompt, Spelling]:
    match message.WhichOneof("input"):
        case "prompt":
            return TextPrompt(message.prompt), Spelling(prompt="prompt")
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids)), Spelling(prompt="token_ids")
        case "chat":
            return ChatPrompt(tuple(_turns(message.chat))), Spelling(prompt="chat")
        case _:
            raise InvalidRequest("one of prompt, token_ids and chat must be given", param="prompt")


def _turns(chat: pb.Chat) -> list[ChatTurn]:
    turns = []
    for at, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"must be one of {', '.join(ROLES)}", param=f"chat.messages[{at}].role")
        turns.append(ChatTurn(ROLES[message.role], message.content))
    return turns


async def _deliver(generation: Generation, ask: Ask, context: Context, told: Trailer, receipt: Receipt) -> None:
    """Write the whole answer as it comes."""
    async for delta in generation:
        if isinstance(delta, PromptPart):
            told.prompt_told = True
            await context.write(_prompt_part(delta, ask.prompt_logprobs or 0, generation.tokenizer))
        else:
            await _hand_over(delta, generation.tokenizer, context, receipt)


async def _hand_over(delta: Delta, tokenizer: Tokenizer, context: Context, receipt: Receipt) -> None:
    """Write what a delta says, and count it."""
    receipt.hold(delta)
    try:
        for event in _events(delta, tokenizer):
            await context.write(event)
    except asyncio.CancelledError:  # gRPC has it already, and clients have been seen to get it
        receipt.handed(delta.index)
        raise
    receipt.handed(delta.index)


def _events(delta: Delta, tokenizer: Tokenizer) -> list[pb.GenerateResponse]:
    events: list[pb.GenerateResponse] = []
    if delta.text or delta.ids:
        logprobs = [_logprob(entry, tokenizer) for entry in delta.entries]
        part = pb.Delta(index=delta.index, text=delta.text, token_ids=delta.ids, logprobs=logprobs)
        events.append(pb.GenerateResponse(delta=part))
    if delta.finish:
        events.append(pb.GenerateResponse(finish=pb.Finish(index=delta.index, reason=delta.finish)))
    return events


def _logprob(entry: TokenEntry, tokenizer: Tokenizer) -> pb.Logprob:
    top = [
        pb.Alternative(token_id=token_id, token=tokenizer.token_bytes(token_id) or b"", logprob=logprob)
        for token_id, logprob in entry.logprob.top
    ]
    return pb.Logprob(token_id=entry.token_id, token=entry.bytes or b"", logprob=entry.logprob.logprob, top=top)


def _prompt_part(part: PromptPart, top: int, tokenizer: Tokenizer) -> pb.GenerateResponse:
    def token_bytes(token_id: int) -> bytes:
        return tokenizer.token_bytes(token_id) or b""

    tokens = [] if part.scores is not None else [pb.PromptToken(token_id=i, token=token_bytes(i)) for i in part.ids]
    for token_id, own, ids, logprobs, rank in part.rows(top):
        likely = [
            pb.Alternative(token_id=other, token=token_bytes(other), logprob=logprob)
            for other, logprob in zip(ids, logprobs, strict=True)
        ]
        token = token_bytes(token_id)
        tokens.append(pb.PromptToken(token_id=token_id, token=token, logprob=own, rank=rank, top=likely))
    return pb.GenerateResponse(prompt=pb.PromptPart(start=part.start, tokens=tokens))


def _summary(generation: Generation, model: str) -> pb.GenerateResponse:
    usage, trace = generation.usage, generation.trace
    summary = pb.Summary(
        request_id=generation.request.public_id,
        model=model,
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        cached_tokens=usage.cached,
        prefill_worker=trace.prefill_worker,
        decode_worker=trace.decode_worker,
        kv_bytes=trace.kv_bytes,
        attempts=trace.attempts,
        timings_ms=trace.timings_ms,
    )
    return pb.GenerateResponse(summary=summary)


def _code(error: Exception) -> grpc.StatusCode:
    match error:
        case ModelNotFound():
            return grpc.StatusCode.NOT_FOUND
        case Unauthenticated():
            return grpc.StatusCode.UNAUTHENTICATED
        case Forbidden():
            return grpc.StatusCode.PERMISSION_DENIED
        case InvalidRequest():
            return grpc.StatusCode.INVALID_ARGUMENT
        case Overloaded():
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case Unavailable():
            return grpc.StatusCode.UNAVAILABLE
        case DeadlineExceeded():
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case _:
            return grpc.StatusCode.INTERNAL


async def _abort(context: Context, error: Exception, told: Trailer) -> NoReturn:
    """End the call with our error; what is not ours may quote a prompt and is not told (FAULTS O08)."""
    details = str(error) if isinstance(error, HeadraceError) else "an internal error; see the router's log"
    if isinstance(error, InvalidRequest) and error.param and not details.startswith(error.param):
        details = f"{error.param}: {details}"
    retry = retry_after_s(error)
    hint = () if retry is None else (("retry-after", f"{retry:g}"),)
    await context.abort(_code(error), details, (*told.metadata(), *hint))
