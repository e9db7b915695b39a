"""What a chaos run is, and the cluster that it needs: pools of a few dozen blocks, so that a handful of clients meets
every limit, and free blocks full of NaN, so that nothing wrong stays unseen."""

from dataclasses import dataclass, replace

from chaos.ask import Appetite
from cluster.core.config import ClusterConfig

TRACER = "tracer"
BLOCK = 16
DEADLINE_S = 60.0
_TRACER_STOPS = (("><",), ("7>", "never this"), ("<29", "8><"), (">", "<2"))  # ids from 256 on are written <id>
_WORDS = ((". ",), (" the", "never this"), ("\n", ","))
_TRACER_VOCAB = 300  # its end token is 299, so that one token in 300 ends an answer


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """One run. `cancels`: the share of clients that leave before the end; `rest_s`: between two faults of a role.

    `rules`: a third of the requests draw under rules (penalties, bias, min_p, min_tokens, grammars), some have several
    prompts; those of a real model have one each, as its answers are written down one by one. Stop strings and logprobs
    are asked for by a fifth each, with or without.
    """

    seconds: float = 180.0
    seed: int = 7
    model: str = TRACER
    tcp: bool = False
    replicas: tuple[int, int, int] = (2, 2, 2)  # prefill, decode, router
    clients: int = 10
    cancels: float = 0.2
    rest_s: float = 1.0
    rules: bool = True

    @property
    def is_tracer(self) -> bool:
        return self.model == TRACER

    def cluster(self) -> ClusterConfig:
        """Ports of the routers are free ones: there are several, and a restarted one is found by what it reports."""
        prefill, decode, router = self.replicas
        context = 512
        return ClusterConfig.model_validate(
            {
                "model": self.model,
                "pools": {
                    "prefill": {"replicas": prefill, "pool_tokens": 96 * BLOCK},
                    "decode": {"replicas": decode, "pool_tokens": 44 * BLOCK},
                },
                "engine": {
                    "dtype": "float32",
                    "block_size": BLOCK,
                    "chunk_tokens": 64,
                    "max_batch": 16,
                    "max_context": context,
                    "poison": True,
                    "tracer": {"vocab_size": _TRACER_VOCAB, "max_context": context, "step_s": 0.01},
                },
                "handoff": {"slots": 8, "slot_bytes": 8192 if self.is_tracer else 4 << 20},
                "router": {
                    "replicas": router,
                    "http_port": 0,
                    "grpc_port": 0,
                    "deadline_s": DEADLINE_S,
                    "local_max_tokens": BLOCK,
                },
                "transport": {"require": "tcp" if self.tcp else "any"},
            }
        )

    def appetite(self) -> Appetite:
        """Prompts of up to 12 blocks and answers of up to 100 tokens: two of them fit a decode pool, ten do not."""
        rules = 0.33 if self.rules else 0.0
        if self.is_tracer:
            batches = 0.1 if self.rules else 0.0
            most = Appetite.of(_TRACER_VOCAB - 1, BLOCK, 12 * BLOCK, 100)
            return replace(most, rules=rules, batches=batches, stops=_TRACER_STOPS)
        return replace(Appetite.of(1000, BLOCK, 10 * BLOCK, 40), rules=rules, stops=_WORDS)
