"""Messages that no honest peer sends, from one that knows the secret: refused or survived, never a crash (I8, S07)."""

from collections.abc import Callable

import pytest

from cluster.core.ids import agent_name
from cluster.stubs.common_pb2 import Blame, Grammar, Sampling, WorkerAddress
from cluster.stubs.link_pb2 import (
    BlockRef,
    CancelJob,
    First,
    FirstToken,
    FromDecodePeer,
    FromPrefill,
    Job,
    JobAccepted,
    JobDone,
    Offer,
    OfferedBlock,
    PrefillHello,
    Recheck,
    RecheckedBlock,
    RecheckResult,
    Taken,
)
from cluster.stubs.session_pb2 import (
    AttemptSettled,
    CancelAttempt,
    FromDecode,
    FromRouter,
    SampleState,
    StopSeq,
    Submit,
)
from decode_worker.effects import ToRouter
from decode_worker.peers import Peer
from prefill_worker.effects import ToDecode
from tests.fakes.world import World
from tests.unit.workers.test_faults import IDS, counters, finish, run_until, submit, warm_world
from tests.unit.workers.test_tracer_matrix import B, config, expected

NAN, INFINITE = float("nan"), float("inf")
PEER = agent_name("prefill-0", 1)
GREEDY = Sampling(top_p=1.0, logprobs=-1)


@pytest.fixture
def world() -> World:
    return warm_world()


BAD_SAMPLING: dict[str, dict[str, object]] = {
    "presence NaN": {"sampling": Sampling(top_p=1.0, presence_penalty=NAN)},
    "frequency infinite": {"sampling": Sampling(top_p=1.0, frequency_penalty=INFINITE)},
    "repetition -1": {"sampling": Sampling(top_p=1.0, repetition_penalty=-1.0)},
    "min_p 2": {"sampling": Sampling(top_p=1.0, min_p=2.0)},
    "min_tokens -1": {"sampling": Sampling(top_p=1.0, min_tokens=-1)},
    "bias beyond the vocabulary": {"sampling": Sampling(top_p=1.0, logit_bias={1024: 1.0})},
    "bias NaN": {"sampling": Sampling(top_p=1.0, logit_bias={1: NAN})},
    "too many biased": {"sampling": Sampling(top_p=1.0, logit_bias=dict.fromkeys(range(-3000, 3000), 1.0))},
    "a grammar of no kind": {"sampling": Sampling(top_p=1.0, grammar=Grammar(kind="ebnf", source="x"))},
    "a grammar too long": {"sampling": Sampling(top_p=1.0, grammar=Grammar(kind="regex", source="x" * (2**20 + 1)))},
    "stop token beyond the vocabulary": {"stop_token_ids": [1024]},
}


def good_submit(**changes: object) -> Submit:
    fields: dict[str, object] = {
        "attempt": "a", "prompt": IDS, "samples": [SampleState()], "max_tokens": 5, "sampling": GREEDY,
        "deadline_s": 60.0, "prefill": [WorkerAddress(worker="prefill-0", epoch=1, address="prefill-0")],
    }  # fmt: skip
    return Submit(**{**fields, **changes})  # type: ignore[arg-type]


