"""Answers of a real model, written down before anything is disturbed: the reference of the run that follows.

A greedy answer is kept only where no token was nearly another one: batches of other sizes round differently in float32.
"""

import random

import grpc.aio

from chaos.ask import Ask, random_ask
from chaos.reference import MARGIN, Expected, RecordedReference
from chaos.routers import Routers
from chaos.settings import DEADLINE_S, ChaosSettings
from cluster.core.clock import Clock
from cluster.core.errors import Unavailable
from cluster.stubs.inference_pb2_grpc import InferenceStub

ASKS = 24


async def record(settings: ChaosSettings, model: str, routers: Routers, clock: Clock) -> RecordedReference:
    """Ask ASKS seeded requests, one after the other. Raises Unavailable when nothing fit to be kept was answered."""
    rng = random.Random(f"{settings.seed} asks")
    answers: dict[Ask, tuple[Expected, ...]] = {}
    for _ in range(ASKS):
        ask = random_ask(rng, settings.appetite())
        router = routers.all()[0]
        answer = await _ask(routers.channel(router), model, ask)
        if answer is not None:
            answers[ask] = answer
    if not answers:
        raise Unavailable("every answer was nearly another one: nothing to compare with")
    return RecordedReference(answers)


async def _ask(wire: grpc.aio.Channel, model: str, ask: Ask) -> tuple[Expected, ...] | None:
    """The undisturbed answer; None where a greedy choice was too close."""
    message = ask.message(model)
    message.logprobs = 2
    tokens: list[list[int]] = [[] for _ in range(ask.n)]
    logprobs: list[list[float]] = [[] for _ in range(ask.n)]
    texts, reasons = [""] * ask.n, [""] * ask.n
    close = False
    async for response in InferenceStub(wire).Generate(message, timeout=DEADLINE_S):
        if response.HasField("delta"):
            delta = response.delta
            tokens[delta.index] += delta.token_ids
            texts[delta.index] += delta.text
            logprobs[delta.index] += [each.logprob for each in delta.logprobs]
            tops = [sorted((t.logprob for t in each.top), reverse=True) for each in delta.logprobs]
            close = close or any(len(top) > 1 and top[0] - top[1] < MARGIN for top in tops)
        elif response.HasField("finish"):
            reasons[response.finish.index] = response.finish.reason
    if close and ask.temperature == 0:
        return None
    samples = zip(tokens, texts, reasons, logprobs, strict=True)
    return tuple(Expected(tuple(ids), text, reason, tuple(values)) for ids, text, reason, values in samples)
