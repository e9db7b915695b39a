"""Overviews for the dashboard's page: a bare one, and one in which every part of the page has something to show."""

import random
from dataclasses import replace

from cluster.core.clock import SystemClock
from router.flows import Failover
from router.front.recent import Recent
from router.lives import Life
from router.overview import RECENT, FlowNow, Overview, WorkerNow
from router.records import AttemptRecord, RequestRecord, record_of
from router.requests import Request, Trace

CLOCK = SystemClock()
LOST = "lost: worker is silent"
SPIKE_S, QUIET_S = 60, range(120, 150)  # seconds ago: slow first tokens, and none at all
SHOWN_S, MINUTES = 240, 5  # of latency, and the span of a chart
KV_BYTES = 1 << 19
DIED_S = 5.5  # seconds ago: a decode worker
WAITING, WAITING_TOKENS = 3, 1200
PROMPT, CACHED, WRITTEN = 40_000, 9_200, 12_000
ENDED, BAD = 48, 2


def worker(name: str, role: str = "decode") -> WorkerNow:
    return WorkerNow(name, "h:1", role, 7, "ready", 1, CLOCK.now(), None, 64, 60, 2, 0, 1, 0, 1, 0)


def request(name: str, public_id: str, *, running: bool = False) -> RequestRecord:
    now = CLOCK.now()
    trace = Trace("prefill-0", "decode-0", 1, arrived=now - 0.5, left=None if running else now)
    record = record_of(Request(name, public_id, (1, 2, 3), 9), trace, now - 0.49)
    record.attempts = [AttemptRecord("decode-0", (), False, (), 1.0, 2.0, 40.0)]
    if not running:
        record.attempt_ended(record.attempts[0], "ok", now)
        record.ended("ok", now)
    return record


def overview(*records: RequestRecord, name: str = "decode-0") -> Overview:
    flows = [FlowNow(("prefill-0", name), 1, 17, 4, 8192, 20.0)]
    return Overview(CLOCK.now(), [worker("prefill-0", "prefill"), worker(name)], [], flows, [], records, 0, 0, 1)


def full() -> Overview:
    """Two pools, one of whose workers is gone; KV between all pairs; as many requests as are told, of every kind."""
    now = CLOCK.now()
    long_ago = now - 900
    workers = [
        replace(worker("prefill-0", "prefill"), met=long_ago, running=1, free_blocks=40, queued_tokens=640),
        replace(worker("prefill-1", "prefill"), met=long_ago, state="draining", free_blocks=52, slots_set_aside=1),
        replace(worker("decode-0"), met=long_ago, running=6, free_blocks=21),
        replace(worker("decode-2"), met=now - 30, running=3, free_blocks=47, lives=2, away_s=2.5),
    ]
    gone = [Life("decode-1", "decode", 9, 1, now - 90, now - DIED_S - 0.5)]
    flows = [
        FlowNow(("prefill-0", "decode-0"), 2, 520, 40, 40 * KV_BYTES, 40 * 6.0),
        FlowNow(("prefill-0", "decode-2"), 0, 0, 22, 22 * KV_BYTES, 22 * 9.0),
        FlowNow(("prefill-1", "decode-0"), 0, 0, 9, 9 * KV_BYTES, 9 * 4.0),
        FlowNow(("prefill-1", "decode-2"), 1, 64, 3, 3 * KV_BYTES, 3 * 21.0),
    ]
    records = [_varied(place, now) for place in range(RECENT)]
    failed = [Failover(now - DIED_S, record, 0) for record in records if len(record.attempts) > 1]
    return Overview(now, workers, gone, flows, failed, records, WAITING, WAITING_TOKENS, 9)


def fill(recent: Recent) -> None:
    """Four minutes of latency with a slow moment and a quiet one; tokens and outcomes."""
    now, rng = CLOCK.now(), random.Random("latency")
    for ago in range(SHOWN_S, 0, -1):
        if ago in QUIET_S:
            continue
        slowness = 5.0 if abs(ago - SPIKE_S) < 5 else 1.0
        for _ in range(4):
            recent.ttft.add(now - ago, slowness * rng.uniform(0.18, 0.3))
            recent.itl.add(now - ago, rng.uniform(0.02, 0.05))
    recent.used(now, PROMPT, CACHED, WRITTEN)
    for number in range(ENDED):
        recent.ended(now, good=number >= BAD)


def _varied(place: int, now: float) -> RequestRecord:
    """The newest two still run; the next two lost their first decode worker; one was cancelled and one failed."""
    rng, running, lost_once = random.Random(place), place < 2, place in (2, 3)
    prefill, decode = f"prefill-{rng.randrange(2)}", f"decode-{2 * rng.randrange(2)}"
    first_ms, kv_ms = rng.uniform(180, 300), rng.uniform(4, 25)
    ended_ms = first_ms + kv_ms + rng.uniform(400, 4000) + (3000 if lost_once else 0)
    admitted = now - (ended_ms / 1000 + 1.3 * place if not running else rng.uniform(0.4, 1.5))
    trace = Trace(prefill, decode, 1, 16 * rng.randrange(9), KV_BYTES, "nixl", arrived=admitted - 0.012)
    prompt = (1,) * rng.choice((180, 260, 420))
    record = record_of(Request(f"r{place}", f"chat-{4000 - place}", prompt, 200), trace, admitted)
    lost_ms = 0.0
    if lost_once:
        lost_ms = (now - DIED_S - admitted) * 1000
        lost = AttemptRecord(
            "decode-1", (), False, (), 1.0, 2.0, 0.3 * lost_ms, lost_ms, LOST, prefill, KV_BYTES, kv_ms
        )
        record.attempts.append(lost)
    attempt = AttemptRecord(decode, (), False, (), lost_ms + 3.0, lost_ms + 9.0, lost_ms + first_ms, kv_from=prefill)
    attempt.kv_bytes, attempt.exposed_ms = KV_BYTES, kv_ms
    record.attempts.append(attempt)
    if not running:
        outcome = {6: "cancelled", 8: "failed: the engine's step"}.get(place, "ok")
        record.attempt_ended(attempt, outcome, admitted + ended_ms / 1000)
        record.ended(outcome, admitted + ended_ms / 1000)
        record.written, trace.left = rng.randrange(20, 90), admitted + ended_ms / 1000 + 0.002
    return record
