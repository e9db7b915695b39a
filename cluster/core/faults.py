"""Fault points: what can be made to go wrong on purpose, where, and when (DESIGN §6; `faults:` in the configuration).

    faults:
      - {point: read.corrupt, program: decode-0, nth: 3}
      - {point: step.delay, seconds: 0.05, probability: 0.1, seed: 7}

A program looks at start which points it has (`Faults.trigger`), and only where there is one wraps what would fail. So a
cluster without faults runs not one instruction for them. Counting starts anew in every life of a program.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

WorkerRole = Literal["prefill", "decode"]
BOTH: tuple[WorkerRole, ...] = ("prefill", "decode")
READERS: tuple[WorkerRole, ...] = ("decode",)
HOLDERS: tuple[WorkerRole, ...] = ("prefill",)


@dataclass(frozen=True, slots=True)
class Point:
    """`timed`: it needs `seconds`; `roles`: the workers that have it; `what`: what happens, and at what occurrence."""

    what: str
    roles: tuple[WorkerRole, ...] = BOTH
    timed: bool = False


STAGES = {
    "offer": "an offer is about to leave, or has arrived",
    "read": "a read has ended",
    "step": "a step has come back",
    "first": "a first token is about to leave, or has arrived",
}
POINTS: dict[str, Point] = {
    "read.delay": Point("a read's end is reported so much later", READERS, timed=True),
    "read.fail": Point("a read that ended well is reported as failed", READERS),
    "read.corrupt": Point("a bit of a read flips after it landed in staging", READERS),
    "step.delay": Point("a step starts so much later", timed=True),
    "engine.freeze": Point("after a step the engine process stands still so long", timed=True),
    "engine.kill": Point("after a step the engine process is killed"),
    "allocate.fail": Point("a reservation of blocks is refused"),
    "session.break": Point("instead of a message to a router its session ends", READERS),
    "link.break": Point("instead of a message to a decode worker its link ends", HOLDERS),
    "watch.drop": Point("instead of a heartbeat every watch of this worker is dropped"),
}
for _stage, _when in STAGES.items():
    _roles = READERS if _stage == "read" else BOTH
    POINTS[f"{_stage}.freeze"] = Point(f"{_when}: the server process stands still so long", _roles, timed=True)
    POINTS[f"{_stage}.kill"] = Point(f"{_when}: the server process is killed", _roles)


class FaultSpec(msgspec.Struct, frozen=True):
    """One fault of one program: at the `nth` occurrence, or at each with a probability drawn from `seed`."""

    point: str
    seconds: float = 0.0
    nth: int | None = None
    probability: float | None = None
    seed: int = 0


class Trigger:
    """One point of one program. `hit` is called at each occurrence."""

    def __init__(self, specs: Sequence[FaultSpec]) -> None:
        self._specs = [(spec, random.Random(f"{spec.seed} {spec.point}")) for spec in specs]
        self._count = 0

    def hit(self) -> FaultSpec | None:
        """The fault that happens now, or None. The first of several wins; each keeps drawing."""
        self._count += 1
        found = [spec for spec, rng in self._specs if self._decide(spec, rng)]
        return found[0] if found else None

    def _decide(self, spec: FaultSpec, rng: random.Random) -> bool:
        if spec.nth is not None:
            return self._count == spec.nth
        return rng.random() < (spec.probability or 0.0)


class Faults:
    """The faults of one program."""

    def __init__(self, specs: Sequence[FaultSpec] = ()) -> None:
        self.specs = tuple(specs)

    def trigger(self, point: str) -> Trigger | None:
        """None, almost always: then nothing may be wrapped. Raises KeyError for a point that does not exist."""
        POINTS[point]
        specs = [spec for spec in self.specs if spec.point == point]
        return Trigger(specs) if specs else None


class Stages:
    """Freezes or kills this process when a stage of its work is passed."""

    def __init__(self, faults: Faults, kill: Callable[[], None], freeze: Callable[[float], None]) -> None:
        self._triggers = {point: t for point in _stage_points() if (t := faults.trigger(point)) is not None}
        self._kill = kill
        self._freeze = freeze

    def __bool__(self) -> bool:
        """Whether any stage has a fault."""
        return bool(self._triggers)

    def passed(self, stage: str) -> None:
        """`stage` is one of STAGES; any other word is no stage and does nothing."""
        freeze, kill = self._triggers.get(f"{stage}.freeze"), self._triggers.get(f"{stage}.kill")
        if freeze is not None and (spec := freeze.hit()) is not None:
            self._freeze(spec.seconds)
        if kill is not None and kill.hit() is not None:
            self._kill()


def _stage_points() -> list[str]:
    return [f"{stage}.{how}" for stage in STAGES for how in ("freeze", "kill")]
