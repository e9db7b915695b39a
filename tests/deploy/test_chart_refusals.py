"""A value that cannot work is refused when Helm renders, with a message that names it: one case for each."""

import json
from typing import Any

import pytest
import yaml
from helm_python.errors import HelmError

from cluster.config import parse_config
from deploy.helm.schema import FILE, text_of, with_settings
from tests.deploy.chart import render

THE_CHART_S = (
    "name",
    "model",
    "served_name",
    "host",
    "secret_file",
    "tenants_file",
    "tenants_redis_url",
    "tls",
    "ray",
    "store",
    "transport",
)

REFUSED = {
    "replica: 2": "replica",
    "pools: {decode: {replicas: -1}}": "/pools/decode/replicas",
    "pools: {decode: {replicas: two}}": "/pools/decode/replicas",
    "pools: {decode: {replica: 2}}": "replica",
    "pools: {embed: {replicas: 1}}": "embed",
    "pools: {decode: {minReplicas: 9}}": "pools.decode.minReplicas: 9 is more than maxReplicas, which is 8",
    "pools: {prefill: {replicas: 20}}": "pools.prefill.replicas: 20 programs do not fit",
    "pools: {prefill: {gpu: {count: -1}}}": "/pools/prefill/gpu/count",
    "pools: {prefill: {resources: {limits: {memory: 4GB}}}}": "/pools/prefill/resources/limits/memory",
    "pools: {prefill: {shm: lots}}": "/pools/prefill/shm",
    "pools: {router: {topologySpread: {whenUnsatisfiable: Never}}}": "/pools/router/topologySpread/whenUnsatisfiable",
    "pools: {router: {podDisruptionBudget: {minAvailable: 50%}}}": "/pools/router/podDisruptionBudget/minAvailable",
    "pools: {router: {podDisruptionBudget: {maxUnavailable: 1}}}": "maxUnavailable",
    "pools: {router: {podDisruptionBudget: {minAvailable: 8}}}": (
        "pools.router.podDisruptionBudget.minAvailable: 8 of at most 8 pods: none could ever be evicted"
    ),
    "{autoscaling: {enabled: false}, pools: {decode: {replicas: 2, podDisruptionBudget: {minAvailable: 2}}}}": (
        "pools.decode.podDisruptionBudget.minAvailable: 2 of at most 2 pods"
    ),
    "pools: {decode: {programsPerPod: 0}}": "/pools/decode/programsPerPod",
    "image: {pullPolicy: Sometimes}": "/image/pullPolicy",
    "image: {digest: latest}": "/image/digest",
    "model: {name: ''}": "/model/name",
    "model: {source: s3}": "/model/source",
    "model: {source: pvc}": "model.pvc.claimName: needed with model.source pvc",
    "model: {mountPath: models}": "/model/mountPath",
    "drainSeconds: 0": "/drainSeconds",
    "config: {timing: {drain_s: 5}}": "config.timing.drain_s: say drainSeconds",
    "config: {host: 0.0.0.0}": "config.host: the chart sets it",
    "config: {pools: {decode: {replicas: 3}}}": "config.pools.decode.replicas: say pools.decode.replicas",
    "config: {router: {http_port: 1}}": "config.router.http_port: the chart sets it",
    "transport: {require: infiniband}": "/transport/require",
    "transport: {devices: []}": "/transport/devices",
    "transport: {portRange: [7200]}": "/transport/portRange",
    "transport: {portRange: [7299, 7200]}": "transport.portRange: the first port is above the last",
    "ports: {internal: [29999, 20000]}": "ports.internal: the first port is above the last",
    "transport: {rdma: {resource: rdma}}": "/transport/rdma/resource",
    "ports: {http: 70000}": "/ports/http",
    "redis: {mode: maybe}": "/redis/mode",
    "redis: {mode: external, external: {existingSecret: one}}": "redis.external.address: needed",
    "redis: {mode: external, external: {address: 'redis://one:6379'}}": "redis.external.existingSecret: needed",
    "redis: {mode: external, external: {address: 'redis://:pa55@one:6379'}}": "redis.external.address: without user",
    "redis: {mode: external, external: {address: 'one:6379'}}": "/redis/external/address",
    "gcsFaultTolerance: {enabled: true}": "gcsFaultTolerance.enabled: needs redis.mode bundled or external",
    "service: {type: External}": "/service/type",
    "ingress: {enabled: true}": "ingress.host: needed with ingress.enabled",
    "ingress: {grpc: {enabled: true}}": "ingress.grpc.host: needed with ingress.grpc.enabled",
    "gateway: {enabled: true}": "gateway.parentRefs: needed with gateway.enabled",
    "serviceMonitor: {interval: often}": "/serviceMonitor/interval",
    "networkPolicy: {egress: {enabled: true}}": "networkPolicy.egress.apiServer.cidr",
    "autoscaling: {upscalingMode: Fast}": "/autoscaling/upscalingMode",
    "fullnameOverride: Head_Race": "/fullnameOverride",
    "auth: {existingSecret: A B}": "/auth/existingSecret",
    "tls: {public: {existingSecret: A B}}": "/tls/public/existingSecret",
    "tls: {internal: {serverName: ''}}": "/tls/internal/serverName",
    "tls: {internal: {cert: a}}": "cert",
    "config: {tls: {}}": "config.tls: the chart sets it",
    "config: {router: {admin_host: 0.0.0.0}}": "config.router.admin_host: the chart sets it",
    "config: {tenants_file: a}": "config.tenants_file: the chart sets it",
    "config: {tenants_redis_url: 'redis://:pa55@a'}": "config.tenants_redis_url: the chart sets it",
    "config: {router: {share_ports: true}}": "config.router.share_ports: the chart sets it",
    "pools: {router: {programsPerPod: 2}}": "pools.router.programsPerPod: more than one router in a pod needs",
    "router: {sharePorts: maybe}": "/router/sharePorts",
    "tenants: {redis: {url: 'redis://:pa55@a'}}": "url",
    "{router: {sharePorts: true}, serviceMonitor: {enabled: true}, networkPolicy: {enabled: false}}": (
        "serviceMonitor.enabled: not possible with router.sharePorts"
    ),
    "serviceMonitor: {enabled: true}": "networkPolicy.monitoring: say where Prometheus is",
    "{serviceMonitor: {enabled: true}, networkPolicy: {enabled: false}, tenants: {existingSecret: a}}": (
        "serviceMonitor.keySecret: with tenants"
    ),
    "tenants: {existingSecret: A B}": "/tenants/existingSecret",
    "pools: {decode: {volumeMounts: [{name: one}]}}": "/pools/decode/volumeMounts/0",
    "head: {volumes: [{name: one}]}": "/head/volumes/0",
    "redis: null": "missing property 'redis'",
    "pools: {decode: {shm: null}}": "missing property 'shm'",
    "startupSeconds: 5": "/startupSeconds",
    "config: {engin: {dtype: float32}}": "engin",
    "config: {engine: {dtype: float8}}": "/config/engine/dtype",
    "config: {tenants: {Big: {}}}": "Big",
    "ports: {http: 8001}": "ports.http: has ports in common with ports.grpc",
    "ports: {admin: 8000}": "ports.http: has ports in common with ports.admin",
    "ports: {http: 80}": "/ports/http",  # the pods' user may not
    "ports: {grpc: 10001}": "ports.grpc: has ports in common with Ray's own port 10001",
    "ports: {internal: [10500, 29999]}": "ports.internal: has ports in common with ports.rayWorkers",
    "ports: {internal: [20000, 20001]}": "ports.internal: 1000 ports at least",
    "ports: {rayWorkers: [10002, 10003]}": "ports.rayWorkers: 100 ports at least",
    "transport: {portRange: [6000, 6400]}": "transport.portRange: has ports in common with ports.gcs",
    "transport: {portRange: [1, 65535]}": "/transport/portRange/0",
    "transport: {devices: ['eth0,eth1']}": "/transport/devices/0",
    "service: {httpPort: 8001}": "service.grpcPort: must not be service.httpPort",
    "routerHost: localhost": "/routerHost",
    "serviceAccount: {create: false}": "serviceAccount.name: needed with serviceAccount.create false",
    "nameOverride: Head Race": "/nameOverride",
    "image: {repository: 'headrace:0.1.0'}": "/image/repository",
    "image: {tag: 'a b'}": "/image/tag",
    "model: {mountPath: /tmp/models}": "/model/mountPath",
    "model: {initContainer: {imag: one}}": "imag",
    "model: {initContainer: {command: [fetch]}}": "model.initContainer.image: needed",
    "model: {source: none, initContainer: {image: one}}": "model.initContainer: there is no volume to fill",
    "redis: {mode: external, external: {address: 'redis://one:6379/3'}}": "/redis/external/address",
    "ingress: {enabled: true, host: https://llm.example.com}": "/ingress/host",
    "ingress: {enabled: true, host: a.b, grpc: {enabled: true, host: a.b}}": "ingress.grpc.host: must not be",
    "gateway: {enabled: true, parentRefs: [{name: a}]}": "gateway.httpHostnames, gateway.grpcHostnames: both needed",
    "gateway: {enabled: true, parentRefs: [{name: a}], httpHostnames: [a.b], grpcHostnames: [a.b, c.b]}": (
        "gateway.httpHostnames, gateway.grpcHostnames: both needed and apart"
    ),
    "serviceMonitor: {rules: true}": "serviceMonitor.rules: needs serviceMonitor.enabled",
    "{serviceMonitor: {enabled: true}, networkPolicy: {enabled: false}, tls: {public: {existingSecret: a}}}": (
        "tls.public.serverName: needed with serviceMonitor.enabled"
    ),
    "tls: {public: {ownCa: true}}": "tls.public.ownCa: there is no TLS without tls.public.existingSecret",
    "tls: {public: {clientCaSecret: a}}": "tls.public.clientCaSecret: there is no TLS",
    "{tls: {public: {existingSecret: a, clientCaSecret: b}}, router: {sharePorts: true}}": (
        "tls.public.clientCaSecret: not possible with router.sharePorts"
    ),
    "networkPolicy: {clients: [{namespaceSelektor: {}}]}": "namespaceSelektor",
    "networkPolicy: {monitoring: [{}]}": "/networkPolicy/monitoring/0",
    "pools: {decode: {tolerations: [{operater: Exists}]}}": "operater",
    "pools: {decode: {affinity: {podAntiAfinity: {}}}}": "podAntiAfinity",
    "redis: {bundled: {affinity: {nodeSelector: {}}}}": "/redis/bundled/affinity",
    "networkPolicy: {egress: {enabled: true, apiServer: {cidr: 10.0.0.1/32}}}": (
        "networkPolicy.egress.extra: say there how to fetch smollm2-135m"
    ),
    "pools: {decode: {resources: {requests: {memory: 8Gi}}}}": (
        "pools.decode.resources.requests.memory: 8Gi is more than the limit, which is 4Gi"
    ),
    "pools: {router: {resources: {requests: {memory: 2.1G}, limits: {memory: 2000Mi}}}}": (
        "pools.router.resources.requests.memory: 2.1G is more than the limit, which is 2000Mi"
    ),
    "head: {resources: {requests: {cpu: 1}, limits: {cpu: 900m}}}": (
        "head.resources.requests.cpu: 1 is more than the limit, which is 900m"
    ),
    "head: {resources: {limits: {memory: 1900000000}}}": "head.resources.requests.memory: 2Gi is more than the limit",
    "autoscaling: {resources: {limits: {memory: 500Mi}}}": "autoscaling.resources.requests.memory: 512Mi is more than",
    "redis: {bundled: {resources: {requests: {memory: 1Gi}}}}": "redis.bundled.resources.requests.memory: 1Gi is more",
    "transport: {require: shm}": "transport.require: shm cannot be met, since two pods never share memory",
    "transport: {require: rdma}": "transport.rdma.resource: needed with transport.require rdma",
    "pools: {decode: {gpu: {count: 1, resource: gpu}}}": "/pools/decode/gpu/resource",
    "pools: {decode: {gpu: {count: 1, resource: 'nvidia.com/a b'}}}": "/pools/decode/gpu/resource",
    "pools: {decode: {hugepages: 3Mi}}": "pools.decode.hugepages: 3Mi are no whole pages of 2Mi",
    "pools: {prefill: {hugepages: 0Mi}}": "pools.prefill.hugepages: 0Mi are no whole pages of 2Mi",
    "pools: {decode: {shm: 5Gi}}": "pools.decode.shm: 5Gi is no less than resources.limits.memory, 4Gi",
    "head: {shm: 2048Mi}": "head.shm: 2048Mi is no less than resources.limits.memory, 2Gi",
    "{transport: {portRange: [7200, 7206]}, pools: {decode: {programsPerPod: 4}}}": (
        "transport.portRange: 7 ports are too few for pools.decode.programsPerPod 4, which take 8"
    ),
    "transport: {portRange: [7200, 7202], devices: [eth0, eth1]}": (
        "transport.portRange: 3 ports are too few for pools.prefill.programsPerPod 1, which take 4"
    ),
    "pools: {decode: {labels: {app.kubernetes.io/component: mine}}}": (
        "pools.decode.labels: app.kubernetes.io/component is the chart's"
    ),
    "head: {labels: {helm.sh/chart: mine}}": "head.labels: helm.sh/chart is the chart's",
    "pools: {router: {labels: {ray.io/group: mine}}}": "pools.router.labels: ray.io/group is the chart's or KubeRay's",
    "{serviceMonitor: {enabled: true, labels: {app.kubernetes.io/name: mine}}, networkPolicy: {enabled: false}}": (
        "serviceMonitor.labels: app.kubernetes.io/name is the chart's"
    ),
    "pools: {decode: {env: [{name: HOME, value: /root}]}}": "pools.decode.env: HOME is the chart's",
    "head: {env: [{name: RAY_AUTH_TOKEN, value: a}]}": "head.env: RAY_AUTH_TOKEN is the chart's or KubeRay's own",
    "{model: {hubTokenSecret: {name: a}}, pools: {prefill: {env: [{name: HF_TOKEN, value: a}]}}}": (
        "pools.prefill.env: HF_TOKEN is the chart's"
    ),
    "{tenants: {redis: {existingSecret: a}}, pools: {router: {env: [{name: HEADRACE_TENANTS_REDIS_URL}]}}}": (
        "pools.router.env: HEADRACE_TENANTS_REDIS_URL is the chart's"
    ),
    "config: {tenants: {acme: {}}}": "config.tenants: say tenants.existingSecret",
    "{networkPolicy: {egress: {enabled: true, apiServer: {cidr: 10.0.0.1/32}}}, redis: {mode: external, "
    "external: {address: 'redis://one:6379', existingSecret: one}}}": "networkPolicy.egress.extra: say there how",
}

