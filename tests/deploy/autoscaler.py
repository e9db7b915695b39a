"""KubeRay's autoscaler without Kubernetes: Ray's own program, as KubeRay puts it beside the head
(ray-operator/controllers/ray/common/pod.go), and an API server that knows one RayCluster, the head's pod, and what it
is told of replicas.
"""

import json
import shlex
import ssl
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.certificates import Authority, Files, files
from tests.deploy.chart import Rendered
from tests.deploy.pods import GATEWAY, READ_ONLY, Pod, ours_within

TOKEN = "a-service-account-s-token"


class KubernetesApi:
    """Answers at the bridge. `replicas`: what the autoscaler last wrote, by worker group."""

    def __init__(self, rendered: Rendered, head: str, folder: Path) -> None:
        self.certificates: Files = files(folder, Authority(), GATEWAY)
        self.cluster = json.loads(json.dumps(rendered.cluster))
        self.cluster["metadata"] |= {"resourceVersion": "1", "uid": "one"}
        for group in self._groups:
            group.setdefault("replicas", 0)  # the definition's own default
        labels = {"ray.io/cluster": "headrace", "ray.io/node-type": "head", "ray.io/group": "headgroup"}
        self._head = head
        metadata = {"name": head, "labels": labels, "resourceVersion": "1"}
        status = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
        self.pod = {"metadata": metadata, "status": status}
        self.refused: list[str] = []
        self._asked = threading.Condition()
        self._server = ThreadingHTTPServer((GATEWAY, 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificates.cert, self.certificates.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return list(self.cluster["spec"]["workerGroupSpecs"])

    @property
    def replicas(self) -> dict[str, int]:
        return {group["groupName"]: group["replicas"] for group in self._groups}

    def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Looked at whenever something is asked here. False when time ran out."""
        with self._asked:
            return self._asked.wait_for(condition, timeout_s)

    def answer(self, method: str, path: str, body: bytes) -> object:
        """What the chart's Role lets the head's account do, and nothing else; None: refused."""
        match method, path.partition("?")[0].split("/"):
            case "GET", [*_, "llm", "pods"]:
                return {"metadata": {"resourceVersion": "1"}, "items": [self.pod]}
            case "GET", [*_, "llm", "pods", name] if name == self._head:
                return self.pod
            case "GET", [*_, "llm", "rayclusters", "headrace"]:
                return self.cluster
            case "PATCH", [*_, "llm", "rayclusters", "headrace"]:
                for change in json.loads(body):
                    _, *where, last = change["path"].split("/")
                    assert (where[:2], last) == (["spec", "workerGroupSpecs"], "replicas"), change
                    self._groups[int(where[2])][last] = change["value"]
                return self.cluster
        self.refused.append(f"{method} {path}")
        return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                known = self.headers.get("authorization") == f"Bearer {TOKEN}"
                with api._asked:
                    found = api.answer(self.command, self.path, body) if known else None
                    api._asked.notify_all()
                text = json.dumps(found).encode()
                self.send_response(403 if found is None else 200)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_PATCH = do_PUT = do_POST = do_DELETE = _serve

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads it."""

        return Handler

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()


class Autoscaler:
    """The container beside the head's: in its network, with a read-only root, and with /tmp/ray in common."""

    def __init__(self, rendered: Rendered, head: Pod, api: KubernetesApi, folder: Path) -> None:
        self._head, self._api, self._folder = head, api, folder
        self._options = rendered.cluster["spec"]["autoscalerOptions"]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self._folder / "autoscaler.log").read_text(errors="replace")

    def _mounts(self) -> list[str]:
        """Where Kubernetes and KubeRay mount something; the rest may not be written to."""
        account = "/run/secrets/kubernetes.io/serviceaccount"
        (self._folder / "token").write_text(TOKEN)
        token, ca, ray = (
            shlex.quote(str(path)) for path in (self._folder / "token", self._api.certificates.ca, self._ray)
        )
        lines = ["mount -t tmpfs tmpfs /run", f"mkdir -p {account}"]
        lines += [f"cp {token} {account}/token", f"cp {ca} {account}/ca.crt"]
        ours = [(shlex.quote(str(path)), f"/run/ours/{number}") for number, path in enumerate(ours_within("/tmp"))]
        lines += [f"mkdir -p {aside} && mount --bind {path} {aside}" for path, aside in ours]
        lines += [
            f"mount --bind {ray} /mnt",
            "mount -t tmpfs tmpfs /tmp",
            "mkdir /tmp/ray",
            "mount --move /mnt /tmp/ray",
        ]
        lines += [f"mkdir -p {path} && mount --move {aside} {path}" for path, aside in ours]
        lines += ["mount -o remount,ro /run", "mount -o remount,ro /tmp"]
        assert self._options["securityContext"]["readOnlyRootFilesystem"] is True
        return [*lines, *READ_ONLY]

    @property
    def _ray(self) -> Path:
        return self._head.folder / "tmp/ray"

    def __enter__(self) -> Self:
        command = "ray kuberay-autoscaler --cluster-name headrace --cluster-namespace llm"
        script = "\n".join([*self._mounts(), f"exec {command}"])
        variables = {
            "KUBERNETES_SERVICE_HOST": GATEWAY,
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self._api.port),
            "RAY_HEAD_POD_NAME": self._head.name,
            "KUBERAY_CRD_VER": "v1",
        }
        with (self._folder / "autoscaler.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._head.namespace, "unshare", "--mount", "bash", "-ec", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._head.environment() | variables,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
