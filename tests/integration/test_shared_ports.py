"""Several router processes on one pair of ports: each is a whole router, and what one leaves the others take."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

from cluster.local import LocalCluster
from cluster.rpc import channel
from cluster.stubs import inference_pb2 as pb
from cluster.stubs.inference_pb2_grpc import InferenceStub
from tests.integration.asks import Ask
from tests.integration.stack import MODEL, config, connect, post_bytes, request_head, until

ROUTERS = ("router-0", "router-1")
CONNECTIONS = 40  # all with the same router once in 2^39 runs
ASK = post_bytes("/v1/completions", json.dumps(Ask(prompt=tuple(range(20, 40)), max_tokens=4).body()).encode())


@contextlib.contextmanager
def reserved_ports() -> Iterator[tuple[int, int]]:
    """Two ports that nobody else takes meanwhile: bound, and not listened on."""
    with socket.socket() as http, socket.socket() as grpc:
        for sock in (http, grpc):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(("127.0.0.1", 0))
        yield http.getsockname()[1], grpc.getsockname()[1]


async def get(url: str, path: str) -> bytes:
    async with connect(url) as connection:
        await connection.send(request_head("GET", path, {}))
        return (await connection.answer()).body


async def ask_often(url: str) -> list[int]:
    """A request on a connection of its own, CONNECTIONS times at once: the statuses of whole answers."""

    async def ask() -> int:
        async with connect(url) as connection:
            await connection.send(ASK)
            answer = await connection.answer()
        return answer.status if answer.whole and b"[DONE]" in answer.body else 0

    return await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))


async def served(cluster: LocalCluster, name: str) -> int:
    """Answers of this router, by its own count at the port that is its alone."""
    text = (await get(cluster.ready(name).http or "", "/metrics")).decode()
    lines = [line for line in text.splitlines() if line.startswith("headrace_requests_total") and '"ok"' in line]
    return sum(int(float(line.split()[-1])) for line in lines)


async def until_ready(cluster: LocalCluster) -> None:
    async def ready() -> bool:
        return all([b'"ready":true' in await get(cluster.ready(name).http or "", "/ready") for name in ROUTERS])

    assert await until(ready, 30.0)


async def test_the_kernel_deals_out_connections_and_one_router_is_enough(tmp_path: Path) -> None:
    with reserved_ports() as (http_port, grpc_port):
        shared = {"replicas": 2, "share_ports": True, "http_port": http_port, "grpc_port": grpc_port}
        with LocalCluster(config(prefill=0, decode=1, router=shared), tmp_path) as cluster:
            await asyncio.to_thread(cluster.wait_ready, 60.0)
            await until_ready(cluster)
            url, address = f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}"
            assert await ask_often(url) == [200] * CONNECTIONS
            counts = [await served(cluster, name) for name in ROUTERS]
            assert min(counts) > 0, counts
            assert sum(counts) == CONNECTIONS
            for door in (address, *(cluster.ready(name).address for name in ROUTERS)):
                async with channel(door) as connection:
                    models = await InferenceStub(connection).ListModels(pb.ListModelsRequest())
                assert [model.id for model in models.models] == [MODEL]
            await asyncio.to_thread(cluster.stop, ["router-1"])
            assert await ask_often(url) == [200] * CONNECTIONS
            assert await served(cluster, "router-0") == counts[0] + CONNECTIONS
