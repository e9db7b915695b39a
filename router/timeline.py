"""One request as a row of parts, end to end, that add up to the time its client waited. Pure.

    receive   the request arrives: body, tokens, grammar                   front door
    queue     it waits for a worker, again after every failed attempt
    admit     a worker is chosen; the decode worker reserves blocks
    prefill   the prompt is computed, until the first token is here
    transfer  decode waits for the last KV after that: the exposed part of the hand-off; the rest went beside prefill
    decode    tokens
    delivery  the last token is here; the last text is being written       front door

Times are milliseconds since the request arrived. A part that another one cuts short ends there: nothing overlaps and
nothing is left out.
"""

from dataclasses import dataclass
from typing import Literal

from router.records import AttemptRecord, RequestRecord

PartName = Literal["receive", "queue", "admit", "prefill", "transfer", "decode", "delivery"]


@dataclass(frozen=True, slots=True)
class Part:
    """`attempt` counts from 1; 0 belongs to none. `lost`: that attempt failed, and another one did the work again."""

    name: PartName
    start_ms: float
    end_ms: float
    attempt: int = 0
    lost: bool = False


class _Row:
    """Parts one after the other. Each begins where the last one ended, whatever clocks and late messages say."""

    def __init__(self, end_ms: float) -> None:
        self.parts: list[Part] = []
        self._end_ms = end_ms
        self._at = 0.0

    def until(self, name: PartName, end_ms: float | None, attempt: int = 0, *, lost: bool = False) -> None:
        """None: it has not ended. What would be empty is left out."""
        end = self._end_ms if end_ms is None else min(max(end_ms, self._at), self._end_ms)
        if end > self._at:
            self.parts.append(Part(name, self._at, end, attempt, lost))
            self._at = end


def total_ms(record: RequestRecord, now: float) -> float:
    """From the request's arrival to the end of its answer, or to now."""
    arrived, end = _arrived(record), record.trace.left
    if end is None:
        end = now if record.ended_ms is None or record.trace.arrived is not None else _end_of_work(record)
    return max(0.0, (end - arrived) * 1000)


def parts(record: RequestRecord, now: float) -> list[Part]:
    """The row of one request, finished or not. The parts add up to `total_ms`."""
    shift = (record.arrived - _arrived(record)) * 1000  # marks of the record count from its admission
    row = _Row(total_ms(record, now))
    row.until("receive", shift)
    for number, attempt in enumerate(record.attempts, 1):
        row.until("queue", attempt.placed_ms + shift)
        over = attempt.ended_ms if attempt.ended_ms is not None else record.ended_ms
        again = number < len(record.attempts)
        _attempt(row, attempt, None if over is None else over + shift, number, shift, again=again)
    if record.ended_ms is None:
        row.until("queue", None)
    else:  # with an attempt to its end, this is empty
        row.until("queue", record.ended_ms + shift)
        row.until("delivery", None)
    return row.parts


def _attempt(row: _Row, attempt: AttemptRecord, over: float | None, number: int, shift: float, *, again: bool) -> None:
    """Its parts, up to `over` if it has ended. `again`: another attempt came after it."""
    failed = attempt.outcome not in ("", "ok", "cancelled")
    lost = failed and again

    def until(name: PartName, mark_ms: float | None) -> bool:
        """Whether this part has ended and another one follows."""
        end = over if mark_ms is None else mark_ms + shift
        row.until(name, end if over is None or end is None else min(end, over), number, lost=lost)
        return mark_ms is not None

    first = attempt.first_token_ms
    if until("admit", attempt.accepted_ms) and until("prefill", first) and first is not None:
        if attempt.exposed_ms is not None:
            until("transfer", first + attempt.exposed_ms)
        elif attempt.kv_from and (failed or over is None):  # it has not ended yet, or never did
            until("transfer", None)
        until("decode", None)


def _arrived(record: RequestRecord) -> float:
    return record.arrived if record.trace.arrived is None else record.trace.arrived


def _end_of_work(record: RequestRecord) -> float:
    return record.arrived + (record.ended_ms or 0.0) / 1000
