"""What one machine of a cluster starts, and what it leaves behind in its run directory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import load_config
from cluster.core.errors import ConfigError
from cluster.node import Kind, Node, ray_command
from cluster.pipe import MODULES
from cluster.ray_launcher import start_hook
from cluster.run_dir import RunDir

HERE = ["host=10.1.2.3", "ray.address=head.example:6379"]


def _command(kind: Kind, settings: list[str] = HERE, places: int = 1) -> tuple[str, ...]:
    return ray_command(Node(kind, places, ("--node-manager-port=6380",), MODULES), load_config(None, settings))


def test_the_head_listens_on_the_port_of_its_address_and_offers_no_place() -> None:
    command = _command("head")
    assert {"--head", "--port=6379", "--node-ip-address=10.1.2.3", "--num-cpus=0", "--block"} <= set(command)
    assert not [word for word in command if word.startswith(("--resources", "--address"))]
    assert command[-1] == "--node-manager-port=6380"


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_node_joins_the_head_and_offers_places_for_its_role_alone(role: Kind) -> None:
    command = _command(role, places=3)
    assert "--address=head.example:6379" in command
    assert [word for word in command if word.startswith("--resources")] == [f'--resources={{"headrace_{role}":3}}']
    assert "--head" not in command


@pytest.mark.parametrize("settings", [[], ["ray.address=head.example"], ["ray.address=auto"]])
def test_an_address_without_a_port_is_refused(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"ray\.address: .* is not the head's host:port"):
        _command("decode", settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
@pytest.mark.parametrize("kind", ["head", "decode", "router"])
def test_an_address_that_no_other_machine_can_dial_is_refused(kind: Kind, host: str) -> None:
    """FAULTS O04: it would be told to all, and nobody would come."""
    with pytest.raises(
        ConfigError, match=r"host: '.*' is this .*ray\.address 'head\.example:6379' .*set host to"
    ) as told:
        _command(kind, [f"host={host}", "ray.address=head.example:6379"])
    assert repr(host) in str(told.value)


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "localhost:6379", "'[::1]:6379'"])
def test_a_cluster_of_one_machine_may_keep_to_itself(address: str) -> None:
    assert "--node-ip-address=127.0.0.1" in _command("decode", ["host=127.0.0.1", f"ray.address={address}"])


def test_a_head_has_no_server_for_rays_own_client() -> None:
    """A second door to run code at (docs/security.md). In pods its absence is looked at: test_pods.py."""
    for head, port in ((True, None), (False, 10001)):
        parameters: Any = SimpleNamespace(ray_client_server_port=10001, redis_username="", redis_password="")
        start_hook(parameters, head)
        assert parameters.ray_client_server_port == port


def test_logs_go_where_they_are_sent_until_the_directory_is_prepared_anew(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "one")
    run_dir.prepare(load_config(), None)
    assert run_dir.log_file("decode-0").name == "decode-0.log"
    target = tmp_path / "common"
    target.touch()
    run_dir.send_logs_to(str(target))
    assert run_dir.log_file("decode-0").resolve() == run_dir.log_file("router-1").resolve() == target
    run_dir.prepare(load_config(), None)
    assert run_dir.log_file("decode-0").name == "decode-0.log"


def test_ready_marks_are_those_of_this_life(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "one")
    run_dir.prepare(load_config(), None)
    run_dir.mark_ready("decode-0", False)
    run_dir.mark_ready("decode-0", True)
    assert [path.name for path in (run_dir.folder / "ready").iterdir()] == ["decode-0"]
    run_dir.mark_ready("decode-0", False)
    assert not list((run_dir.folder / "ready").iterdir())
    run_dir.mark_ready("decode-0", True)
    run_dir.prepare(load_config(), None)
    assert not list((run_dir.folder / "ready").iterdir())