BAD_SUBMITS: dict[str, dict[str, object]] = {
    "no id": {"attempt": ""},
    "no prompt": {"prompt": []},
    "token -1": {"prompt": [5, -1]},
    "token beyond the vocabulary": {"prompt": [1024]},
    "token 2**31-1": {"prompt": [2**31 - 1]},
    "prompt over the context": {"prompt": [1] * 200_000},
    "fewer than none": {"max_tokens": -(2**31)},
    "more than the context": {"max_tokens": 2**31 - 1},
    "more than the pool": {"max_tokens": 5000},
    "no samples": {"samples": []},
    "too many samples": {"samples": [SampleState()] * 129},
    "history of nonsense": {"samples": [SampleState(emitted=[-7])]},
    "history too long": {"samples": [SampleState(emitted=[1] * 5)]},
    "all finished": {"samples": [SampleState(finished=True)]},
    "temperature NaN": {"sampling": Sampling(temperature=NAN, top_p=1.0)},
    "temperature infinite": {"sampling": Sampling(temperature=INFINITE, top_p=1.0)},
    "top_p 0": {"sampling": Sampling(top_p=0.0)},
    "top_p NaN": {"sampling": Sampling(top_p=NAN)},
    "top_k -1": {"sampling": Sampling(top_p=1.0, top_k=-1)},
    "logprobs": {"sampling": Sampling(top_p=1.0, logprobs=10**6)},
    "deadline NaN": {"deadline_s": NAN},
    "deadline infinite": {"deadline_s": INFINITE},
    "waited NaN": {"waited_s": NAN},
    "waited -1": {"waited_s": -1.0},
    **BAD_SAMPLING,
}


def router_heard(world: World) -> list[FromDecode]:
    effects = world.decode["decode-0"].take_effects()
    return [effect.message for effect in effects if isinstance(effect, ToRouter)]


@pytest.mark.parametrize("kind", BAD_SUBMITS)
def test_a_submit_that_nobody_can_serve_is_refused_for_good(world: World, kind: str) -> None:
    core = world.decode["decode-0"]
    core.from_router("router", FromRouter(submit=good_submit(**BAD_SUBMITS[kind])), world.clock.now())
    [answer] = router_heard(world)
    assert answer.refused.permanent
    assert answer.refused.reason
    world.assert_quiet()


def test_an_id_in_use_is_refused_and_the_first_attempt_goes_on(world: World) -> None:
    attempt = submit(world)
    run_until(world, ">decode-0:wire")
    core = world.decode["decode-0"]
    core.from_router("router", FromRouter(submit=good_submit(attempt=attempt)), world.clock.now())
    assert [m.refused.permanent for m in router_heard(world) if m.HasField("refused")] == [True]
    finish(world, attempt)


def test_an_id_used_again_while_its_prefix_hits_are_still_proved(world: World) -> None:
    """The late digests belong to the attempt that was cancelled, not to the one that has its name now."""
    finish(world, submit(world))
    core, now = world.decode["decode-0"], world.clock.now()
    core.from_router("router", FromRouter(submit=good_submit()), now)
    core.from_router("router", FromRouter(cancel=CancelAttempt(attempt="a")), now)
    core.from_router("router", FromRouter(submit=good_submit(prompt=[*IDS[: 2 * B], 5, 6])), now)
    world._decode_effects("decode-0")
    world.run(check=True)
    assert world.answers["a"].tokens[0] == expected([*IDS[: 2 * B], 5, 6], 5)[: len(world.answers["a"].tokens[0])]
    core.from_router("router", FromRouter(ended=AttemptSettled(attempt="a")), world.clock.now())
    world.wait(8)
    world.assert_quiet()


def test_words_of_routers_about_nothing(world: World) -> None:
    attempt = submit(world)
    core, now = world.decode["decode-0"], world.clock.now()
    for message in (
        FromRouter(),
        FromRouter(cancel=CancelAttempt(attempt="nobody")),
        FromRouter(stop_seq=StopSeq(attempt="nobody", index=0)),
        FromRouter(stop_seq=StopSeq(attempt=attempt, index=-1)),
        FromRouter(stop_seq=StopSeq(attempt=attempt, index=2**31 - 1)),
    ):
        core.from_router("router", message, now)
        core.from_router("nobody", message, now)
        world.step()
    finish(world, attempt)


def good_job(**changes: object) -> Job:
    fields: dict[str, object] = {
        "attempt": "a", "tokens": IDS, "sample_indices": [0], "sampling": GREEDY, "deadline_s": 60.0
    }  # fmt: skip
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


