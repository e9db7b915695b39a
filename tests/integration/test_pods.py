"""The chart's own commands as at most four Ray nodes, each in namespaces of its own: scaled, drained and rolled under
traffic, every pod of every group, and nothing is lost. What listens in them is looked at too (docs/security.md).

No Kubernetes is here, so the test is kubelet, DNS and Service (tests/deploy/pods.py); KubeRay's operator and autoscaler
are played by starting a pod where a program waits for a place, or another head.
"""

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.core.clock import SystemClock
from tests.deploy.chart import CHART, Rendered, objects_in, render
from tests.deploy.pods import GATEWAY, Network, Pod, may_make_namespaces
from tests.integration.test_ray_cluster import RAYS, assert_asks_for_its_token
from tests.integration.valkey import PASSWORD, Redis
from tests.listening import Listening

PATIENCE_S = 300.0
CLIENTS = 3
PROMPTS = [f"Water of the {word} river turns the wheel of the mill. " * 6 for word in ("first", "second", "third")]
VALUES: dict[str, Any] = {
    "model": {"name": "tracer", "source": "none"},
    "drainSeconds": 20,
    "pools": {"decode": {"programsPerPod": 3}},
    "config": {"engine": {"tracer": {"step_s": 0.01}}},
}
OURS = ("engine_process", "prefill_worker", "decode_worker", "router")
"""What of ours listens."""

pytestmark = pytest.mark.verify


class Cluster:
    """Pods of one release, with Ray's tables in a Redis outside. At most four at a time."""

    def __init__(self, folder: Path, network: Network, valkey: Redis) -> None:
        secret = {"password": PASSWORD, "url": valkey.url}
        outside = {"mode": "external", "external": {"address": valkey.address, "existingSecret": "valkey"}}
        files = render({**VALUES, "redis": outside, "gcsFaultTolerance": {"enabled": True}})
        self._rendered = Rendered(files, objects_in(files))
        self._folder, self._network, self._secrets = folder, network, {"valkey": secret}
        self.pods: dict[str, Pod] = {}
        self.head = self.start("head", "head-a")

    def start(self, group: str, name: str) -> Pod:
        pod = Pod(self._rendered, group, name, self._network, self._folder, self._secrets)
        self.pods[name] = pod
        assert len(self.pods) <= 4
        pod.start(self._services(pod if group == "head" else self.head))
        return pod

    def start_head(self, name: str) -> None:
        """Another one, at another address, which the head's service then has."""
        self.head = self.start("head", name)
        for pod in self.pods.values():
            pod.resolve(self._services(self.head))

    @staticmethod
    def _services(head: Pod) -> dict[str, str]:
        return {"headrace-head-svc.llm.svc": head.address}

    def stop(self, name: str) -> str:
        return self.pods.pop(name).stop()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.head.run("sh", "-c", "headrace status --json || true") or "{}")
        return found

    def scale(self, *sizes: str) -> None:
        self.head.run("headrace", "scale", *sizes)

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """A look takes seconds by itself, so there is no pause between two."""
        clock = SystemClock()
        give_up = clock.now() + PATIENCE_S
        while clock.now() < give_up:
            if condition(status := self.status()):
                return status
        raise AssertionError(f"{status}\n" + "\n".join(f"---- {n}\n{p.log[-3000:]}" for n, p in self.pods.items()))


def _ready(**counts: int) -> Callable[[dict[str, Any]], bool]:
    """Exactly so many programs of these roles are ready, and everything that is wanted is."""

    def holds(status: dict[str, Any]) -> bool:
        ready = [each["role"] for each in status.get("programs", []) if each["state"] == "ready"]
        return bool(status.get("ready")) and all(ready.count(role) == count for role, count in counts.items())

    return holds


def _lives(status: dict[str, Any], role: str) -> set[tuple[str, int, str]]:
    """Who serves a role: a program that was touched has another epoch."""
    found = [each for each in status["programs"] if each["role"] == role]
    return {(each["name"], each["ready"]["epoch"], each["node"]) for each in found}


class Traffic:
    """Clients that ask all the time, greedily; every answer must be the one that was given at the beginning."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self.answers = [0] * CLIENTS
        self.wrong: list[str] = []
        self._expected = {prompt: self._ask(prompt) for prompt in PROMPTS}

    def move(self, address: str) -> None:
        """New requests go there, as when a service's endpoints change; those that run stay where they are."""
        self._address = address

    def goes_on(self) -> None:
        """Return when each client had an answer to something that it asked from now on: its second."""
        enough = [answers + 2 for answers in self.answers]
        clock, give_up = SystemClock(), SystemClock().now() + PATIENCE_S
        while any(answers < least for answers, least in zip(self.answers, enough, strict=True)):
            assert clock.now() < give_up, (self.answers, self.wrong)
            self._stop.wait(0.05)

    def _ask(self, prompt: str) -> str:
        body = {"model": "tracer", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"http://{self._address}:8000/v1/completions", json=body, timeout=120.0)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["text"])

    def _client(self, first: int) -> None:
        for prompt in itertools.islice(itertools.cycle(PROMPTS), first, None):
            if self._stop.is_set():
                return
            try:
                if (text := self._ask(prompt)) != self._expected[prompt]:
                    self.wrong.append(f"another text: {text!r}")
                self.answers[first] += 1
            except httpx.HTTPError as error:
                self.wrong.append(repr(error))

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client, first) for first in range(CLIENTS)]
            try:
                yield
            finally:
                self._stop.set()
            for client in clients:
                client.result()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if not may_make_namespaces():
        pytest.skip("needs root and `ip netns` for the pods' namespaces")
    with Network() as network:
        valkey = Redis(tmp_path, GATEWAY)
        one = Cluster(tmp_path, network, valkey)
        try:
            yield one
        finally:
            for pod in one.pods.values():
                pod.kill()
            valkey.close()


