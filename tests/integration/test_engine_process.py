"""A real engine process behind a real socket, running the tracer: what the server may rely on."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import psutil
import pytest

from cluster.core.digest import digest_block
from engine.channel import ChannelClosed, Codec
from engine.client import EngineProcess
from engine.layout import KVLayout
from engine.messages import (
    AddPeer,
    Command,
    Copy,
    CopyDone,
    Digest,
    DigestDone,
    Fatal,
    Fill,
    FolderModel,
    Init,
    ModelSpec,
    PeerAdded,
    PeerFailed,
    Poison,
    Read,
    ReadDone,
    ReadFailed,
    Ready,
    Report,
    Row,
    SampleSpec,
    Shutdown,
    Step,
    StepDone,
    TracerModel,
)
from engine.model.base import ForwardRow
from engine.model.tracer import GREEDY, TracerModelRunner, reference_tokens

MODULE = "tests.integration.tracer_engine"
SPEC = TracerModel(vocab_size=128, max_context=256)
SIZE = 4
LAYOUT = KVLayout(SPEC.layers, SPEC.kv_heads, 2, SIZE, "int64")
BLOCKS = 64
TIMEOUT_S = 30.0
PROMPT = [(7 * i + 3) % 100 for i in range(11)]
SEEDED = SampleSpec(index=1, seed=42, temperature=0.9, top_p=0.9, top_k=40, logprobs=-1)

R = TypeVar("R", bound=Report)


def init(model: ModelSpec = SPEC, **changes: object) -> Init:
    base = Init("me-1", model, SIZE, BLOCKS, 2, 8 * LAYOUT.block_bytes, 1, True, "inprocess", {})
    return msgspec.structs.replace(base, **changes)


class Server:
    """The test's end: sends a command, waits for the report that must come next."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self._reports = engine.channel.__aiter__()
        self._plan = 0

    async def next(self, kind: type[R]) -> R:
        report = await asyncio.wait_for(anext(self._reports), TIMEOUT_S)
        assert isinstance(report, kind), report
        return report

    async def ended(self) -> None:
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(self._reports), TIMEOUT_S)

    async def ask(self, command: Command, kind: type[R]) -> R:
        self.engine.channel.send(command)
        return await self.next(kind)

    async def step(self, *rows: Row, drop: tuple[int, ...] = ()) -> StepDone:
        self._plan += 1
        done = await self.ask(Step(self._plan, list(rows), list(drop)), StepDone)
        assert done.plan == self._plan
        return done

    async def generate(self, sequence: int, table: list[int], sampling: SampleSpec, count: int) -> list[int]:
        """Prefill PROMPT in three chunks, then decode with "the last token"."""
        for first, last in ((0, 5), (5, 6), (6, len(PROMPT))):
            samples = [sampling] if last == len(PROMPT) else []
            blocks = table if first == 0 else []
            done = await self.step(
                Row(sequence, first, PROMPT[first:last], first and len(table), blocks, True, [], samples)
            )
        tokens = [done.samples[0][0].token]
        while len(tokens) < count:
            start = len(PROMPT) + len(tokens) - 1
            done = await self.step(Row(sequence, start, None, len(table), [], True, [], [sampling]))
            tokens.append(done.samples[0][0].token)
        return tokens


def row(sequence: int, start: int, tokens: list[int] | None, table: list[int], **changes: object) -> Row:
    base = Row(sequence, start, tokens, 0, table, True, [], [GREEDY])
    return msgspec.structs.replace(base, **changes)


def local_pool(
    tokens: list[int], table: list[int], blocks: int = BLOCKS
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """What the pool must hold after `tokens` ran through `table`, computed by a runner in this process."""
    pool = np.full((blocks, LAYOUT.block_bytes), 0xFF, np.uint8)
    runner = TracerModelRunner(SPEC, SIZE)
    runner.bind(pool)
    runner.run([ForwardRow(tokens, 0, table, write=True, logits=False)])
    return pool


def expected_digests(tokens: list[int], table: list[int], blocks: list[int]) -> list[bytes]:
    pool = local_pool(tokens, table)
    return [digest_block(pool[block], LAYOUT.kv_heads) for block in blocks]


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Server]:
    engine = await EngineProcess.spawn(MODULE)
    try:
        yield Server(engine)
    finally:
        engine.kill()
        await engine.wait()
        engine.channel.close()
        await engine.channel.wait_closed()


@contextlib.asynccontextmanager
async def ready() -> AsyncIterator[Server]:
    async with running() as server:
        await server.ask(init(), Ready)
        yield server


async def test_ready_describes_the_engine_and_torch_is_not_loaded() -> None:
    async with running() as server:
        answer = await server.ask(init(), Ready)
        runner = TracerModelRunner(SPEC, SIZE)
        assert KVLayout(answer.layers, answer.kv_heads, answer.head_dim, SIZE, answer.kv_dtype) == LAYOUT
        assert (answer.vocab_size, answer.max_context, answer.eos_ids) == (128, 256, [127])
        assert (answer.fingerprint, answer.transport, answer.metadata) == (runner.fingerprint, "inprocess", b"me-1")
        assert answer.pool_address % 4096 == 0
        assert "torch" not in Path(f"/proc/{server.engine.pid}/maps").read_text()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_chunks_and_decode_give_the_reference(sampling: SampleSpec) -> None:
    async with ready() as server:
        tokens = await server.generate(1, [9, 3, 40, 0, 22, 7], sampling, 12)
        assert tokens == reference_tokens(PROMPT, 12, SPEC, sampling, stop_at_eos=False)


