"""Random requests, random cancels, tiny pools, two workers of each kind: right tokens, nothing stuck or leaked."""

import random
from collections import Counter

import pytest

from cluster.stubs.common_pb2 import Sampling
from cluster.stubs.session_pb2 import SampleState
from tests.fakes.world import World
from tests.unit.workers.test_tracer_matrix import B, config, expected

REQUESTS = 100  # times 20 seeds


class Load:
    """Clients that submit, cancel, and submit again what was pre-empted or refused."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        blocks = self.random.choice([14, 24, 64])
        self.world = World(config(pool_tokens=blocks * B, chunk_tokens=32), prefill=2, decode=2, seed=seed)
        self.system = self.random.choices(range(1000), k=3 * B)
        self.open: dict[str, tuple[list[int], int, int, Sampling, list[list[int]], int, str]] = {}
        self.answers: dict[tuple[int, int], list[int]] = {}
        self.cancelled: set[str] = set()
        self.finished = 0

    def submit(self) -> None:
        shared = self.system[: self.random.randrange(len(self.system))] if self.random.random() < 0.5 else []
        ids = shared + self.random.choices(range(1000), k=self.random.randrange(1, 5 * B))
        n = self.random.choice([1, 1, 1, 2])
        count = self.random.randrange(1, 40)
        sampling = Sampling(
            temperature=self.random.choice([0.0, 0.8]), top_p=0.95, seed=self.random.getrandbits(64), logprobs=-1
        )
        self.send(ids, n, count, sampling, [[] for _ in range(n)], 0)

    def send(
        self, ids: list[int], n: int, count: int, sampling: Sampling, done: list[list[int]], preemptions: int
    ) -> None:
        names = self.random.sample(list(self.world.prefill), k=self.random.randrange(3))
        decode = self.random.choice(list(self.world.decode))
        finished = [len(d) == count for d in done]
        histories = [SampleState(emitted=d, finished=f) for d, f in zip(done, finished, strict=True)]
        attempt = self.world.submit(
            ids, count, decode=decode, prefill=names, sampling=sampling, histories=histories, ignore_eos=True,
            preemptions=preemptions, local_max_tokens=self.random.choice([0, 20]),
        )  # fmt: skip
        self.open[attempt] = (ids, n, count, sampling, done, preemptions, decode)

    def harvest(self) -> None:
        """Check what has ended; submit again what was given back."""
        for attempt, (ids, n, count, sampling, before, preemptions, _) in list(self.open.items()):
            answer = self.world.answers[attempt]
            done = [before[i] + answer.tokens[i] for i in range(n)]
            for i in range(n):
                assert done[i] == self.right(ids, count, sampling, i)[: len(done[i])], attempt
            if attempt in self.cancelled:
                del self.open[attempt]
            elif all(len(d) == count for d in done):
                self.finished += 1
                del self.open[attempt]
            elif answer.lost:
                assert "failed" not in answer.lost, answer.lost
                del self.open[attempt]
                self.send(ids, n, count, sampling, done, preemptions + answer.lost.startswith("preempted"))

    def right(self, ids: list[int], count: int, sampling: Sampling, index: int) -> list[int]:
        key = (sampling.seed, index)
        if key not in self.answers:
            self.answers[key] = expected(ids, count, sampling, index)
        return self.answers[key]

    def cancel_one(self) -> None:
        if self.open:
            attempt = self.random.choice(list(self.open))
            self.cancelled.add(attempt)
            self.world.cancel(attempt, decode=self.open[attempt][6])

    def run(self) -> None:
        sent = 0
        while sent < REQUESTS or self.open:
            if sent < REQUESTS and len(self.open) < 12:
                self.submit()
                sent += 1
            for _ in range(self.random.randrange(60)):
                self.world.step()
            if self.random.random() < 0.1:
                self.cancel_one()
            if self.random.random() < 0.2 or sent == REQUESTS:
                self.world.tick(0.1)
            self.world.check_integrity()
            self.harvest()


@pytest.mark.parametrize("seed", range(20))
def test_random_load(seed: int) -> None:
    load = Load(seed)
    load.run()
    assert load.finished + len(load.cancelled) >= REQUESTS
    load.world.run()
    load.world.tick(6)
    load.world.run()
    load.world.assert_quiet()
    totals = sum((core.state.counters for core in load.world.decode.values()), Counter())
    for what in ("handoffs", "prefill_local", "attempts_cancelled", "prefix_hit_tokens", "kv_blocks_verified"):
        assert totals[what], f"this load never saw {what}"
    verified = totals["kv_blocks_verified"] - totals["kv_blocks_distrusted"] - totals["kv_blocks_behind_a_gap"]
    ends = verified + sum(totals[f"kv_blocks_{how}"] for how in ("recomputed", "refused", "abandoned"))
    assert totals["kv_blocks_wanted"] == ends, "every block that was to come over ends in one way"
