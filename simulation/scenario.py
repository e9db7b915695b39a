"""What a seed decides before anything runs: sizes, paces, how rough the wire is, and what may go wrong how often."""

import random
from dataclasses import dataclass, field

from cluster.core.config import ClusterConfig
from engine.messages import TracerModel

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
)


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

    @property
    def model(self) -> TracerModel:
        return TracerModel(vocab_size=VOCAB, layers=1, kv_heads=HEADS, max_context=512)


def draw_scenario(rng: random.Random, *, faults: bool = True) -> Scenario:
    """The world of one seed. Half of the worlds know few kinds of fault, so that each kind is also met alone."""
    rough = faults and rng.random() < 0.6
    kinds = [kind for kind in FAULTS if rng.random() < rng.choice((0.2, 1.0))] if faults else []
    often = faults and rng.random() < 0.1
    if often:  # connections break again and again, between peers that live
        kinds = ["break session", *(kind for kind in ("break stream", "drain", "freeze router") if rng.random() < 0.3)]
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
        requests=rng.randrange(10, 30),
        span_s=rng.choice((1.0, 5.0, 12.0)),
        fault_every=(5.0 if often else rng.choice((20.0, 60.0, 200.0))) if kinds else 0.0,
        faults=tuple(kinds),
        config=_config(rng, verify),
    )


def _config(rng: random.Random, verify: str) -> ClusterConfig:
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
                "max_attempts": 16,  # here a request may meet more deaths than one that kills workers ever should
                "local_max_tokens": rng.choice((0, 4, 12)),
            },
            "handoff": {
                "slots": rng.choice((1, 4, 8)),
                "slot_bytes": BLOCK * HEADS * 4 * 8 * rng.choice((1, 2, 4)),
                "admission_window_tokens": rng.choice((16, 64, 256)),
                "wait_line": rng.choice((0, 2, 8)),
            },
        }
    )
