"""One call as spans, made when it has ended from the marks that records hold. Pure; times are the router's clock.

    chat | completions | grpc          the call, from its first byte to its last
      parse                            reading, tokenising, checking
      queue, place                     of each attempt: waiting for a place, until the decode worker took it
      prefill                          whoever computes the prompt
        chunk                          up to each offer of blocks, as the decode worker heard of it
      transfer                         first offer -> ready to decode
      decode                           of each attempt: first token -> end
      text                             first token -> last byte: folding and writing, while tokens come
Spans of a hand-off are those of the first one; its worker's clock tells durations, and the router's when it began.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cluster.core.ids import attempt_id
from router.records import AttemptRecord, RequestRecord

Attributes = Mapping[str, str | int | float]
HANDED_OFF = "exposed_transfer"  # in timings: there was a hand-off


@dataclass(frozen=True, slots=True)
class Part:
    """One span below a call's: when, in seconds, and what is inside."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    inside: tuple["Part", ...] = ()


@dataclass(frozen=True, slots=True)
class CallMarks:
    """What the front door knows of one call. `first_token` None: none came."""

    started: float
    ended: float
    first_token: float | None


def parts_of(call: CallMarks, records: list[RequestRecord]) -> list[Part]:
    """All spans below the call's. `records`: of the requests that it became."""
    parsed = min((record.arrived for record in records), default=call.ended)
    parts = [Part("parse", call.started, parsed)]
    for record in records:
        parts += _attempts(record, call.ended)
    if call.first_token is not None:
        parts.append(Part("text", call.first_token, call.ended))
    return parts


def _attempts(record: RequestRecord, ended: float) -> Iterator[Part]:
    last = _last_ms(record, ended)
    waits_from, told = 0.0, False
    for number, attempt in enumerate(record.attempts, 1):
        at = _Marks(record, attempt, last)
        name = {"headrace.attempt": attempt_id(record.request_id, number)}  # as workers log it
        yield at.part("queue", waits_from, attempt.placed_ms)
        waits_from = at.end
        if attempt.accepted_ms is None:
            continue
        yield at.part("place", attempt.placed_ms, attempt.accepted_ms, {"headrace.decode": attempt.decode} | name)
        if not told and HANDED_OFF in record.trace.timings_ms:
            yield from at.handed_off()
            told = True
        elif attempt.first_token_ms is not None:
            worker = {"headrace.prefill": record.trace.prefill_worker}
            yield at.part("prefill", attempt.accepted_ms, attempt.first_token_ms, worker)
        if attempt.first_token_ms is not None:
            yield at.part("decode", attempt.first_token_ms, at.end, {"headrace.decode": attempt.decode})
    if not record.attempts or (record.attempts[-1].ended_ms is not None and waits_from < last):
        yield Part("queue", record.arrived + waits_from / 1000, record.arrived + last / 1000)


def _last_ms(record: RequestRecord, ended: float) -> float:
    return record.ended_ms if record.ended_ms is not None else record.since(ended)


@dataclass(frozen=True, slots=True)
class _Marks:
    """One attempt, in milliseconds since its request was admitted."""

    record: RequestRecord
    attempt: AttemptRecord
    last: float

    @property
    def end(self) -> float:
        return self.attempt.ended_ms if self.attempt.ended_ms is not None else self.last

    def part(
        self, name: str, start: float, end: float, attributes: Attributes | None = None, inside: tuple[Part, ...] = ()
    ) -> Part:
        """Never longer than the attempt, whatever two clocks say."""
        start = min(start, self.end)
        arrived = self.record.arrived
        return Part(
            name, arrived + start / 1000, arrived + min(max(start, end), self.end) / 1000, attributes or {}, inside
        )

    def handed_off(self) -> Iterator[Part]:
        """Prefill, chunk by chunk, and the transfer beside it."""
        trace, began = self.record.trace, self.attempt.accepted_ms or 0.0
        timings = trace.timings_ms
        chunks, before = [], 0.0
        for until, at in trace.offers:
            chunks.append(self.part("chunk", began + before, began + at, {"headrace.until_position": until}))
            before = at
        read = began + max(timings.get("prefill", 0.0), before)
        yield self.part("prefill", began, read, {"headrace.prefill": trace.prefill_worker}, tuple(chunks))
        if trace.offers:
            told = {f"headrace.{name}_ms": timings.get(name, 0.0)
                    for name in ("transfer_wire", "transfer_verify", "transfer_publish", HANDED_OFF)}  # fmt: skip
            told |= {"headrace.kv_bytes": trace.kv_bytes}
            yield self.part("transfer", began + trace.offers[0][1], began + before + timings[HANDED_OFF], told)
