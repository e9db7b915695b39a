"""The lines between a supervisor and its program, and who follows them."""

import asyncio
import os

import pytest

from cluster.core.clock import ManualClock
from cluster.core.errors import Unavailable
from cluster.pipe import (
    Answer,
    AnswerLine,
    Ask,
    AskLine,
    Drain,
    Member,
    MembersLine,
    PipeError,
    Ready,
    ReadyLine,
    Role,
    Scale,
    decode_from_program,
    decode_to_program,
    encode,
    role_of,
)
from cluster.program import Membership, Wishes

DECODE = Member(name="decode-0", role="decode", address="127.0.0.1:5", epoch=2**64 - 1)
PREFILL = Member(name="prefill-0", role="prefill", address="127.0.0.1:6", epoch=1)


def test_lines_survive_the_trip() -> None:
    ready = Ready(name="router-0", role="router", address="a:1", epoch=7, http="http://a:2", pids=(3, 4))
    assert decode_from_program(encode(ReadyLine(ready))) == ready
    assert ready.member() == Member(name="router-0", role="router", address="a:1", epoch=7)
    members = (DECODE, PREFILL)
    desired: dict[Role, int] = {"prefill": 0, "decode": 2, "router": 1}
    line = encode(MembersLine(members, desired=desired))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_to_program(line) == MembersLine(members, desired=desired)
    assert decode_to_program(encode(MembersLine((), 7.5))) == MembersLine((), 7.5)
    for wish in (Drain("decode-0"), Scale("prefill", 3)):
        assert decode_from_program(encode(AskLine(Ask(7, wish)))) == Ask(7, wish)
    for answer in (Answer(7), Answer(8, "nobody is called so")):
        assert decode_to_program(encode(AnswerLine(answer))) == answer


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello\n",
        b'{"ready": {"name": "a"}}\n',
        b'{"ready": {"name": "a", "role": "boss", "address": "a:1", "epoch": 1}}\n',
        b'{"ready": {"name": "a", "role": "decode", "address": "a:1", "epoch": "1"}}\n',
        b'{"members": []}\n',
        b"{}",
        b'{"ask": {"number": 1}}',
        b'{"ask": {"number": 1, "wish": {"type": "scale", "role": "boss", "count": 1}}}',
        b'{"ask": {"number": 1, "wish": {"type": "run", "program": "sh"}}}',
        b'{"ask": {"number": 1, "wish": {"type": "drain", "program": "a"}}, '
        b'"ready": {"name": "a", "role": "decode", "address": "a:1", "epoch": 1}}',
    ],
)
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(PipeError):
        decode_from_program(line)


@pytest.mark.parametrize(
    "line",
    [
        b"null",
        b"{}",
        b'{"ready": {}}',
        b'{"members": [{"name": "x"}]}',
        b'{"members": {}}',
        b'{"answer": {}}',
        b'{"answer": {"number": 1}, "members": []}',
    ],
)
def test_no_members_line(line: bytes) -> None:
    with pytest.raises(PipeError):
        decode_to_program(line)


def test_names_tell_roles() -> None:
    assert role_of("decode-12") == "decode"
    for name in ("decode", "decode-", "decode-x", "boss-1", "-1", ""):
        with pytest.raises(PipeError, match="decode-0"):
            role_of(name)


async def test_followers_see_the_first_list_and_always_the_newest() -> None:
    membership = Membership()
    updates = membership.updates()
    assert await anext(updates) == ()
    waiting = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    membership.replace((DECODE,))
    membership.replace((DECODE, PREFILL))
    assert await waiting == (DECODE, PREFILL)
    membership.replace((PREFILL,))
    assert await anext(updates) == (PREFILL,)
    assert membership.current == (PREFILL,)


async def test_what_is_desired_is_there_for_who_looks_and_wakes_nobody() -> None:
    membership = Membership()
    assert membership.desired is None
    updates = membership.updates()
    membership.replace((DECODE,), desired={"decode": 1})
    assert await anext(updates) == (DECODE,)
    waiting = asyncio.ensure_future(anext(updates))
    membership.replace((DECODE,), desired={"decode": 2})
    await asyncio.sleep(0)
    assert membership.desired == {"decode": 2}
    assert not waiting.done()
    membership.replace(())
    assert (await waiting, membership.desired) == ((), None)


async def test_the_same_list_again_wakes_nobody_and_says_that_the_controller_lives() -> None:
    clock = ManualClock()
    membership = Membership(clock)
    assert membership.age_s() is None
    updates = membership.updates()
    membership.replace((DECODE,))
    assert await anext(updates) == (DECODE,)
    waiting = asyncio.ensure_future(anext(updates))
    clock.advance(9)
    assert membership.age_s() == 9
    membership.replace((DECODE,))
    assert membership.age_s() == 0
    await asyncio.sleep(0)
    assert not waiting.done()
    membership.replace((PREFILL,))
    assert await waiting == (PREFILL,)


async def test_a_list_that_was_old_when_it_came_does_not_say_that_the_controller_lives() -> None:
    """A program that is started again hears the last list at once, however long nobody has told it any more."""
    clock = ManualClock()
    membership = Membership(clock)
    membership.replace((DECODE,), 3600.0)
    clock.advance(2)
    assert (membership.current, membership.age_s()) == ((DECODE,), 3602)


async def test_a_wish_without_a_supervisor_is_refused() -> None:
    with pytest.raises(Unavailable, match="no supervisor"):
        await Wishes().ask(Drain("decode-0"))


async def test_every_wish_gets_its_own_answer() -> None:
    read, write = os.pipe()
    wishes = Wishes()
    wishes.pipe = write
    with os.fdopen(read, "rb", buffering=0) as pipe:
        first = asyncio.ensure_future(wishes.ask(Drain("decode-0")))
        second = asyncio.ensure_future(wishes.ask(Scale("decode", 2)))
        await asyncio.sleep(0)
        asked = [decode_from_program(line) for line in pipe.read(65536).splitlines()]
        assert asked == [Ask(1, Drain("decode-0")), Ask(2, Scale("decode", 2))]
        wishes.answered(Answer(2))
        wishes.answered(Answer(9, "who?"))
        wishes.answered(Answer(1, "no"))
        assert [await first, await second] == ["no", None]
    os.close(write)
