"""Every values file of deploy/helm/values: rendered by Helm, validated, compared with its golden file."""

import copy
from typing import Literal

import jsonschema
import pytest
import typer.main
import yaml
from helm_python.chart import lint

from cluster.cli.main import app
from cluster.config import REDIS_VARIABLE, TENANTS_REDIS_VARIABLE, parse_config
from tests.deploy.chart import (
    CHART,
    GOLDEN,
    GROUPS,
    NAMES,
    ROOT,
    Object,
    Rendered,
    golden_text,
    objects_in,
    render,
    values_of,
    variant,
)
from tests.deploy.schemas import validate

POOLS = ("prefill", "decode", "router")
FILES_OF_A_SECRET = ("tls.crt", "tls.key", "ca.crt")
KV_POOLS: tuple[Literal["prefill"], Literal["decode"]] = ("prefill", "decode")


def test_there_are_enough_variants() -> None:
    assert set(NAMES) >= {"minimal", "gpu-rdma", "ha-routers", "tls-external-redis", "air-gapped", "autoscaled"}


@pytest.mark.parametrize("name", NAMES)
def test_variant_is_valid_and_as_expected(name: str) -> None:
    rendered = variant(name)
    for each in rendered.objects:
        validate(each)
    # After a wanted change: python -m tests.deploy.chart
    assert golden_text(rendered) == (GOLDEN / f"{name}.yaml").read_text()


def test_no_two_objects_are_one() -> None:
    for name in NAMES:
        keys = [(each["kind"], each["metadata"]["name"]) for each in variant(name).objects]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("RayCluster", ("spec", "headGroupSpec", "template", "spec", "containers", 0, "comand"), ["ray"]),
        ("RayCluster", ("spec", "workerGroupSpecs", 0, "minReplicas"), "one"),
        ("NetworkPolicy", ("spec", "podSelektor"), {}),
        ("PodDisruptionBudget", ("spec", "minAvailable"), {}),
        ("HTTPRoute", ("spec", "rules", 0, "backendRefs", 0, "port"), "http"),
    ],
)
def test_validation_sees_what_is_wrong(kind: str, path: tuple[str | int, ...], value: object) -> None:
    wrong = copy.deepcopy(variant("autoscaled").of(kind)[0])
    below = wrong
    for key in path[:-1]:
        below = below[key]  # type: ignore[index]
    below[path[-1]] = value  # type: ignore[index]
    with pytest.raises(jsonschema.ValidationError):
        validate(wrong)


def test_helm_finds_nothing_to_complain_about() -> None:
    report = lint(CHART, strict=True, kube_version="v1.33.0")
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("name", NAMES)
def test_cluster_yaml_is_a_configuration_and_grace_follows_from_it(name: str) -> None:
    rendered = variant(name)
    config = parse_config(rendered.config)
    for role in KV_POOLS:
        assert config.pool(role).replicas == values_of(name).get("pools", {}).get(role, {}).get("replicas", 1)
    for group in GROUPS:
        assert rendered.pod(group)["terminationGracePeriodSeconds"] == config.timing.pod_stop_s > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", GROUPS)
def test_commands_are_commands_of_the_command_line(name: str, group: str) -> None:
    """Helm's output through typer's own parser: an option that does not exist is an error here."""
    container = variant(name).container(group)
    commands = [container["command"]]
    commands += [container["lifecycle"]["preStop"]["exec"]["command"]] if group != "head" else []
    for program, *arguments in commands:
        assert program == "headrace"
        command = typer.main.get_command(app)
        with command.make_context("headrace", list(arguments)) as context:
            sub_name, sub, rest = command.resolve_command(context, arguments)  # type: ignore[attr-defined]
            with sub.make_context(sub_name, rest, parent=context) as parsed:
                assert parsed.params
    assert commands[0][1:3] == ["node", group]


@pytest.mark.parametrize("name", NAMES)
def test_no_secret_is_written_out(name: str) -> None:
    """Pods refer to secrets; what the chart itself makes is in Secret objects and nowhere else."""
    rendered = variant(name)
    made = [value for each in rendered.of("Secret") for value in each["data"].values()]
    others = yaml.safe_dump([each for each in rendered.objects if each["kind"] != "Secret"])
    assert not [value for value in made if value in others]
    for group in GROUPS:
        for variable in rendered.container(group)["env"]:
            if any(word in variable["name"] for word in ("PASSWORD", "REDIS", "TOKEN", "SECRET")):
                assert "secretKeyRef" in variable["valueFrom"]


