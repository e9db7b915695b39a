"""Fault points: when they fire, which program has them, and that a wrong one is refused with what is allowed."""

from pathlib import Path

import pytest

from cluster.config import dump_config, load_config, parse_config
from cluster.core.errors import ConfigError
from cluster.core.faults import POINTS, STAGES, Faults, FaultSpec, Stages, Trigger


def hits(spec: FaultSpec, count: int = 400) -> list[int]:
    trigger = Trigger([spec])
    return [number for number in range(1, count + 1) if trigger.hit() is not None]


def test_the_nth_occurrence_and_no_other() -> None:
    assert hits(FaultSpec("step.delay", 1.0, nth=7)) == [7]


def test_a_probability_is_drawn_from_its_seed() -> None:
    first, again, other = (hits(FaultSpec("read.fail", probability=0.25, seed=s)) for s in (1, 1, 2))
    assert first == again != other
    assert 60 < len(first) < 140
    assert len(hits(FaultSpec("read.fail", probability=1.0))) == 400


def test_several_faults_of_one_point_count_the_same_occurrences() -> None:
    specs = [FaultSpec("step.delay", 1.0, nth=2), FaultSpec("step.delay", 2.0, nth=3)]
    trigger = Trigger(specs)
    assert [trigger.hit() for _ in range(4)] == [None, *specs, None]


def test_a_point_that_is_not_set_has_no_trigger() -> None:
    faults = Faults([FaultSpec("read.fail", nth=1)])
    assert faults.trigger("read.fail") is not None
    assert faults.trigger("read.delay") is None
    with pytest.raises(KeyError):
        faults.trigger("read.failed")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_freezes_or_kills_at_its_nth_passing(stage: str) -> None:
    for how, expected in (("freeze", 1.5), ("kill", "killed")):
        done: list[object] = []
        faults = Faults([FaultSpec(f"{stage}.{how}", 1.5, nth=2)])
        stages = Stages(faults, kill=lambda done=done: done.append("killed"), freeze=done.append)  # type: ignore[misc]
        assert stages
        for passed in (stage, "hello", stage):
            assert done == []
            stages.passed(passed)
        assert done == [expected]
        stages.passed(stage)
        assert done == [expected]
    assert not Stages(Faults(), kill=lambda: None, freeze=lambda _: None)


def test_programs_get_the_faults_that_name_them() -> None:
    config = parse_config(
        "faults:\n"
        "  - {point: step.delay, program: prefill-*, seconds: 0.5, nth: 3}\n"
        "  - {point: read.corrupt, program: decode-1, probability: 0.5, seed: 9}\n"
        "  - {point: watch.drop, nth: 2}\n"
    )
    assert parse_config(dump_config(config)) == config
    points = {name: [s.point for s in config.faults_of(name).specs] for name in ("prefill-3", "decode-0", "decode-1")}
    assert points == {
        "prefill-3": ["step.delay", "watch.drop"],
        "decode-0": ["watch.drop"],
        "decode-1": ["read.corrupt", "watch.drop"],
    }
    assert config.faults_of("prefill-3").specs[0] == FaultSpec("step.delay", 0.5, nth=3)
    assert config.faults_of("decode-1").specs[0] == FaultSpec("read.corrupt", 0.0, probability=0.5, seed=9)


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("{point: step.dleay, seconds: 1, nth: 1}", ["faults.0.point", "'step.dleay'", ", ".join(POINTS)]),
        ("{point: step.delay, nth: 1}", ["faults.0", "step.delay needs `seconds`"]),
        ("{point: read.fail, seconds: 1, nth: 1}", ["faults.0", "read.fail has no `seconds`"]),
        ("{point: step.delay, seconds: -1, nth: 1}", ["faults.0.seconds", "-1"]),
        ("{point: read.fail}", ["exactly one of `nth` and `probability`"]),
        ("{point: read.fail, nth: 1, probability: 0.5}", ["exactly one of `nth` and `probability`"]),
        ("{point: read.fail, nth: 0}", ["faults.0.nth", "0"]),
        ("{point: read.fail, probability: 1.5}", ["faults.0.probability", "1.5"]),
        ("{point: read.fail, program: prefill-0, nth: 1}", ["read.fail exists on decode workers only"]),
        ("{point: link.break, program: decode-0, nth: 1}", ["link.break exists on prefill workers only"]),
        ("{point: read.fail, program: decoder, nth: 1}", ["faults.0.program", "decoder"]),
        ("{point: read.fail, nth: 1, value: 3}", ["faults.0.value"]),
    ],
)
def test_a_wrong_fault_is_refused_with_what_is_allowed(fault: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [f"faults=[{fault}]"])
    for part in parts:
        assert part in str(refused.value)


def test_the_documentation_lists_every_point() -> None:
    text = (Path(__file__).parents[3] / "docs/fault-points.md").read_text(encoding="utf-8")
    listed = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and "." in line.split("`")[1]]
    assert listed == list(POINTS)
