"""Desired counts and actual programs in, actions out. Pure: the controller carries them out (DESIGN §2).

Programs are named role-index. Starting takes the lowest free indices. Stopping takes first who cannot take calls anyway
(a pool must not lose its only ready worker while others start), then the highest: scaling 1 -> 3 -> 1 leaves decode-0
alone. A name that is still stopping is not started again before it is gone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cluster.pipe import ROLES, Role, role_of

Desired = Mapping[Role, int]


@dataclass(frozen=True, slots=True)
class Start:
    """A program that should run and does not."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Stop:
    """A program that runs and should not."""

    name: str


Action = Start | Stop


def program_name(role: Role, index: int) -> str:
    """`decode-0`."""
    return f"{role}-{index}"


def reconcile(desired: Desired, running: Mapping[str, bool], stopping: Iterable[str] = ()) -> list[Action]:
    """What to do so that `running` (supervised programs by name: is it ready?) becomes `desired`; stops come first.

    Roles that `desired` does not mention are not touched. Raises PipeError for a name that is no program's.
    """
    have: dict[Role, list[tuple[bool, int]]] = {
        role: [] for role in ROLES
    }  # (of no use yet, index): the last goes first
    for name, ready in running.items():
        have[role_of(name)].append((not ready, int(name.rpartition("-")[2])))
    leaving = set(stopping)
    stops: list[Action] = []
    starts: list[Action] = []
    for role, count in desired.items():
        indices = {index for _, index in have[role]}
        surplus = len(indices) - count
        if surplus > 0:
            stops += [Stop(program_name(role, index)) for _, index in sorted(have[role])[-surplus:]]
        free = (index for index in range(count + len(leaving)) if index not in indices)
        names = [program_name(role, index) for index in free][: max(0, -surplus)]
        starts += [Start(name, role) for name in names if name not in leaving]
    return stops + starts
