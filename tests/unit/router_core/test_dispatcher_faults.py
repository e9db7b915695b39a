"""Whatever workers and clients do, every request has one outcome and every token comes once (I3, I4, I5, I2)."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.requests import Request, SamplingParams
from tests.unit.router_core.fakes import FakeWorker, Faults, expected
from tests.unit.router_core.world import Client, World

CHANCE = st.sampled_from([0.0, 0.0, 0.05, 0.3])
FAULTS = st.builds(
    Faults,
    refuse=CHANCE,
    no_prefill=CHANCE,
    preempt=CHANCE,
    fail=CHANCE,
    die=CHANCE,
    repeat=CHANCE,
    gap=CHANCE,
    late=CHANCE,
    hang_up=CHANCE,
)
REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 12), st.integers(1, 3)),
    min_size=1,
    max_size=8,
)


def misbehave(world: World, faults: Faults, rng: random.Random) -> None:
    """Faults that are not a worker's own: deaths, broken sessions, lost watch events, clients that leave or stop."""
    for address, worker in list(world.workers.items()):
        if not worker.up:
            worker.restart()
        elif rng.random() < faults.die:
            world.die(address)
        elif worker.role == "decode" and rng.random() < faults.hang_up:
            world.hang_up(address)
        elif rng.random() < faults.gap and address in world.watching:
            world.watching[address] += 1
    for name, client in world.clients.items():
        if rng.random() < faults.late / 4:
            world.cancel(name)
        elif rng.random() < faults.late / 4:
            world.stop(name, rng.randrange(client.request.n))


def check(client: Client) -> None:
    """One outcome; nothing but the function's tokens, in order; success means all of them."""
    assert client.over
    assert len(client.outcomes) <= 1
    for index, ids in enumerate(client.ids):
        whole = expected(client.request, index)
        assert ids == whole[: len(ids)]
        if client.outcomes == [None] and index not in client.stopped:
            assert ids == whole
            assert client.ends[index] is not None


@settings(max_examples=150, deadline=None)
@given(FAULTS, REQUESTS, st.integers(0, 2**32), st.integers(0, 2), st.integers(1, 3))
def test_one_outcome_and_every_token_once(
    faults: Faults, asked: list[tuple[list[int], int, int]], seed: int, prefills: int, decodes: int
) -> None:
    rng = random.Random(seed)
    workers = [FakeWorker(f"p{i}", "prefill", rng) for i in range(prefills)]
    workers += [FakeWorker(f"d{i}", "decode", rng, faults, blocks=rng.choice([16, 40])) for i in range(decodes)]
    world = World(workers, seed, max_attempts=4)
    for number, (prompt, max_tokens, n) in enumerate(asked):
        if rng.random() < 0.5:
            world.advance()
        world.ask(
            Request(f"r{number}", "x", tuple(prompt), max_tokens, n, SamplingParams(seed=number), deadline_s=30.0)
        )
    for _ in range(40):
        misbehave(world, faults, rng)
        world.advance()
    for worker in workers:
        worker.faults = Faults()
        if not worker.up:
            worker.restart()
    world.run()
    for client in world.clients.values():
        check(client)
    world.connect()
    assert world.idle()
    outcomes = sum(count for name, count in world.core.counters().items() if name.startswith("outcome_"))
    assert outcomes == len(world.clients)


@settings(max_examples=30, deadline=None)
@given(REQUESTS, st.integers(0, 2**32))
def test_without_faults_everything_succeeds(asked: list[tuple[list[int], int, int]], seed: int) -> None:
    rng = random.Random(seed)
    world = World([FakeWorker("p", "prefill"), FakeWorker("d", "decode", rng, Faults(repeat=0.5), blocks=20)], seed)
    for number, (prompt, max_tokens, n) in enumerate(asked):
        world.ask(Request(f"r{number}", "x", tuple(prompt), max_tokens, n, SamplingParams(seed=number)))
    world.run()
    for client in world.clients.values():
        check(client)
        assert client.outcomes == [None]
    assert world.idle()
