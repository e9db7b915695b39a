"""What an operator does to a running cluster: reaching it, sizes of pools, waiting for a program's new life."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.config import export_to_libraries
from cluster.controller import ClusterStatus
from cluster.core.clock import SystemClock
from cluster.core.errors import ConfigError, HeadraceError
from cluster.pipe import ROLES, Role, role_of
from cluster.ray_environment import ray_environment
from cluster.run_dir import RunDir

if TYPE_CHECKING:
    from cluster.ray_launcher import Client

START_S = 120.0  # a model may take a while to load
_HOPELESS_DEATHS = 3

Look = Callable[[int, float], ClusterStatus]  # (after this version, seconds to wait for it at most)


def sizes_of(words: list[str]) -> dict[Role, int]:
    """Desired counts from `decode 2` or `prefill=3 decode=2`. Raises ConfigError."""
    pairs = [tuple(words)] if len(words) == 2 and "=" not in "".join(words) else [w.split("=", 1) for w in words]
    counts: dict[Role, int] = {}
    for pair in pairs:
        role = next((known for known in ROLES if known == pair[0]), None)
        if role is None:
            raise ConfigError(f"{pair[0]!r} is no role: it is one of {', '.join(ROLES)}")
        if len(pair) != 2 or not (pair[1].isascii() and pair[1].isdecimal()):
            raise ConfigError(f"{'='.join(pair)}: expected role=count, for example {role}=2")
        if role in counts:
            raise ConfigError(f"{role} appears twice")
        counts[role] = int(pair[1])
    return counts


@contextmanager
def client_of(run_dir: RunDir) -> Iterator["Client"]:
    """A connection to the cluster's controller. Raises HeadraceError when it does not run."""
    if run_dir.holder() is None:
        raise HeadraceError(f"{run_dir.folder.name} is not running; `headrace up` starts it")
    # Ray reads its settings when it is imported, so they are set first; and no other command should wait for it.
    export_to_libraries(ray_environment(run_dir, local=run_dir.config().ray.address is None))
    from cluster.ray_launcher import Client

    client = Client(run_dir)
    try:
        yield client
    finally:
        client.close()


def wait_for_successor(look: Look, program: str, *, within_s: float = START_S) -> bool:
    """Until the program's new life is ready; False when none is desired. Raises HeadraceError."""
    role, clock, version = role_of(program), SystemClock(), -1
    give_up = clock.now() + within_s
    while (left := give_up - clock.now()) > 0:
        now = look(version, left)
        version = now.version
        found = next((one for one in now.programs if one.name == program), None)
        if found is not None and found.state == "ready":
            return True
        if found is not None and found.early_deaths >= _HOPELESS_DEATHS:
            raise HeadraceError(f"{program} does not start again (exit code {found.last_exit}); see its log")
        if found is None and program not in now.stopping and _count(now, role) >= now.desired[role]:
            return False
    raise HeadraceError(f"{program} is not ready again after {within_s:g} s; see its log")


def _count(now: ClusterStatus, role: Role) -> int:
    return sum(one.role == role for one in now.programs)
