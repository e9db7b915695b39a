"""What Kubernetes, KubeRay and Ray's own autoscaler would make of the chart, beyond that its objects are valid."""

import copy

import pytest
from ray import __version__ as ray_version
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr as derived
from ray.scripts.scripts import start

from cluster.config import parse_config
from tests.deploy.chart import GROUPS, NAMES, Rendered, objects_in, render, variant
from tests.deploy.schemas import validate

POOLS = ("prefill", "decode", "router")
COMPONENT = "app.kubernetes.io/component"


def test_evictions_are_limited_in_the_one_way_that_works_for_pods_of_a_custom_resource() -> None:
    """RayCluster has no scale subresource, so Kubernetes cannot tell how many pods there should be: with
    maxUnavailable, or a percentage, it lets nobody go, and a node's drain waits for ever.
    """
    for name in NAMES:
        for budget in variant(name).of("PodDisruptionBudget"):
            assert "maxUnavailable" not in budget["spec"]
            assert isinstance(budget["spec"]["minAvailable"], int)

    def least(name: str) -> dict[str, int]:
        budgets = variant(name).of("PodDisruptionBudget")
        return {each["metadata"]["labels"][COMPONENT]: each["spec"]["minAvailable"] for each in budgets}

    assert least("minimal") == {}, "the only pod may go"
    assert least("ha-routers") == {"prefill": 1, "decode": 1, "router": 2}
    assert least("autoscaled") == {"decode": 1, "router": 1}
    assert least("air-gapped") == {"decode": 1, "router": 1}
    told = {"pools": {"decode": {"replicas": 4, "podDisruptionBudget": {"minAvailable": 3}}}}
    (budget,) = (each for each in objects_in(render(told)) if each["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] == 3


@pytest.mark.parametrize("name", NAMES)
def test_ray_s_autoscaler_reads_of_each_group_what_its_pods_offer(name: str) -> None:
    """By the very function with which it reads a RayCluster."""
    kinds = derived(copy.deepcopy(variant(name).cluster))["available_node_types"]
    assert kinds["headgroup"]["resources"]["CPU"] == 0
    for role in POOLS:
        places = int(variant(name).container(role)["command"][3].removeprefix("--places="))
        assert kinds[role]["resources"][f"headrace_{role}"] == places
        assert kinds[role]["resources"]["CPU"] == 0
        limits = variant(name).container(role)["resources"]["limits"]
        assert kinds[role]["resources"].get("GPU", 0) == int(limits.get("nvidia.com/gpu", 0))
        group = variant(name).group(role)
        assert (kinds[role]["min_workers"], kinds[role]["max_workers"]) == (group["minReplicas"], group["maxReplicas"])


def test_the_chart_s_ray_is_the_one_that_is_installed() -> None:
    assert variant("minimal").cluster["spec"]["rayVersion"] == ray_version


def test_a_model_may_take_its_time_to_come() -> None:
    """A pod fetches it before Ray starts; FAULTS O01: what loads long is not killed."""
    files = render({"startupSeconds": 7200})
    rendered = Rendered(files, objects_in(files))
    for role in POOLS:
        probe = rendered.container(role)["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == 7200


def test_clients_may_be_asked_for_certificates() -> None:
    values = {"tls": {"public": {"existingSecret": "doors", "clientCaSecret": "clients"}}}
    files = render(values)
    rendered = Rendered(files, objects_in(files))
    for each in rendered.objects:
        validate(each)
    assert parse_config(rendered.config).tls.public.client_ca_file == "/etc/headrace/tls/clients/ca.crt"
    for group in GROUPS:
        mounts = {each["name"]: each["mountPath"] for each in rendered.container(group)["volumeMounts"]}
        assert mounts.get("tls-clients") == ("/etc/headrace/tls/clients" if group == "router" else None)
    (volume,) = (each for each in rendered.pod("router")["volumes"] if each["name"] == "tls-clients")
    assert volume["secret"]["secretName"] == "clients"
    assert [item["key"] for item in volume["secret"]["items"]] == ["ca.crt"]


def test_volumes_of_one_s_own_come_beside_the_chart_s() -> None:
    """For example whom to believe, where a Redis has a certificate that nobody else knows."""
    mine = {"name": "own-ca", "secret": {"secretName": "redis-ca"}}
    there = {"name": "own-ca", "mountPath": "/etc/own-ca", "readOnly": True}
    added = {"volumes": [mine], "volumeMounts": [there]}
    files = render({"head": added, "pools": {"router": added}})
    rendered = Rendered(files, objects_in(files))
    validate(rendered.cluster)
    for group in GROUPS:
        wanted = group in ("head", "router")
        assert (
            (mine in rendered.pod(group)["volumes"]) is (there in rendered.container(group)["volumeMounts"]) is wanted
        )


def test_options_after_the_dashes_are_ray_s_own() -> None:
    """Through Ray's parser. Without --no-monitor the head and KubeRay's autoscaler would both speak for autoscaling."""
    for name in NAMES:
        for group in GROUPS:
            command = variant(name).container(group)["command"]
            options = command[command.index("--") + 1 :]
            with start.make_context("start", list(options)) as parsed:
                assert parsed.params["no_monitor"] is (group == "head")
                assert parsed.params["node_manager_port"] == 6380
