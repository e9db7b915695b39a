"""How long one choice would take, in milliseconds, until the client has read the first tokens of its answer. Pure.

    remote(p, d) = queue(p) + compute(p) + transfer(p, d) + decode(d)
    local(d)     = queue(d) + compute(d)                  + decode(d)

- *queue*: an engine reads the shortest prompts first, so the `missing` positions of this one wait for what is shorter,
  and what is longer waits for them. Either costs somebody min(other, missing) positions: the sum over the queue is
  what this prompt adds to everybody's waiting, its own included. On D streams run between the chunks: each chunk of
  `local_chunk_tokens` brings one of their steps along.
- *compute*: positions that the worker lacks, at the rates it measured at their depth.
- *transfer*: positions that D lacks, over the measured bandwidth of the pair. Counted whole, though most of it is
  hidden behind the computing: it takes slots and bandwidth from others.
- *decode*: as many steps as tokens may come, ANSWER_TOKENS at most, each as long as with this request on board. When D
  reads the prompt by itself, its streams stand still for `compute` in all, or those that come meanwhile: that counts
  too, so it does so when its prefix or the queues of prefill workers make up for twice the computing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from router.placement.types import Demand, Estimate, WorkerLoad

ANSWER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Reading:
    """What it takes a worker to read the rest of a prompt."""

    worker: WorkerLoad
    queue_ms: float
    compute_ms: float


def reading(worker: WorkerLoad, demand: Demand) -> Reading:
    """A prefill worker reads the prompt."""
    missing = worker.missing(demand.tokens)
    ahead = displaced(worker.queue, missing)
    rates = worker.rates
    return Reading(
        worker,
        ahead / rates.tokens_per_s * 1000 if ahead else 0.0,
        rates.compute_ms(demand.tokens - missing, demand.tokens),
    )


def local_reading(decode: WorkerLoad, demand: Demand) -> Reading:
    """A decode worker reads the prompt between the steps of its streams."""
    alone = reading(decode, demand)
    if not decode.active:
        return alone
    positions = displaced(decode.queue, decode.missing(demand.tokens)) + decode.missing(demand.tokens)
    steps = -(-positions // decode.rates.local_chunk_tokens)
    between_ms = steps * decode.rates.step_ms(decode.active, decode.context)
    return Reading(decode, alone.queue_ms + between_ms, alone.compute_ms)


def displaced(queue: Iterable[int], missing: int) -> int:
    """Positions of waiting that a prompt of `missing` positions adds to a queue that serves the shortest first."""
    return sum(min(other, missing) for other in queue)


def decode_ms(decode: WorkerLoad, demand: Demand) -> float:
    """The first tokens of the answer on this decode worker."""
    steps = min(ANSWER_TOKENS, demand.max_tokens - min(demand.histories, default=0))
    batch = decode.active + len(demand.histories)
    return max(1, steps) * decode.rates.step_ms(batch, decode.context + demand.tokens)


def remote(read: Reading, decode: WorkerLoad, demand: Demand, answer_ms: float = 0.0) -> Estimate:
    """`read` is done by a prefill worker; `answer_ms` from `decode_ms`."""
    prefill = read.worker
    moved = decode.missing(demand.tokens) * decode.shape.kv_bytes
    transfer_ms = moved / decode.rates.gb_per_s(prefill.epoch) / 1e6
    return Estimate(decode.name, prefill.name, read.queue_ms, read.compute_ms, transfer_ms, answer_ms)


def local(read: Reading, demand: Demand, answer_ms: float) -> Estimate:
    """`read`, from `local_reading`, is done by the decode worker itself."""
    decode = read.worker
    return Estimate(decode.name, "", read.queue_ms, read.compute_ms, 0.0, answer_ms + read.compute_ms)


def estimate(decode: WorkerLoad, prefill: WorkerLoad | None, demand: Demand) -> Estimate:
    """One choice by itself."""
    answer_ms = decode_ms(decode, demand)
    if prefill is None:
        return local(local_reading(decode, demand), demand, answer_ms)
    return remote(reading(prefill, demand), decode, demand, answer_ms)
