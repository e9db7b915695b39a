"""What Ray is about to start, with Redis' password taken off its command line."""

import subprocess
from types import SimpleNamespace

import pytest

from cluster.ray_password import conceal_in, concealed

PASSWORDS = ["plain", "two words", 'a "quoted" one', "back\\slash\\", "--redis_password=", "it's $HOME %s"]


def _raylet(password: str) -> list[str]:
    """As ray._private.services.start_raylet spells it: the commands of workers as one word each."""
    python = ["python", "default_worker.py", "--session-name=s", "PLACEHOLDER", f"--redis-password={password}"]
    java = ["python", "-Dray.redis.username=", f"-Dray.redis.password={password}", "-Dray.home=/h"]
    lines = [subprocess.list2cmdline(words) for words in (python, java)]
    return ["raylet", f"--python_worker_command={lines[0]}", f"--java_worker_command={lines[1]}", "--gcs-address=h:1"]


@pytest.mark.parametrize("password", PASSWORDS)
def test_the_gcs_reads_its_environment(password: str) -> None:
    command = ["gcs_server", "--redis_address=h", f"--redis_password={password}", "--node-id=n"]
    words, variables = concealed(command, password)
    assert words == ["gcs_server", "--redis_address=h", "--fromenv=redis_password", "--node-id=n"]
    assert variables == {"FLAGS_redis_password": password}


@pytest.mark.parametrize("password", PASSWORDS)
def test_the_raylet_s_workers_do_without(password: str) -> None:
    words, variables = concealed(_raylet(password), password)
    assert words == [
        "raylet",
        "--python_worker_command=python default_worker.py --session-name=s PLACEHOLDER",
        "--java_worker_command=python -Dray.redis.username= -Dray.home=/h",
        "--gcs-address=h:1",
    ]
    assert variables == {}


def test_everything_that_ray_starts_goes_through_it_and_keeps_its_own_variables() -> None:
    started: list[tuple[object, ...]] = []

    def start(command: list[str], kind: str, **options: object) -> str:
        started.append((command, kind, options))
        return "running"

    services = SimpleNamespace(start_ray_process=start)
    conceal_in(services, "")
    assert services.start_ray_process is start
    conceal_in(services, "pw")
    command = ["gcs_server", "--redis_password=pw"]
    assert services.start_ray_process(command, "gcs", env_updates={"A": "1"}, fate_share=True) == "running"
    assert services.start_ray_process(["log"], "log", fate_share=False) == "running"
    told = {"A": "1", "FLAGS_redis_password": "pw"}
    assert started == [
        (["gcs_server", "--fromenv=redis_password"], "gcs", {"env_updates": told, "fate_share": True}),
        (["log"], "log", {"env_updates": {}, "fate_share": False}),
    ]