def test_pools_scale_and_pods_roll_under_traffic_and_nothing_is_lost(cluster: Cluster) -> None:
    router = cluster.start("router", "router-a")
    cluster.start("prefill", "prefill-a")
    cluster.start("decode", "decode-a")
    before = cluster.until(_ready(prefill=1, decode=1, router=1))
    assert len({each["node"] for each in before["programs"]}) == 3
    (told,) = [each["ready"] for each in before["programs"] if each["role"] == "router"]
    assert (told["http"], told["address"]) == (f"http://{router.address}:8000", f"{router.address}:8001")
    asked_from_the_head = cluster.head.run("headrace", "usage")
    assert asked_from_the_head.startswith("day,")
    _what_listens_is_known(cluster)
    traffic = Traffic(router.address)
    with traffic.running():
        cluster.scale("decode=3")
        wide = cluster.until(_ready(decode=3))
        cluster.scale("decode=1")
        narrow = cluster.until(_ready(decode=1))
        for status in (wide, narrow):  # one pool's change touches nobody else
            assert _lives(status, "prefill") == _lives(before, "prefill")
            assert _lives(status, "router") == _lives(before, "router")
        assert _lives(narrow, "decode") == _lives(before, "decode") < _lives(wide, "decode")

        _roll_decode(cluster)
        _roll_router(cluster, traffic)
        _roll_prefill(cluster)
        _roll_head(cluster, traffic)
    assert traffic.wrong == []
    assert sum(traffic.answers) > 20


def _what_listens_is_known(cluster: Cluster) -> None:
    """One of our doors, UCX's, or Ray's, which asks for its token; where and at ports that the network policy tells."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    ports = values["ports"]
    free = _all_of(ports["internal"])
    of_ray = {ports["gcs"], ports["nodeManager"], ports["objectManager"], *_all_of(ports["rayWorkers"]), *free}
    told = {
        "engine_process": set(_all_of(values["transport"]["portRange"])),
        "prefill_worker": set(free),
        "decode_worker": set(free),
        "router": {ports["http"], ports["grpc"], ports["admin"]},
    }
    found: dict[str, set[str]] = {}
    for pod in cluster.pods.values():
        said = json.loads(pod.run(sys.executable, "-m", "tests.listening"))
        for one in (Listening(*each) for each in said):
            what = one.what((*RAYS, *OURS))
            found.setdefault(pod.group, set()).add(what)
            assert one.port in told.get(what, of_ray), (what, one)
            everywhere = {"0.0.0.0", "::"} if what == "router" or what in RAYS else set()
            assert one.host in {pod.address} | everywhere, (what, one)
            if what in RAYS:
                assert_asks_for_its_token(what, f"{pod.address}:{one.port}")
    node = {"raylet/raylet", "ray::RuntimeEnvAgent", "ray::SupervisorActor"}
    assert found == {
        "head": {"gcs_server", "raylet/raylet", "ray::RuntimeEnvAgent", "ray::ControllerActor", "cluster.head"},
        "router": node | {"router"},
        "prefill": node | {"prefill_worker", "engine_process"},
        "decode": node | {"decode_worker", "engine_process"},
    }


def _all_of(bounds: list[int]) -> range:
    return range(bounds[0], bounds[1] + 1)


def _roll_decode(cluster: Cluster) -> None:
    """The prefill pod makes room for a second decode pod: decode workers compute prompts themselves meanwhile."""
    cluster.scale("prefill=0")
    cluster.until(_ready(prefill=0))
    assert cluster.stop("prefill-a") == "drained: nothing runs here\n"
    cluster.start("decode", "decode-b")
    cluster.scale("decode=4")  # three places a pod, and the first program is where it was: both have some of the four
    wide = cluster.until(_ready(decode=4))["programs"]
    (first,) = [each["node"] for each in wide if each["name"] == "decode-0"]
    here = sorted(each["name"] for each in wide if each["role"] == "decode" and each["node"] == first)
    assert cluster.stop("decode-a") == f"drained: {', '.join(here)}\n"
    cluster.scale("decode=3")  # three of the four fit here
    moved = cluster.until(_ready(decode=3))
    assert len({each["node"] for each in moved["programs"] if each["role"] == "decode"}) == 1


def _roll_router(cluster: Cluster, traffic: Traffic) -> None:
    """Requests that run at the pod that goes are answered by it; new ones go to the other, as a service sends them."""
    there = cluster.start("router", "router-b")
    cluster.scale("router=2")
    cluster.until(_ready(router=2))
    traffic.move(there.address)
    assert cluster.stop("router-a") == "drained: router-0\n"
    cluster.scale("router=1")
    cluster.until(_ready(router=1))
    traffic.goes_on()


def _roll_prefill(cluster: Cluster) -> None:
    """A pod that comes is used by a program that waits for a place."""
    cluster.scale("prefill=1")
    cluster.start("prefill", "prefill-b")
    cluster.until(_ready(prefill=1, decode=3))


def _roll_head(cluster: Cluster, traffic: Traffic) -> None:
    """Programs go on without one, and the new one takes them over as they are: no life ends. Then it is obeyed."""
    before = cluster.status()
    cluster.stop("head-a")
    traffic.goes_on()
    cluster.start_head("head-b")
    after = cluster.until(_ready(prefill=1, decode=3, router=1))
    for role in ("prefill", "decode", "router"):
        assert _lives(after, role) == _lives(before, role)
    cluster.scale("decode=2")
    cluster.until(_ready(prefill=1, decode=2, router=1))
    traffic.goes_on()
