"""The chart as Helm renders it: the real engine (helm-python-sdk carries Helm v4 as a library), no cluster."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/headrace"
VARIANTS = ROOT / "deploy/helm/values"
GOLDEN = Path(__file__).with_name("golden")
NAMES = sorted(path.stem for path in VARIANTS.glob("*.yaml"))
GROUPS = ("head", "prefill", "decode", "router")

Object = dict[str, Any]


def values_of(variant: str) -> Object:
    """The values file deploy/helm/values/<variant>.yaml."""
    loaded = yaml.safe_load((VARIANTS / f"{variant}.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def render(values: Object, *, name: str = "headrace") -> dict[str, str]:
    """Template file -> what it renders to, as release `name` in the namespace `llm`. Raises HelmError."""
    with Chart.load(CHART) as chart:
        rendered: dict[str, str] = chart.render(values=values, name=name, namespace="llm")
    return {path.removeprefix("headrace/templates/"): text for path, text in rendered.items() if text.strip()}


def objects_in(rendered: dict[str, str]) -> list[Object]:
    """Every Kubernetes object, in the order of files and documents."""
    texts = (text for path, text in sorted(rendered.items()) if path.endswith(".yaml"))
    return [each for text in texts for each in yaml.safe_load_all(text) if each is not None]


@dataclass(frozen=True, slots=True)
class Rendered:
    """One values file, rendered."""

    files: dict[str, str]
    objects: list[Object]

    def of(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    @property
    def cluster(self) -> Object:
        (found,) = self.of("RayCluster")
        return found

    @property
    def config(self) -> str:
        """cluster.yaml, as every pod mounts it."""
        (found,) = self.of("ConfigMap")
        text = found["data"]["cluster.yaml"]
        assert isinstance(text, str)
        return text

    def group(self, group: str) -> Object:
        """A worker group of the RayCluster, or the head's."""
        spec = self.cluster["spec"]
        if group == "head":
            return dict(spec["headGroupSpec"])
        (found,) = [each for each in spec["workerGroupSpecs"] if each["groupName"] == group]
        return dict(found)

    def pod(self, group: str) -> Object:
        """The pod spec of a group."""
        return dict(self.group(group)["template"]["spec"])

    def container(self, group: str) -> Object:
        (found,) = self.pod(group)["containers"]
        return dict(found)

    def pods(self) -> dict[str, Object]:
        """Every pod that any object makes, of whatever kind: where it is -> its spec."""
        found = ((f"{each['kind']} {each['metadata']['name']}", each) for each in self.objects)
        return {path: spec for name, each in found for path, spec in _pods_in(name, each)}

    def containers(self) -> dict[str, Object]:
        """Every container and init container of these pods."""
        kinds = ("initContainers", "containers")
        pods = self.pods().items()
        return {f"{path} {each['name']}": each for path, pod in pods for kind in kinds for each in pod.get(kind, [])}


def _pods_in(path: str, value: object) -> Iterator[tuple[str, Object]]:
    if isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield path, value
        for key, below in value.items():
            yield from _pods_in(f"{path}.{key}", below)
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _pods_in(f"{path}.{index}", below)


@functools.cache
def variant(name: str) -> Rendered:
    files = render(values_of(name))
    return Rendered(files, objects_in(files))


_RANDOM = re.compile(r"^(  (?:cluster-secret|auth_token|password|url)): \S+$", re.MULTILINE)


def golden_text(rendered: Rendered) -> str:
    """All of it as one text; what is drawn at random anew each time is left out."""
    parts = [f"# {path}\n{text.strip()}\n" for path, text in sorted(rendered.files.items())]
    return _RANDOM.sub(r"\1: <random>", "\n".join(parts))


if __name__ == "__main__":  # python -m tests.deploy.chart: write the golden files anew, for a look at the difference
    for each in NAMES:
        (GOLDEN / f"{each}.yaml").write_text(golden_text(variant(each)))
