"""A value that cannot work is refused when Helm renders, with a message that names it: one case for each."""

from typing import Any

import pytest
import yaml
from helm_python.errors import HelmError

from tests.deploy.chart import render

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
    "pools: {router: {podDisruptionBudget: {maxUnavailable: 0}}}": "/pools/router/podDisruptionBudget/maxUnavailable",
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
}


@pytest.mark.parametrize("values", REFUSED)
def test_wrong_value_is_named(values: str) -> None:
    given: dict[str, Any] = yaml.safe_load(values)
    with pytest.raises(HelmError) as refused:
        render(given)
    message = str(refused.value)
    assert REFUSED[values] in message
    assert "pa55" not in message  # a password in a URL is not repeated