@pytest.mark.parametrize("name", NAMES)
def test_pods_are_locked_down(name: str) -> None:
    rendered = variant(name)
    for group in GROUPS:
        pod, container = rendered.pod(group), rendered.container(group)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        may_ask_kubernetes = group == "head" and rendered.cluster["spec"]["enableInTreeAutoscaling"]
        assert pod["automountServiceAccountToken"] is may_ask_kubernetes
        mounts = {each["mountPath"] for each in container["volumeMounts"]}
        assert mounts >= {"/tmp", "/home/headrace", "/dev/shm"}  # what is written to, and Ray's and UCX's shared memory
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
        memory = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm"]
        assert memory[0]["medium"] == "Memory"


def test_rdma_brings_its_device_and_pinned_memory_to_the_kv_pools_alone() -> None:
    rendered = variant("gpu-rdma")
    for group in GROUPS:
        container = rendered.container(group)
        limits, added = container["resources"]["limits"], container["securityContext"]["capabilities"].get("add", [])
        assert ("rdma/ib" in limits) is ("nvidia.com/gpu" in limits) is (group in KV_POOLS)
        assert added == (["IPC_LOCK"] if group in KV_POOLS else [])
        assert ("hugepages-2Mi" in limits) is (group in KV_POOLS)
    assert rendered.pod("decode")["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    transport = parse_config(rendered.config).transport
    assert (transport.require, transport.devices) == ("rdma", ("mlx5_0:1",))
    assert variant("autoscaled").container("prefill")["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE"]


def test_probes_ask_the_right_endpoints() -> None:
    rendered = variant("minimal")
    router = rendered.container("router")
    paths = {probe: router[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/ready"}
    for group in GROUPS:
        container = rendered.container(group)
        named = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            how = container[probe].get("httpGet") or container[probe].get("tcpSocket")
            assert how is None or how["port"] in named
    assert "/.headrace/headrace/ready" in rendered.container("decode")["readinessProbe"]["exec"]["command"][-1]


def test_the_autoscaler_may_read_pods_and_change_this_cluster_and_nothing_else() -> None:
    (role,) = variant("autoscaled").of("Role")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": ["ray.io"],
            "resources": ["rayclusters"],
            "resourceNames": ["headrace"],
            "verbs": ["get", "patch"],
        },
    ]
    (binding,) = variant("autoscaled").of("RoleBinding")
    assert binding["subjects"][0]["name"] == variant("autoscaled").pod("head")["serviceAccountName"]
    assert not variant("air-gapped").of("Role")


def test_with_autoscaling_replicas_are_the_autoscalers_and_without_the_chart_s() -> None:
    for role in POOLS:
        autoscaled, fixed = variant("autoscaled").group(role), variant("air-gapped").group(role)
        assert "replicas" not in autoscaled
        assert fixed["replicas"] == fixed["minReplicas"] == fixed["maxReplicas"] > 0
        assert autoscaled["rayStartParams"]["resources"] == f'"{{\\"headrace_{role}\\": 1}}"'


def test_ray_s_tables_are_on_redis_and_only_the_head_reaches_it() -> None:
    rendered = variant("tls-external-redis")
    options = rendered.cluster["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "rediss://redis.data.svc:6380"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "headrace-redis", "key": "password"}
    assert options["redisUsername"] == {"value": "headrace"}
    for group in GROUPS:
        assert not [word for word in rendered.container(group)["command"] if "redis" in word]
    for role in POOLS:
        assert not [each for each in rendered.container(role)["env"] if "REDIS" in each["name"]]


def _open(policies: list[Object], to: str, source: str) -> set[tuple[int, int]]:
    """The ports of `to`'s pods that `source`'s pods may reach."""
    found: set[tuple[int, int]] = set()
    for policy in policies:
        if not _covers(policy["spec"]["podSelector"], to):
            continue
        for rule in policy["spec"].get("ingress", []):
            if "from" not in rule or any(_covers(peer.get("podSelector", {"no": 1}), source) for peer in rule["from"]):
                found |= {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}
    return found


def _covers(selector: Object, group: str) -> bool:
    (wanted,) = selector.get("matchExpressions", [{"key": "ray.io/group", "values": []}])
    return wanted["key"] == "ray.io/group" and group in wanted["values"]


def test_planes_are_open_to_those_who_need_them_and_closed_to_others() -> None:
    policies = variant("minimal").of("NetworkPolicy")
    ray = {(6380, 6380), (6381, 6381), (10002, 10999)}
    doors, internal, kv = {(8000, 8000), (8001, 8001)}, {(20000, 29999)}, {(7200, 7299)}
    assert _open(policies, "headgroup", "decode") == ray | {(6379, 6379)}
    assert _open(policies, "prefill", "router") == ray | internal
    assert _open(policies, "decode", "router") == ray | internal
    assert _open(policies, "prefill", "decode") == ray | internal | kv
    assert _open(policies, "decode", "prefill") == ray | kv
    assert _open(policies, "router", "decode") == ray | doors
    assert _open(policies, "router", "headgroup") == ray | doors | {(8002, 8002)}, "its commands ask routers"
    assert _open(policies, "router", "stranger") == doors, "and not their numbers"
    assert _open(policies, "prefill", "stranger") == _open(policies, "decode", "stranger") == set()
    (deny,) = [each for each in policies if each["metadata"]["name"].endswith("default-deny")]
    assert "ingress" not in deny["spec"]
    labels = variant("minimal").group("prefill")["template"]["metadata"]["labels"]
    assert deny["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_where_clients_are_few_the_head_s_commands_still_reach_every_router() -> None:
    """`headrace explain`, `usage` and `generate` in the head's pod, which no list of clients has to name."""
    assert _open(variant("air-gapped").of("NetworkPolicy"), "router", "headgroup") >= {(8000, 8000), (8002, 8002)}
    shared = objects_in(render({"router": {"sharePorts": True}}))
    policies = [each for each in shared if each["kind"] == "NetworkPolicy"]
    assert (20000, 29999) in _open(policies, "router", "headgroup"), "each router's own ports are any of these"
    assert (20000, 29999) not in _open(policies, "router", "stranger")


def test_kv_ports_and_worker_ports_are_those_the_pods_are_told() -> None:
    rendered = variant("minimal")
    assert parse_config(rendered.config).transport.port_range == (7200, 7299)
    sysctls = {each["name"]: each["value"] for each in rendered.pod("decode")["securityContext"]["sysctls"]}
    assert sysctls == {"net.ipv4.ip_local_port_range": "20000 29999"}


def test_certificates_are_mounted_where_they_are_needed_and_renew() -> None:
    """By whole volumes: what is mounted by subPath stays as it was when the pod started."""
    rendered = variant("tls-inside")
    tls = parse_config(rendered.config).tls
    wanted = {"head": {"public"}, "prefill": {"internal"}, "decode": {"internal"}, "router": {"public", "internal"}}
    for group in GROUPS:
        mounts = {each["mountPath"]: each for each in rendered.container(group)["volumeMounts"]}
        folders = {path.rpartition("/")[2] for path in mounts if path.startswith("/etc/headrace/tls/")}
        assert folders == wanted[group]
        assert not any("subPath" in mounts[f"/etc/headrace/tls/{folder}"] for folder in folders)
        volumes = {each["name"] for each in rendered.pod(group)["volumes"] if "secret" in each}
        assert {f"tls-{folder}" for folder in folders} <= volumes
    named = [tls.public.cert_file, tls.public.key_file, tls.public.ca_file]
    named += [tls.internal.cert_file, tls.internal.key_file, tls.internal.ca_file]
    sides = [f"/etc/headrace/tls/{side}/{file}" for side in ("public", "internal") for file in FILES_OF_A_SECRET]
    assert named == sides
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert rendered.container("router")[probe]["httpGet"]["scheme"] == "HTTPS"
        assert "scheme" not in variant("minimal").container("router")[probe]["httpGet"]
    (monitor,) = rendered.of("ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["port"]) == ("https", "admin")
    assert parse_config(rendered.config).tenants_file == "/etc/headrace/tenants/tenants.yaml"
    assert parse_config(variant("minimal").config).tls.internal.cert_file is None


def test_alert_rules_come_with_the_chart_where_they_are_wanted() -> None:
    values = values_of("ha-routers")
    assert "PrometheusRule" not in {each["kind"] for each in objects_in(render(values))}
    values["serviceMonitor"]["rules"] = True
    (rules,) = (each for each in objects_in(render(values)) if each["kind"] == "PrometheusRule")
    validate(rules)
    assert rules["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())


def test_routers_of_one_pod_share_ports_and_probes_ask_there() -> None:
    values = {"router": {"sharePorts": True}, "pools": {"router": {"programsPerPod": 2, "replicas": 4}}}
    files = render(values)
    rendered = Rendered(files, objects_in(files))
    router = parse_config(rendered.config).router
    assert (router.share_ports, router.admin_port, router.http_port) == (True, 0, 8000)
    container = rendered.container("router")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"
        assert variant("minimal").container("router")[probe]["httpGet"]["port"] == "admin"
    assert [port["name"] for port in container["ports"]] == ["raylet", "http", "grpc"]
    assert "--places=2" in container["command"]


def test_tenants_redis_is_for_routers_and_for_headrace_key_on_the_head() -> None:
    """By a Secret of its own: whoever writes to the Redis with Ray's tables can run code. And by variables, not on
    command lines, which show what they were given to everybody on the node.
    """
    rendered = variant("tls-inside")
    wanted = {
        "head": {TENANTS_REDIS_VARIABLE},
        "router": {TENANTS_REDIS_VARIABLE, REDIS_VARIABLE},
        "prefill": set(),
        "decode": set(),
    }
    for group in GROUPS:
        container = rendered.container(group)
        assert not [word for word in container["command"] if "redis_url" in word]
        given = {each["name"]: each for each in container["env"] if each["name"].endswith("REDIS_URL")}
        assert given.keys() == wanted[group]
        for variable in given.values():
            assert variable["valueFrom"]["secretKeyRef"] == {"name": "headrace-tenants-redis", "key": "url"}
    (store,) = (each for each in variant("ha-routers").container("head")["env"] if each["name"] == REDIS_VARIABLE)
    assert store["valueFrom"]["secretKeyRef"] == {"name": "headrace-redis", "key": "url"}


def test_only_where_keys_are_asked_for_does_a_router_s_admin_port_listen_on_loopback_too() -> None:
    """There `kubectl port-forward` and a mesh's proxy come from; without keys who does may act (docs/security.md)."""
    hosts = {
        name: [word for word in variant(name).container("router")["command"] if word.startswith("router.admin_host")]
        for name in ("minimal", "tls-inside")
    }
    assert hosts == {"minimal": ["router.admin_host=$(POD_IP)"], "tls-inside": ["router.admin_host='0.0.0.0'"]}


def test_notes_say_how_to_ask_and_how_to_scale() -> None:
    notes = variant("minimal").files["NOTES.txt"]
    assert "headrace scale decode=3" in notes
    assert "/v1/chat/completions" in notes
    assert "curl https://llm.example.com/v1/models" in variant("tls-external-redis").files["NOTES.txt"]
    inside = variant("tls-inside").files["NOTES.txt"]
    wanted = "curl https://llm.example.internal:8000/v1/chat/completions"
    assert f"{wanted} --resolve llm.example.internal:8000:127.0.0.1 --cacert ca.crt" in inside
    assert 'authorization: Bearer $KEY"' in inside
    assert "curl https://llm.example.com/v1/models" in variant("autoscaled").files["NOTES.txt"]
    assert "authorization" not in notes
    assert "curl http://127.0.0.1:8000/v1/chat/completions -H" in notes
    assert "UCX, which carries KV, authenticates nobody" in render({"networkPolicy": {"enabled": False}})["NOTES.txt"]


def test_two_releases_in_one_namespace_share_no_name() -> None:
    def names(release: str) -> set[tuple[str, str]]:
        objects = objects_in(render(values_of("autoscaled"), name=release))
        return {(each["kind"], each["metadata"]["name"]) for each in objects}

    assert not names("chat") & names("code")
    assert "headrace status --name chat-headrace" in render({}, name="chat")["NOTES.txt"]
