"""What a seed decides before anything runs: sizes, paces, how rough the wire is, and what may go wrong how often."""

import copy
import random
from dataclasses import dataclass, field

from cluster.core.config import ClusterConfig
from cluster.quotas import Quota
from engine.messages import TracerModel
from router.tenants import Tenant

CROWD = 80  # requests of a world in which tenants crowd each other out
BLOCK = 4
HEADS = 2
VOCAB = 256
FAULTS = (
    "kill server",
    "kill engine",
    "freeze server",
    "freeze engine",
    "freeze worker",
    "kill router",
    "freeze router",
    "partition",
    "break stream",
    "break session",
    "drain",
    "replace",
    "rot",
    "kill in a grammar",
    "kill under penalties",
    "hunt",
    "lose limits",
)


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant, and what of the cluster it may have and does ask for."""

    tenant: Tenant
    weight: float
    asks: float  # of all requests, relative to the other tenants


@dataclass(frozen=True, slots=True)
class Scenario:
    """One world. Seconds are virtual. Chances are per read or per step."""

    tcp: bool  # reads over TCP need the holder; over CMA they do not
    latency_s: float
    step_s: float
    token_s: float
    slow_step: float
    read_fail: float
    read_flip: float
    read_slow: float
    requests: int
    span_s: float  # requests arrive within this time
    fault_every: float  # messages between two faults on average; 0: none
    faults: tuple[str, ...]
    config: ClusterConfig = field(repr=False)
    rules: float = 0.0  # share of the requests that are drawn under rules
    scores: float = 0.0  # share of the requests that ask for the log-probabilities of their prompt
    batches: float = 0.0  # share of the calls that have several prompts
    shares: tuple[Share, ...] = ()  # tenants, when there are any
    shared_limits: bool = False  # one book for all routers
    fail_closed: bool = False

    @property
    def model(self) -> TracerModel:
        return TracerModel(vocab_size=VOCAB, layers=1, kv_heads=HEADS, max_context=512)


def draw_scenario(rng: random.Random, *, faults: bool = True) -> Scenario:
    """The world of one seed. Half of the worlds know few kinds of fault, so that each kind is also met alone."""
    later = random.Random(copy.copy(rng).getrandbits(64))  # for draws that came later: older worlds stay as they were
    rough = faults and rng.random() < 0.6
    kinds = [kind for kind in FAULTS if rng.random() < rng.choice((0.2, 1.0))] if faults else []
    often = faults and rng.random() < 0.1
    if often:  # connections break again and again, between peers that live
        kinds = ["break session", *(kind for kind in ("break stream", "drain", "freeze router") if rng.random() < 0.3)]
    if not (shares := _shares(rng)):
        kinds = [kind for kind in kinds if kind != "lose limits"]
    crowded = bool(shares) and rng.random() < 0.1
    verify = "full" if rng.random() < 0.8 or "rot" in kinds else "transfer"
    return Scenario(
        tcp=rng.random() < 0.5,
        latency_s=rng.choice((0.0003, 0.001, 0.01, 0.05)),
        step_s=rng.choice((0.002, 0.01, 0.03)),
        token_s=rng.choice((0.0001, 0.002)),
        slow_step=rng.choice((0.0, 0.003)) if faults else 0.0,
        read_fail=rng.choice((0.0, 0.05)) if rough else 0.0,
        read_flip=rng.choice((0.0, 0.05, 0.2)) if rough else 0.0,
        read_slow=rng.choice((0.0, 0.1)) if rough else 0.0,
        requests=CROWD if crowded else rng.randrange(10, 30),
        span_s=rng.choice((1.0, 5.0, 12.0)),
        fault_every=(5.0 if often else rng.choice((20.0, 60.0, 200.0))) if kinds else 0.0,
        faults=tuple(kinds),
        config=_config(rng, verify, failovers_at_once=later.choice((1, 2, 32))),
        rules=rng.choice((0.0, 0.3, 0.3, 0.8)),
        batches=rng.choice((0.0, 0.1)),
        shares=shares,
        shared_limits=rng.random() < 0.7,
        fail_closed=rng.random() < 0.2,
        scores=rng.choice((0.0, 0.2, 0.6)),
    )


def _shares(rng: random.Random) -> tuple[Share, ...]:
    """In half of the worlds: one that may ask what it wants, one that may do little at a time, perhaps a third."""
    if rng.random() < 0.5:
        return ()
    quotas = [Quota(), Quota(concurrency=rng.choice((1, 2, 4)))]
    if rng.random() < 0.5:
        quotas.append(Quota(concurrency=3, tokens_per_minute=rng.choice((200, 2000)), requests_per_minute=30))
    return tuple(
        Share(
            Tenant(name, quota, name.encode()),
            weight=rng.choice((0.5, 1.0, 4.0)),
            asks=rng.choice((2.0, 8.0)) if quota.unlimited else 1.0,
        )
        for name, quota in zip("abc", quotas, strict=False)
    )


def _config(rng: random.Random, verify: str, *, failovers_at_once: int) -> ClusterConfig:
    """Pools of a few blocks, slots of a few blocks, short lines: everything that is scarce is scarce."""
    chunk = rng.choice((8, 16, 32))
    return ClusterConfig.model_validate(
        {
            "model": "tracer",
            "engine": {
                "block_size": BLOCK,
                "chunk_tokens": chunk,
                "routing_tokens": BLOCK,
                "max_batch": rng.choice((2, 4, 8)),
                "verify": verify,
                "poison": True,
            },
            "pools": {
                "prefill": {"pool_tokens": BLOCK * rng.choice((12, 20, 40))},
                "decode": {"pool_tokens": BLOCK * rng.choice((12, 20, 40))},
            },
            "router": {
                "queue_limit": rng.choice((8, 64)),
                "failovers_at_once": failovers_at_once,
                "max_attempts": 16,  # here a request may meet more deaths than one that kills workers ever should
                "local_max_tokens": rng.choice((0, 4, 12)),
                "prefix_index_entries": rng.choice((64, 4096)),  # all there are, or too few for them
            },
            "handoff": {
                "slots": rng.choice((1, 4, 8)),
                "slot_bytes": BLOCK * HEADS * 4 * 8 * rng.choice((1, 2, 4)),
                "admission_window_tokens": rng.choice((16, 64, 256)),
                "wait_line": rng.choice((0, 2, 8)),
            },
        }
    )
