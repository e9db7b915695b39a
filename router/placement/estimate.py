"""How long one choice would take, in milliseconds, until the client has read the first tokens of its answer. Pure.

    remote(p, d) = queue(p) + compute(p) + transfer(p, d) + decode(d)
    local(d)     = queue(d) + compute(d)                  + decode(d)

- *queue*: an engine reads the shortest prompts first, so the `missing` positions of this one wait for what is shorter,
  and what is longer waits for them. Either costs somebody min(other, missing) positions: the sum over the queue is
  what this prompt adds to everybody's waiting, its own included. The chunk that runs is not interrupted: half of it,
  on average. On D streams run between the chunks: each `local_chunk_tokens` bring one of their steps along.
- *compute*: positions that the worker lacks, at the rates it measured at their depth.
- *transfer*: positions that D lacks, over the measured bandwidth of the pair. Counted whole, though most of it is
  hidden behind the computing: it takes slots and bandwidth from others.
- *decode*: as many steps as tokens may come, ANSWER_TOKENS at most, each as long as with this request on board. When D
  reads the prompt by itself, its streams stand still for `compute` in all, or those that come meanwhile: that counts
  too, so it does so when its prefix or the queues of prefill workers make up for twice the computing.
"""

from collections.abc import Iterable
from typing import NamedTuple

from router.placement.types import Demand, Estimate, WorkerLoad

ANSWER_TOKENS = 32


class Reading(NamedTuple):
    """What it takes a worker to read the rest of a prompt."""

    worker: WorkerLoad
    queue_ms: float
    compute_ms: float


def reading(worker: WorkerLoad, demand: Demand) -> Reading:
    """A prefill worker reads the prompt."""
    missing = worker.missing(demand.tokens)
    return _alone(worker, demand.tokens, missing, displaced(worker.queue, missing))


def local_reading(decode: WorkerLoad, demand: Demand) -> Reading:
    """A decode worker reads the prompt between the steps of its streams."""
    missing = decode.missing(demand.tokens)
    others = displaced(decode.queue, missing)
    alone = _alone(decode, demand.tokens, missing, others)
    if not decode.active:
        return alone
    steps = -(-(others + missing) // decode.rates.local_chunk_tokens)
    between_ms = steps * decode.rates.step_ms(decode.active, decode.context)
    return Reading(decode, alone.queue_ms + between_ms, alone.compute_ms)


def displaced(queue: Iterable[int], missing: int) -> int:
    """Positions of waiting that a prompt of `missing` positions adds to a queue that serves the shortest first."""
    return sum([other if other < missing else missing for other in queue])


def _alone(worker: WorkerLoad, tokens: int, missing: int, others: int) -> Reading:
    """Where nothing but prompts runs. `others`: see `displaced`."""
    rates, queue_ms = worker.rates, 0.0
    if worker.queue:
        queue_ms = (others + rates.chunk_tokens / 2) / rates.tokens_per_s * 1000
    return Reading(worker, queue_ms, rates.compute_ms(tokens - missing, tokens))


class Answer(NamedTuple):
    """What a decode worker lacks of the prompt's KV, and the first tokens of the answer there."""

    worker: WorkerLoad
    moved_bytes: int
    decode_ms: float


def answer(decode: WorkerLoad, demand: Demand) -> Answer:
    """The request on this decode worker, whoever reads the prompt."""
    tokens = demand.tokens
    steps = min(ANSWER_TOKENS, demand.max_tokens - min(demand.histories, default=0))
    step_ms = decode.rates.step_ms(decode.active + len(demand.histories), decode.context + tokens)
    return Answer(decode, decode.missing(tokens) * decode.shape.moved_bytes, max(1, steps) * step_ms)


def remote(read: Reading, answer: Answer) -> Estimate:
    """`read` is done by a prefill worker."""
    prefill, decode = read.worker, answer.worker
    transfer_ms = answer.moved_bytes / decode.rates.gb_per_s(prefill.epoch) / 1e6
    return Estimate(decode.name, prefill.name, read.queue_ms, read.compute_ms, transfer_ms, answer.decode_ms)


def local(read: Reading, answer: Answer) -> Estimate:
    """`read`, from `local_reading`, is done by the decode worker itself."""
    return Estimate(answer.worker.name, "", read.queue_ms, read.compute_ms, 0.0, answer.decode_ms + read.compute_ms)


def estimate(decode: WorkerLoad, prefill: WorkerLoad | None, demand: Demand) -> Estimate:
    """One choice by itself."""
    if prefill is None:
        return local(local_reading(decode, demand), answer(decode, demand))
    return remote(reading(prefill, demand), answer(decode, demand))
