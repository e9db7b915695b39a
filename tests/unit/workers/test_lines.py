"""What a decode worker's log says of attempts: by their names, in our own words."""

import logging

import pytest

from cluster.logs import ATTEMPT
from cluster.stubs.common_pb2 import Blame
from engine.messages import ReadFailed
from tests.fakes.world import World
from tests.unit.workers.test_faults import finish, run_until, submit, warm_world
from tests.unit.workers.test_faults_correctness import small_pools
from tests.unit.workers.test_tracer_matrix import B, prompt

WORD = "Zwetschgenknoedel"
Line = tuple[int, str, str]


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "decode_worker.lines")


def told(caplog: pytest.LogCaptureFixture) -> list[Line]:
    found = [record for record in caplog.records if record.name == "decode_worker.lines"]
    return [(each.levelno, getattr(each, ATTEMPT), each.getMessage()) for each in found]


def test_a_hand_off_that_goes_well_leaves_no_line(caplog: pytest.LogCaptureFixture) -> None:
    world = warm_world()
    finish(world, submit(world))
    assert not told(caplog)


def test_a_hand_off_that_leaves_its_holder_and_one_that_comes_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    world = warm_world()
    attempt = submit(world)
    run_until(world, ">decode-0:wire")
    world.queues[">decode-0:wire"].pop()
    core = world.decode["decode-0"]
    (read,) = core.handoffs._reads
    core.from_engine(ReadFailed(read, WORD), world.clock.now())
    world._decode_effects("decode-0")
    world.kill_prefill("prefill-1")
    world.kill_prefill("prefill-0")
    finish(world, attempt)
    lines = told(caplog)
    assert {(level, name) for level, name, _ in lines} == {(logging.WARNING, attempt)}
    text = "\n".join(message for _, _, message in lines)
    assert "hand-off with prefill-0 left: read failed" in text
    assert "is computed here: " in text
    assert attempt in text
    assert WORD not in text


def test_refusals_are_no_news_to_be_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    world = warm_world()
    for holder in world.prefill.values():
        holder.draining = True
    attempt = submit(world)
    world.run(check=True)
    said = [(logging.INFO, attempt, f"attempt {attempt}: hand-off with prefill-{n} left: refused") for n in (0, 1)]
    assert sorted(told(caplog)) == said


def test_one_that_makes_room_is_told_with_what_it_had_written(caplog: pytest.LogCaptureFixture) -> None:
    world = World(small_pools(decode=12), prefill=2, seed=12)
    asked = [world.submit(prompt(4 * B, seed), 4 * B, ignore_eos=True) for seed in (1, 2)]
    world.run(check=True)
    (lost,) = (name for name in asked if world.answers[name].lost)
    (line,) = told(caplog)
    written = len(world.answers[lost].tokens[0])
    assert line == (logging.INFO, lost, f"attempt {lost}: pre-empted after {written} tokens")


def test_a_failure_says_who_is_to_blame_and_not_what_was_said(caplog: pytest.LogCaptureFixture) -> None:
    world = warm_world()
    attempt = submit(world)
    run_until(world, ">decode-0:wire")
    core = world.decode["decode-0"]
    core._failed(core.state.attempts[attempt], WORD, Blame.BLAME_WORKER, world.clock.now())
    assert told(caplog) == [(logging.WARNING, attempt, f"attempt {attempt}: failed here, to be blamed: worker")]