BAD_JOBS: dict[str, dict[str, object]] = {
    "no id": {"attempt": ""},
    "no tokens": {"tokens": []},
    "token -1": {"tokens": [-1]},
    "token beyond the vocabulary": {"tokens": [1024]},
    "over the context": {"tokens": [1] * 200_000},
    "sample -1": {"sample_indices": [-1]},
    "a sample twice": {"sample_indices": [3, 3]},
    "too many samples": {"sample_indices": range(129)},
    "temperature NaN": {"sampling": Sampling(temperature=NAN, top_p=1.0)},
    "top_p 0": {"sampling": Sampling()},
    "logprobs": {"sampling": Sampling(top_p=1.0, logprobs=10**6)},
    "first_position -16": {"first_position": -B},
    "first_position behind the end": {"first_position": len(IDS) + 1},
    "deadline NaN": {"deadline_s": NAN},
    "a prompt that ends beyond the tokens": {"prompt_tokens": len(IDS) + 1},
    **BAD_SAMPLING,
}


def decode_heard(world: World, link: str) -> list[FromPrefill]:
    effects = world.prefill["prefill-0"].take_effects()
    return [effect.message for effect in effects if isinstance(effect, ToDecode) and effect.link == link]


@pytest.mark.parametrize("kind", BAD_JOBS)
def test_a_job_that_nobody_can_do_fails_as_invalid(world: World, kind: str) -> None:
    core = world.prefill["prefill-0"]
    core.from_decode("decode-0", FromDecodePeer(job=good_job(**BAD_JOBS[kind])), world.clock.now())
    [answer] = decode_heard(world, "decode-0")
    assert answer.failed.blame == Blame.BLAME_REQUEST
    assert answer.failed.reason
    world.assert_quiet()


def test_words_of_decode_workers_about_nothing(world: World) -> None:
    attempt = submit(world)
    core, now = world.prefill["prefill-0"], world.clock.now()
    refs = [BlockRef(block=b, generation=g) for b in (-1, 0, 127, 128, 2**31 - 1, -(2**31)) for g in (-1, 0, 2**63 - 1)]
    for message in (
        FromDecodePeer(),
        FromDecodePeer(cancel=CancelJob(attempt="nobody")),
        FromDecodePeer(taken=Taken(attempt="nobody", until_position=-1, all=True)),
        FromDecodePeer(recheck=Recheck(attempt="nobody", blocks=refs)),
        FromDecodePeer(recheck=Recheck(attempt="nobody")),
        FromDecodePeer(recheck=Recheck(attempt=attempt, blocks=refs * 1000)),
    ):
        core.from_decode("decode-0", message, now)
        world._prefill_effects("prefill-0")
    assert counters(world, "prefill-0")["rechecks_invalid"] == 1
    finish(world, attempt)


Lie = Callable[[Offer], None]


def negative_block(offer: Offer) -> None:
    offer.blocks[0].block = -1


def block_of_no_pool(offer: Offer) -> None:
    offer.blocks[0].block = 2**31 - 1


def wrong_digest(offer: Offer) -> None:
    offer.blocks[0].digest = b""


def other_generation(offer: Offer) -> None:
    offer.blocks[0].generation = -5
    offer.blocks[0].digest = bytes(16)


def wrong_key(offer: Offer) -> None:
    offer.blocks[-1].key = b""


def between_blocks(offer: Offer) -> None:
    offer.first_position += 1


def far_away(offer: Offer) -> None:
    offer.first_position = 2**31 - B


def before_the_start(offer: Offer) -> None:
    offer.first_position = -B


def endless(offer: Offer) -> None:
    offer.blocks.extend([OfferedBlock(block=1)] * 10_000)


def nothing(offer: Offer) -> None:
    del offer.blocks[:]


LIES = [negative_block, block_of_no_pool, wrong_digest, other_generation, wrong_key, between_blocks, far_away,
        before_the_start, endless, nothing]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_offers_that_lie(world: World, lie: Lie) -> None:
    """Whatever comes of them, the answer is right."""
    core = world.decode["decode-0"]
    real = core.handoffs.offered

    def lying(offer: Offer, peer: Peer, now: float) -> None:
        lie(offer)
        real(offer, peer, now)

    core.handoffs.offered = lying  # type: ignore[method-assign]
    finish(world, submit(world))


