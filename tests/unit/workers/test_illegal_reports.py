"""Reports of an engine about what it was never asked: our own books disagree, and nothing may be changed by them."""

import pytest

from cluster.core.errors import IntegrityError
from cluster.stubs.common_pb2 import Sampling
from cluster.stubs.link_pb2 import FromDecodePeer, Job
from engine.messages import CopyDone, DigestDone, ReadDone, ReadFailed, Report, StepDone
from prefill_worker.effects import ToDecode, ToEngine
from tests.fakes.world import World
from tests.unit.workers.test_tracer_matrix import config

REPORTS: list[Report] = [
    DigestDone(99, []), CopyDone(99, [], 0.0), ReadDone(99, 0.0), ReadFailed(99, "?"), StepDone(99, [], [], {}, 0.0)
]  # fmt: skip


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_decode_worker(report: Report) -> None:
    world = World(config())
    core = world.decode["decode-0"]
    with pytest.raises(IntegrityError):
        core.from_engine(report, world.clock.now())
    assert core.take_effects() == []
    world.assert_quiet()


@pytest.mark.parametrize("report", [REPORTS[0], REPORTS[-1]], ids=lambda report: type(report).__name__)
def test_prefill_worker(report: Report) -> None:
    world = World(config())
    core = world.prefill["prefill-0"]
    with pytest.raises(IntegrityError):
        core.from_engine(report, world.clock.now())
    assert core.take_effects() == []
    world.assert_quiet()


def test_a_job_that_was_done_is_not_failed_when_its_deadline_comes() -> None:
    """Its pins end with it, without another word: Done was its outcome."""
    world = World(config())
    core, now = world.prefill["prefill-0"], world.clock.now()
    core.link_opened("d", world.decode["decode-0"].state.facts.identity, now)
    job = Job(attempt="a", tokens=list(range(40)), sample_indices=[0], sampling=Sampling(top_p=1.0), deadline_s=1.0)
    core.from_decode("d", FromDecodePeer(job=job), now)
    heard = []
    for _ in range(20):
        for effect in core.take_effects():
            if isinstance(effect, ToDecode):
                heard.append(effect.message.WhichOneof("message"))
            elif isinstance(effect, ToEngine) and (report := world.engines["prefill-0"].handle(effect.command)):
                core.from_engine(report, now)
    assert heard[-1] == "done"
    core.tick(now + 1.1)
    assert [effect for effect in core.take_effects() if isinstance(effect, ToDecode)] == []
    assert core.counters["jobs_pins_expired"] == 1
    assert not core.counters["jobs_failed"]
    world.assert_quiet()
