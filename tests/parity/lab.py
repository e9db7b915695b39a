"""One tiny checkpoint, the engines that run it, and everything they ever wrote.

A test builds a World (real worker cores, real engines, one thread) from the lab, submits through it and hands the
streams to the lab's ledger: those of all tests are compared with each other and judged by transformers.
"""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cluster.core.config import ClusterConfig
from cluster.stubs.common_pb2 import Sampling
from cluster.stubs.session_pb2 import SampleState
from engine.messages import FolderModel, SampleSpec
from engine.model.base import Model
from engine.model.loader import load_model, sources
from tests.checkpoints import VOCAB_SIZE, reference_model
from tests.fakes.world import World
from tests.parity.judge import Ledger

B = 16
GREEDY = Sampling(top_p=1.0, logprobs=-1)
SEEDED = Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=7, logprobs=-1)
UNCUT = Sampling(temperature=1.3, top_p=1.0, seed=(1 << 64) - 3, logprobs=-1)  # the whole vocabulary races
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED, "uncut": UNCUT}
LOCAL: list[str] = []  # no prefill worker may be asked
TOKENS = 10


@dataclass(frozen=True, slots=True)
class Asked:
    """A request under way: what it should depend on, and its attempt."""

    attempt: str
    prompt: list[int]
    sampling: Sampling
    history: list[SampleState]


@dataclass(slots=True)
class Lab:
    """One checkpoint. `kv`: what prefill and decode workers store KV in, "" as they compute it."""

    name: str
    folder: Path
    kernels: Literal["auto", "triton"] = "auto"
    kv: tuple[str, str] = ("", "")
    models: dict[str, Model] = field(default_factory=dict)
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(reference_model(self.folder))

    def world(self, *, prefill: int = 1, decode: int = 1, pool_tokens: int = 16384, chunk_tokens: int = 64) -> World:
        """A new World with poisoned pools and empty caches. Only one at a time: they share the models."""
        config = ClusterConfig.model_validate(
            {
                "model": self.name,
                "engine": {
                    "dtype": "float32",
                    "block_size": B,
                    "pool_tokens": pool_tokens,
                    "chunk_tokens": chunk_tokens,
                    "max_batch": 64,
                    "poison": True,
                },
                # Slots of 3 blocks: reads and copies in pieces. Nobody is refused, however many ask at once.
                "handoff": {"slot_bytes": 3 * self._model("prefill-0").layout.block_bytes}
                | {"admission_window_tokens": 1 << 20, "wait_line": 1024},
            }
        )
        return World(
            config,
            prefill=prefill,
            decode=decode,
            seed=len(self.name),
            model_factory=self._model,
            sources=sources(self._spec("decode-0"), B),
        )

    def ask(
        self,
        world: World,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        *,
        max_tokens: int = TOKENS,
        n: int = 1,
        history: list[SampleState] | None = None,
        prefill: list[str] | None = None,
        decode: str = "decode-0",
        preemptions: int = 0,
    ) -> Asked:
        """Submit; `prefill` LOCAL: compute on the decode worker, None: on any prefill worker."""
        ids = list(prompt)
        attempt = world.submit(
            ids,
            max_tokens,
            decode=decode,
            prefill=prefill,
            n=n,
            sampling=sampling,
            histories=history,
            ignore_eos=True,
            preemptions=preemptions,
        )
        return Asked(attempt, ids, sampling, history or [SampleState() for _ in range(n)])

    def collect(self, world: World, asked: Asked, path: str, *, max_tokens: int = TOKENS) -> list[list[int]]:
        """The streams of an ended request, history included, noted in the ledger; returns them by sample."""
        answer = world.answers[asked.attempt]
        assert not answer.lost, f"{path}: {answer.lost}"
        assert answer.ends == dict.fromkeys(range(len(asked.history)), "length"), f"{path}: {answer.ends}"
        s, streams = asked.sampling, []
        for index, state in enumerate(asked.history):
            output = [*state.emitted, *answer.tokens[index]]
            assert len(output) == max_tokens, f"{path}: {len(output)} tokens"
            spec = SampleSpec(index, s.seed, s.temperature, s.top_p, s.top_k, s.logprobs)
            self.ledger.add(asked.prompt, spec, output, path)
            streams.append(output)
        return streams

    def _model(self, engine: str) -> Model:
        if engine not in self.models:
            self.models[engine] = load_model(self._spec(engine), B, threads=1)
        return self.models[engine]

    def _spec(self, engine: str) -> FolderModel:
        prefill, decode = self.kv
        decodes = engine.startswith("decode")
        return FolderModel(
            str(self.folder),
            "float32",
            kernels=self.kernels,
            kv_dtype=decode if decodes else prefill,
            converts_from=prefill if decodes and prefill != decode else "",
        )


@functools.cache
def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids; prompts of other lengths or seeds share no prefix."""
    return random.Random(f"{length} {seed}").choices(range(4, VOCAB_SIZE), k=length)


def end_quietly(world: World) -> None:
    """Nothing is left in use, and every proof of a prefix hit held."""
    world.tick(6)
    world.run()
    world.assert_quiet()
    for core in world.decode.values():
        assert not core.state.counters["prefix_hit_corrupt"]
    for prefill in world.prefill.values():
        assert not prefill.counters["prefix_hit_corrupt"]
