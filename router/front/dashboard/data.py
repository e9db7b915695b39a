"""GET /dashboard/data: one look at this router and its workers, for the page. No text, no token ids."""

from collections.abc import Sequence
from datetime import UTC, datetime

from cluster.core.clock import Clock
from router.flows import SLOT_S as FLOW_SLOT_S
from router.flows import SLOTS as FLOW_SLOTS
from router.flows import Failover
from router.front.door import FrontDoor
from router.front.openai_shapes import Json
from router.front.recent import SLOT_S, SLOTS, Recent
from router.lives import Life
from router.overview import FlowNow, Overview, WorkerNow
from router.records import RequestRecord
from router.timeline import parts, total_ms
from router.windows import RollingHistogram

SHARES = (0.5, 0.95, 0.99)
_POOLS = ("prefill", "decode")


def dashboard_json(front: FrontDoor, recent: Recent, seen: Overview) -> Json:
    """Everything the page shows. Times are milliseconds or seconds, as their names say; ages count back from now."""
    clock = front.metrics.clock
    return {
        "model": front.model_name,
        "at": datetime.fromtimestamp(clock.wall(), UTC).isoformat(timespec="milliseconds"),
        "ready": not (reasons := front.not_ready_reasons()),
        "reasons": reasons,
        "pools": {role: _pool(seen, role) for role in _POOLS},
        "others": [_worker(worker, seen.now) for worker in seen.workers if worker.role not in _POOLS],
        "queue": {
            "waiting": seen.waiting,
            "tokens": seen.waiting_tokens,
            "limit": front.settings.queue_limit,
            "limit_tokens": front.settings.queue_tokens,
        },
        "streams": len(front.metrics.in_flight),
        "flows": [_flow(flow) for flow in seen.flows],
        "flow_window_s": FLOW_SLOT_S * FLOW_SLOTS,
        "recent": _recent(recent, seen.now),
        "failovers": [_failover(failover, seen.now) for failover in seen.failovers],
        "requests": [_request(record, clock) for record in seen.requests],
    }


def _pool(seen: Overview, role: str) -> Json:
    return {
        "workers": [_worker(worker, seen.now) for worker in seen.workers if worker.role == role],
        "gone": [_gone(life, seen.now) for life in seen.gone if life.role == role],
    }


def _worker(worker: WorkerNow, now: float) -> Json:
    return {
        "name": worker.name,
        "address": worker.address,
        "epoch": f"{worker.epoch:016x}",
        "state": worker.state,
        "restarts": worker.lives - 1,
        "met_s": round(now - worker.met, 1),
        "away_s": None if worker.away_s is None else round(worker.away_s, 1),
        "blocks": worker.blocks,
        "blocks_used": max(0, worker.blocks - worker.free_blocks) if worker.blocks else 0,
        "running": worker.running,
        "waiting": worker.waiting,
        "handing_off": worker.handing_off,
        "queued_tokens": worker.queued_tokens,
        "attempts": worker.attempts,
        "slots_set_aside": worker.slots_set_aside,
    }


def _gone(life: Life, now: float) -> Json:
    return {
        "name": life.name,
        "epoch": f"{life.epoch:016x}",
        "restarts": life.lives - 1,
        "left_in_order": life.leaving,
        "heard_s": round(now - life.heard, 1),
    }


def _flow(flow: FlowNow) -> Json:
    return {
        "prefill": flow.pair[0],
        "decode": flow.pair[1],
        "under_way": flow.under_way,
        "tokens_under_way": flow.tokens_under_way,
        "handoffs": flow.handoffs,
        "bytes": flow.kv_bytes,
        "exposed_ms": round(flow.exposed_ms / flow.handoffs, 3) if flow.handoffs else None,
    }


def _recent(recent: Recent, now: float) -> Json:
    prompt, cached, written = recent.tokens(now)
    ended, bad = recent.outcomes(now)
    return {
        "slot_s": SLOT_S,
        "window_s": SLOT_S * SLOTS,
        "ttft": _times(recent.ttft, now),
        "itl": _times(recent.itl, now),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": written,
        "ended": ended,
        "bad": bad,
    }


def _times(histogram: RollingHistogram, now: float) -> Json:
    """Milliseconds; a slot in which nothing came is null."""
    each, together = histogram.quantiles(now, SHARES)
    counts = histogram.counts(now)
    names = [f"p{share * 100:g}" for share in SHARES]
    return {
        "count": sum(counts),
        "counts": counts,
        **dict(zip(names, [_ms(value) for value in together], strict=True)),
        "series": dict(zip(names, [[_ms(value) for value in row] for row in each], strict=True)),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


def _failover(failover: Failover, now: float) -> Json:
    failed, successor = failover.failed, failover.successor
    return {
        "ago_s": round(now - failover.at, 1),
        "request": failover.record.request_id,
        "id": failover.record.public_id,
        "from": failed.decode,
        "to": None if successor is None else successor.decode,
        "attempt": failover.attempt,
        "why": failed.outcome,
        "request_outcome": _outcome(failover.record),
    }


def _request(record: RequestRecord, clock: Clock) -> Json:
    now, last = clock.now(), record.attempts[-1] if record.attempts else None
    return {
        "request": record.request_id,
        "id": record.public_id,
        "ago_s": round(now - (record.arrived if record.trace.arrived is None else record.trace.arrived), 1),
        "outcome": _outcome(record),
        "running": record.ended_ms is None,
        "waiting_for": record.waiting_for or None,
        "total_ms": round(total_ms(record, now), 3),
        "ttft_ms": _ttft_ms(record),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.trace.cached_tokens,
        "output_tokens": None if record.ended_ms is None else record.written,
        "samples": record.samples,
        "prefill": record.trace.prefill_worker or None,
        "decode": None if last is None else last.decode,
        "kv_bytes": record.trace.kv_bytes,
        "transport": record.trace.transport or None,
        "attempts": _attempts(record),
        "parts": [
            {
                "name": part.name,
                "start_ms": round(part.start_ms, 3),
                "ms": round(part.end_ms - part.start_ms, 3),
                "attempt": part.attempt,
                "lost": part.lost,
            }
            for part in parts(record, now)
        ],
    }


def _attempts(record: RequestRecord) -> Sequence[Json]:
    return [
        {"decode": attempt.decode, "prefill": attempt.kv_from or None, "outcome": attempt.outcome or "running"}
        for attempt in record.attempts
    ]


def _ttft_ms(record: RequestRecord) -> float | None:
    """As the front door's clients feel it: from arrival, not from admission."""
    first = next((a.first_token_ms for a in record.attempts if a.first_token_ms is not None), None)
    if first is None:
        return None
    arrived = record.arrived if record.trace.arrived is None else record.trace.arrived
    return round(first + (record.arrived - arrived) * 1000, 3)


def _outcome(record: RequestRecord) -> str:
    return record.outcome or "running"