async def test_a_batch_gives_every_row_its_own_reference() -> None:
    prompts = [[10 * n + i for i in range(n + 1)] for n in range(8)]
    async with ready() as server:
        rows = [row(n, 0, prompt, [2 * n, 2 * n + 1]) for n, prompt in enumerate(prompts)]
        done = await server.step(*rows)
        firsts = [drawn[0].token for drawn in done.samples]
        assert firsts == [reference_tokens(prompt, 1, SPEC)[0] for prompt in prompts]


async def test_filled_blocks_come_with_generation_and_digest() -> None:
    async with ready() as server:
        done = await server.step(row(5, 0, PROMPT, [4, 8, 6], fills=[Fill(4, 70), Fill(8, 71)]))
        assert [(f.block, f.sequence, f.generation) for f in done.filled] == [(4, 5, 70), (8, 5, 71)]
        expected = expected_digests(PROMPT, [4, 8, 6], [4, 8])
        assert [f.digest for f in done.filled] == expected
        assert (await server.ask(Digest(1, [4, 8]), DigestDone)).digests == expected


async def test_read_copy_and_decode_from_the_copy() -> None:
    async with running() as server:
        answer = await server.ask(init(), Ready)
        await server.step(row(1, 0, PROMPT[:8], [10, 11], samples=[]))
        assert (await server.ask(AddPeer("me-1", answer.metadata, answer.pool_address), PeerAdded)).peer == "me-1"
        # In the order of the table, though not in that of the addresses.
        ranges = [(answer.pool_address + block * LAYOUT.block_bytes, LAYOUT.block_bytes) for block in (10, 11)]
        assert (await server.ask(Read(77, "me-1", ranges, 1), ReadDone)).id == 77
        copied = await server.ask(Copy(78, 1, [31, 30]), CopyDone)
        assert copied.digests == expected_digests(PROMPT[:8], [10, 11], [10, 11])
        await server.ask(Digest(79, [10]), DigestDone)
        server.engine.channel.send(Poison([10, 11]))
        done = await server.step(row(2, 8, PROMPT[8:], [31, 30, 5]))
        assert done.samples[0][0].token == reference_tokens(PROMPT, 1, SPEC)[0]


async def test_wire_failures_are_reports() -> None:
    async with ready() as server:
        assert (await server.ask(AddPeer("nobody", b"nobody", 0), PeerFailed)).peer == "nobody"
        assert (await server.ask(Read(5, "nobody", [(0, 8)], 0), ReadFailed)).id == 5
        await server.step(row(1, 0, [1], [0]))  # and the engine goes on


async def test_poison_shows_in_the_next_token() -> None:
    async with ready() as server:
        await server.step(row(1, 0, PROMPT, [0, 1, 2], samples=[]))
        server.engine.channel.send(Poison([1]))
        poisoned = await server.ask(Digest(1, [1]), DigestDone)
        nan = np.full(LAYOUT.block_bytes, 0xFF, np.uint8)
        assert poisoned.digests == [digest_block(nan, LAYOUT.kv_heads)]
        done = await server.step(row(1, len(PROMPT), [3], [], table_from=3, samples=[with_logprob()]))
        clean = await server.step(row(2, 0, [*PROMPT, 3], [0, 1, 2], samples=[with_logprob()]))
        assert done.samples[0] != clean.samples[0]


def with_logprob() -> SampleSpec:
    """Greedy with the logprob: two different logits then show even if their largest token is the same."""
    return SampleSpec(index=0, seed=0, temperature=0.0, top_p=1.0, top_k=0, logprobs=3)


async def test_a_bad_row_fails_alone() -> None:
    bad = {
        1: row(1, 0, [5, 128], [1]),  # beyond the vocabulary
        2: row(2, 0, [5, -1], [2]),
        3: row(3, 0, [1] * 5, [3]),  # a table too short
        4: row(4, 254, [1, 2, 3], [4] * 64),  # beyond the context
        5: row(5, 0, None, [5]),  # has drawn nothing yet
        6: row(6, 0, [1], [BLOCKS]),  # no such block
        7: row(7, 0, [1], [7], table_from=2),  # a gap in the table
        8: row(8, 0, [1], [8], fills=[Fill(8, 1)]),  # does not fill that block
        9: row(9, 0, [1], [9], samples=[SampleSpec(0, 0, -1.0, 1.0, 0, -1)]),
        10: row(10, 0, [], [10]),
    }
    async with ready() as server:
        done = await server.step(row(0, 0, PROMPT, [20, 21, 22], fills=[Fill(20, 1)]), *bad.values())
        assert set(done.errors) == set(bad)
        assert done.samples[0][0].token == reference_tokens(PROMPT, 1, SPEC)[0]
        assert [drawn for drawn in done.samples[1:] if drawn] == []
        assert [f.block for f in done.filled] == [20]
        assert "128" in done.errors[1].reason
        assert (await server.step(row(1, 0, [5], [1]))).errors == {}


