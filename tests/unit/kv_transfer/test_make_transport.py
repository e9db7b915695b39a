"""Choosing a transport: what cannot be had is refused at start, by name, before anything is loaded."""

from pathlib import Path

import pytest

from cluster.core.errors import TransferError
from kv_transfer.transports import make_transport


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("pigeon", {}, "pigeon"),
        ("nixl", {"require": "pigeon"}, "pigeon"),
        ("nixl", {"require": "cuda_ipc"}, "no NVIDIA GPU"),
    ],
)
def test_what_cannot_be_had_is_named_at_start(kind: str, options: dict[str, str], reason: str) -> None:
    with pytest.raises(TransferError, match=reason):
        make_transport(kind, options, "agent-1")


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this machine has RDMA")
def test_rdma_is_not_replaced_by_something_slower() -> None:
    with pytest.raises(TransferError, match=r"network devices: .*lo"):
        make_transport("nixl", {"require": "rdma"}, "agent-1")
