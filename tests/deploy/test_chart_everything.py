"""Every value of the chart arrives: one values file that says them all; and what an upgrade keeps."""

import base64
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart

from cluster.config import load_config, parse_config
from tests.deploy.chart import CHART, GOLDEN, GROUPS, Rendered, golden_text, render, values_of
from tests.deploy.schemas import rendered_with

EVERYTHING = Path(__file__).with_name("data") / "everything.yaml"
LEFT_OUT = {
    "fullnameOverride": "nameOverride is said",
    "image.digest": "wins over the tag",
    "model.pvc.claimName": "of model.source pvc",
    "model.pvc.subPath": "the same",
    "model.pvc.readOnly": "the same",
    "model.source": "cacheSize is the cache's",
    "pools.*.topologySpread.enabled": "off, the rest of it would say nothing",
    "pools.*.podDisruptionBudget.enabled": "the same",
    "pools.router.gpu.*": "routers have none",
    "pools.router.programsPerPod": "needs sharePorts",
    "pools.router.hugepages": "routers have none",
    "autoscaling.enabled": "off, the rest of it would say nothing",
    "redis.external.*": "bundled is said",
    "router.sharePorts": "not with clients' certificates",
    "networkPolicy.enabled": "off, the rest of it would say nothing",
    "serviceAccount.create": "off, its annotations would say nothing",
    "podSecurityContext.runAsNonRoot": "off, it is not what anybody should be told",
    "securityContext.allowPrivilegeEscalation": "the same",
    "securityContext.capabilities.drop": "the same",
    "securityContext.readOnlyRootFilesystem": "the same",
}
"""Values that stay as they are there, and why."""


@pytest.fixture(scope="module")
def everything() -> Rendered:
    return rendered_with(yaml.safe_load(EVERYTHING.read_text()))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, f"{path}.{key}" if path else key)
    else:
        yield path, value


def test_nothing_is_as_it_is_by_default() -> None:
    """A new value of the chart needs a line in that file, or in LEFT_OUT."""
    said = yaml.safe_load(EVERYTHING.read_text())
    left_out = [re.escape(name).replace(r"\*", ".+") for name in LEFT_OUT]
    silent = []
    for path, default in leaves(yaml.safe_load((CHART / "values.yaml").read_text())):
        here: Any = said
        for part in path.split("."):
            here = here.get(part) if isinstance(here, dict) else None
        if here in (None, default) and not any(re.fullmatch(name, path) for name in left_out):
            silent.append(path)
    assert not silent


def test_everything_is_valid_and_as_expected(everything: Rendered) -> None:
    # After a wanted change: python -m tests.deploy.test_chart_everything
    assert golden_text(everything) == (GOLDEN / "everything.yaml").read_text()