def test_offers_twice_and_in_any_order(world: World) -> None:
    core = world.decode["decode-0"]
    real, held = core.handoffs.offered, list[Offer]()

    def shuffled(offer: Offer, peer: Peer, now: float) -> None:
        held.insert(0, offer)
        if offer.last:
            for one in (*held, *held):
                real(one, peer, now)

    core.handoffs.offered = shuffled  # type: ignore[method-assign]
    attempt = submit(world)
    finish(world, attempt)
    assert counters(world)["handoffs"] == 1


FIRSTS = {
    "no token": [],
    "token -1": [FirstToken(index=0, id=-1)],
    "token beyond the vocabulary": [FirstToken(index=0, id=1024)],
    "another sample": [FirstToken(index=1, id=5)],
    "a sample twice": [FirstToken(index=0, id=5), FirstToken(index=0, id=6)],
    "sample -1": [FirstToken(index=-1, id=5)],
}


@pytest.mark.parametrize("kind", FIRSTS)
def test_first_tokens_that_were_not_asked_for_reach_nobody(world: World, kind: str) -> None:
    attempt = submit(world)
    run_until(world, ">decode-0:wire")
    core = world.decode["decode-0"]
    first = First(attempt=attempt, tokens=FIRSTS[kind], cached_tokens=-5)
    core.from_prefill(PEER, FromPrefill(first=first), world.clock.now())
    world._decode_effects("decode-0")
    finish(world, attempt)
    assert counters(world)["handoff_left: sent other first tokens"] == 1


def test_words_of_prefill_workers_about_nothing(world: World) -> None:
    attempt = submit(world)
    run_until(world, ">decode-0:wire")
    core, now = world.decode["decode-0"], world.clock.now()
    results = [RecheckedBlock(block=b, generation=b, current=c) for b in (-1, 0, 5, 2**31 - 1) for c in (True, False)]
    for name in (attempt, "nobody"):
        for message in (
            FromPrefill(),
            FromPrefill(recheck=RecheckResult(attempt=name, blocks=results)),
            FromPrefill(accepted=JobAccepted(attempt=name, eta_s=NAN)),
            FromPrefill(accepted=JobAccepted(attempt=name, eta_s=-INFINITE)),
            FromPrefill(done=JobDone(attempt="nobody", cached_tokens=-1)),
        ):
            core.from_prefill(PEER, message, now)
            world._decode_effects("decode-0")
    finish(world, attempt)


HELLOS: dict[str, Callable[[PrefillHello], None]] = {
    "another agent": lambda hello: setattr(hello, "agent", "prefill-1-0000000000000001"),
    "an address of no machine": lambda hello: setattr(hello, "pool_address", 2**64 - 1),
    "metadata without end": lambda hello: setattr(hello, "agent_metadata", bytes(2**20 + 1)),
    "blocks of no size": lambda hello: setattr(hello, "block_bytes", 0),
    "another epoch": lambda hello: setattr(hello.identity, "epoch", 7),
    "another layout": lambda hello: setattr(hello.identity.layout, "layers", 99),
    "another model": lambda hello: setattr(hello.identity, "fingerprint", b""),
}


@pytest.mark.parametrize("kind", HELLOS)
def test_prefill_workers_that_are_not_who_they_should_be(kind: str) -> None:
    world = World(config(chunk_tokens=32))
    HELLOS[kind](world.prefill["prefill-0"]._hello)
    core = world.decode["decode-0"]
    core.warm([WorkerAddress(worker="prefill-0", epoch=1, address="prefill-0")])
    world._decode_effects("decode-0")
    world.run()
    attempt = submit(world)
    world.run(check=True)
    assert world.answers[attempt].lost.startswith("no_prefill")
    assert counters(world).get("kv_bytes", 0) == 0
    world.wait(8)
    world.assert_quiet()
