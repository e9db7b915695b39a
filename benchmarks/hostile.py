"""What hostile requests cost the others (FAULTS S07, S08): `python -m benchmarks.hostile [--model NAME] [--rounds 5]`.

One prefill and one decode worker. Streams are timed in turns, A B C C B A ...:

    alone     nothing else is asked
    bombs     beside grammars made to explode, always two at a time
    absurd    beside bodies with impossible values, always two at a time
ITL: gaps between the chunks of the streams. Ratios are taken within a round, so that what the machine does meanwhile is
in both sides: S08 allows 1.2 beside bombs. S07 wants what is refused to be so within 50 ms; a bomb may take longer,
since it is tried, in a process of its own, for up to two seconds of processor time.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import uvloop

from benchmarks.http_client import HttpClient
from benchmarks.machine import describe_machine, today
from benchmarks.report import head, number, publish
from benchmarks.setups import SPLIT, Setup, make_cluster, pinned, wait_serving, warm_up
from benchmarks.timeline import percentile
from benchmarks.workloads import Ask, Writer
from cluster.core.clock import Clock, SystemClock
from cluster.core.errors import HeadraceError, Unavailable

RESULTS = Path(__file__).with_name("results")
ALONE, BOMBS, ABSURD = TURNS = ("alone", "bombs", "absurd")
STREAMS, PROMPT, TOKENS = 4, 64, 128
TOGETHER = 2
READY_S = 120.0
EARLY_MS = 50.0  # S07: an impossible value is refused sooner
_WRITER = Writer()

_DEEP: dict[str, Any] = {"type": "string"}
for _ in range(100):
    _DEEP = {"type": "object", "properties": {"a": _DEEP}}
_EITHER = {"anyOf": [{"properties": {"a": {"const": i}}} for i in range(6)]}
GRAMMARS: Sequence[Mapping[str, Any]] = (
    {"guided_regex": "("},
    {"guided_regex": "(?<=x)*"},
    {"guided_regex": "(a{1,1000}){1,1000}"},
    {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
    {"guided_regex": "(.*a.{200}){5}"},
    {"guided_json": _DEEP},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"enum": [f"value {i}" for i in range(10_000)]}},
    {"guided_json": {"allOf": [_EITHER] * 12}},
)
VALUES: Sequence[Mapping[str, Any]] = (
    {"temperature": 1e308},
    {"logprobs": 10**6},
    {"n": 10**6},
    {"max_tokens": 2**31},
    {"logit_bias": {str(token): 1 for token in range(300_000)}},
    {"logit_bias": {str(2**40): 1}},
    {"stop": ["x" * 10] * 10_000},
    {"stop_token_ids": [1] * 100_000},
    {"prompt": ["a"] * 10_000},
    {"prompt": [2**63] * 1000},
)


@dataclass(slots=True)
class Turn:
    """Milliseconds: gaps between the streams' chunks, and from a hostile request to its whole answer, by status."""

    gaps: list[float] = field(default_factory=list)
    answers: dict[int, list[float]] = field(default_factory=dict)


Rounds = Sequence[Mapping[str, Turn]]


class Hostile:
    """Runs the turns on one cluster."""

    def __init__(self, client: HttpClient, other: HttpClient, model: str, clock: Clock) -> None:
        self._client = client
        self._other = other
        self._model = model
        self._clock = clock

    async def turn(self, name: str, seed: str) -> Turn:
        """Raises Unavailable when a stream fails."""
        turn, rng = Turn(), random.Random(seed)
        asks = [Ask("stream", _WRITER.prompt(rng, PROMPT), TOKENS) for _ in range(STREAMS)]
        fields: Sequence[Mapping[str, Any]] = {ALONE: (), BOMBS: GRAMMARS, ABSURD: VALUES}[name]
        bodies = [orjson.dumps({"model": self._model, "prompt": "hello", "max_tokens": 4, **one}) for one in fields]
        async with self._beside(bodies, turn):
            timelines = await asyncio.gather(*(self._client.stream(ask) for ask in asks))
        for timeline in timelines:
            if not timeline.ok:
                raise Unavailable(f"a stream failed in turn {name!r}: {timeline.error}")
            turn.gaps += [1000 * (b - a) for a, b in itertools.pairwise(timeline.chunks)]
        return turn

    @contextlib.asynccontextmanager
    async def _beside(self, bodies: Sequence[bytes], turn: Turn) -> AsyncIterator[None]:
        """Some senders take turns with the bodies until the block ends; what is on its way then is waited for."""
        done = asyncio.Event()
        endless = itertools.cycle(bodies)

        async def send() -> None:
            while not done.is_set():
                sent = self._clock.now()
                answer = await self._other.post("/v1/completions", next(endless))
                turn.answers.setdefault(answer.status, []).append(1000 * (self._clock.now() - sent))

        async with asyncio.TaskGroup() as senders:
            for _ in range(TOGETHER if bodies else 0):
                senders.create_task(send())
            try:
                yield
            finally:
                done.set()