def test_what_pools_the_head_and_redis_say_of_their_pods_arrives(everything: Rendered) -> None:
    groups = {"head": [77], "prefill": [44, 109]}
    for group in GROUPS:
        context = everything.pod(group)["securityContext"]
        assert context.get("supplementalGroups") == groups.get(group, [44, 109] if group == "router" else None)
        assert context["fsGroup"] == (20001 if group == "decode" else 20000)
        assert everything.pod(group).get("runtimeClassName") == (None if group == "head" else "nvidia")
        variables = {each["name"]: each for each in everything.container(group)["env"]}
        assert variables["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "mine"}}
        sizes = {each["name"]: each.get("emptyDir", {}).get("sizeLimit") for each in everything.pod(group)["volumes"]}
        assert sizes.get("models") == (None if group == "head" else "90Gi")
    (redis,) = everything.of("StatefulSet")
    (claim,) = redis["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"


def test_routers_listen_on_every_interface_of_ipv6_where_they_are_told_to(everything: Rendered) -> None:
    """Two colons are a mapping to YAML, in the template and in `--set`, unless they are quoted."""
    command = everything.container("router")["command"]
    settings = [command[at + 1] for at, word in enumerate(command) if word == "--set"]
    settings = [each.replace("$(POD_IP)", "fd00::7") for each in settings]
    config = load_config(None, settings)
    assert (config.router.admin_host, config.host) == ("::", "fd00::7")
    assert parse_config(everything.config).router.host == "::"


def test_a_token_of_the_hub_has_a_key_by_default() -> None:
    variables = rendered_with({"model": {"hubTokenSecret": {"name": "hub"}}}).container("decode")["env"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in variables


def test_where_memory_is_pinned_it_is_said_that_the_capability_is_for_root() -> None:
    """And what the guide and the notes tell to set makes such pods."""
    rendered = rendered_with(values_of("gpu-rdma"))
    notes = " ".join(rendered.files["NOTES.txt"].split())
    guide = (CHART.parents[2] / "docs/kubernetes.md").read_text()
    remedy = "podSecurityContext: {runAsNonRoot: false, runAsUser: 0}"
    for text in (notes, guide, (CHART.parent / "values/gpu-rdma.yaml").read_text()):
        assert "IPC_LOCK" in text
        assert "LimitMEMLOCK=infinity" in text
        assert remedy in text
    assert "IPC_LOCK" not in render({})["NOTES.txt"]
    as_root = yaml.safe_load(remedy)
    values = values_of("gpu-rdma")
    for role in ("prefill", "decode"):
        values["pools"][role] |= as_root
    rendered = rendered_with(values)
    for group in GROUPS:
        pod = rendered.pod(group)["securityContext"]
        expected = (False, 0) if group in ("prefill", "decode") else (True, 10001)
        assert (pod["runAsNonRoot"], pod["runAsUser"]) == expected
        container = rendered.container(group)["securityContext"]
        assert not {"runAsUser", "runAsNonRoot"} & container.keys(), "it would win over the pod's"
        assert ("IPC_LOCK" in container["capabilities"].get("add", [])) is (group in ("prefill", "decode"))


LOOKUP = re.compile(r'\(lookup "v1" "Secret" \.Release\.Namespace \(printf "%s-(\w+)" \$name\)\)')


def test_an_upgrade_keeps_the_secrets_that_were_drawn(tmp_path: Path) -> None:
    """There is no cluster to look into: what `lookup` would find is put in its place."""
    shutil.copytree(CHART, tmp_path / "headrace")
    template = tmp_path / "headrace/templates/secrets.yaml"
    text = template.read_text()
    assert len(LOOKUP.findall(text)) == text.count("lookup ") == 2

    def found(asked: "re.Match[str]") -> str:
        keys = {"auth": ("cluster-secret", "auth_token"), "redis": ("password",)}[asked[1]]
        pairs = " ".join(f'"{key}" ("{asked[1]} {key}" | b64enc)' for key in keys)
        return f'(dict "data" (dict {pairs}))'

    template.write_text(LOOKUP.sub(found, text))
    with Chart.load(tmp_path / "headrace") as chart:
        files = chart.render(values={"redis": {"mode": "bundled"}}, name="headrace", namespace="llm")
    secrets = {each["metadata"]["name"]: each for each in yaml.safe_load_all(files["headrace/templates/secrets.yaml"])}
    assert set(secrets) == {f"headrace-{suffix}" for suffix in LOOKUP.findall(text)}, "else the lookup finds nothing"
    assert {each["metadata"]["namespace"] for each in secrets.values()} == {"llm"}
    kept = {key: _plain(value) for each in secrets.values() for key, value in each["data"].items()}
    assert kept == {
        "cluster-secret": "auth cluster-secret",
        "auth_token": "auth auth_token",
        "password": "redis password",
        "url": "redis://:redis password@headrace-redis.llm.svc:6379",
    }


def _plain(text: str) -> str:
    return base64.b64decode(text).decode()


if __name__ == "__main__":
    (GOLDEN / "everything.yaml").write_text(golden_text(rendered_with(yaml.safe_load(EVERYTHING.read_text()))))
