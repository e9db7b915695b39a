"""What a chaos run found, and whether all invariants held."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from chaos.tally import Tally

_RANGES = (
    "handoffs",
    "kv_blocks_verified",
    "kv_blocks_reread",
    "kv_blocks_recomputed",
    "kv_blocks_refused",
    "prefill_local",
    "read_failed",
    "read_given_up",
    "read_late",
    "digest_mismatch",
    "kv_blocks_stale",
    "kv_blocks_corrupt",
    "kv_blocks_distrusted",
    "prefix_hit_corrupt",
    "preempted",
)
_SHOWN_PROBLEMS = 10


@dataclass(slots=True)
class Report:
    """`faults` by role and kind; `workers` and `routers`: counters summed over all lives; `leaked`: gauges left."""

    seconds: float
    tally: Tally
    faults: Counter[str]
    workers: Counter[str]
    routers: Counter[str]
    unrecovered: list[str] = field(default_factory=list)
    leaked: dict[str, int] = field(default_factory=dict)
    crashed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing wrong, failed, hung, leaked or lost, and something was asked at all."""
        return not self.violations() and self.tally.outcomes["ok"] > 0

    def violations(self) -> list[str]:
        """Every broken invariant, in words."""
        return [
            *(f"wrong: {words}" for words in self.tally.wrong),
            *(f"failed: {words}" for words in self.tally.failed),
            *(f"hung: {words}" for words in self.tally.hung),
            *(f"not back within a minute: {words}" for words in self.unrecovered),
            *(f"leaked: {name}: {count}" for name, count in self.leaked.items()),
            *(f"died by itself: {words}" for words in self.crashed),
        ]

    def lines(self) -> Iterator[str]:
        """For a person."""
        tally = self.tally
        done = f"{self.faults.total()} process faults, {tally.requests} requests, {tally.tokens} tokens"
        yield f"{self.seconds:.0f} s, {done}"
        yield f"faults        {_counts(self.faults)}"
        yield f"outcomes      {_counts(tally.outcomes)}"
        yield f"tried again   {_counts(tally.retries)}"
        asked = _counts(tally.failovers_with)
        yield f"failovers     {tally.failovers} answers took more than one attempt, those with {asked}"
        for kind, gaps in sorted(tally.gaps_s.items()):
            p50, p99, longest = (1000 * percentile(gaps, share) for share in (0.5, 0.99, 1.0))
            times = f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {longest:.0f} ms of {len(gaps)}"
            yield f"gap           {kind} of a decode worker: {times}"
        ranges = Counter({name: self.workers[name] for name in _RANGES})
        ranges.update({name: count for name, count in self.workers.items() if name.startswith("handoff_left")})
        yield f"ranges        {_counts(ranges)}"
        yield f"routers       {_counts(self.routers)}"
        yield (
            f"wrong tokens {len(tally.wrong)}, failed {len(tally.failed)}, hung {len(tally.hung)}, "
            f"leaked {sum(self.leaked.values())}"
        )
        problems = self.violations()
        yield from problems[:_SHOWN_PROBLEMS]
        if len(problems) > _SHOWN_PROBLEMS:
            yield f"... and {len(problems) - _SHOWN_PROBLEMS} more"
        yield "all invariants held" if self.ok else "INVARIANTS BROKEN"


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000 * len(ordered)) // 1000) - 1)]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common() if count) or "none"