async def measure(model: str, rounds: int, clock: Clock) -> Rounds:
    """Every turn, round by round. Raises Unavailable, ConfigError."""
    with tempfile.TemporaryDirectory() as folder, make_cluster(SPLIT, model, (), Path(folder)) as cluster:
        await asyncio.to_thread(cluster.wait_ready, READY_S)
        setup, label = Setup(SPLIT, cluster), cluster.config.model_name
        async with (
            HttpClient(cluster.url, label, clock) as client,
            HttpClient(cluster.url, label, clock) as other,
        ):
            await wait_serving(setup, client, clock)
            await warm_up(setup, client, _WRITER, longest=1024)
            run = Hostile(client, other, label, clock)
            with pinned([setup]):
                await run.turn(BOMBS, "warm")
                return [
                    {name: await run.turn(name, f"{number}") for name in (TURNS if number % 2 == 0 else TURNS[::-1])}
                    for number in range(rounds)
                ]


def ratios(rounds: Rounds, name: str, share: float) -> list[float]:
    """A percentile of the gaps in turn `name`, in parts of that of the streams alone, round by round."""
    return [_gap(one[name], share) / _gap(one[ALONE], share) for one in rounds]


def _gap(turn: Turn, share: float) -> float:
    found = percentile(turn.gaps, share)
    assert found is not None, "a turn without gaps"  # streams have 128 tokens
    return found


def markdown(rounds: Rounds, machine: Mapping[str, str]) -> str:
    """The tables."""
    lines = ["# What hostile requests cost the others", "", *head(machine)]
    lines += [
        f"- {len(rounds)} rounds; {STREAMS} streams of {TOKENS} tokens a turn",
        f"- {TOGETHER} hostile ones at a time",
    ]
    lines += ["", "| turn | ITL p50, ms | p99 | p50, to alone | p99, to alone | answers |", "| --- " * 6 + "|"]
    for name in TURNS:
        gaps = [number(median(_gap(one[name], share) for one in rounds)) for share in (50, 99)]
        parts = [_spread(ratios(rounds, name, share)) for share in (50, 99)]
        statuses = sorted({status for one in rounds for status in one[name].answers})
        count = ", ".join(f"{len(answered(rounds, name, status))} x {status}" for status in statuses) or "-"
        lines.append(f"| {name} | {' | '.join(gaps)} | {' | '.join(parts)} | {count} |")
    lines += ["", f"| refused in, ms | p50 | p99 | most | over {EARLY_MS:g} ms |", "| --- " * 5 + "|"]
    for name in (BOMBS, ABSURD):
        told = answered(rounds, name, 400)
        cells = (percentile(told, 50), percentile(told, 99), max(told, default=None))
        late = f"{sum(ms > EARLY_MS for ms in told)} of {len(told)}"
        lines.append(f"| {name} | {' | '.join(map(number, cells))} | {late} |")
    return "\n".join([*lines, "", *(__doc__ or "").strip().splitlines()[2:]]) + "\n"


def answered(rounds: Rounds, name: str, status: int) -> list[float]:
    """How long hostile requests took that were answered so, in milliseconds."""
    return [ms for one in rounds for ms in one[name].answers.get(status, ())]


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


def main() -> int:
    """Returns the exit code: 0, or 1 when it could not be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.hostile")
    try:
        rounds = uvloop.run(measure(options.model, options.rounds, clock))
    except HeadraceError as error:
        print(f"the benchmark could not be run: {error}", file=sys.stderr)
        return 1
    figures = [{name: {"gaps_ms": t.gaps, "answers_ms": t.answers} for name, t in one.items()} for one in rounds]
    text = markdown(rounds, machine)
    publish(options.out, f"{today(clock)}-hostile", text, {"machine": machine, "rounds": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
