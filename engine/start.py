"""Starting an engine for a worker: the Init that the settings ask for, and the wait for Ready."""

import ipaddress
from typing import Literal

from cluster.core.config import ClusterConfig
from cluster.core.errors import HeadraceError
from cluster.core.faults import Faults
from engine.client import EngineProcess
from engine.layout import KVLayout
from engine.messages import Fatal, FolderModel, Init, ModelSpec, Ready, TracerModel

TRACER = "tracer"


class EngineFailed(HeadraceError):
    """The engine could not start, or ended by itself."""


def model_spec(config: ClusterConfig, folder: str, role: Literal["prefill", "decode"]) -> ModelSpec:
    """Which model a worker's engine loads: the tracer, or a Hugging Face folder."""
    if config.model == TRACER:
        return TracerModel(**config.engine.tracer.model_dump())
    engine = config.engine
    converts = role == "decode" and config.handoff.convert == "kv_dtype"
    return FolderModel(
        path=folder,
        dtype=engine.dtype,
        max_context=engine.max_context,
        kernels=engine.kernels,
        quantization=engine.quantization,
        device=engine.device,
        kv_dtype=config.kv_dtype(role),
        converts_from=config.kv_dtype("prefill") if converts else "",
    )


def is_loopback(host: str) -> bool:
    """Whether workers are reached within this machine only: UCX then need not listen on any other interface (I10)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_init(
    config: ClusterConfig,
    role: Literal["prefill", "decode"],
    agent: str,
    model: ModelSpec,
    faults: Faults | None = None,
) -> Init:
    """The first message to a worker's engine. Staging holds twice the slots: set-aside ones are replaced."""
    transport = config.transport
    devices = transport.devices or (("lo",) if is_loopback(config.host) else ())
    options = {"require": transport.require, "devices": ",".join(devices)}
    if transport.port_range is not None:
        options["port_range"] = f"{transport.port_range[0]}-{transport.port_range[1]}"
    return Init(
        agent=agent,
        model=model,
        block_size=config.engine.block_size,
        num_blocks=config.num_blocks(role),
        slots=2 * config.handoff.slots if role == "decode" else 1,
        slot_bytes=config.handoff.slot_bytes,
        threads=config.threads(role),
        poison=config.engine.poison,
        transport=transport.kind,
        transport_options=options,
        faults=faults.specs if faults is not None else (),
    )


async def start_engine(module: str, init: Init) -> tuple[EngineProcess, Ready]:
    """Spawn the engine and wait until it is loaded. Raises EngineFailed with its reason."""
    engine = await EngineProcess.spawn(module)
    engine.channel.send(init)
    async for report in engine.channel:
        if isinstance(report, Ready):
            return engine, report
        if isinstance(report, Fatal):
            await engine.wait()
            raise EngineFailed(f"the engine cannot start: {report.reason}")
    raise EngineFailed(f"the engine ended while it was starting, exit code {await engine.wait()}")


def layout_of(ready: Ready, block_size: int) -> KVLayout:
    """The KV layout of a started engine."""
    return KVLayout(ready.layers, ready.kv_heads, ready.head_dim, block_size, ready.kv_dtype)
