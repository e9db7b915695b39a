"""Redis' password, kept off the command lines that Ray writes: `ps` shows those to everybody on a machine.

Ray gives the password to two of its processes as an argument, and has no setting that would change it. What it is about
to start is therefore changed on the way:

1. the GCS     needs it. It reads its arguments with gflags, which take one from the environment where they are told to
2. the raylet  has it in the commands that start workers, which ask the GCS and never Redis: left out
"""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

_FROM_ENVIRONMENT = "--fromenv=redis_password"
_VARIABLE = "FLAGS_redis_password"
_OF_WORKERS = ("--redis-password=", "-Dray.redis.password=", "--ray_redis_password=")  # Python's, Java's, C++'s


class Services(Protocol):
    """Ray's own module `ray._private.services`: it starts every process of Ray through this function."""

    start_ray_process: Callable[..., object]


def conceal_in(services: Services, password: str) -> None:
    """Whatever this process has Ray start from now on shows the password to nobody. Nothing changes without one."""
    start = services.start_ray_process

    def start_concealed(
        command: Sequence[str], *arguments: object, env_updates: Mapping[str, str] | None = None, **options: object
    ) -> object:
        words, variables = concealed(command, password)
        return start(words, *arguments, env_updates={**(env_updates or {}), **variables}, **options)

    if password:
        services.start_ray_process = start_concealed


def concealed(command: Sequence[str], password: str) -> tuple[list[str], dict[str, str]]:
    """The same command without the password, and what its environment must have instead."""
    told = f"--redis_password={password}"
    words = [_FROM_ENVIRONMENT if word == told else word for word in command]
    for option in _OF_WORKERS:
        spelt = subprocess.list2cmdline([option + password])  # as Ray makes one word of a worker's command
        words = [word.replace(f" {spelt}", "") for word in words]
    return words, {_VARIABLE: password} if told in command else {}