NAMES_REFUSED = ("7b", "a.b")
"""Helm takes them for releases, Kubernetes not for services."""


@pytest.mark.parametrize("values", REFUSED)
def test_wrong_value_is_named(values: str) -> None:
    given: dict[str, Any] = yaml.safe_load(values)
    with pytest.raises(HelmError) as refused:
        render(given)
    message = str(refused.value)
    assert "nil pointer" not in message
    assert REFUSED[values] in message
    assert "pa55" not in message  # a password in a URL is not repeated


def test_what_is_just_within_is_taken() -> None:
    """The other side of each of these bounds."""
    pool = {
        "resources": {"requests": {"cpu": 2, "memory": "4096Mi"}, "limits": {"cpu": "2000m", "memory": "4Gi"}},
        "shm": "4095Mi",
        "hugepages": "6Mi",
        "programsPerPod": 4,
        "labels": {"team": "chat"},
        "env": [{"name": "HF_TOKEN", "value": "a"}],
    }
    assert render({"pools": {"decode": pool}, "transport": {"portRange": [7200, 7207]}})


@pytest.mark.parametrize("name", NAMES_REFUSED)
def test_a_release_whose_objects_could_have_no_name_is_told_what_helps(name: str) -> None:
    with pytest.raises(HelmError, match="fullnameOverride: needed"):
        render({}, name=name)
    assert render({"fullnameOverride": "seven-b"}, name=name)


def test_settings_are_refused_by_helm_as_they_would_be_by_a_pod() -> None:
    """After a change of settings: python -m deploy.helm.schema."""
    schema = json.loads(FILE.read_text())
    assert FILE.read_text() == text_of(with_settings(schema))
    every = parse_config("{}").model_dump(mode="json", exclude=set(THE_CHART_S), exclude_none=True)
    for section in ("pools", "router", "timing"):
        every.pop(section)
    assert render({"config": every})
