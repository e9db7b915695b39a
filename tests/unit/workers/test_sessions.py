"""Sessions that break and come back: every attempt goes on where its router stands, or is over (DESIGN §6)."""

import random

import pytest

from cluster.stubs.common_pb2 import Sampling
from cluster.stubs.session_pb2 import (
    AttemptSettled,
    FromRouter,
    ResumeAttempt,
    RouterHello,
    SampleState,
    StopSeq,
    Submit,
)
from decode_worker.effects import ToRouter
from tests.fakes.world import ROUTER, World
from tests.unit.workers.test_faults import IDS, counters, finish, warm_world
from tests.unit.workers.test_tracer_matrix import SEEDED, config, expected


def run_some(world: World, steps: int, seed: int = 0) -> None:
    """Some messages move, and outboxes are sent."""
    moves = random.Random(seed)
    for _ in range(steps):
        if not world.step() or moves.random() < 0.2:
            world.clock.advance(0.01)
            world.decode["decode-0"].flush(world.clock.now())
            world._decode_effects("decode-0")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("away", [0, 30, 3000], ids=["at once", "meanwhile", "ended meanwhile"])
def test_an_attempt_goes_on_where_its_router_stands(seed: int, away: int) -> None:
    """At any moment, several times: no token is lost or repeated, and nothing is computed twice."""
    world = warm_world(seed)
    attempt = world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 1)  # the Submit has arrived
    for part in range(3):
        run_some(world, 4 + 4 * seed, seed + part)
        world.hang_up()
        run_some(world, away, seed)
        world.come_back()
    answer = finish(world, attempt)
    assert not answer.lost
    assert counters(world)["attempts_resumed"] >= 1
    jobs = sum(counters(world, name).get("jobs_accepted", 0) for name in world.prefill)
    assert jobs <= 1


@pytest.mark.parametrize("seed", range(6))
def test_samples_and_their_logprobs_go_on(seed: int) -> None:
    """n = 3 with log-probabilities, one sample with history: what is replayed is what would have been sent."""
    sampling = Sampling(temperature=1.0, top_p=1.0, seed=9, logprobs=1)
    history = [SampleState(emitted=expected(IDS, 4, sampling, 0)), SampleState(), SampleState()]

    def play(*, broken: bool) -> list[tuple[int, int, float]]:
        world = warm_world(seed)
        logprobs: list[tuple[int, int, float]] = []
        receive = world._receive

        def listen(name: str, effect: object) -> None:
            if effect.session == world.sessions.get(name):  # type: ignore[attr-defined]
                for run in effect.message.tokens.runs:  # type: ignore[attr-defined]
                    assert len(run.logprobs) == len(run.ids)
                    logprobs.extend((run.index, run.offset + i, p.logprob) for i, p in enumerate(run.logprobs))
            receive(name, effect)  # type: ignore[arg-type]

        world._receive = listen  # type: ignore[method-assign]
        attempt = world.submit(IDS, 12, sampling=sampling, histories=history, ignore_eos=True)
        run_some(world, 40 + 5 * seed, seed)
        if broken:
            world.hang_up()
            run_some(world, 10, seed)
            world.come_back()
        world.run(check=True)
        world.wait(8)
        world.assert_quiet()
        for index in range(3):
            assert history[index].emitted[:] + world.answers[attempt].tokens[index] == expected(
                IDS, 12, sampling, index
            )
        return sorted(logprobs)

    assert play(broken=True) == play(broken=False)


def test_what_the_router_does_not_name_is_cancelled() -> None:
    world = warm_world()
    attempt = world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 60)
    world.hang_up()
    world.come_back(without=[attempt])
    world.run(check=True)
    world.wait(8)
    world.assert_quiet()
    assert counters(world)["attempts_cancelled"] == 1


def test_an_end_that_nobody_heard_is_told_again() -> None:
    """Pre-empted while the session was broken: the router learns why, with all tokens before it."""
    world = warm_world()
    attempt = world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 60)
    world.hang_up()
    world.decode["decode-0"].hand_over(world.clock.now())
    world._decode_effects("decode-0")
    run_some(world, 50)
    world.come_back()
    world.run(check=True)
    answer = world.answers[attempt]
    assert answer.lost.startswith("preempted")
    assert answer.tokens[0] == expected(IDS, 20)[: len(answer.tokens[0])]
    world.wait(8)
    world.assert_quiet()


def test_without_a_router_attempts_are_cancelled_in_time() -> None:
    world = warm_world()
    world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 30)
    world.hang_up()
    world.tick(4.5)
    assert not counters(world).get("attempts_cancelled")
    world.tick(1.0)
    world.run(check=True)
    world.wait(2)
    world.assert_quiet()
    assert counters(world)["attempts_cancelled"] == 1


