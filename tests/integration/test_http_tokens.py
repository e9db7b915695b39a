"""/tokenize and /detokenize over HTTP: ids as transformers has them, text as it was, bad input named."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from transformers import AutoTokenizer

from cluster.models.pull import pull
from cluster.models.store import default_cache
from router.front.model_text import load_model_text
from tests.fakes.dispatcher import FakeDispatcher, say
from tests.integration.front_door_server import MODEL, serve

TEXTS = ["The river.", "  two  spaces ", "水车 gira 🛞\n\tdef f(x): return x", "<|im_start|>user", ""]


@asynccontextmanager
async def door() -> AsyncIterator[tuple[httpx.AsyncClient, FakeDispatcher]]:
    dispatcher = FakeDispatcher(say("x"))
    async with serve(dispatcher) as served, httpx.AsyncClient(base_url=served.url) as client:
        yield client, dispatcher


@pytest.mark.parametrize("text", TEXTS)
async def test_there_and_back(text: str) -> None:
    async with door() as (client, _):
        there = (await client.post("/tokenize", json={"model": MODEL, "prompt": text})).json()
        assert there == {"count": len(text.encode()), "max_model_len": 512, "tokens": list(text.encode())}
        back = await client.post("/detokenize", json={"tokens": there["tokens"]})
        assert back.json() == {"prompt": text}


async def test_messages_go_through_the_template_and_pieces_can_be_had() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    async with door() as (client, _):
        said = (await client.post("/tokenize", json=body)).json()
    assert bytes(said["tokens"]) == b"user: hi\nassistant: "
    assert "".join(said["token_strs"]) == "user: hi\nassistant: "


async def test_no_worker_is_needed() -> None:
    async with door() as (client, dispatcher):
        dispatcher.available = False
        said = (await client.post("/tokenize", json={"prompt": "x"})).json()
    assert said == {"count": 1, "max_model_len": None, "tokens": [120]}


BAD = {
    "neither": ("/tokenize", {}, "prompt"),
    "both": ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
    "a number": ("/tokenize", {"prompt": 5}, "prompt"),
    "ids": ("/tokenize", {"prompt": [1, 2]}, "prompt"),
    "a role": ("/tokenize", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "no text": ("/detokenize", {}, "tokens"),
    "text": ("/detokenize", {"tokens": "x"}, "tokens"),
    "a negative id": ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    "a huge id": ("/detokenize", {"tokens": [1 << 62]}, "tokens[0]"),
    "a fraction": ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
}


@pytest.mark.parametrize(("path", "body", "param"), BAD.values(), ids=BAD)
async def test_bad_input_is_named(path: str, body: dict[str, object], param: str) -> None:
    async with door() as (client, _):
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_another_model_and_no_json() -> None:
    async with door() as (client, _):
        assert (await client.post("/tokenize", json={"model": "other", "prompt": "x"})).status_code == 404
        assert (await client.post("/detokenize", content=b"{")).status_code in (400, 415)
        assert (await client.get("/tokenize")).status_code == 405
        lone = await client.post(
            "/tokenize", content=b'{"prompt": "\\ud800"}', headers={"content-type": "application/json"}
        )
        assert (lone.status_code, lone.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_the_default_models_ids_are_those_of_transformers() -> None:
    folder = pull("smollm2-135m", default_cache())
    reference = AutoTokenizer.from_pretrained(folder)
    text_of_model = load_model_text(folder)
    async with (
        serve(FakeDispatcher(say("x")), text=text_of_model) as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        for text in TEXTS:
            said = (await client.post("/tokenize", json={"prompt": text})).json()
            assert said["tokens"] == reference(text)["input_ids"]
            back = (await client.post("/detokenize", json={"tokens": said["tokens"]})).json()
            assert back["prompt"] == reference.decode(said["tokens"], clean_up_tokenization_spaces=False)
