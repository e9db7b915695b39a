"""The chart's own commands as at most four Ray nodes, each in namespaces of its own: scaled, drained and rolled under
traffic, and nothing is lost.

No Kubernetes is here, so the test is kubelet, DNS and Service (tests/deploy/pods.py); KubeRay's operator and autoscaler
are played by starting a pod where a program waits for a place.
"""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.core.clock import SystemClock
from tests.deploy.chart import Rendered, objects_in, render
from tests.deploy.pods import Network, Pod, may_make_namespaces

PATIENCE_S = 300.0
CLIENTS = 3
PROMPTS = [f"Water of the {word} river turns the wheel of the mill. " * 6 for word in ("first", "second", "third")]
VALUES: dict[str, Any] = {
    "model": {"name": "tracer", "source": "none"},
    "drainSeconds": 20,
    "pools": {"decode": {"programsPerPod": 3}},
    "config": {"engine": {"tracer": {"step_s": 0.01}}},
}

pytestmark = pytest.mark.verify


class Cluster:
    """Pods of one release. At most four at a time."""

    def __init__(self, folder: Path, network: Network) -> None:
        files = render(VALUES)
        self._rendered = Rendered(files, objects_in(files))
        self._folder, self._network = folder, network
        self.head = Pod(self._rendered, "head", "head", network, folder)
        self.pods: dict[str, Pod] = {}

    def start(self, group: str, name: str) -> Pod:
        pod = self.head if group == "head" else Pod(self._rendered, group, name, self._network, self._folder)
        self.pods[name] = pod
        assert len(self.pods) <= 4
        pod.start({"headrace-head-svc.llm.svc": self.head.address})
        return pod

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
        self._url = f"http://{address}:8000/v1/completions"
        self._stop = threading.Event()
        self.answers = 0
        self.wrong: list[str] = []
        self._expected = {prompt: self._ask(prompt) for prompt in PROMPTS}

    def _ask(self, prompt: str) -> str:
        body = {"model": "tracer", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(self._url, json=body, timeout=120.0)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["text"])

    def _client(self, first: int) -> None:
        for prompt in itertools.islice(itertools.cycle(PROMPTS), first, None):
            if self._stop.is_set():
                return
            try:
                if (text := self._ask(prompt)) != self._expected[prompt]:
                    self.wrong.append(f"another text: {text!r}")
                self.answers += 1
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
        one = Cluster(tmp_path, network)
        try:
            one.start("head", "head")
            yield one
        finally:
            for pod in one.pods.values():
                pod.kill()


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
        _roll_prefill(cluster)
    assert traffic.wrong == []
    assert traffic.answers > 20


def _roll_decode(cluster: Cluster) -> None:
    """The prefill pod makes room for a second decode pod: decode workers compute prompts themselves meanwhile."""
    cluster.scale("prefill=0")
    cluster.until(_ready(prefill=0))
    assert cluster.stop("prefill-a") == "drained: nothing runs here\n"
    cluster.start("decode", "decode-b")
    cluster.scale("decode=4")  # three places here, so one of the four is on the new pod
    cluster.until(_ready(decode=4))
    said = cluster.stop("decode-a")
    assert said == "drained: decode-0, decode-1, decode-2\n"
    cluster.scale("decode=3")  # three of the four fit here
    moved = cluster.until(_ready(decode=3))
    assert len({each["node"] for each in moved["programs"] if each["role"] == "decode"}) == 1


def _roll_prefill(cluster: Cluster) -> None:
    """A pod that comes is used by a program that waits for a place."""
    cluster.scale("prefill=1")
    cluster.start("prefill", "prefill-b")
    cluster.until(_ready(prefill=1, decode=3))