def test_a_worker_that_was_frozen_gives_its_routers_the_time_to_come_back() -> None:
    world = warm_world()
    attempt = world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 60)
    world.hang_up()
    world.clock.advance(30.0)
    world.decode["decode-0"].slept(30.0)
    world.tick(1.0)
    world.come_back()
    finish(world, attempt)


def test_the_session_with_the_highest_number_is_spoken_with() -> None:
    world = warm_world()
    attempt = world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 60)
    world.come_back()  # the first one has not been heard to break
    core, now = world.decode["decode-0"], world.clock.now()
    assert not core.session_opened("late", RouterHello(epoch=ROUTER, session=1), now)
    for old in ("router", "late"):
        core.from_router(old, FromRouter(stop_seq=StopSeq(attempt=attempt, index=0)), now)
        core.session_closed(old, now)
    finish(world, attempt)


@pytest.mark.parametrize("offsets", [[9999], [0, 0], [], [-2]], ids=["ahead", "too many", "none", "negative"])
def test_offsets_that_cannot_be_are_unknown(offsets: list[int]) -> None:
    world = warm_world()
    attempt = world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 60)
    world.hang_up()
    world.come_back(without=[attempt])
    second = world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 60)
    world.hang_up()
    world.sessions["decode-0"] = "odd"
    hello = RouterHello(epoch=ROUTER, session=77, attempts=[ResumeAttempt(attempt=second, next_offsets=offsets)])
    assert world.decode["decode-0"].session_opened("odd", hello, world.clock.now())
    world._decode_effects("decode-0")
    world.run(check=True)
    assert world.answers[second].lost.startswith("unknown")
    world.wait(8)
    world.assert_quiet()


def test_a_router_cannot_resume_the_attempt_of_another() -> None:
    world = warm_world()
    attempt = world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 60)
    hello = RouterHello(epoch=99, session=1, attempts=[ResumeAttempt(attempt=attempt, next_offsets=[0])])
    core = world.decode["decode-0"]
    assert core.session_opened("stranger", hello, world.clock.now())
    said = [e.message.WhichOneof("message") for e in core.state.effects if getattr(e, "session", "") == "stranger"]  # type: ignore[union-attr]
    assert said == ["hello", "unknown"]
    world._decode_effects("decode-0")
    finish(world, attempt)


def test_a_sample_that_its_router_ended_meanwhile_is_stopped() -> None:
    world = World(config(), seed=3)
    attempt = world.submit(IDS, 200, n=2, sampling=SEEDED, ignore_eos=True)
    run_some(world, 200)
    answer = world.answers[attempt]
    world.hang_up()
    answer.ends[1] = "stopped by the router"
    world.come_back()
    before = len(answer.tokens[1])
    world.run(check=True)
    assert len(answer.tokens[1]) == before
    assert len(answer.tokens[0]) == 200
    world.wait(8)
    world.assert_quiet()


def test_a_break_that_is_heard_after_a_sleep_and_counted_into_it_is_no_longer_one() -> None:
    world = warm_world()
    world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 30)
    world.hang_up()
    world.decode["decode-0"].slept(60.0)
    world.tick(6.0)
    world.run(check=True)
    world.wait(2)
    world.assert_quiet()


def test_a_worker_that_drains_waits_for_a_router_that_may_come_back() -> None:
    world = warm_world()
    attempt = world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 60)
    core = world.decode["decode-0"]
    core.drain(world.clock.now())
    world.hang_up()
    run_some(world, 3000)
    assert not core.state.attempts
    assert not core.idle
    world.come_back()
    finish(world, attempt)
    assert core.idle


def test_a_worker_that_drains_does_not_wait_for_ever() -> None:
    world = warm_world()
    world.submit(IDS, 20, ignore_eos=True)
    run_some(world, 60)
    core = world.decode["decode-0"]
    core.drain(world.clock.now())
    world.hang_up()
    run_some(world, 3000)
    world.tick(6.0)
    assert core.idle


def test_an_id_is_not_used_again_before_its_end_is_settled() -> None:
    world = warm_world()
    core, now = world.decode["decode-0"], world.clock.now()
    submit = Submit(attempt="a", prompt=[1, 2, 3], samples=[SampleState()], max_tokens=1, deadline_s=60.0)
    submit.sampling.CopyFrom(Sampling(top_p=1.0, logprobs=-1))
    core.from_router("router", FromRouter(submit=submit), now)
    world._decode_effects("decode-0")
    world.run()
    for expected_kind in ("refused", None):
        core.from_router("router", FromRouter(submit=submit), now)
        kinds = [e.message.WhichOneof("message") for e in core.state.effects if isinstance(e, ToRouter)]
        assert ("refused" in kinds) == (expected_kind == "refused")
        world._decode_effects("decode-0")
        world.run()
        core.from_router("router", FromRouter(ended=AttemptSettled(attempt="a")), now)
        world.answers.pop("a", None)
