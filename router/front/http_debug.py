"""GET /debug/requests/{id}: why a recent request went where it went, and what became of it. No text, no token ids."""

from collections.abc import Sequence
from datetime import UTC, datetime

from cluster.core.clock import Clock
from cluster.core.errors import InvalidRequest
from router.front.openai_shapes import Json
from router.placement import Considered
from router.records import AttemptRecord, Recorder, RequestRecord
from router.tenants import Tenant


class RequestNotFound(InvalidRequest):
    """No recent request of this id, or none that the asker may see: the two look alike."""

    status = 404


def explain(recorder: Recorder, name: str, tenant: Tenant, clock: Clock) -> Json:
    """The newest request of this id, ours or the client's, that this tenant may see. Raises RequestNotFound."""
    known = may_see(recorder.records(name), tenant)
    if not known:
        raise RequestNotFound(
            "no recent request of this id was served by this router process", param="id", code="request_not_found"
        )
    return request_json(known[0], clock)


def may_see(records: Sequence[RequestRecord], tenant: Tenant) -> Sequence[RequestRecord]:
    """The one place that decides who is told of which request: a tenant of its own, an operator of all."""
    return [record for record in records if tenant.operator or record.tenant == tenant.name]


def request_json(record: RequestRecord, clock: Clock) -> Json:
    """A record for people and programs."""
    trace = record.trace
    arrived = datetime.fromtimestamp(clock.wall() - (clock.now() - record.arrived), UTC)
    return {
        "id": record.public_id,
        "request": record.request_id,
        "arrived": arrived.isoformat(timespec="milliseconds"),
        "outcome": record.outcome or "running",
        "ended_ms": _rounded(record.ended_ms),
        "waiting_for": record.waiting_for or None,
        "prompt_tokens": record.prompt_tokens,
        "max_tokens": record.max_tokens,
        "samples": record.samples,
        "cached_tokens": trace.cached_tokens,
        "kv_bytes": trace.kv_bytes,
        "prefill": trace.prefill_worker or None,
        "decode": trace.decode_worker or None,
        "transport": trace.transport or None,
        "timings_ms": {name: _rounded(value) for name, value in trace.timings_ms.items()},
        "attempts": [_attempt(attempt) for attempt in record.attempts],
    }


def _attempt(attempt: AttemptRecord) -> Json:
    return {
        "decode": attempt.decode,
        "prefill": list(attempt.prefill),
        "local": attempt.local,
        "placed_ms": _rounded(attempt.placed_ms),
        "accepted_ms": _rounded(attempt.accepted_ms),
        "first_token_ms": _rounded(attempt.first_token_ms),
        "ended_ms": _rounded(attempt.ended_ms),
        "outcome": attempt.outcome or "running",
        "considered": [_considered(pair) for pair in attempt.considered],
    }


def _considered(pair: Considered) -> Json:
    return {
        "decode": pair.decode,
        "prefill": pair.prefill or "local",
        "cost_ms": _rounded(sum(pair.terms_ms.values())),
        "terms_ms": {name: _rounded(value) for name, value in pair.terms_ms.items()},
    }


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 3)
