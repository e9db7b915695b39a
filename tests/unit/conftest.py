"""Unit tests run in one process: what would start another or reach the network raises here, by accident or not."""

import socket
import subprocess
import sys
from typing import NoReturn

import pytest


class NotInAUnitTest(AssertionError):
    """A unit test tried to leave its process: give the code a fake, or move it to tests/contract or integration."""


@pytest.fixture(autouse=True)
def _stay_in_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    real_connect = socket.socket.connect

    def connect(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX:
            raise NotInAUnitTest(f"connect to {address!r}")
        real_connect(self, address)  # type: ignore[arg-type]

    def popen(self: "subprocess.Popen[bytes]", args: object, *more: object, **options: object) -> NoReturn:
        self.returncode = -1  # Popen's own __repr__ and __del__ need it
        raise NotInAUnitTest(f"start of {args!r}")

    def refuse(*args: object, **options: object) -> NoReturn:
        raise NotInAUnitTest(f"called with {args!r}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    if request.node.get_closest_marker("processes") is None:
        monkeypatch.setattr(subprocess.Popen, "__init__", popen)
    for module, name in (
        ("ray", "init"),
        ("grpc.aio", "server"),
        ("grpc.aio", "insecure_channel"),
        ("grpc.aio", "secure_channel"),
    ):
        if module in sys.modules:
            monkeypatch.setattr(sys.modules[module], name, refuse)
