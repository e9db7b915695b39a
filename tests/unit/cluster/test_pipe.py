"""The lines between a supervisor and its program, and who follows them."""

import asyncio

import pytest

from cluster.pipe import (
    Member,
    MembersLine,
    PipeError,
    Ready,
    ReadyLine,
    decode_members,
    decode_ready,
    encode,
    role_of,
)
from cluster.program import Membership

DECODE = Member(name="decode-0", role="decode", address="127.0.0.1:5", epoch=2**64 - 1)
PREFILL = Member(name="prefill-0", role="prefill", address="127.0.0.1:6", epoch=1)


def test_lines_survive_the_trip() -> None:
    ready = Ready(name="router-0", role="router", address="a:1", epoch=7, http="http://a:2", pids=(3, 4))
    assert decode_ready(encode(ReadyLine(ready))) == ready
    assert ready.member() == Member(name="router-0", role="router", address="a:1", epoch=7)
    members = (DECODE, PREFILL)
    line = encode(MembersLine(members))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_members(line) == members


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello\n",
        b'{"ready": {"name": "a"}}\n',
        b'{"ready": {"name": "a", "role": "boss", "address": "a:1", "epoch": 1}}\n',
        b'{"ready": {"name": "a", "role": "decode", "address": "a:1", "epoch": "1"}}\n',
        b'{"members": []}\n',
    ],
)
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(PipeError):
        decode_ready(line)


@pytest.mark.parametrize("line", [b"null", b'{"ready": {}}', b'{"members": [{"name": "x"}]}', b'{"members": {}}'])
def test_no_members_line(line: bytes) -> None:
    with pytest.raises(PipeError):
        decode_members(line)


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
