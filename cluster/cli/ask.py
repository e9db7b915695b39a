"""`headrace generate`: one question over gRPC, the answer as it is written, and where the time went."""

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from rich.console import Console
from rich.table import Table

from cluster.config import API_KEY_VARIABLE, api_key_from_environment
from cluster.core.clock import Clock, SystemClock
from cluster.core.errors import HeadraceError
from cluster.rpc import auth_metadata, channel
from cluster.stubs import inference_pb2, inference_pb2_grpc
from cluster.tls import ClientTls

_STATUS_WORDS = {
    grpc.StatusCode.UNAVAILABLE: "no router answers there",
    grpc.StatusCode.DEADLINE_EXCEEDED: "it took too long",
    grpc.StatusCode.UNAUTHENTICATED: f"tenants are configured there, and {API_KEY_VARIABLE} holds no key of one",
}


class AskFailed(HeadraceError):
    """The question was refused, or its answer broke off."""


@dataclass(frozen=True, slots=True)
class Question:
    """`raw`: the text goes to the model as it is, without the chat template. None: the server's default."""

    text: str
    raw: bool = False
    max_tokens: int | None = None
    temperature: float | None = None

    def message(self) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(max_tokens=self.max_tokens, temperature=self.temperature)
        if self.raw:
            request.prompt = self.text
        else:
            request.chat.messages.add(role="user", content=self.text)
        return request


@dataclass(slots=True)
class Answer:
    """Times on our clock, in seconds: `arrivals` of each message that brought tokens."""

    asked: float
    arrivals: list[float] = field(default_factory=list)
    summary: inference_pb2.Summary | None = None
    reason: str = ""


def ask(question: Question, address: str, write: Callable[[str], None], tls: ClientTls | None = None) -> Answer:
    """Ask the router at `address`, hand each piece of text to `write`. Raises AskFailed."""
    return asyncio.run(_ask(question, address, write, tls, SystemClock()))


async def _ask(
    question: Question, address: str, write: Callable[[str], None], tls: ClientTls | None, clock: Clock
) -> Answer:
    answer = Answer(clock.now())
    async with channel(address, tls) as wire:
        stub = inference_pb2_grpc.InferenceStub(wire)
        try:
            key = api_key_from_environment()
            async for event in stub.Generate(question.message(), metadata=() if key is None else auth_metadata(key)):
                _take(event, answer, write, clock)
        except grpc.aio.AioRpcError as error:
            words = _STATUS_WORDS.get(error.code(), error.code().name)
            raise AskFailed(f"{address}: {words}: {error.details()}") from error
    return answer


def _take(event: inference_pb2.GenerateResponse, answer: Answer, write: Callable[[str], None], clock: Clock) -> None:
    kind = event.WhichOneof("event")
    if kind == "delta":
        if event.delta.token_ids or event.delta.text:
            answer.arrivals.append(clock.now())
        write(event.delta.text)
    elif kind == "finish":
        answer.reason = event.finish.reason
    elif kind == "summary":
        answer.summary = event.summary


def show_timings(answer: Answer, console: Console) -> None:
    """A small table: TTFT, ITL, KV moved, who did it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in timings(answer):
        table.add_row(name, value)
    console.print(table)


def timings(answer: Answer) -> list[tuple[str, str]]:
    """What there is to tell about an answer, as (name, words)."""
    gaps = [1000 * (after - before) for before, after in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
    rows = []
    if answer.arrivals:
        rows.append(("TTFT", f"{1000 * (answer.arrivals[0] - answer.asked):.0f} ms"))
    if gaps:
        rows.append(("ITL", f"{statistics.median(gaps):.1f} ms median, {max(gaps):.1f} ms longest"))
    summary = answer.summary
    if summary is None:
        return rows
    rows.append(("tokens", f"{summary.prompt_tokens} in ({summary.cached_tokens} cached), "
                           f"{summary.completion_tokens} out, ended by {answer.reason}"))  # fmt: skip
    rows.append(("KV moved", f"{summary.kv_bytes / 1e6:.2f} MB"))
    rows.append(("prefill", summary.prefill_worker or "-"))
    rows.append(("decode", summary.decode_worker or "-"))
    rows += [(name, f"{value:.1f} ms") for name, value in sorted(summary.timings_ms.items())]
    return rows
