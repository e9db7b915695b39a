"""Ray's own autoscaler on the chart's RayCluster: it asks Kubernetes for a pod where a program waits for a place."""

from pathlib import Path

import pytest

from tests.deploy.autoscaler import Autoscaler, KubernetesApi
from tests.deploy.chart import Rendered, objects_in, render
from tests.deploy.pods import Network, Pod, may_make_namespaces
from tests.integration.test_pods import VALUES

PATIENCE_S = 120.0
pytestmark = pytest.mark.verify


def test_pods_are_asked_for_where_programs_wait_by_a_container_that_writes_nowhere_else(tmp_path: Path) -> None:
    if not may_make_namespaces():
        pytest.skip("needs root and `ip netns` for the pods' namespaces")
    files = render({**VALUES, "pools": {role: {"maxReplicas": 4} for role in ("prefill", "decode", "router")}})
    rendered = Rendered(files, objects_in(files))
    with Network() as network, KubernetesApi(rendered, "head", tmp_path / "tls") as api:
        head = Pod(rendered, "head", "head", network, tmp_path)
        head.start({})
        try:
            with Autoscaler(rendered, head, api, tmp_path) as autoscaler:
                one_each = {"prefill": 1, "decode": 1, "router": 1}
                assert api.until(lambda: api.replicas == one_each, PATIENCE_S), autoscaler.log + head.log
                head.run("headrace", "scale", "decode=3")
                assert api.until(lambda: api.replicas == one_each | {"decode": 3}, PATIENCE_S), autoscaler.log
                assert api.refused == []
                assert "Read-only file system" not in autoscaler.log
        finally:
            head.kill()
