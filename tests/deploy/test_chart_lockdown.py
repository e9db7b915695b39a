"""What every container of the chart may do, and where its pod may run: over all that is rendered, of whatever kind."""

from typing import Any

import pytest

from tests.deploy.chart import GROUPS, NAMES, Object, Rendered, values_of, variant
from tests.deploy.schemas import rendered_with

WORKERS = ("prefill", "decode")


def contexts(rendered: Rendered) -> dict[str, Object]:
    """Container -> what holds for it: its own security context over its pod's."""
    found = {}
    for path, pod in rendered.pods().items():
        for each in [*pod.get("initContainers", []), *pod["containers"]]:
            found[f"{path} {each['name']}"] = {**pod.get("securityContext", {}), **each.get("securityContext", {})}
    head = rendered.pod("head")["securityContext"]
    if options := rendered.cluster["spec"].get("autoscalerOptions"):
        found["autoscaler, which KubeRay puts into the head's pod"] = {**head, **options["securityContext"]}
    return found


ALL = {name: variant(name) for name in NAMES}
ALL["a model that is fetched to workers with devices"] = rendered_with(
    {
        **values_of("gpu-rdma"),
        "model": {"name": "/models/m", "initContainer": {"image": "models:1"}},
        "redis": {"mode": "bundled"},
        "transport": {**values_of("gpu-rdma")["transport"], "ptrace": True},
    }
)


@pytest.mark.parametrize("name", ALL)
def test_every_container_is_locked_down(name: str) -> None:
    for container, context in contexts(ALL[name]).items():
        assert context["runAsNonRoot"] is True, container
        assert context["runAsUser"] == context["runAsGroup"] == 10001, container
        assert context["allowPrivilegeEscalation"] is False, container
        assert context["readOnlyRootFilesystem"] is True, container
        assert context["capabilities"]["drop"] == ["ALL"], container
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, container
        assert not context.get("privileged"), container


@pytest.mark.parametrize("name", ALL)
def test_pods_share_nothing_with_their_node(name: str) -> None:
    for path, pod in ALL[name].pods().items():
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & pod.keys(), path
        assert not [each for each in pod.get("volumes", []) if "hostPath" in each], path


@pytest.mark.parametrize("name", ALL)
def test_the_restricted_profile_of_pod_security_takes_what_adds_no_capability(name: str) -> None:
    """What it wants beside the above, by its definition: kinds of volumes, safe sysctls, no port of the node."""
    for path, pod in ALL[name].pods().items():
        kinds = {key for volume in pod.get("volumes", []) for key in volume if key != "name"}
        assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}, path
        sysctls = {each["name"] for each in pod["securityContext"].get("sysctls", [])}
        assert sysctls <= {"net.ipv4.ip_local_port_range"}, path
        assert not [port for each in pod["containers"] for port in each["ports"] if "hostPort" in port], path


@pytest.mark.parametrize("name", ALL)
def test_capabilities_are_those_of_the_planes(name: str) -> None:
    """IPC_LOCK for RDMA, SYS_PTRACE for CMA: in workers, and not in what fetches their model."""
    rendered = ALL[name]
    values = {**values_of(name)} if name in NAMES else {"transport": {"rdma": {"resource": "rdma/ib"}, "ptrace": True}}
    transport: dict[str, Any] = values.get("transport", {})
    wanted = ["IPC_LOCK"] if transport.get("rdma") else []
    wanted += ["SYS_PTRACE"] if transport.get("ptrace") else []
    workers = [rendered.container(group)["securityContext"] for group in WORKERS]
    assert [each["capabilities"].get("add", []) for each in workers] == [wanted, wanted]
    added = [context["capabilities"].get("add", []) for context in contexts(rendered).values()]
    assert sum(map(bool, added)) == (len(WORKERS) if wanted else 0)


def test_the_look_finds_every_kind_of_container() -> None:
    everything = {container.rpartition(" ")[2] for rendered in ALL.values() for container in rendered.containers()}
    assert everything == {"headrace", "model", "redis"}
    assert len(contexts(ALL["autoscaled"])) == len(GROUPS) + len(("redis", "autoscaler"))


def anti_affinity(group: str) -> Object:
    """No two pods of a group on one node."""
    labels = {"matchLabels": {"ray.io/cluster": "headrace", "ray.io/group": group}}
    term = {"labelSelector": labels, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def node_affinity(zone: str) -> Object:
    terms = [{"matchExpressions": [{"key": "topology.kubernetes.io/zone", "operator": "In", "values": [zone]}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def test_each_pool_the_head_and_redis_have_a_place_of_their_own() -> None:
    wanted = {role: anti_affinity(role) for role in ("prefill", "decode", "router")} | {"head": node_affinity("a")}
    pools = {role: {"affinity": wanted[role]} for role in ("prefill", "decode", "router")}
    redis = {
        "affinity": node_affinity("b"),
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "data", "operator": "Exists"}],
        "priorityClassName": "high",
    }
    rendered = rendered_with(
        {"head": {"affinity": wanted["head"]}, "pools": pools, "redis": {"mode": "bundled", "bundled": redis}}
    )
    assert {group: rendered.pod(group)["affinity"] for group in GROUPS} == wanted
    (server,) = rendered.of("StatefulSet")
    pod = server["spec"]["template"]["spec"]
    assert {key: pod[key] for key in redis} == redis
    assert not [path for path, pod in variant("minimal").pods().items() if "affinity" in pod]
