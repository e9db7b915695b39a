"""Pods without Kubernetes: a container's rendered command in network, mount, process and IPC namespaces of its own.

A pod gets an address on a bridge as `eth0`, the chart's sysctl, its ConfigMap and Secret as files, a root that is
read-only but for the volumes /dev/shm, /tmp and home, names of services that can move to other addresses, and the
environment that KubeRay v1.7.0 adds (ray-operator/controllers/ray/common/pod.go).
Stopping one is what a kubelet does: preStop, SIGTERM, and SIGKILL when the grace period is over.
"""

import base64
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import psutil

from tests.deploy.chart import ROOT, Rendered

Secrets = Mapping[str, Mapping[str, str]]
NO_SECRETS: Secrets = MappingProxyType({})
SUBNET = "10.77.3"
GATEWAY = f"{SUBNET}.1"
"""This machine, as pods see it."""
READ_ONLY = ("mount -o remount,bind,ro /", "if touch /written 2>/dev/null; then exit 1; fi")
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_NAMESPACES = ["--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]


def ours_within(folder: str) -> list[Path]:
    """The checkout and its Python, as far as they lie in `folder`: what hides it has to leave them in sight."""
    ours = {Path(path).resolve() for path in (ROOT, sys.prefix, sys.base_prefix)}
    return sorted(path for path in ours if path.is_relative_to(folder))


def may_make_namespaces() -> bool:
    """Whether this machine lets us: root, `ip netns`, overlay mounts."""
    probe = "ip netns add hr-probe && ip netns exec hr-probe unshare --mount --pid --fork --mount-proc true"
    done = subprocess.run(["sh", "-c", f"{probe}; code=$?; ip netns del hr-probe; exit $code"], capture_output=True)
    return done.returncode == 0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Network:
    """A bridge; pods are addresses on it, and this process reaches them."""

    def __init__(self) -> None:
        self.bridge = f"hr{os.getpid()}"
        self._used = 1

    def address(self) -> str:
        self._used += 1
        return f"{SUBNET}.{self._used}"

    def __enter__(self) -> Self:
        _ip("link", "add", self.bridge, "type", "bridge")
        # Else it takes the lowest among its ports', and a pod that goes may change what the others know it by.
        _ip("link", "set", self.bridge, "address", "02:68:72:00:00:01")
        _ip("addr", "add", f"{GATEWAY}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _ip("link", "del", self.bridge)


class Pod:
    """One pod of a worker group or the head. `start` and `stop` are the kubelet's.

    `secrets`: those that the chart does not make, by name and key.
    """

    def __init__(
        self, rendered: Rendered, group: str, name: str, network: Network, folder: Path, secrets: Secrets = NO_SECRETS
    ) -> None:
        self.name, self.group = name, group
        self.address = network.address()
        self._secrets = secrets
        self._rendered, self._network, self.folder = rendered, network, folder / name
        self._container = rendered.container(group)
        self.namespace = f"{network.bridge}-{name}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What `kubectl logs` would show."""
        return (self.folder / "log").read_text(errors="replace")

    def start(self, hosts: Mapping[str, str]) -> None:
        """`hosts`: names to addresses, as the cluster's DNS would have them."""
        self._write_files()
        self.resolve(hosts)
        _ip("netns", "add", self.namespace)
        link = f"{self._network.bridge}v{self.address.rpartition('.')[2]}"
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _ip("link", "set", link, "master", self._network.bridge, "up")
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.namespace, "link", "set", "eth0", "up")
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        script = "\n".join([*self._mounts(), *self._sysctls(), "exec " + shlex.join(self._command())])
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, "unshare", *_NAMESPACES, "sh", "-ec", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
            )
        while not psutil.Process(self._process.pid).children():  # until it is in its namespaces
            assert self._process.poll() is None, self.log

    def resolve(self, hosts: Mapping[str, str]) -> None:
        """From now on these names have these addresses here. The file is one inode for good: it is bound in the pod."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in hosts.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def run(self, *command: str, timeout_s: float = 60.0) -> str:
        """`kubectl exec`: standard output. Raises CalledProcessError with all that was said."""
        enter = ["nsenter", "--target", str(self._first.pid), "--mount", "--net", "--ipc", "--pid"]
        done = subprocess.run(
            [*enter, *command], capture_output=True, text=True, env=self.environment(), timeout=timeout_s, check=False
        )
        if done.returncode:
            raise AssertionError(f"{self.name}: {shlex.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def stop(self) -> str:
        """As Kubernetes deletes a pod; what the preStop command said. Raises when the grace period is over."""
        assert self._process is not None
        grace_s = float(self._rendered.pod(self.group)["terminationGracePeriodSeconds"])
        said = ""
        if (hook := self._container.get("lifecycle")) is not None:
            said = self.run(*hook["preStop"]["exec"]["command"], timeout_s=grace_s)
        self._first.send_signal(signal.SIGTERM)
        self._process.wait(grace_s)
        self._forget()
        return said

    def kill(self) -> None:
        """At once, with everything in it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    @property
    def _first(self) -> psutil.Process:
        """Process 1 of the pod, as this machine sees it."""
        assert self._process is not None
        (first,) = psutil.Process(self._process.pid).children()
        return first

    def _forget(self) -> None:
        self._process = None
        _ip("netns", "del", self.namespace)

    def _write_files(self) -> None:
        etc = self.folder / "etc"
        for folder in (etc / "headrace/secret", self.folder / "home/headrace", self.folder / "tmp/ray"):
            folder.mkdir(parents=True, exist_ok=True)
        (etc / "headrace/cluster.yaml").write_text(self._rendered.config)
        secret = etc / "headrace/secret/cluster-secret"
        secret.write_bytes(self._secret("cluster-secret"))
        secret.chmod(0o440)
        (etc / "hosts").touch()

    def _secret(self, key: str) -> bytes:
        (found,) = [each for each in self._rendered.of("Secret") if each["metadata"]["name"].endswith("-auth")]
        return base64.b64decode(found["data"][key])

    def _mounts(self) -> list[str]:
        etc, home, tmp = (shlex.quote(str(self.folder / name)) for name in ("etc", "home", "tmp"))
        assert self._container["securityContext"]["readOnlyRootFilesystem"] is True
        written = {each["mountPath"] for each in self._container["volumeMounts"] if not each.get("readOnly")}
        assert written == {"/home/headrace", "/tmp", "/dev/shm"}
        return [
            f"mount -t overlay overlay -o lowerdir={etc}:/etc /etc",
            f"mount --bind {shlex.quote(str(self.folder / 'hosts'))} /etc/hosts",
            *self._kept_in_sight("home"),
            *self._kept_in_sight("tmp"),
            f"mount --rbind {home} /home",
            f"mount --rbind {tmp} /tmp",
            "mount -t tmpfs -o size=1G tmpfs /dev/shm",
            *READ_ONLY,
        ]

    def _kept_in_sight(self, name: str) -> list[str]:
        """The checkout and its Python, should they lie in the very folder that the pod gets one of its own for."""
        lines = []
        for path in ours_within(f"/{name}"):
            at = self.folder / name / path.relative_to(f"/{name}")
            at.mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {shlex.quote(str(path))} {shlex.quote(str(at))}")
        return lines

    def _sysctls(self) -> list[str]:
        settings = self._rendered.pod(self.group)["securityContext"]["sysctls"]
        return [f"echo {each['value']} > /proc/sys/{each['name'].replace('.', '/')}" for each in settings]

    def _command(self) -> list[str]:
        variables = self.environment()
        return [_VARIABLE.sub(lambda found: variables[found[1]], word) for word in self._container["command"]]

    def environment(self) -> dict[str, str]:
        port = self._rendered.group("head")["rayStartParams"]["port"]
        mine = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "POD_IP": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._secret("auth_token").decode(),
            "RAY_PORT": port,
            "RAY_ADDRESS": f"127.0.0.1:{port}" if self.group == "head" else f"{self._head_service}:{port}",
            "RAY_CLOUD_INSTANCE_ID": self.name,
            "RAY_NODE_TYPE_NAME": "headgroup" if self.group == "head" else self.group,
            "RAY_ENABLE_AUTOSCALER_V2": "true",
        }
        if self.group == "head":
            mine |= self._of_fault_tolerance()
        kept = {name: value for name, value in os.environ.items() if name.startswith(("OPENBLAS", "HEADRACE_TEST"))}
        written: list[dict[str, Any]] = self._container["env"]
        told = {each["name"]: value for each in written if (value := self._value(each)) is not None}
        return kept | mine | told

    def _value(self, variable: dict[str, Any]) -> str | None:
        """What a variable of the template is; None: POD_IP, which is in `environment`."""
        if (written := variable.get("value")) is not None:
            return str(written)
        reference = variable["valueFrom"].get("secretKeyRef")
        return None if reference is None else self._secrets[reference["name"]][reference["key"]]

    def _of_fault_tolerance(self) -> dict[str, str]:
        """What KubeRay makes of `gcsFaultToleranceOptions` in a head's pod."""
        options = self._rendered.cluster["spec"].get("gcsFaultToleranceOptions")
        if options is None:
            return {}
        return {
            "RAY_REDIS_ADDRESS": options["redisAddress"],
            "RAY_external_storage_namespace": options["externalStorageNamespace"],
            "REDIS_PASSWORD": str(self._value(options["redisPassword"])),
        }

    @property
    def _head_service(self) -> str:
        name = self._rendered.cluster["metadata"]["name"]
        return f"{name}-head-svc.llm.svc"
