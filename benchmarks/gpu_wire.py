"""KV between two processes through NIXL, and one prefill and one decode worker on one device.

The holder is this module, run as a program: it says (one JSON line) what a reader must know, then keeps polling until
its standard input ends.
"""

import asyncio
import json
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import uvloop
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.figures import MS
from benchmarks.gpu_models import GB, Figure, RandomWeights
from benchmarks.http_client import HttpClient
from benchmarks.load import closed_loop
from benchmarks.setups import READY_S, SPLIT, Setup, make_cluster, wait_serving, warm_up
from benchmarks.workloads import Ask, Writer
from cluster.core.clock import SystemClock
from cluster.core.errors import TransferError
from engine.gpu.memory import DeviceMemory
from engine.layout import KVLayout
from engine.messages import PeerAdded, PeerFailed, ReadDone, ReadFailed
from engine.model.config import ModelConfig
from engine.model.weights import expected_shapes
from engine.pool import HostMemory, Memory
from engine.wire import Transport
from kv_transfer.transports import make_transport

LAYOUT = KVLayout(layers=32, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")  # Llama 8B: 2 MB a block
BLOCKS = 64
PATIENCE_S = 20.0
POLL_S = 0.0002


def memory_on(device: torch.device, slots: int, slot_blocks: int) -> Memory:
    """Of a GPU, or of the host."""
    slot_bytes = slot_blocks * LAYOUT.block_bytes
    if device.type == "cuda":
        return DeviceMemory(LAYOUT, BLOCKS, slots, slot_bytes, device)
    return HostMemory(LAYOUT, BLOCKS, slots, slot_bytes)


def fill(memory: Memory) -> None:
    """Other bytes in every block."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**62), 2**62, (BLOCKS, LAYOUT.block_bytes // 8), generator=generator)
    if isinstance(memory, DeviceMemory):
        memory.blocks.view(torch.int64).copy_(words)
        torch.cuda.synchronize()
    elif isinstance(memory, HostMemory):
        memory.pool.view("int64")[:] = words.numpy()


def hold(device: torch.device) -> None:
    """The holder's whole life."""
    memory = memory_on(device, 1, 1)
    fill(memory)
    transport = make_transport("nixl", {"devices": "lo"}, "holder")
    metadata = transport.register(memory.pool, memory.staging)
    transport.serve(True)
    digests = [digest.hex() for digest in memory.digests(range(BLOCKS))]
    sys.stdout.write(json.dumps([metadata.hex(), memory.pool_address, digests]) + "\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], POLL_S)[0]:
        transport.poll()
    transport.close()


def transfer(device: torch.device, *, dry: bool) -> Iterator[Figure]:
    """Reads of 1, 2 and 16 blocks from another process, each proved. Raises TransferError."""
    command = [sys.executable, "-m", "benchmarks.gpu_wire", str(device)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        line = holder.stdout.readline()
        if not line:
            raise TransferError("the holder ended before it held anything")
        metadata, address, digests = json.loads(line)
        memory = memory_on(device, 2, 16)
        transport = make_transport("nixl", {"devices": "lo"}, "reader")
        transport.register(memory.pool, memory.staging)
        transport.add_peer("holder", bytes.fromhex(metadata), address)
        added = _wait(transport)
        if not isinstance(added, PeerAdded):
            raise TransferError(f"the link is not there: {added}")
        yield Figure("warm link, 1 MB reads", added.gb_per_s, "GB/s")
        for number, count in enumerate((1, 2, 16)):
            yield _reads(transport, memory, (number, count), (address, digests), 3 if dry else 20)
        transport.close()
    finally:
        holder.stdin.close()
        holder.wait(PATIENCE_S)


def _reads(
    transport: Transport, memory: Memory, case: tuple[int, int], holder: tuple[int, list[str]], rounds: int
) -> Figure:
    number, count = case
    address, digests = holder
    best = 0.0
    for repetition in range(rounds):
        blocks = random.Random(f"{number}/{repetition}").sample(range(BLOCKS), count)
        ranges = [(address + block * LAYOUT.block_bytes, LAYOUT.block_bytes) for block in blocks]
        transport.read(repetition, "holder", ranges, repetition % 2)
        done = _wait(transport)
        if not isinstance(done, ReadDone):
            raise TransferError(f"a read failed: {done}")
        best = max(best, count * LAYOUT.block_bytes / max(done.seconds, 1e-9))
        if [proof.hex() for proof in memory.take(repetition % 2, list(range(count)))] != [digests[b] for b in blocks]:
            raise TransferError(f"what was read of blocks {blocks} is not what is there")
    return Figure(f"{count} blocks of {LAYOUT.block_bytes >> 10} kB, proved, best of {rounds}", best / GB, "GB/s")


def _wait(transport: Transport) -> ReadDone | ReadFailed | PeerAdded | PeerFailed:
    give_up = time.monotonic() + PATIENCE_S
    while not (events := transport.poll()):
        if time.monotonic() > give_up:
            raise TransferError(f"nothing ended within {PATIENCE_S:g} s")
        time.sleep(0)
    return events[0]


def make_folder(folder: Path, config: ModelConfig) -> Path:
    """A checkpoint of random weights with a tokenizer of one token a byte."""
    weights, attention = RandomWeights(config, "bfloat16", torch.device("cpu")), config.attention
    save_file({name: weights.take(name) for name in expected_shapes(config)}, folder / "model.safetensors")
    fields: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers, "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads, "rms_norm_eps": config.rms_eps, "eos_token_id": 0,
        "max_position_embeddings": 8192, "tie_word_embeddings": config.tied_embeddings, "rope_theta": config.rope.theta,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    pieces = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def serve(config: ModelConfig, settings: list[str], asks: tuple[int, int, int], streams: int) -> list[Figure]:
    """1P+1D over a random model. `asks`: how many, tokens in, tokens out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        model = make_folder(folder / "model", config)
        figures: list[Figure] = uvloop.run(_serve(model, folder / "run", settings, asks, streams))
        return figures


async def _serve(
    model: Path, folder: Path, settings: list[str], asks: tuple[int, int, int], streams: int
) -> list[Figure]:
    clock, writer, (count, tokens, out) = SystemClock(), Writer(per_byte=True), asks
    texts = random.Random("gpu")
    cluster = make_cluster(SPLIT, str(model), ["router.local_max_tokens=0", *settings], folder)
    with cluster:
        await asyncio.to_thread(cluster.wait_ready, READY_S)
        setup = Setup(SPLIT, cluster)
        async with HttpClient(cluster.url, cluster.config.model_name, clock) as client:
            await wait_serving(setup, client, clock)
            if streams > 1:
                await warm_up(setup, client, writer, tokens)
            load = await closed_loop(client, [Ask("chat", writer.prompt(texts, tokens), out)] * count, streams)
    bad = [line.error for line in load.timelines if not line.ok or line.output_tokens != out]
    if bad:
        raise TransferError(f"{len(bad)} of {count} streams did not end well: {bad[0]}")
    handed = sum(line.handoff is not None for line in load.timelines)
    span = max(line.ended for line in load.timelines) - min(line.sent for line in load.timelines)
    label = f"1P+1D, {streams} streams, {tokens} in / {out} out"
    return [
        Figure(f"{label}: TTFT p50", statistics.median(line.ttft for line in load.timelines) * MS, "ms"),
        Figure(f"{label}: TPOT p50", statistics.median(line.tpot or 0.0 for line in load.timelines) * MS, "ms"),
        Figure(f"{label}: output", count * out / span, "tok/s"),
        Figure(f"{label}: handed off", float(handed), f"of {count}"),
    ]


if __name__ == "__main__":
    hold(torch.device(sys.argv[1]))
