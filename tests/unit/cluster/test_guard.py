"""The guard of tests/unit itself: leaving the process raises."""

import socket
import subprocess
import sys

import grpc
import grpc.aio
import pytest

from cluster.rpc import channel


def test_no_process() -> None:
    with pytest.raises(AssertionError, match=sys.executable):
        subprocess.run([sys.executable, "-c", ""], check=True)


def test_no_connection() -> None:
    with socket.socket() as one, pytest.raises(AssertionError, match="connect"):
        one.connect(("127.0.0.1", 1))


def test_no_grpc() -> None:
    with pytest.raises(AssertionError):
        channel("127.0.0.1:1")
    with pytest.raises(AssertionError):
        grpc.aio.secure_channel("127.0.0.1:1", grpc.local_channel_credentials())
    with pytest.raises(AssertionError):
        grpc.aio.server()
