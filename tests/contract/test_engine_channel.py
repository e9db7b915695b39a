"""What both engine channels promise: the Unix socket and the in-memory pair (engine/channel.py)."""

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from engine.channel import (
    MAX_FRAME,
    ChannelClosed,
    ChannelError,
    EngineChannel,
    EnginePort,
    SocketChannel,
    SocketPort,
    memory_pair,
)
from engine.messages import (
    AddPeer,
    Command,
    Copy,
    CopyDone,
    Digest,
    DigestDone,
    DropPeer,
    Fatal,
    Fill,
    FilledBlock,
    FolderModel,
    Init,
    PeerAdded,
    PeerFailed,
    Poison,
    Read,
    ReadDone,
    ReadFailed,
    Ready,
    Report,
    Row,
    RowError,
    Sampled,
    SampleSpec,
    Serve,
    Shutdown,
    Step,
    StepDone,
    TracerModel,
)

TIMEOUT_S = 10.0
ADDED = PeerAdded("p", False, 2.0)

COMMANDS: list[Command] = [
    Init("w-1", TracerModel(), 16, 64, 4, 1 << 22, 2, True, "nixl", {"devices": "all"}),
    Init("w-1", FolderModel("/models/m", "float32", 4096), 16, 64, 4, 1 << 22, 2, False, "inprocess", {}),
    Step(2**40, [Row(1, 5, [1, 2], 0, [3], True, [Fill(3, 9)], [SampleSpec(0, 2**64 - 1, 0.7, 0.9, 40, 5)])], [7]),
    Step(3, [Row(1, 7, None, 1, [], False, [], [])], []),
    Read(1, "p-2", [(2**47, 4096), (0, 8)], 3),
    Copy(2, 3, [4, 5]),
    Digest(3, [1]),
    Poison([1, 2]),
    AddPeer("p-2", bytes(range(256)), 2**47),
    Serve(True),
    DropPeer("p-2"),
    Shutdown(),
]
REPORTS: list[Report] = [
    Ready(2, 2, 64, "float32", 1024, 4096, [0, 2], b"\xff\x00", 2**47, b"meta", "nixl", 1.5),
    Fatal("no memory"),
    StepDone(
        1,
        [[Sampled(5, -0.25, [(5, -0.25), (6, -2.0)])], []],
        [FilledBlock(1, 2, 3, b"12345678")],
        {1: RowError("bad", refused=True)},
        0.1,
    ),
    ReadDone(1, 0.001),
    ReadFailed(1, "gone"),
    CopyDone(1, [b"12345678"], 0.1),
    DigestDone(1, []),
    PeerAdded("p", True, 1.5),
    PeerFailed("p", "refused"),
]


@dataclass
class Ends:
    channel: EngineChannel
    port: EnginePort

    async def receive(self) -> Command | None:
        return await asyncio.wait_for(asyncio.to_thread(self.port.receive), TIMEOUT_S)

    async def reports(self, count: int) -> list[Report]:
        stream = self.channel.__aiter__()
        return [await asyncio.wait_for(anext(stream), TIMEOUT_S) for _ in range(count)]

    async def rest(self) -> list[Report]:
        async with asyncio.timeout(TIMEOUT_S):
            return [report async for report in self.channel]