async def test_dropped_sequences_are_forgotten() -> None:
    async with ready() as server:
        await server.step(row(1, 0, [1, 2], [0]))
        done = await server.step(row(1, 2, None, [0]), drop=(1,))
        assert "has drawn none" in done.errors[0].reason


async def test_rerun_read_only_gives_the_same_token_and_writes_nothing() -> None:
    prompt = PROMPT[:8]
    async with ready() as server:
        await server.step(row(1, 0, prompt, [0, 1], samples=[]))
        before = await server.ask(Digest(1, [0, 1]), DigestDone)
        done = await server.step(row(2, 7, prompt[7:], [0, 1], write=False))
        assert done.samples[0][0].token == reference_tokens(prompt, 1, SPEC)[0]
        assert (await server.ask(Digest(2, [0, 1]), DigestDone)).digests == before.digests


async def test_commands_sent_ahead_are_answered_in_order() -> None:
    async with ready() as server:
        for plan in range(100):
            server.engine.channel.send(Step(plan, [row(plan, 0, PROMPT, [0, 1, 2])], [plan]))
        assert [(await server.next(StepDone)).plan for _ in range(100)] == list(range(100))


async def test_shutdown_leaves_with_code_0() -> None:
    async with ready() as server:
        server.engine.channel.send(Shutdown())
        await server.ended()
        assert await asyncio.wait_for(server.engine.wait(), TIMEOUT_S) == 0
        with pytest.raises(ChannelClosed):
            server.engine.channel.send(Shutdown())


async def test_stop_kills_an_engine_that_does_not_leave() -> None:
    async with ready() as server:
        os.kill(server.engine.pid, signal.SIGSTOP)
        assert await server.engine.stop(grace_s=0.05) == -signal.SIGKILL


@pytest.mark.parametrize("when", ["before", "after"])
async def test_engine_exits_when_the_server_hangs_up(when: str) -> None:
    async with running() as server:
        if when == "after":
            await server.ask(init(), Ready)
        server.engine.channel.close()
        assert await asyncio.wait_for(server.engine.wait(), TIMEOUT_S) == 0


async def test_a_killed_engine_ends_the_channel() -> None:
    async with ready() as server:
        server.engine.kill()
        await server.ended()
        assert await server.engine.exit_code() == -signal.SIGKILL
        assert server.engine.returncode == -signal.SIGKILL
        server.engine.send(Poison([1]))  # nobody is there, which is the business of whoever follows the channel


async def test_a_module_that_does_not_exist_ends_the_channel() -> None:
    engine = await EngineProcess.spawn("tests.integration.no_such_engine")
    await Server(engine).ended()
    assert await engine.stop() == 1


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (init(FolderModel("/does/not/exist", "float32")), "ModelError"),
        (init(transport="carrier-pigeon"), "carrier-pigeon"),
        (init(slot_bytes=8), "handoff.slot_bytes: 8 does not hold"),
        (Digest(1, [0]), "before Init"),
    ],
    ids=["model", "transport", "slot", "order"],
)
async def test_what_cannot_start_is_fatal(command: Command, reason: str) -> None:
    async with running() as server:
        assert reason in (await server.ask(command, Fatal)).reason
        await server.ended()
        assert await server.engine.wait() == 1


async def test_a_server_that_contradicts_itself_is_fatal() -> None:
    async with ready() as server:
        assert "IntegrityError" in (await server.ask(Copy(1, 7, [0]), Fatal)).reason
        assert await server.engine.wait() == 1


async def test_idle_costs_nothing() -> None:
    """In its quietest second: the first ones after a start may still see threads of torch or UCX come to rest."""
    async with ready() as server:
        process = psutil.Process(server.engine.pid)
        used: list[float] = []
        while min(used, default=1.0) > 0.02 and len(used) < 5:
            before = process.cpu_times()
            with pytest.raises(TimeoutError):  # nothing to report: this is how the test lets a second pass
                await asyncio.wait_for(anext(server.engine.channel.__aiter__()), 1.0)
            after = process.cpu_times()
            used.append(after.user + after.system - before.user - before.system)
        assert min(used) <= 0.02, used


def test_engine_dies_with_a_killed_parent() -> None:
    """Its channel is held open by this test, so only the kernel's signal can end it."""
    ours, theirs = socket.socketpair()
    fd = theirs.fileno()
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-m', {MODULE!r}, '--fd', '{fd}'], pass_fds=({fd},))\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], pass_fds=(fd,), stdout=subprocess.PIPE, text=True)
    with ours, theirs, parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        ours.sendall(Codec().encode(init()))
        ours.settimeout(TIMEOUT_S)
        assert ours.recv(1)  # Ready is coming: the engine has asked for the signal by now
        parent.kill()
        psutil.wait_procs([child], timeout=TIMEOUT_S)
        assert not child.is_running()


def test_the_server_side_imports_no_torch() -> None:
    code = "import sys, engine.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
