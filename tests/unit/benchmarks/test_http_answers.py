"""Bytes and the times they came at, turned into answers and timelines."""

import pytest

from benchmarks.http_client import parse_answer, read_timeline

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LINES = (
    b'data: {"choices":[{"index":0,"text":"Par"}],"usage":null}\n\n',
    b'data: {"choices":[{"index":0,"text":"is"}],"usage":null}\n\n',
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}],"usage":null}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n',
    b": x-headrace-kv-bytes: 4096\n\n"
    b": x-headrace-timings-ms: prefill=9.000;transfer_wire=1.000;transfer_verify=2.000;exposed_transfer=3.000;"
    b"offer_wait=4.000\n\n",
    b"data: [DONE]\n\n",
)


def chunked(part: bytes) -> bytes:
    return f"{len(part):x}\r\n".encode() + part + b"\r\n"


WHOLE = [HEAD + chunked(LINES[0]), *map(chunked, LINES[1:]), b"0\r\n\r\n"]


def test_a_stream() -> None:
    reads = [(float(second), part) for second, part in enumerate(WHOLE)]
    answer = parse_answer(reads)
    assert (answer.status, answer.complete) == (200, True)
    timeline = read_timeline("chat", -1.0, answer)
    assert timeline.ok
    assert timeline.chunks == (0.0, 1.0)  # the chunk without text is no token
    assert (timeline.prompt_tokens, timeline.output_tokens) == (7, 2)
    assert timeline.handoff is not None
    assert (timeline.handoff.kv_bytes, timeline.handoff.verify, timeline.handoff.exposed) == (4096, 0.002, 0.003)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_how_the_network_cut_it_does_not_matter(size: int) -> None:
    raw = b"".join(WHOLE)
    reads = [(float(at), raw[at : at + size]) for at in range(0, len(raw), size)]
    timeline = read_timeline("chat", 0.0, parse_answer(reads))
    assert timeline.ok
    assert timeline.output_tokens == 2
    ends = [raw.index(b"\n\n", raw.index(mark)) for mark in (b"Par", b'"is"')]
    # the read that holds the end of an event's line stamps it
    assert timeline.chunks == tuple(float(end // size * size) for end in ends)


def test_two_events_in_one_chunk_share_its_time() -> None:
    reads = [(0.0, HEAD), (2.0, chunked(LINES[0] + LINES[1])), (3.0, b"".join(map(chunked, LINES[2:])) + b"0\r\n\r\n")]
    assert read_timeline("chat", 0.0, parse_answer(reads)).chunks == (2.0, 2.0)


@pytest.mark.parametrize("kept", range(1, len(WHOLE)))
def test_a_cut_stream_is_an_error(kept: int) -> None:
    reads = [(float(second), part) for second, part in enumerate(WHOLE[:kept])]
    timeline = read_timeline("chat", 0.0, parse_answer(reads))
    assert not timeline.ok
    assert timeline.error == "the stream was cut"


def test_errors_are_told() -> None:
    body = b'{"error":{"message":"full"}}'
    refused = parse_answer([(0.0, b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n" % len(body) + body)])
    assert (refused.status, refused.complete, refused.body) == (429, True, body)
    timeline = read_timeline("chat", 0.0, refused)
    assert timeline.error is not None
    assert timeline.error.startswith("HTTP 429")
    assert parse_answer([]).status == 0
    late = [(0.0, HEAD + chunked(LINES[0])), (1.0, chunked(b'data: {"error":{"message":"lost"}}\n\n') + b"0\r\n\r\n")]
    failed = read_timeline("chat", 0.0, parse_answer(late))
    assert failed.error is not None
    assert "lost" in failed.error