@pytest.fixture(params=["socket", "memory"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    if request.param == "memory":
        pair = Ends(*memory_pair())
        yield pair
        pair.channel.close()
        pair.port.close()
        return
    ours, theirs = socket.socketpair()
    channel, port = await SocketChannel.open(ours), SocketPort(theirs)
    yield Ends(channel, port)
    channel.close()
    port.close()
    await channel.wait_closed()


async def test_every_command_arrives_as_it_was_sent(ends: Ends) -> None:
    for command in COMMANDS:
        ends.channel.send(command)
    assert [await ends.receive() for _ in COMMANDS] == COMMANDS


async def test_every_report_arrives_as_it_was_sent(ends: Ends) -> None:
    for report in REPORTS:
        ends.port.send(report)
    assert await ends.reports(len(REPORTS)) == REPORTS


async def test_a_reader_that_waits_is_woken(ends: Ends) -> None:
    waiting = asyncio.ensure_future(ends.reports(1))
    command = asyncio.ensure_future(ends.receive())
    ends.channel.send(Poison([1]))
    assert await command == Poison([1])
    ends.port.send(ADDED)
    assert await waiting == [ADDED]


async def test_many_frames_of_every_size_stay_apart(ends: Ends) -> None:
    sizes = [0, 1, 200, 70_000, 3, 3_000_000, 5]
    for size in sizes:
        ends.channel.send(AddPeer("p", bytes(size), 0))
    received = [await ends.receive() for _ in sizes]
    assert [len(c.metadata) for c in received if isinstance(c, AddPeer)] == sizes

    def answer() -> None:
        for size in sizes:
            ends.port.send(Fatal("x" * size))

    sender = asyncio.create_task(asyncio.to_thread(answer))
    assert [len(r.reason) for r in await ends.reports(len(sizes)) if isinstance(r, Fatal)] == sizes
    await sender


async def test_reports_of_several_threads_arrive_whole(ends: Ends) -> None:
    def talk(peer: str) -> None:
        for i in range(200):
            ends.port.send(PeerFailed(peer, str(i) * 50))

    threads = [threading.Thread(target=talk, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    reports = await ends.reports(800)
    for thread in threads:
        thread.join()
    for n in range(4):
        own = [r.reason for r in reports if isinstance(r, PeerFailed) and r.peer == str(n)]
        assert own == [str(i) * 50 for i in range(200)]


async def test_a_message_too_long_is_refused_and_the_channel_lives(ends: Ends) -> None:
    with pytest.raises(ChannelError, match="longer than"):
        ends.channel.send(AddPeer("p", bytes(MAX_FRAME), 0))
    with pytest.raises(ChannelError, match="longer than"):
        ends.port.send(Fatal("x" * MAX_FRAME))
    ends.channel.send(Shutdown())
    ends.port.send(ADDED)
    assert await ends.receive() == Shutdown()
    assert await ends.reports(1) == [ADDED]


async def test_the_engine_hanging_up_ends_the_reports_after_the_last(ends: Ends) -> None:
    ends.port.send(ADDED)
    ends.port.close()
    assert await ends.rest() == [ADDED]
    assert await ends.rest() == []
    with pytest.raises(ChannelClosed):
        ends.channel.send(Shutdown())
    ends.port.close()


async def test_the_server_hanging_up_ends_the_commands_after_the_last(ends: Ends) -> None:
    ends.channel.send(Poison([1]))
    ends.channel.close()
    assert await ends.receive() == Poison([1])
    assert await ends.receive() is None
    assert await ends.receive() is None
    with pytest.raises(ChannelClosed):
        ends.port.send(ADDED)
    with pytest.raises(ChannelClosed):
        ends.channel.send(Shutdown())
    assert await ends.rest() == []
    ends.channel.close()


async def test_hanging_up_wakes_who_waits(ends: Ends) -> None:
    waiting = asyncio.ensure_future(ends.rest())
    command = asyncio.ensure_future(ends.receive())
    ends.port.close()
    assert await waiting == []
    assert await command is None


BROKEN = {
    "length": struct.pack("<I", MAX_FRAME + 1),
    "random": struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
    "pickle": struct.pack("<I", 20) + b"\x80\x04cos\nsystem\n(S'id'\n".ljust(20, b"."),
    "wrong type": struct.pack("<I", 9) + b"\x81\xa4type\xa1xx",
}


@pytest.mark.parametrize("junk", BROKEN)
async def test_broken_frames_are_refused_by_both_ends_of_the_socket(junk: str) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = await SocketChannel.open(ours)
        theirs.sendall(BROKEN[junk])
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(ChannelError):
                await anext(channel.__aiter__())
        await channel.wait_closed()
    ours, theirs = socket.socketpair()
    with ours:
        port = SocketPort(theirs)
        ours.sendall(BROKEN[junk])
        with pytest.raises(ChannelError):
            await asyncio.wait_for(asyncio.to_thread(port.receive), TIMEOUT_S)
        port.close()


async def test_half_a_frame_is_no_more_than_a_hang_up() -> None:
    ours, theirs = socket.socketpair()
    channel = await SocketChannel.open(ours)
    theirs.sendall(struct.pack("<I", 100) + b"half")
    theirs.close()
    async with asyncio.timeout(TIMEOUT_S):
        assert [report async for report in channel] == []
    await channel.wait_closed()
    ours, theirs = socket.socketpair()
    port = SocketPort(theirs)
    ours.sendall(struct.pack("<I", 100) + b"half")
    ours.close()
    assert port.receive() is None
    port.close()


async def test_commands_in_memory_can_be_taken_without_waiting() -> None:
    channel, port = memory_pair()
    assert port.receive_nowait() is None
    channel.send(Poison([1]))
    assert port.receive_nowait() == Poison([1])
    channel.close()
