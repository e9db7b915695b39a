"""The password of the Redis with Ray's tables is on no command line of a cluster, whoever starts its Ray.

Command lines are shown to everybody on a machine and to whatever watches its processes, an environment to its user.
"""

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from cluster.cli.start import stop_head
from cluster.config import environment
from cluster.core.config import ClusterConfig
from tests.integration.stack import until
from tests.integration.test_documents import free_ports
from tests.integration.test_ray_cluster import MODULES, PATIENCE_S, Cluster, gone
from tests.integration.test_ray_death import gcs_of, runs_again
from tests.integration.valkey import PASSWORD, Redis

pytestmark = pytest.mark.verify  # whole clusters; what pods run is looked at in every run (tests/deploy)
STARTS_S = 120.0


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    server = Redis(tmp_path_factory.mktemp("valkey"))
    yield server
    server.close()


def command_lines(processes: list[psutil.Process]) -> dict[str, str]:
    """Process -> its command line, for each that still lives."""
    found = {f"{each.pid}": " ".join(each.cmdline()) for each in processes if each.is_running()}
    return {pid: line for pid, line in found.items() if line}


def knows_the_password(processes: list[psutil.Process]) -> bool:
    (gcs,) = [each for each in processes if each.name() == "gcs_server"]
    return gcs.environ().get("FLAGS_redis_password") == PASSWORD


async def test_of_a_cluster_on_one_machine_nor_of_the_gcs_that_is_started_again(valkey: Redis, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ClusterConfig(), MODULES, redis_url=valkey.url)
    try:
        for _ in range(2):
            lines = command_lines(cluster.processes())
            assert len(lines) > 10
            assert not [line for line in lines.values() if PASSWORD in line]
            assert knows_the_password(cluster.processes()), "or it would not be on any command line for another reason"
            (gcs,) = gcs_of(cluster)
            gcs.kill()
            assert await until(partial(runs_again, cluster, gcs), PATIENCE_S)
        assert cluster.command("scale", "decode", "2").returncode == 0
        cluster.until(lambda status: status.ready and status.desired["decode"] == 2)  # workers that this raylet starts
        assert not [line for line in command_lines(cluster.processes()).values() if PASSWORD in line]
    finally:
        stop_head(cluster.head, cluster.run_dir)


@pytest.fixture
def head_node(valkey: Redis, tmp_path: Path) -> Iterator[psutil.Process]:
    """`headrace node head` with what KubeRay tells a head's pod of Redis; the chart's command says nothing of it."""
    (port,) = free_ports(1)
    told = {
        "RAY_REDIS_ADDRESS": valkey.address,
        "RAY_external_storage_namespace": "llm-headrace",
        "REDIS_PASSWORD": PASSWORD,
    }
    settings = ["--set", "host=127.0.0.1", "--set", f"ray.address=127.0.0.1:{port}", "--set", "name=one"]
    with tempfile.TemporaryDirectory(prefix="hr-") as short, (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "cluster.cli.main", "node", "head", "--root", str(tmp_path), *settings]
        command += ["--", "--no-monitor", f"--temp-dir={short}"]
        node = psutil.Popen(command, env=environment(told), stdout=log, stderr=log)
        try:
            yield node
        finally:
            everything = node.children(recursive=True)
            node.terminate()
            node.wait(STARTS_S)
        assert gone(everything)


async def test_of_a_head_node_in_a_pod(head_node: psutil.Process, valkey: Redis, tmp_path: Path) -> None:
    async def controls() -> bool:
        assert head_node.is_running(), (tmp_path / "log").read_text()
        lines = command_lines(head_node.children(recursive=True)).values()
        return any("ControllerActor" in line for line in lines)

    assert await until(controls, STARTS_S), (tmp_path / "log").read_text()
    processes = [head_node, *head_node.children(recursive=True)]
    assert "RAYllm-headrace@NODE" in valkey.holds()
    assert knows_the_password(processes)
    assert not [line for line in command_lines(processes).values() if PASSWORD in line]
