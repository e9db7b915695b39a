"""A real scrape of /metrics, and what must add up in it (FAULTS O07)."""

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.asks import Ask
from tests.integration.stack import Stack, until

Labels = dict[str, str]
Laws = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one answer, as Prometheus reads them."""

    samples: tuple[tuple[str, Labels, float], ...]

    def of(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        """Samples of this name with these labels."""
        return [(own, n) for known, own, n in self.samples if known == name and labels.items() <= own.items()]

    def sum(self, name: str, **labels: str) -> float:
        return sum(n for _, n in self.of(name, **labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = {}
        for own, n in self.of(name, **labels):
            sums[own[label]] = sums.get(own[label], 0.0) + n
        return sums


async def scrape(running: Stack) -> Scrape:
    text = (await running.get("/metrics")).body.decode()
    families = text_string_to_metric_families(text)
    return Scrape(tuple((s.name, s.labels, s.value) for family in families for s in family.samples))


def adds_up(seen: Scrape, asks: Sequence[Ask], left: Sequence[Ask]) -> Laws:
    """What holds at rest after exactly these requests, whatever went wrong inside: (one side, other).

    `asks` were all answered; clients of those in `left` went away when their answer had begun.
    """
    every = [*asks, *left]
    least, most = (sum(len(tokens) for ask in some for tokens, _ in ask.right) for some in (asks, every))
    good, gone = (seen.sum("headrace_requests_total", outcome=outcome) for outcome in ("ok", "cancelled"))
    out = seen.sum("headrace_output_tokens_total")
    laws: Laws = {
        "outcomes are requests": (seen.sum("headrace_requests_total"), len(every)),
        "and all of them good, but of clients that left": (good + gone, len(every)),
        "of whom there are no more": (max(gone, len(left)), len(left)),
        "the dispatcher counts the same": (seen.sum("headrace_dispatched_total"), len(every)),
        "each has a first token": (seen.sum("headrace_ttft_seconds_count"), len(every)),
        "and an end where it is good": (seen.sum("headrace_e2e_seconds_count"), good),
        "and waited once": (seen.sum("headrace_queue_seconds_count"), len(every)),
        "tokens out are what clients saw": (out, min(max(out, least), most)),
        "prompts are what clients sent": (seen.sum("headrace_prompt_tokens_total"), sum(len(a.prompt) for a in every)),
    }
    laws |= _usage_adds_up(seen, asks, left, good)
    for name in ("requests_in_flight", "queue_requests", "queue_tokens", "attempts_running", "bookings",
                 "permits_in_use", "worker_in_use", "worker_batch_sequences", "pair_slots_set_aside"):  # fmt: skip
        laws[f"{name} at rest"] = (seen.sum(f"headrace_{name}"), 0)
    for worker in seen.by("worker", "headrace_worker_state", pool="decode"):
        laws |= {f"{worker}: {law}": sides for law, sides in _hand_offs_add_up(seen, worker).items()}
    return laws


def _usage_adds_up(seen: Scrape, asks: Sequence[Ask], left: Sequence[Ask], good: float) -> Laws:
    """What clients are charged for: all of every answer, and of one that its client left what was handed to it. No
    prompt is charged for twice, and none that nobody was answered."""
    used = {kind: seen.sum("headrace_usage_tokens_total", kind=kind) for kind in ("input", "cached", "output")}
    calls, out = seen.sum("headrace_usage_requests_total"), seen.sum("headrace_output_tokens_total")
    least = sum(len(tokens) for ask in asks for tokens, _ in ask.right)
    prompts, others = (sum(len(ask.prompt) for ask in some) for some in (asks, left))
    return {
        "requests charged for were answered": (calls, min(max(calls, good, len(asks)), len(asks) + len(left))),
        "tokens charged for were delivered": (used["output"], min(max(used["output"], least), out)),
        "prompts charged for were sent": (used["input"], min(max(used["input"], prompts), prompts + others)),
        "and cached by as many as answers say": (
            used["cached"],
            min(used["cached"], seen.sum("headrace_cached_tokens_total")),
        ),
    }


def _hand_offs_add_up(seen: Scrape, worker: str) -> Laws:
    """Of the present life of one decode worker."""
    event = seen.by("event", "headrace_worker_events_total", worker=worker)

    def blocks(how: str) -> float:
        return event.get(f"kv_blocks_{how}", 0.0)

    here = blocks("verified") - blocks("distrusted") - blocks("behind_a_gap")
    ended = here + blocks("recomputed") + blocks("refused") + blocks("abandoned")
    moved = seen.sum("headrace_pair_kv_bytes_total", decode=worker)
    return {
        "each job has one end": (
            seen.sum("headrace_pair_jobs_sent_total", decode=worker),
            seen.sum("headrace_pair_jobs_total", decode=worker),
        ),
        "bytes of pairs are those of verified blocks": (moved, event.get("kv_bytes", 0.0)),
        "which are all of one size": (moved % max(1.0, blocks("verified")), 0),
        "each wanted block has one end": (blocks("wanted"), ended),
    }


def all_was_computed_once(seen: Scrape) -> Laws:
    """What holds besides when nothing was tried twice, cancelled or pre-empted."""
    front = {name: seen.sum(f"headrace_{name}_tokens_total") for name in ("prompt", "cached", "output", "dropped")}
    # A hit on a decode worker saves computing where it computes the prompt; otherwise only what would be sent.
    hits = seen.by("pool", "headrace_worker_prefix_hit_tokens_total")
    accepted = ("jobs_accepted", "jobs_refused")
    return {
        "no attempt was lost": (seen.sum("headrace_attempts_left_total"), 0),
        "prompts = cached + computed": (
            front["prompt"],
            front["cached"] + seen.sum("headrace_worker_prompt_tokens_computed_total"),
        ),
        "tokens out = tokens written": (
            front["output"] + front["dropped"],
            seen.sum("headrace_worker_output_tokens_total"),
        ),
        "charged is what was answered": (
            seen.sum("headrace_usage_tokens_total", kind="cached"),
            front["cached"],
        ),
        "cached is what was found in caches": (
            front["cached"],
            min(max(front["cached"], hits["prefill"]), sum(hits.values())),
        ),
        "jobs sent are jobs heard": (
            seen.sum("headrace_pair_jobs_sent_total"),
            sum(seen.sum("headrace_worker_events_total", pool="prefill", event=event) for event in accepted),
        ),
    }


def broken(laws: Laws) -> Laws:
    return {law: sides for law, sides in laws.items() if sides[0] != sides[1]}


async def assert_adds_up(
    running: Stack, asks: Sequence[Ask], *, once: bool, left: Sequence[Ask] = (), within_s: float = 2.0
) -> Scrape:
    """Fails naming every law that does not hold when all workers have told of the last request."""
    seen: list[Scrape] = []

    def laws() -> Laws:
        return adds_up(seen[-1], asks, left) | (all_was_computed_once(seen[-1]) if once else {})

    async def hold() -> bool:
        seen.append(await scrape(running))
        return not broken(laws())

    assert await until(hold, within_s), broken(laws())
    return seen[-1]
