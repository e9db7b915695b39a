"""What is run side by side: the works, who does them, and how often. Pure.

Two stages, one after the other, each with its own set-ups up at the same time:
    steady         one stream, one long prompt, many streams: servers as they come, and libraries that serve nobody
    interference   steady chats beside long prompts, and the highest rate of chats; vLLM tuned for it
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.timeline import Slo
from benchmarks.workloads import Workload

SLO = Slo(ttft=2.0, tpot=0.050)
ATTAINED = 0.9
"""Share of the chats that must keep the SLO at a rate for it to count as served."""

SPLIT, AGGREGATED, INT8 = "headrace split", "headrace aggregated", "headrace int8"
VLLM_SPLIT, VLLM_AGGREGATED = "vllm split", "vllm aggregated"
LLAMA, OPENVINO = "llama.cpp", "openvino-genai"  # and the format of the weights
OURS = (SPLIT, AGGREGATED)
SERVERS = (*OURS, VLLM_SPLIT, VLLM_AGGREGATED)

SINGLE, MANY, MIXED, CAPACITY, MEMORY = "single stream", "many streams", "interference", "capacity", "memory"
STEADY, INTERFERENCE = "steady", "interference"
LONG_PROMPTS = (1024, 2048)
A_CORE = 8  # streams
CORES = 2


def prompt_name(tokens: int) -> str:
    """The work that is one prompt of `tokens` tokens."""
    return f"prompt {tokens}"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run. `single`, `prompts`, `many`: requests a turn; `searches`: seeds of the highest rate."""

    name: str
    seeds: Sequence[int]
    rounds: int
    single: int
    prompts: int
    many: int
    mixed_s: float
    probe_s: float = 0.0
    searches: int = 0


SIZES = {
    "smoke": Size("smoke", (1,), 1, 1, 1, 2, 6.0),
    "quick": Size("quick", (1,), 2, 1, 1, 16, 40.0),
    "default": Size("default", (1, 2, 3), 1, 2, 2, 32, 120.0, 60.0, 1),
    "full": Size("full", (1, 2, 3), 2, 3, 3, 32, 120.0, 120.0, 3),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """Set-ups that are up at the same time, and what they do in turn."""

    name: str
    works: Sequence[Workload]

    def doers(self, work: Workload, subjects: Sequence[str]) -> list[str]:
        """Who of `subjects` does a work: libraries serve one stream, and 8-bit weights are a matter of decoding."""
        if work.concurrency == 1:
            return list(subjects)
        return [name for name in subjects if name in SERVERS]


def stages(size: Size, chosen: Sequence[str] = ()) -> list[Stage]:
    """What is run. `chosen`: names of works; empty for all."""
    steady = [Workload(SINGLE, 32, 128, concurrency=1, count=size.single)]
    steady += [Workload(prompt_name(n), n, 4, concurrency=1, count=size.prompts) for n in LONG_PROMPTS]
    steady += [Workload(MANY, 512, 64, concurrency=A_CORE * CORES, count=size.many)]
    mixed = [chats(MIXED, 1.0, size.mixed_s)]
    if size.searches:
        mixed.append(chats(CAPACITY, 1.0, size.probe_s))
    found = [Stage(STEADY, steady), Stage(INTERFERENCE, mixed)]
    kept = [replace(stage, works=[w for w in stage.works if not chosen or w.name in chosen]) for stage in found]
    return [stage for stage in kept if stage.works]


def chats(name: str, rate: float, duration_s: float) -> Workload:
    """Chats at `rate` a second beside a long prompt every 20 s."""
    return Workload(name, 128, 128, duration_s=duration_s, rate=rate, long_rate=0.05)


def probe(work: Workload, rate: float) -> Workload:
    """The same at another rate, with arrivals and texts of its own."""
    return replace(work, name=f"{work.name} {rate:.3f}", rate=rate)


@dataclass(frozen=True, slots=True)
class Search:
    """For the highest rate that is served: doubling until one is not, then halving the ratio between the two.

    `low`: the highest served, `high`: the lowest not served; None: not met yet.
    """

    low: float | None = None
    high: float | None = None
    start: float = 1.0
    until: float = 1.1  # the ratio of the two at which it ends
    least: float = 0.1

    @property
    def rate(self) -> float | None:
        """What to try next; None when it is found (`low`), or nothing above `least` is served."""
        if self.low is None:
            if self.high is None:
                return self.start
            return self.high / 2 if self.high / 2 >= self.least else None
        if self.high is None:
            return self.low * 2
        return float((self.low * self.high) ** 0.5) if self.high / self.low > self.until else None

    def told(self, rate: float, served: bool) -> "Search":
        """After a try. More at a lower rate than at a higher one is noise: the lower failure stands."""
        if served:
            return replace(self, low=max(rate, self.low or 0.0))
        return replace(self, high=min(rate, self.high or rate))


def turns(size: Size) -> Iterator[tuple[int, int]]:
    """(seed, repetition) of each."""
    for seed in size.seeds:
        for repetition in range(size.rounds):
            yield seed, repetition
